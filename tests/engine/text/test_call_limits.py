"""Bounds on the calls of one answer: what is delivered, and where the answer ends."""

import itertools
import json
from collections.abc import Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.contracts.parsing import Event, SpecialText, Text, ToolCallArguments, ToolCallStart
from penstock.engine.text.answer import CallLimits, LimitedCalls

FORCED = CallLimits(max_calls=5, max_alike=1, opening="")


def events_of(calls: Sequence[tuple[str, str]], num_cuts: int = 1) -> list[Event]:
    """The calls as a parser gives them, their arguments in pieces of so many characters."""
    events: list[Event] = []
    for index, (name, arguments) in enumerate(calls):
        events.append(ToolCallStart(index, name, f"call_{index}"))
        events += [ToolCallArguments(index, arguments[start : start + num_cuts]) for start in range(0, len(arguments), num_cuts)]
    return events


def read(events: Sequence[Event], limits: CallLimits, unread: Sequence[Event] = ()) -> tuple[list[Any], bool]:
    """What was delivered, and whether the limits ended it."""
    limited, passed = LimitedCalls(limits), list[Event]()
    for event in events:
        passed += limited.feed([event])
        if limited.is_over:
            break
    passed += limited.finish(unread)
    said: list[Any] = []
    for event in passed:
        if isinstance(event, ToolCallStart):
            assert event.index == sum(isinstance(one, list) for one in said)
            said.append([event.name, ""])
        elif isinstance(event, ToolCallArguments):
            said[-1][1] += event.fragment
        else:
            said.append(event.text)
    return said, limited.is_over


def test_a_call_that_repeats_the_one_before_it_is_not_delivered_and_ends_the_answer() -> None:
    a, b = ("f", '{"x": 1}'), ("f", '{"x": 12}')
    assert read(events_of([a, a, b]), FORCED) == ([[*a]], True)
    assert read(events_of([a, b, a, b, b, a]), FORCED) == ([[*a], [*b], [*a], [*b]], True)
    assert read(events_of([a, ("g", a[1]), b]), FORCED) == ([[*a], ["g", a[1]], [*b]], False)


def test_an_answer_has_as_many_calls_as_it_may() -> None:
    calls = [("f", json.dumps({"x": number})) for number in range(9)]
    assert read(events_of(calls), FORCED) == ([[*call] for call in calls[:5]], True)
    assert read(events_of(calls[:5]), FORCED) == ([[*call] for call in calls[:5]], False)
    assert read([Text("a"), *events_of(calls), Text("b")], CallLimits()) == (["a", *([*call] for call in calls), "b"], False)


def test_equal_calls_are_delivered_up_to_the_bound_where_they_may_be_meant() -> None:
    roll, stop = ("roll", "{}"), ("stop", "{}")
    assert read(events_of([roll] * 9), CallLimits(max_alike=3)) == ([[*roll]] * 3, True)
    assert read(events_of([roll, roll, stop] * 3), CallLimits(max_alike=2)) == ([[*roll], [*roll], [*stop]] * 3, False)


def test_a_call_is_held_only_while_it_may_be_a_repetition_and_is_never_lost() -> None:
    limited = LimitedCalls(FORCED)
    first, start = events_of([("f", '{"x": 1}')], 4), ToolCallStart(1, "f", "call_1")
    assert limited.feed(first) == first, "the first one is never held"
    held: list[Event] = [start, ToolCallArguments(1, '{"x"')]
    assert limited.feed(held) == []
    assert limited.finish([]) == held, "it was cut"
    again = LimitedCalls(FORCED)
    again.feed([*first, *held])
    assert again.feed([ToolCallArguments(1, ": 2")]) == [*held, ToolCallArguments(1, ": 2")]
    assert again.feed([ToolCallArguments(1, "}")]) == [ToolCallArguments(1, "}")]


@given(
    calls=st.lists(st.tuples(st.sampled_from("fg"), st.sampled_from(["{}", '{"x": 1}', '{"x": 12}'])), max_size=9), cut=st.integers(1, 9)
)
def test_any_cut_gives_the_same_calls_of_which_none_repeats_the_one_before(calls: list[tuple[str, str]], cut: int) -> None:
    said, is_over = read(events_of(calls, cut), FORCED)
    assert (said, is_over) == read(events_of(calls), FORCED)
    assert said == [[*call] for call in calls[: len(said)]]
    assert all(one != other for one, other in itertools.pairwise(said))
    assert is_over == (len(said) < len(calls))


def test_text_that_a_grammar_forced_open_is_no_content() -> None:
    marker = SpecialText("<tool_call>")
    unread: list[Event] = [Text("a <"), Text(marker), Text('\n{"name')]
    assert read([], FORCED, unread) == (["", "", ""], False)
    assert read([], CallLimits(opening="<tool_call>"), unread) == (["a <", "", ""], False)
    assert read([], CallLimits(opening="[CALL]"), unread) == (["a <", "<tool_call>", '\n{"name'], False)
    assert read([], CallLimits(), unread) == (["a <", "<tool_call>", '\n{"name'], False)
    assert read([], CallLimits(opening="<call>"), [Text("a <ca"), Text("ll>{")]) == (["a ", ""], False)
