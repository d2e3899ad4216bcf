"""Outputs that repeat themselves: what is detected, and how answers, reasoning and free text before an answer end then."""

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from penstock.engine.contracts.grammar import GrammarKind
from penstock.engine.deltas import FinishReason
from penstock.engine.errors import InvalidRequest
from penstock.engine.output import REPETITION
from penstock.engine.sampling.params import SamplingParams
from penstock.engine.text.answer import LOOPS, PreambleParams
from penstock.engine.text.streaming import RepetitionDetection
from penstock.plugins.reasoning.formats import FORMATS
from tests.engine.constraints.test_closing import compiled, is_whole
from tests.fakes import END_THINK, EOS, content, generate, ids, make_core, make_request, preamble, reasoning, tokens
from tests.matchers import Grammar, Spelling

TWICE = RepetitionDetection(max_pattern_size=4, min_count=2)
THRICE = RepetitionDetection(max_pattern_size=8, min_pattern_size=2, min_count=3)
CUE = "=>"


def looping(beginning: str, loop: str) -> Any:
    """A model that says the beginning and then the loop for ever."""

    def next_token(token_ids: Sequence[int]) -> int:
        said = len(token_ids) - 1
        return ids(beginning + loop * (1 + said // len(loop)))[said]

    return next_token


@given(
    token_ids=st.lists(st.integers(0, 2), max_size=24),
    start=st.integers(0, 4),
    largest=st.integers(0, 6),
    smallest=st.integers(0, 6),
    count=st.integers(2, 4),
)
@example([0, 1, 0, 1], 0, 4, 0, 2)
@example([0, 0, 0, 0, 0, 0], 0, 3, 2, 3)  # of a shorter pattern
def test_what_ends_with_a_pattern_often_enough_is_found(token_ids: list[int], start: int, largest: int, smallest: int, count: int) -> None:
    detection = RepetitionDetection(largest, min(smallest, largest), count)
    detection.check()
    output = token_ids[start:]
    sizes = range(max(1, detection.min_pattern_size), largest + 1)
    expected = any(len(output) >= size * count and output[-size * count :] == output[-size:] * count for size in sizes)
    assert detection.finds(token_ids, min(start, len(token_ids))) == expected


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({"max_pattern_size": -1}, "max_pattern_size"),
        ({"max_pattern_size": 10**30, "min_count": 2}, "max_pattern_size"),
        ({"max_pattern_size": 3, "min_pattern_size": 4, "min_count": 2}, "min_pattern_size"),
        ({"max_pattern_size": 3, "min_count": 1}, "min_count"),
    ],
)
def test_a_number_out_of_range_is_named(given: dict[str, int], name: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        SamplingParams(repetition_detection=given)  # type: ignore[arg-type]  # as a dict
    assert refused.value.param == f"repetition_detection.{name}"


@pytest.mark.parametrize("given", [{"size": 3}, {"max_pattern_size": "3"}])
def test_a_dict_of_something_else_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as refused:
        SamplingParams(repetition_detection=given)  # type: ignore[arg-type]
    assert refused.value.param == "repetition_detection"


@pytest.mark.parametrize("options", [{}, {"rows_for_weights": 8.0}, {"is_async": True}])
def test_an_answer_that_repeats_itself_ends(options: dict[str, Any]) -> None:
    core = make_core(looping("now ", "again."), **options)
    deltas = generate(core, make_request(repetition_detection=THRICE, max_tokens=60))
    assert content(deltas) == "now again.again.again."
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == (FinishReason.LENGTH, REPETITION)
    assert len(tokens(generate(core, make_request(max_tokens=60)))) == 60
    core.check_integrity()


def test_an_answer_that_ends_in_time_says_so() -> None:
    deltas = generate(make_core(looping("", "again.")), make_request(repetition_detection=THRICE, max_tokens=18))
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == (FinishReason.LENGTH, None)
    deltas = generate(make_core(looping("", "again.")), make_request(repetition_detection=THRICE, max_tokens=60, stop=["n.a", "in.again."]))
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == (FinishReason.STOP, "n.a")


def test_the_prompt_counts_for_nothing() -> None:
    def next_token(token_ids: Sequence[int]) -> int:
        return ids("b")[0] if len(token_ids) < 12 else EOS

    deltas = generate(make_core(next_token), make_request(prompt="bbbbbbbbb", repetition_detection={"max_pattern_size": 1, "min_count": 4}))
    assert (content(deltas), deltas[-1].finish_reason) == ("bbb", FinishReason.STOP)


@pytest.mark.parametrize(("budget", "expected"), [(100, "because "), (None, "because ")])
def test_reasoning_that_repeats_itself_is_closed_where_an_answer_is_wanted(budget: int | None, expected: str) -> None:
    def next_token(token_ids: Sequence[int]) -> Any:
        if END_THINK in token_ids:
            said = len(token_ids) - token_ids.index(END_THINK) - 1
            return [*ids("ok"), EOS][min(said, 2)]
        return looping("", expected)(token_ids)

    grammar = None if budget else Grammar(lambda: Spelling("ok"))
    request = make_request(
        parser=FORMATS["deepseek_r1"], thinking_token_budget=budget, grammar=grammar, repetition_detection=THRICE, max_tokens=100
    )
    deltas = generate(make_core(next_token), request)
    assert (reasoning(deltas), content(deltas)) == (expected * 3, "ok")
    assert deltas[-1].finish_reason is FinishReason.STOP


def test_reasoning_that_repeats_itself_ends_an_answer_that_nothing_was_asked_of() -> None:
    request = make_request(parser=FORMATS["deepseek_r1"], repetition_detection=TWICE, max_tokens=50)
    deltas = generate(make_core(looping("so ", "abc")), request)
    assert (reasoning(deltas), deltas[-1].stop_reason) == ("so abcabc", REPETITION)


def test_free_text_before_an_answer_ends_where_it_repeats_itself() -> None:
    loop, answer = "over and over a", "done"
    long = loop + " long time."

    def next_token(token_ids: Sequence[int]) -> Any:
        said = list(token_ids[1:])
        place = next((place for place in range(len(said)) if said[place : place + len(CUE)] == ids(CUE)), None)
        if place is None:
            return looping("first, ", long)(token_ids)
        return [*ids(answer), EOS][min(len(said) - place - len(CUE), len(answer))]

    def said(**params: Any) -> tuple[str, str]:
        request = make_request(
            grammar=Grammar(lambda: Spelling(answer)), preamble=PreambleParams(150, tuple(ids(CUE))), max_tokens=190, **params
        )
        deltas = generate(make_core(next_token), request)
        return preamble(deltas), content(deltas)

    assert LOOPS.min_pattern_size <= len(long) <= LOOPS.max_pattern_size
    assert said() == ("first, " + long * LOOPS.min_count, answer)
    assert said(repetition_detection={}) == ("first, " + (long * 9)[:143], answer)  # detects nothing
    assert said(repetition_detection={"max_pattern_size": 40, "min_count": 2}) == ("first, " + long * 2, answer)


SCHEMA = {"type": "object", "properties": {"name": {"type": "string"}, "tags": {"type": "array"}}, "required": ["name", "tags"]}


@pytest.mark.parametrize("options", [{}, {"rows_for_weights": 8.0}, {"is_async": True}])
def test_an_answer_that_has_to_be_complete_is_completed(options: dict[str, Any]) -> None:
    core = make_core(looping('{"name":"', "abc"), **options)
    request = make_request(grammar=compiled(json.dumps(SCHEMA)), max_tokens=150, ends_within=True, repetition_detection=TWICE)
    deltas = generate(core, request)
    assert is_whole(deltas, 60)
    assert deltas[-1].is_closed
    assert json.loads(content(deltas))["name"].startswith("abcabc")
    core.check_integrity()


def test_an_answer_is_completed_however_far_its_end_is() -> None:
    """Each bracket has to be closed, and the model opens many before it repeats itself in the eyes of the request."""
    grammar = compiled('start: "<" start ">" | "a"', GrammarKind.LARK)
    detection = {"max_pattern_size": 1, "min_count": 30}
    for max_tokens in (70, 100):
        deltas = generate(
            make_core(looping("", "<")),
            make_request(grammar=grammar, max_tokens=max_tokens, ends_within=True, repetition_detection=detection),
        )
        assert is_whole(deltas, max_tokens)
        depth = content(deltas).count("<")
        assert content(deltas) == "<" * depth + "a" + ">" * depth
        assert depth >= 30


def test_a_list_of_numbers_is_not_compared_at_each_of_its_commas() -> None:
    """The event loop looks at each token: to copy thousands of tokens at each of thousands of distances would hold it up."""
    num_slices = 0

    class Tokens(list[int]):
        def __getitem__(self, place: Any) -> Any:
            nonlocal num_slices
            num_slices += isinstance(place, slice)
            return super().__getitem__(place)

    numbers = Tokens(token_id for number in range(2000) for token_id in (100 + number * number % 4001, 1))
    assert not RepetitionDetection(max_pattern_size=4000, min_count=2).finds(numbers)
    assert num_slices < 20
