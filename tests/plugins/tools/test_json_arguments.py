"""Calls that are named before their arguments: DeepSeek, Kimi and Mistral."""

import json
import re

import pytest

from penstock.engine.contracts.parsing import Event, SpecialText, Text, ToolCallArguments, ToolCallStart, Turn
from penstock.plugins.tools.json_formats import MISTRAL, MISTRAL_ARRAY
from penstock.testing import check_cuts, check_tool_format, read
from tests.helpers.tool_parsers import tool_parser

BEGIN, END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_BEGIN, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
SEPARATOR = "<｜tool▁sep｜>"
deepseek_v3 = tool_parser("deepseek_v3")
deepseek_v31 = tool_parser("deepseek_v31")

AUTO = Turn(tool_choice="auto")
F: list[Event] = [ToolCallStart(0, "f", ""), ToolCallArguments(0, '{"x": 1}')]


@pytest.mark.parametrize(
    "body",
    [
        'f\n```json\n{"x": 1}\n```',
        'f\n```json{"x": 1}```',
        ' f \n\n```json\n\n{"x": 1}\n\n```\n',
        'f\n{"x": 1}\n',
        'f\n```json\n{"x": 1}',
    ],
)
def test_the_fence_is_part_of_the_format_and_may_be_missing(body: str) -> None:
    call = f"{CALL_BEGIN}function{SEPARATOR}{body}"
    for text in (f"{BEGIN}{call}{CALL_END}{END}", f"{BEGIN}\n{call}{CALL_END}\n{END}", f"{call}{CALL_END}", f"{BEGIN}{call}"):
        assert read(deepseek_v3(AUTO), [f"Hm.{text}"]) == [Text("Hm."), *F]


def test_arguments_over_several_lines_are_given_out_as_they_were_written() -> None:
    arguments = json.dumps({"city": "Tokyo", "days": [1, 2]}, indent=2)
    text = f"{BEGIN}{CALL_BEGIN}function{SEPARATOR}f\n```json\n{arguments}\n```{CALL_END}{END}"
    assert read(deepseek_v3(AUTO), [text])[1] == ToolCallArguments(0, arguments)


@pytest.mark.parametrize("factory", [deepseek_v3, deepseek_v31])
def test_a_section_without_a_call_is_content(factory: type) -> None:
    for text in (f"{BEGIN}function{SEPARATOR}f\n```json\n{{}}\n```{END}", f"{BEGIN}{END}", f"{BEGIN}{CALL_BEGIN}{CALL_END}{END}"):
        assert read(factory(AUTO), [text]) == [Text(text)]


def test_a_call_that_is_not_closed_does_not_break_the_next() -> None:
    broken = f'{CALL_BEGIN}function{SEPARATOR}f\n```json\n{{"x": 1\n```{CALL_END}'
    whole = f"{CALL_BEGIN}function{SEPARATOR}g\n```json\n{{}}\n```{CALL_END}"
    events = read(deepseek_v3(AUTO), [f"{BEGIN}{broken}\n{whole}{END}"])
    assert events == [
        ToolCallStart(0, "f", ""),
        ToolCallArguments(0, '{"x": 1\n}'),
        ToolCallStart(1, "g", ""),
        ToolCallArguments(1, "{}"),
    ]


def test_text_after_the_section_is_content() -> None:
    call = f'{CALL_BEGIN}f{SEPARATOR}{{"x": 1}}{CALL_END}'
    assert read(deepseek_v31(AUTO), [f"{BEGIN}{call}{END} It is."]) == [*F, Text(" It is.")]


KIMI_K2_BEGIN, KIMI_K2_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
KIMI_K2_CALL_BEGIN, KIMI_K2_CALL_END = "<|tool_call_begin|>", "<|tool_call_end|>"
ARGUMENTS = "<|tool_call_argument_begin|>"
kimi_k2 = tool_parser("kimi_k2")


def call(call_id: str, arguments: str) -> str:
    return f"{KIMI_K2_CALL_BEGIN}{call_id} {ARGUMENTS}{arguments}{KIMI_K2_CALL_END}"


@pytest.mark.parametrize(
    ("call_id", "name"), [("functions.f:0", "f"), ("functions.a.b:12", "a.b"), ("f:3", "f"), ("functions.functions.f:1", "functions.f")]
)
def test_the_native_id_is_kept_and_holds_the_name(call_id: str, name: str) -> None:
    (start, arguments) = kimi_k2(AUTO).feed(f"{KIMI_K2_BEGIN}{call(call_id, '{}')}{KIMI_K2_END}")
    assert start == ToolCallStart(0, name, call_id)
    assert arguments == ToolCallArguments(0, "{}")


def test_numbers_go_on_from_the_turns_before() -> None:
    events = kimi_k2(AUTO).feed(f"{KIMI_K2_BEGIN}{call('functions.f:4', '{}')}{call('functions.f:5', '{}')}{KIMI_K2_END}")
    starts = [event for event in events if isinstance(event, ToolCallStart)]
    assert starts == [ToolCallStart(0, "f", "functions.f:4"), ToolCallStart(1, "f", "functions.f:5")]


def test_an_id_without_a_number_is_content_and_the_next_call_is_read() -> None:
    broken = call("functions.invalid.0", '{"x": 1}')
    events = read(kimi_k2(AUTO), [f"{KIMI_K2_BEGIN}{broken}{call('functions.f:1', '{}')}{KIMI_K2_END}"])
    assert events == [Text(f"{KIMI_K2_BEGIN}{broken}"), ToolCallStart(0, "f", ""), ToolCallArguments(0, "{}")]


def test_a_call_with_broken_arguments_does_not_break_the_next() -> None:
    broken = call("functions.f:0", '{"x": 1')
    events = read(kimi_k2(AUTO), [f"{KIMI_K2_BEGIN}{broken}{call('functions.g:1', '{}')}{KIMI_K2_END}"])
    assert [event for event in events if isinstance(event, ToolCallStart)] == [ToolCallStart(0, "f", ""), ToolCallStart(1, "g", "")]
    assert not [event for event in events if isinstance(event, Text)]


def test_text_around_calls_is_content_even_in_a_section() -> None:
    events = read(kimi_k2(AUTO), [f"a {KIMI_K2_BEGIN} noise {call('functions.f:0', '{}')}{KIMI_K2_END} b"])
    assert [event for event in events if isinstance(event, Text)] == [Text(f"a {KIMI_K2_BEGIN} noise "), Text(" b")]


@pytest.mark.parametrize("arguments", ["", " ", "{}"])
def test_a_call_without_arguments_has_an_empty_object(arguments: str) -> None:
    assert read(kimi_k2(AUTO), [f"{KIMI_K2_BEGIN}{call('functions.f:0', arguments)}{KIMI_K2_END}"]) == [
        ToolCallStart(0, "f", ""),
        ToolCallArguments(0, "{}"),
    ]


def test_an_empty_section_is_content() -> None:
    assert read(kimi_k2(AUTO), [f"a{KIMI_K2_BEGIN}{KIMI_K2_END}"]) == [Text(f"a{KIMI_K2_BEGIN}{KIMI_K2_END}")]


def test_a_section_may_be_misspelt() -> None:
    text = f"<|tool_call_section_begin|>{call('functions.f:0', '{}')}<|tool_call_section_end|>!"
    assert read(kimi_k2(AUTO), [text]) == [ToolCallStart(0, "f", ""), ToolCallArguments(0, "{}"), Text("!")]


def test_an_id_that_comes_again_is_given_out_once() -> None:
    events = kimi_k2(AUTO).feed(f"{KIMI_K2_BEGIN}{call('functions.f:0', '{}') * 2}{KIMI_K2_END}")
    first, second = (event.id for event in events if isinstance(event, ToolCallStart))
    assert first == "functions.f:0"
    assert second.startswith("call_")


START, ID, MISTRAL_ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
mistral = tool_parser("mistral")

TOKENS = Turn(tool_choice="auto", added_tokens=frozenset({START, ID, MISTRAL_ARGUMENTS}))
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
    check_cuts(
        mistral,
        [f"hi{{hi{GENERATIONS[1]}!", GENERATIONS[2], GENERATIONS[5], "[TOOL_CALLS]f[ARGS]oops"],
        markers=[START, ID, MISTRAL_ARGUMENTS],
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
    pieces = [SpecialText(START), 'f{"x": "[ARGS]{"}', SpecialText(START), "g", SpecialText(MISTRAL_ARGUMENTS), '{"y": "[TOOL_CALLS]"}']
    events = read(mistral(TOKENS), pieces)
    assert [event.fragment for event in events if isinstance(event, ToolCallArguments)] == ['{"x": "[ARGS]{"}', '{"y": "[TOOL_CALLS]"}']


def test_the_vocabulary_tells_how_calls_are_written() -> None:
    assert mistral(AUTO).tool_format is MISTRAL_ARRAY
    assert mistral(Turn(added_tokens=frozenset({START}))).tool_format is MISTRAL_ARRAY
    assert mistral(TOKENS).tool_format is MISTRAL
    check_tool_format(mistral, markers=[START], num_walks=3)
