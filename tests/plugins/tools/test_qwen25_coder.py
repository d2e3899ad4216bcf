import json
from typing import Any

import pytest

from penstock.engine.contracts.parsing import Event, SpecialText, Text, ToolCallArguments, ToolCallStart, Turn
from penstock.testing import check_cuts, check_tool_format, read, split_atoms
from tests.helpers.tool_parsers import tool_parser

qwen25_coder = tool_parser("qwen25_coder")

TOKENS = frozenset({"<tool_call>", "</tool_call>"})


def tool(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object"}, **more}}


AUTO = Turn(tool_choice="auto", tools=[tool("f"), tool("g")], added_tokens=TOKENS)
STRICT = Turn(tool_choice="auto", tools=[tool("f", strict=True), tool("g")], added_tokens=TOKENS)
BARE = '{"name": "f", "arguments": {"x": 1}}'
OTHER = '{"name": "g", "arguments": {}}'
INDENTED = '{\n  "name": "f",\n  "arguments": {"x": 1}\n}'
F: list[Event] = [ToolCallStart(0, "f", ""), ToolCallArguments(0, '{"x": 1}')]
G: list[Event] = [ToolCallStart(1, "g", ""), ToolCallArguments(1, "{}")]


def answer(text: str, turn: Turn = AUTO) -> list[Event]:
    return read(qwen25_coder(turn), split_atoms(text, turn.added_tokens))


@pytest.mark.parametrize(
    "text",
    [
        BARE,
        f"\n{INDENTED}\n",
        f"```json\n{BARE}\n```",
        f"```json\n{INDENTED}\n```\n",
        f"```\n{BARE}\n```",
        f"<tool_call>\n{BARE}\n</tool_call>",
        f"<tools>\n{BARE}\n</tools>",
        f"[{BARE}]",
        f"```json\n[{INDENTED}]\n```",
        f"<tools>[{BARE}]</tools>",
    ],
)
def test_every_spelling_is_a_call_and_nothing_of_it_is_content(text: str) -> None:
    assert answer(text) == F


@pytest.mark.parametrize(
    "text",
    [
        f"{BARE}\n{OTHER}",
        f"{BARE}, {OTHER}",
        f"```json\n{BARE},\n{OTHER}\n```",
        f"```json\n{BARE}\n```\n\n```json\n{OTHER}\n```",
        f"```json\n[{BARE}, {OTHER}]\n```",
        f"<tools>\n{BARE}\n{OTHER}\n</tools>",
        f"<tool_call>\n{BARE}\n</tool_call>\n<tool_call>\n{OTHER}\n</tool_call>",
        f"<tool_call>\n{BARE}\n</tool_call>\n{OTHER}",
        f"{BARE}\n<tool_call>\n{OTHER}\n</tool_call>",
    ],
)
def test_several_calls_stand_one_after_the_other(text: str) -> None:
    assert answer(text) == [*F, *G]


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "h", "arguments": {"x": 1}}',  # not offered
        f"```json\n{BARE.replace('f', 'h')}\n```",
        '{"name": "f"}',
        '{"name": "f", "arguments": [1]}',
        '```json\n{"name": "f", "age": 3}\n```',
        f"An object such as {INDENTED} calls.",
        f"```python\ncall = {INDENTED}\n```",
        f'{{"calls": [{BARE}]}}',
        "```json\n[1, 2]\n```",
        "```\nprint()\n```\n{ }",
        "<tools>none</tools>",
        "[1] says so",
    ],
)
def test_anything_else_is_content_as_it_stood(text: str) -> None:
    assert answer(text) == [Text(text)]


def test_text_around_calls_stays() -> None:
    assert answer(f"Let me see: {BARE} That is all.") == [Text("Let me see: "), *F, Text(" That is all.")]
    assert answer(f"Let me see:\n```json\n{BARE}\n```\nThat is all.") == [Text("Let me see:\n"), *F, Text("\nThat is all.")]


def test_a_block_between_its_tags_may_call_any_tool() -> None:
    [start, _] = answer(f"<tool_call>{BARE.replace('f', 'h')}</tool_call>")
    assert isinstance(start, ToolCallStart)
    assert start.name == "h"


def test_without_tools_only_tags_call() -> None:
    turn = Turn(tool_choice="auto", added_tokens=TOKENS)
    assert answer(BARE, turn) == [Text(BARE)]
    assert answer(f"<tool_call>{BARE}</tool_call>", turn) == F


@pytest.mark.parametrize(
    "text", [BARE, f"Now: {BARE}", f"```json\n{BARE}\n```", f"<tool_call>\n{BARE}\n</tool_call>", f"<tools>\n{BARE}\n</tools>"]
)
def test_with_a_strict_tool_what_the_grammar_takes_over_is_a_call(text: str) -> None:
    events = answer(text, STRICT)
    assert [event for event in events if not isinstance(event, Text)] == F
    assert "".join(event.text for event in events if isinstance(event, Text)) in ("", "Now: ")


@pytest.mark.parametrize("text", [INDENTED, f"```json\n{INDENTED}\n```", BARE.replace('": ', '":')])
def test_with_a_strict_tool_what_no_grammar_saw_is_content(text: str) -> None:
    assert answer(text, STRICT) == [Text(text)]


def test_arguments_are_streamed() -> None:
    parser = qwen25_coder(AUTO)
    assert [*parser.feed('```json\n{"name": "f", "arguments": {"x": "O')][1:] == [ToolCallArguments(0, '{"x": "O')]
    assert [*parser.feed("s")] == [ToolCallArguments(0, "s")]


@pytest.mark.parametrize("turn", [AUTO, STRICT], ids=["free", "strict"])
def test_any_cut_and_any_stop_give_the_same_answer(turn: Turn) -> None:
    texts = [f"a\n```json\n{INDENTED}\n```\n{BARE}, {OTHER}, c", f"<tools>{BARE}</tools>b", f"{BARE}\n<tool_call>{OTHER}</tool_call>d"]
    check_cuts(
        qwen25_coder, texts, markers=[*TOKENS, "<tools>", "</tools>", "```json\n", "```", BARE, OTHER, ","], turn=turn, max_examples=20
    )


def test_what_the_format_allows_is_read_as_calls() -> None:
    nothing = {"type": "object", "properties": {}, "additionalProperties": False}
    tools = {"f": nothing, "g-2": nothing | {"properties": {"x": {"enum": ["]}", "日本"]}}, "required": ["x"]}}
    check_tool_format(qwen25_coder, markers=sorted(TOKENS), tools=tools, num_walks=3)


def test_a_token_within_a_bare_call_is_part_of_the_text() -> None:
    """Whether it is spelled out or the vocabulary's own."""
    text = json.dumps({"name": "f", "arguments": {"x": "</tool_call>"}})
    assert read(qwen25_coder(AUTO), [text]) == [ToolCallStart(0, "f", ""), ToolCallArguments(0, '{"x": "</tool_call>"}')]
    pieces = ['{"name": "f", "arguments": {"x": "', SpecialText("</tool_call>"), '"}}']
    assert read(qwen25_coder(AUTO), pieces) == read(qwen25_coder(AUTO), [text])


def test_a_marker_in_an_open_string_of_a_tool_that_is_not_offered_is_text() -> None:
    turn = Turn(tool_choice="auto", tools=[tool("f", strict=True)])
    text = '<tool_call>{"name": "other", "arguments": {"x": "a</tool_call> b'
    assert answer(text, turn) == [Text(text)]


def test_what_follows_a_call_in_another_format_is_in_no_call_of_the_first() -> None:
    """An array that turns out to hold no call is passed over until the second format's call begins."""
    parser = qwen25_coder(Turn(tool_choice="auto", tools=[tool("f")]))
    parts = ('<tool_call>[{"name": 5, "x": ', BARE, "}]", "</tool_call>\n", "Then text. ")
    states = []
    for part in parts:
        parser.feed(part)
        states.append(parser.is_in_call)
    assert not states[-1]
