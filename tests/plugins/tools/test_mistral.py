import re

import pytest

from penstock.engine.events import Event, SpecialText, Text, ToolCallArguments, ToolCallStart
from penstock.engine.turn import Turn
from penstock.plugins.tools.json_arguments import MISTRAL, MISTRAL_ARRAY
from penstock.testing import check_parser, check_tool_format, read
from tests.helpers.tool_parsers import tool_parser

START, ID, ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
mistral = tool_parser("mistral")

AUTO = Turn(tool_choice="auto")
TOKENS = Turn(tool_choice="auto", added_tokens=frozenset({START, ID, ARGUMENTS}))
CALLS: list[Event] = [
    ToolCallStart(0, "add", ""),
    ToolCallArguments(0, '{"a": 3.5}'),
    ToolCallStart(1, "sub", ""),
    ToolCallArguments(1, '{"b": 4}'),
]
GENERATIONS = [
    '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 3.5}}, {"name": "sub", "arguments": {"b": 4}}]',
    '[TOOL_CALLS][ {"arguments":{"a": 3.5}, "name":"add"} ,{"name" : "sub", "arguments" : {"b": 4} , "id": "Ab3De6Gh9"} ]',
    '[TOOL_CALLS] {"name": "add", "arguments": {"a": 3.5}}, {"name": "sub", "arguments": {"b": 4}}',
    '[TOOL_CALLS]add{"a": 3.5}[TOOL_CALLS]sub{"b": 4}',
    '[TOOL_CALLS]add[ARGS]{"a": 3.5}[TOOL_CALLS]sub[ARGS] {"b": 4}',
    '[TOOL_CALLS]add[CALL_ID]Ab3De6Gh9[ARGS]{"a": 3.5}\n[TOOL_CALLS] sub[CALL_ID]9hG6eD3bA[ARGS]{"b": 4}',
]


@pytest.mark.parametrize("text", GENERATIONS)
def test_every_generation_is_read(text: str) -> None:
    assert read(mistral(AUTO), [f"hi{{hi{text}\nextra"]) == [Text("hi{hi"), *CALLS, Text("\nextra")]


def test_any_cut_and_any_stop_give_the_same_answer() -> None:
    check_parser(
        mistral,
        [f"hi{{hi{GENERATIONS[1]}!", GENERATIONS[2], GENERATIONS[5], "[TOOL_CALLS]f[ARGS]oops"],
        markers=[START, ID, ARGUMENTS],
        max_examples=25,
    )


def test_ids_are_nine_letters_and_digits() -> None:
    for text in GENERATIONS:
        ids = [event.id for event in mistral(AUTO).feed(text) if isinstance(event, ToolCallStart)]
        assert len(set(ids)) == 2
        assert all(re.fullmatch("[A-Za-z0-9]{9}", call_id) for call_id in ids)
    assert ids == ["Ab3De6Gh9", "9hG6eD3bA"]


@pytest.mark.parametrize(
    "text",
    ["[TOOL_CALLS] not json at all", "[TOOL_CALLS]name_alone", "[TOOL_CALLS] [1]", "[TOOL_CALLS]", "[TOOL_CALLS]{}"],
)
def test_what_is_no_call_is_content(text: str) -> None:
    assert read(mistral(AUTO), [text]) == [Text(text)]


def test_a_call_that_is_cut_after_its_name_is_one() -> None:
    assert read(mistral(AUTO), ["[TOOL_CALLS]f[ARGS]"]) == [ToolCallStart(0, "f", "")]


def test_arguments_that_are_cut_keep_what_came() -> None:
    events = read(mistral(AUTO), [r'[TOOL_CALLS]bash{"command": "print(\"{}\")'])
    assert events == [ToolCallStart(0, "bash", ""), ToolCallArguments(0, r'{"command": "print(\"{}\")')]


def test_names_with_brackets_in_their_arguments_are_no_heads() -> None:
    pieces = [SpecialText(START), 'f{"x": "[ARGS]{"}', SpecialText(START), "g", SpecialText(ARGUMENTS), '{"y": "[TOOL_CALLS]"}']
    events = read(mistral(TOKENS), pieces)
    assert [event.fragment for event in events if isinstance(event, ToolCallArguments)] == ['{"x": "[ARGS]{"}', '{"y": "[TOOL_CALLS]"}']


def test_the_vocabulary_tells_how_calls_are_written() -> None:
    assert mistral(AUTO).tool_format is MISTRAL_ARRAY
    assert mistral(Turn(added_tokens=frozenset({START}))).tool_format is MISTRAL_ARRAY
    assert mistral(TOKENS).tool_format is MISTRAL
    check_tool_format(mistral, markers=[START], num_walks=3)
