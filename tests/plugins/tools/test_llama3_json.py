import pytest

from penstock.engine.events import Event, SpecialText, Text, ToolCallArguments, ToolCallStart
from penstock.engine.turn import Turn
from penstock.testing import read
from tests.helpers.tool_parsers import tool_parser

TAG = "<|python_tag|>"
llama3_json = tool_parser("llama3_json")

AUTO = Turn(tool_choice="auto")
F: list[Event] = [ToolCallStart(0, "f", ""), ToolCallArguments(0, '{"x": 1}')]
G: list[Event] = [ToolCallStart(1, "g", ""), ToolCallArguments(1, "{}")]


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "f", "parameters": {"x": 1}}; {"name": "g", "parameters": {}}',
        '<|python_tag|>{"name": "f", "parameters": {"x": 1}} ;\n{"name": "g", "arguments": {}}',
        '<|python_tag|> {"parameters": {"x": 1}, "name": "f"}\n<|python_tag|>{"name": "g", "parameters": null}',
        '{"type": "function", "name": "f", "parameters": {"x": 1}}{"name": "g", "parameters": ""}',
    ],
)
def test_calls_are_objects_with_a_name_and_parameters(text: str) -> None:
    assert read(llama3_json(AUTO), [text]) == [*F, *G]


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "f"}',
        '{"parameters": {}}',
        '{"name": "f", "parameters": {invalid json}',
        '{"name": "f", "parameters": [1]}',
        '{"result": {"name": "f", "parameters": {"x": 1}}}',
        '[1, {"data": [{"name": "f", "parameters": {"x": 1}}]}]',
        "{hello world[A(A=\t)A(A=,\t",
        "<|python_tag|>print({})",
        "an { in prose",
    ],
)
def test_any_other_json_is_content(text: str) -> None:
    assert read(llama3_json(AUTO), [text]) == [Text(text)]


def test_text_around_calls_is_content() -> None:
    events = read(llama3_json(AUTO), ['Here: {"name": "f", "parameters": {"x": 1}} Would you like more?'])
    assert events == [Text("Here: "), *F, Text(" Would you like more?")]


def test_the_tag_is_left_out_of_calls_and_kept_before_code() -> None:
    turn = Turn(tool_choice="auto", added_tokens=frozenset({TAG}))
    assert read(llama3_json(turn), [SpecialText(TAG), '{"name": "f", "parameters": {"x": 1}}']) == F
    assert read(llama3_json(turn), [SpecialText(TAG), "print(1)"]) == [Text(SpecialText(TAG)), Text("print(1)")]
