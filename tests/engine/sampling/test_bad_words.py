from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.sampling.state import BadWords

TOKEN = st.integers(0, 3)


@given(st.lists(st.lists(TOKEN, max_size=4), max_size=5), st.lists(TOKEN, max_size=12))
def test_a_token_completes_a_word_exactly_where_the_output_would_end_with_it(words: list[list[int]], output: list[int]) -> None:
    bad_words = BadWords(words)
    for token_id in output:
        bad_words.append(token_id)
    completing = set(bad_words.completing_ids())
    for token_id in range(4):
        longer = [*output, token_id]
        assert (token_id in completing) == any(word and longer[-len(word) :] == word for word in words)
