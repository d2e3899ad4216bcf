import pytest

from penstock.engine.events import Text, ToolCallArguments, ToolCallStart
from penstock.engine.turn import Turn
from penstock.testing import read
from tests.helpers.tool_parsers import tool_parser

BEGIN, END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL_BEGIN, CALL_END = "<|tool_call_begin|>", "<|tool_call_end|>"
ARGUMENTS = "<|tool_call_argument_begin|>"
kimi_k2 = tool_parser("kimi_k2")

AUTO = Turn(tool_choice="auto")


def call(call_id: str, arguments: str) -> str:
    return f"{CALL_BEGIN}{call_id} {ARGUMENTS}{arguments}{CALL_END}"


@pytest.mark.parametrize(
    ("call_id", "name"), [("functions.f:0", "f"), ("functions.a.b:12", "a.b"), ("f:3", "f"), ("functions.functions.f:1", "functions.f")]
)
def test_the_native_id_is_kept_and_holds_the_name(call_id: str, name: str) -> None:
    (start, arguments) = kimi_k2(AUTO).feed(f"{BEGIN}{call(call_id, '{}')}{END}")
    assert start == ToolCallStart(0, name, call_id)
    assert arguments == ToolCallArguments(0, "{}")


def test_numbers_go_on_from_the_turns_before() -> None:
    events = kimi_k2(AUTO).feed(f"{BEGIN}{call('functions.f:4', '{}')}{call('functions.f:5', '{}')}{END}")
    starts = [event for event in events if isinstance(event, ToolCallStart)]
    assert starts == [ToolCallStart(0, "f", "functions.f:4"), ToolCallStart(1, "f", "functions.f:5")]


def test_an_id_without_a_number_is_content_and_the_next_call_is_read() -> None:
    broken = call("functions.invalid.0", '{"x": 1}')
    events = read(kimi_k2(AUTO), [f"{BEGIN}{broken}{call('functions.f:1', '{}')}{END}"])
    assert events == [Text(f"{BEGIN}{broken}"), ToolCallStart(0, "f", ""), ToolCallArguments(0, "{}")]


def test_a_call_with_broken_arguments_does_not_break_the_next() -> None:
    broken = call("functions.f:0", '{"x": 1')
    events = read(kimi_k2(AUTO), [f"{BEGIN}{broken}{call('functions.g:1', '{}')}{END}"])
    assert [event for event in events if isinstance(event, ToolCallStart)] == [ToolCallStart(0, "f", ""), ToolCallStart(1, "g", "")]
    assert not [event for event in events if isinstance(event, Text)]


def test_text_around_calls_is_content_even_in_a_section() -> None:
    events = read(kimi_k2(AUTO), [f"a {BEGIN} noise {call('functions.f:0', '{}')}{END} b"])
    assert [event for event in events if isinstance(event, Text)] == [Text(f"a {BEGIN} noise "), Text(" b")]


@pytest.mark.parametrize("arguments", ["", " ", "{}"])
def test_a_call_without_arguments_has_an_empty_object(arguments: str) -> None:
    assert read(kimi_k2(AUTO), [f"{BEGIN}{call('functions.f:0', arguments)}{END}"]) == [
        ToolCallStart(0, "f", ""),
        ToolCallArguments(0, "{}"),
    ]


def test_an_empty_section_is_content() -> None:
    assert read(kimi_k2(AUTO), [f"a{BEGIN}{END}"]) == [Text(f"a{BEGIN}{END}")]


def test_a_section_may_be_misspelt() -> None:
    text = f"<|tool_call_section_begin|>{call('functions.f:0', '{}')}<|tool_call_section_end|>!"
    assert read(kimi_k2(AUTO), [text]) == [ToolCallStart(0, "f", ""), ToolCallArguments(0, "{}"), Text("!")]


def test_an_id_that_comes_again_is_given_out_once() -> None:
    events = kimi_k2(AUTO).feed(f"{BEGIN}{call('functions.f:0', '{}') * 2}{END}")
    first, second = (event.id for event in events if isinstance(event, ToolCallStart))
    assert first == "functions.f:0"
    assert second.startswith("call_")
