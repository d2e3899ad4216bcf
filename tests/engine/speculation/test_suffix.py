"""Proposals from the texts of other sequences: exact, kept apart by their keys, and bounded."""

from array import array
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engine.config import EngineConfig
from penstock.engine.contracts.proposer import DraftedSequence, Proposer, SequenceProposer, proposer_of
from penstock.engine.core import EngineCore
from penstock.engine.errors import ConfigurationError
from penstock.engine.kv_cache.blocks import PrefixKey
from penstock.engine.scheduling.step import Speculation, speculation_of
from penstock.engine.speculation import proposers
from penstock.engine.speculation.proposers import BUILT_IN, MATCH_LENGTHS, SuffixIndex, SuffixProposer
from tests.fakes import content, drive, generate, ids, letter_after, make_core, make_request, saying, tokens
from tests.matchers import Grammar, Walk

FEW_TOKENS = st.lists(st.integers(0, 3), min_size=1, max_size=60)
TEXT = "it was a bright cold day in april, and the clocks were striking thirteen"
EAGER = 1000.0


def longest_match(text: list[int], tail: list[int], places: range) -> int:
    """The length in `MATCH_LENGTHS` of the longest match of the end of `tail` that ends at one of these places; 0 without any."""
    lengths = [
        length
        for place in places
        for length in MATCH_LENGTHS
        if length <= min(place, len(tail)) and text[place - length : place] == tail[-length:]
    ]
    return max(lengths, default=0)


@given(text=FEW_TOKENS, tail=st.lists(st.integers(0, 3), min_size=2, max_size=40), is_array=st.booleans())
@settings(max_examples=200)
def test_the_longest_match_is_found_among_the_last_places(text: list[int], tail: list[int], is_array: bool) -> None:
    index = SuffixIndex(array("i", text) if is_array else text, 16)
    index.extend(len(text))
    matches = index.find([*tail, 9], len(tail))
    for match in matches:
        length = MATCH_LENGTHS[match.level - 1]
        assert text[match.place - length : match.place] == tail[-length:]
    assert [match.place for match in matches] == sorted({match.place for match in matches}, reverse=True)
    if len(text) <= proposers.MAX_CANDIDATES:  # all places are compared
        longest = max((MATCH_LENGTHS[match.level - 1] for match in matches), default=0)
        assert longest == longest_match(text, tail, range(2, len(text) + 1))


def sequence_of(proposer: Proposer, prompt: list[int], answer: list[int], **options: Any) -> tuple[SequenceProposer, list[int]]:
    token_ids = [*prompt]
    sequence = proposer.begin(DraftedSequence(token_ids=token_ids, num_prompt_tokens=len(prompt), **options))
    while not sequence.read():
        pass
    token_ids += answer
    assert sequence.read()
    return sequence, token_ids


@given(texts=st.lists(FEW_TOKENS, max_size=4), prompt=FEW_TOKENS, answer=FEW_TOKENS, max_read=st.integers(1, 30))
def test_what_is_proposed_followed_the_same_tokens_in_a_text_of_the_same_key(
    texts: list[list[int]], prompt: list[int], answer: list[int], max_read: int
) -> None:
    proposer = SuffixProposer()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(proposers, "MAX_READ", max_read)
        for text in texts:
            sequence_of(proposer, text[:1], text[1:])[0].end(0)
        sequence, token_ids = sequence_of(proposer, prompt, answer)
        while proposer._texts["", 0]._unread:
            sequence.read()
        draft = sequence.propose(5) if sequence.has_guess else []
    sources = [text for text in texts if len(text) > 1]
    if draft:
        own = [*token_ids, *draft]
        assert any(text[at : at + len(draft)] == draft for text in [*sources, own] for at in range(2, len(text)))


def test_an_answer_of_another_request_takes_few_steps() -> None:
    core = make_core(saying(TEXT), max_model_len=500, num_blocks=150, rows_for_weights=12.0, proposer=SuffixProposer())
    first = generate(core, make_request("first"))
    num_steps = core.stats().num_steps
    again = generate(core, make_request("again"))
    assert content(first) == content(again) == TEXT
    assert core.stats().num_steps - num_steps < num_steps / 3
    counts = core.stats().drafts["other"]
    assert counts.num_accepted > 0.7 * len(ids(TEXT))


def steps_after(core: EngineCore, **options: Any) -> int:
    num_steps = core.stats().num_steps
    assert content(generate(core, make_request("next", **options))) == TEXT
    return core.stats().num_steps - num_steps


def test_nothing_is_proposed_from_the_texts_of_another_salt() -> None:
    core = make_core(saying(TEXT), max_model_len=500, num_blocks=150, rows_for_weights=12.0, proposer=SuffixProposer())
    alone = steps_after(core, cache_salt="one")
    assert steps_after(core, cache_salt="two") == alone
    assert steps_after(core, cache_salt="one") < alone / 3


def test_a_match_is_surer_with_each_token_that_is_right() -> None:
    sequence, _ = sequence_of(SuffixProposer(), [1, 2, 3, 4, 5, 6, 7, 9, 1, 2], [3])
    after = [sequence.accuracy_after(number) for number in range(4)]
    assert after == sorted(after)
    assert after[0] == sequence.accuracy < after[3]


def test_what_another_key_repeats_changes_no_accuracy() -> None:
    proposer = SuffixProposer()
    first = sequence_of(proposer, [1, 2, 3, 1, 2], [3], key="own")[0].accuracy
    own, other = (proposer._texts_of(key).accuracies for key in ("own", "other"))
    before = list(own)
    for _ in range(40):
        sequence_of(proposer, [1, 2, 3, 1, 2], [9, 1, 2, 8, 1, 2, 7, 1, 2, 6], key="other")[0].end(0)
    assert own == before != other
    assert sequence_of(proposer, [1, 2, 3, 1, 2], [3], key="own")[0].accuracy >= first


def test_a_sequence_whose_guesses_are_wrong_is_less_sure_of_matches_of_any_length() -> None:
    proposer = SuffixProposer()
    text = list(range(10, 60))
    for _ in range(4):  # after which long matches are nearly always right
        sequence_of(proposer, text[:2], text[2:])[0].end(0)
    wrong = [token for place in range(12, 40, 4) for token in (place, place + 1, 99)]  # what followed each pair before was another token
    unlucky, _ = sequence_of(proposer, [5], [*wrong, *text[:2]])
    lucky, _ = sequence_of(proposer, [5], text[:2])
    assert unlucky.propose(10) == lucky.propose(10) == text[2:12]
    assert unlucky.accuracy_after(9) < 0.9 * lucky.accuracy_after(9)  # behind a match that is longer than any that was wrong


def test_a_token_is_surer_where_all_places_agree_and_less_sure_where_they_do_not() -> None:
    one, _ = sequence_of(SuffixProposer(), [1, 2, 3, 4, 5, 1], [2])
    agreed, _ = sequence_of(SuffixProposer(), [1, 2, 3, 4, 5, 1, 2, 3, 4, 6, 1], [2])
    assert one.propose(3) == [*agreed.propose(3)[:2], 5] == [3, 4, 5]
    assert [agreed.accuracy_after(place) > one.accuracy_after(place) for place in range(3)] == [True, True, False]
    assert agreed.accuracy_after(2) < one.accuracy_after(2)


def test_a_match_goes_on_behind_a_value_that_is_another_one() -> None:
    sequence, token_ids = sequence_of(SuffixProposer(), [1, 2, 3, 40, 5, 6, 7, 8, 1, 2], [3, 41])
    assert sequence.propose(3) == [5, 6, 7]
    assert sequence.accuracy < 0.3  # which has to prove itself
    token_ids += [9]
    assert sequence.read()
    assert not sequence.has_guess  # twice in a row is another text


def test_of_places_that_disagree_the_one_that_is_right_is_followed() -> None:
    sequence, _ = sequence_of(SuffixProposer(), [1, 2, 3, 4, 1, 2, 5, 6, 1], [2, 3])
    assert sequence.propose(1) == [4]


@pytest.mark.parametrize("name", BUILT_IN)
def test_placeholders_are_not_proposed(name: str) -> None:
    """Of prompts with images, neither to the sequence itself nor to later ones."""
    proposer = BUILT_IN[name]()
    prompt, placeholders = [1, 2, 3, 900, 900, 4, 1], frozenset({3, 4})
    sequence, token_ids = sequence_of(proposer, prompt, [2], placeholders=placeholders)
    assert sequence.propose(5) == [3]
    token_ids += [3]
    assert sequence.read()
    assert not sequence.has_guess
    sequence.end(0)
    later, _ = sequence_of(proposer, [5, 1, 2], [])
    assert not later.has_guess or later.propose(5) == [3]


@pytest.mark.parametrize(("num_shared", "expected"), [(4, 7), (8, 8)])
def test_another_text_comes_first_where_it_matches_for_two_levels_more(num_shared: int, expected: int) -> None:
    """The sequence itself has matched for two tokens."""
    proposer = SuffixProposer()
    shared = list(range(10, 10 + num_shared))
    sequence_of(proposer, [1], [*shared, 8, 1, 1])[0].end(0)
    sequence, _ = sequence_of(proposer, [*shared[-2:], 7, *shared], [])
    assert sequence.propose(1) == [expected]


def test_an_answer_under_the_same_grammar_comes_first() -> None:
    proposer, grammar, other = SuffixProposer(), Grammar(lambda: Walk(1)), Grammar(lambda: Walk(2))
    for answer, of in (([7, 8, 9, 9], grammar), ([7, 8, 5, 5], None), ([7, 8, 6, 6], other)):
        sequence_of(proposer, [1, 2], answer, grammar=of)[0].end(0)
    for of, expected in ((grammar, [9, 9]), (other, [6, 6]), (None, [6, 6])):
        sequence, _ = sequence_of(proposer, [3, 4], [7], grammar=of)
        sequence, _ = sequence_of(proposer, [3, 4], [7, 8], grammar=of)
        assert sequence.propose(2) == expected


def test_an_answer_under_a_grammar_takes_fewer_steps_the_second_time() -> None:
    proposer, grammar = SuffixProposer(), Grammar(lambda: Walk(1, forces=False))
    core = make_core(letter_after, max_model_len=120, rows_for_weights=12.0, proposer=proposer)
    num_steps = []
    for number in range(2):
        before = core.stats().num_steps
        said = tokens(generate(core, make_request(str(number), "?", grammar=grammar, max_tokens=40)))
        num_steps.append(core.stats().num_steps - before)
        assert proposer._texts[PrefixKey(), id(grammar)]._num_unread == len([*ids("?"), *said]) + 1
    assert num_steps[1] < num_steps[0] - 10


def test_a_prompt_that_an_earlier_sequence_had_is_kept_once() -> None:
    proposer = SuffixProposer()
    prompt = list(range(1000))
    sizes = []
    for number in range(3):
        sequence_of(proposer, prompt, [5000 + number] * 3)[0].end(0 if number == 0 else len(prompt))
        sequence_of(proposer, [1], [2])[0].read()
        sizes.append(proposer.num_bytes)
    assert sizes[2] - sizes[1] == sizes[1] - sizes[0] < 8 * 100


def test_the_memory_of_texts_is_bounded_and_what_was_read_last_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proposers, "FIRST_TEXT_TOKENS", 64)
    monkeypatch.setattr(proposers, "MAX_TEXT_TOKENS", 256)
    proposer = SuffixProposer(max_bytes=20_000)
    for number in range(100):
        for key in range(5):
            sequence, _ = sequence_of(proposer, [number, key], [number + place for place in range(20)], key=key)
            sequence.end(0)
            assert proposer.num_bytes < 20_000 + 8_000
    sequence, _ = sequence_of(proposer, [99, 4], [99, 100], key=4)
    assert sequence.propose(3) == [101, 102, 103]


def test_the_number_of_keys_is_bounded() -> None:
    proposer = SuffixProposer()
    for key in range(2 * proposers.MAX_KEYS):
        sequence_of(proposer, [1, 2], [3], key=key)[0].end(0)
    assert len(proposer._texts) == proposers.MAX_KEYS
    assert proposer.num_bytes < proposers.MAX_KEYS * 20_000


def test_a_text_is_read_in_parts() -> None:
    proposer = SuffixProposer()
    sequence_of(proposer, list(range(3 * proposers.MAX_READ)), [7])[0].end(0)
    texts = proposer._texts["", 0]
    sequence, _ = sequence_of(proposer, [1], [2])
    assert 0 < texts._num_unread < 3 * proposers.MAX_READ
    for _ in range(4):
        sequence.read()
    assert texts._num_unread == 0


class Failing(Proposer, SequenceProposer):
    """A plug-in's, which raises, or proposes what is no token."""

    has_guess = True

    def __init__(self, draft: list[int]) -> None:
        self._draft = draft

    def begin(self, sequence: DraftedSequence) -> SequenceProposer:
        if self._draft == [0]:
            raise RuntimeError("broken from the beginning")
        return self

    def read(self) -> bool:
        if not self._draft:
            raise RuntimeError("broken")
        return True

    def propose(self, num_tokens: int) -> list[int]:
        return self._draft[:num_tokens]


@pytest.mark.parametrize("draft", [[0], [], [-1], [10**9], [5, "a"]])
def test_a_proposer_that_fails_ends_no_request(draft: list[int], caplog: pytest.LogCaptureFixture) -> None:
    core = make_core(saying(TEXT), max_model_len=500, num_blocks=150, rows_for_weights=EAGER)
    assert core.scheduler.speculation is not None
    core.scheduler.speculation.proposer, core.scheduler.speculation.vocab_size = Failing(draft), core.vocab_size
    assert content(generate(core, make_request())) == TEXT
    assert "failed: its sequence gets no more draft tokens" in caplog.text
    assert core.stats().num_drafts == 0


def test_a_proposer_is_chosen_by_its_name() -> None:
    others = {**BUILT_IN, "mine": lambda: proposer_of(lambda token_ids: []), "wrong": lambda: "text"}
    made = [speculation_of(EngineConfig(speculation=name), "cpu", 100, others) for name in ("none", "suffix", "mine")]  # type: ignore[arg-type]
    assert made[0] is None
    assert isinstance(made[1], Speculation)
    assert isinstance(made[1].proposer, SuffixProposer)
    assert made[2] is not None
    assert made[2].name == "mine"
    with pytest.raises(ConfigurationError, match="there are ngram, suffix, mine, wrong, draft, mtp, none"):
        speculation_of(EngineConfig(speculation="nothing"), "cpu", 100, others)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="made a str"):
        speculation_of(EngineConfig(speculation="wrong"), "cpu", 100, others)  # type: ignore[arg-type]


def test_answers_are_the_same_when_they_come_again() -> None:
    plan: list[dict[str, Any]] = [{"prompt": "abc" * 4, "n": 2, "seed": seed, "temperature": 1.0, "max_tokens": 30} for seed in range(4)]
    said = []
    for rows_for_weights in (None, EAGER):
        core = make_core(rows_for_weights=rows_for_weights, proposer=SuffixProposer())
        for _ in range(3):
            for number, options in enumerate(plan):
                core.add(make_request(str(number), **options))
            answers = drive(core)
            said.append([tokens(answers[str(number)], index) for number in range(4) for index in range(2)])
    assert all(one == said[0] for one in said)
    assert core.stats().num_accepted_tokens > 100
