from hypothesis import given
from hypothesis import strategies as st

from penstock.engine import speculation
from penstock.engine.speculation import MATCH_LENGTH, NgramProposer

LETTERS = st.integers(0, 3)


def last_source(ids: list[int]) -> int | None:
    """Where the last tokens stood before, the last time."""
    tail = ids[-MATCH_LENGTH:]
    places = [place for place in range(MATCH_LENGTH, len(ids)) if ids[place - MATCH_LENGTH : place] == tail]
    return places[-1] if places and len(tail) == MATCH_LENGTH else None


@given(prompt=st.lists(LETTERS, min_size=1, max_size=20), answer=st.lists(LETTERS, max_size=20), max_read=st.integers(1, 30))
def test_what_is_proposed_stood_after_the_same_tokens(prompt: list[int], answer: list[int], max_read: int) -> None:
    ids = list(prompt)
    proposer = NgramProposer(ids, len(ids))
    before, speculation.MAX_READ = speculation.MAX_READ, max_read
    try:
        for token_id in answer:
            ids.append(token_id)
            while not proposer.read():
                pass
            draft = proposer.propose(5) if proposer.has_guess else []
            assert len(draft) in (0, 5)
            assert bool(draft) >= (last_source(ids) is not None)
            if draft:
                whole = ids + draft
                places = range(MATCH_LENGTH, len(ids))
                assert any(whole[p - MATCH_LENGTH : p] == ids[-MATCH_LENGTH:] and whole[p : p + 5] == draft for p in places)
    finally:
        speculation.MAX_READ = before


def proposer_after(ids: list[int], num_prompt_tokens: int = 1) -> NgramProposer:
    proposer = NgramProposer(ids, num_prompt_tokens)
    assert proposer.read()
    return proposer


def test_a_prompt_is_found_again_in_the_answer() -> None:
    prompt = list(range(50))
    assert proposer_after([*prompt, 99, 10, 11], len(prompt)).propose(4) == [12, 13, 14, 15]


def test_a_text_that_goes_round_is_proposed_as_often_as_it_takes() -> None:
    assert proposer_after([1, 2, 3, 1, 2, 3, 1, 2]).propose(7) == [3, 1, 2, 3, 1, 2, 3]
    assert proposer_after([5, 5, 5]).propose(3) == [5, 5, 5]


def test_what_has_not_stood_before_is_not_guessed() -> None:
    assert not proposer_after(list(range(40))).has_guess


def test_guesses_are_judged_whether_they_are_asked_for_or_not() -> None:
    right = proposer_after([1, 2, 3, 4] * 10)
    wrong = proposer_after([token_id for number in range(10) for token_id in (1, 2, 50 + number)])
    assert right.accuracy > 0.95
    assert wrong.accuracy < 0.1


@given(st.lists(LETTERS, min_size=2, max_size=60))
def test_how_the_text_came_in_makes_no_difference(ids: list[int]) -> None:
    at_once = proposer_after(list(ids))
    growing: list[int] = ids[:1]
    one_by_one = NgramProposer(growing, 1)
    for token_id in ids[1:]:
        growing.append(token_id)
        assert one_by_one.read()
    assert one_by_one.accuracy == at_once.accuracy
    assert one_by_one.has_guess == at_once.has_guess
    if at_once.has_guess:
        assert one_by_one.propose(6) == at_once.propose(6)
