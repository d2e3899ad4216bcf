"""White space next to calls is left out; all other text stays as it was."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.contracts.parsing import Event, Reasoning, Text, ToolCallArguments, ToolCallStart
from penstock.engine.text.answer import BlankText

CALL: list[Event] = [ToolCallStart(0, "f", "call_0"), ToolCallArguments(0, "{}")]


def shown(events: list[Event]) -> list[Event]:
    blank = BlankText()
    return [*blank.feed(events), *blank.finish()]


def content(events: list[Event]) -> str:
    return "".join(event.text for event in shown(events) if isinstance(event, Text))


@pytest.mark.parametrize("space", [" ", "\n", "\n\n", " \t\r\n"])
def test_white_space_before_between_and_after_calls_is_left_out(space: str) -> None:
    second: list[Event] = [ToolCallStart(1, "g", "call_1")]
    events = [Reasoning("why"), Text(space), *CALL, Text(space), Text(space), *second, Text(space)]
    assert shown(events) == [Reasoning("why"), *CALL, *second]


def test_white_space_beside_text_stays() -> None:
    events = [Text("\n"), Text("Wait. \n"), Text("\n"), *CALL, Text("\n"), Text("Done")]
    assert shown(events) == [Text("\nWait. \n"), Text("\n"), *CALL, Text("\nDone")]


@given(st.lists(st.text(alphabet=" \na", min_size=1)))
def test_an_answer_without_calls_is_what_it_was(texts: list[str]) -> None:
    assert content([Text(text) for text in texts]) == "".join(texts)


@given(st.text(alphabet=" \na"), st.integers(0, 9))
def test_the_same_is_left_out_however_the_text_is_cut(text: str, position: int) -> None:
    cut: list[Event] = [Text(text[:position]), Text(text[position:])]
    assert content([*cut, *CALL, *cut]) == content([Text(text), *CALL, Text(text)])
