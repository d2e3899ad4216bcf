import json
import re
from dataclasses import replace

import pytest

from penstock.engine.events import SpecialText, Text, ToolCallArguments, ToolCallStart
from penstock.engine.turn import Turn
from penstock.plugins.tools.json_objects import HERMES
from penstock.testing import check_parser, check_tool_format, read
from tests.helpers.tool_parsers import tool_parser

hermes = tool_parser("hermes")

AUTO = Turn(tool_choice="auto")
MARKERS = ("<tool_call>", "</tool_call>")
TOKENS = Turn(tool_choice="auto", added_tokens=frozenset(MARKERS))
CALL = '<tool_call>\n{"name": "f", "arguments": {"x": [1, "</tool_call>"]}}\n</tool_call>'

SAMPLES = [
    CALL,
    f"Let me see.\n{CALL}\n{CALL}\nDone.",
    '<tool_call>{"arguments": {"a": {}}, "name": "g"}</tool_call>',
    '<tool_call>{"name": "f"}</tool_call>',
    '<tool_call>{"name": "f", "arguments": {"x": 1}</tool_call>!',
    '<tool_call>{"name": "f", "arguments": {"x": oops}}</tool_call>',
    '<tool_call>{"name": 1}</tool_call> <tool_call> <tool_call>{"name": "f", "arguments": 1 }',
    '<tool_call>{"name": "f", "arguments": {"x": "a<tool_call>b',
    "1 < 2 <tool_",
    "</tool_call>",
]


@pytest.mark.parametrize("tool_choice", ["auto", "none"])
def test_any_cut_and_any_stop_give_the_same_answer(tool_choice: str) -> None:
    check_parser(hermes, SAMPLES, markers=MARKERS, turn=Turn(tool_choice=tool_choice), max_examples=60)


def test_what_the_format_allows_is_read_as_calls() -> None:
    check_tool_format(hermes, markers=MARKERS, num_walks=6)


def test_a_call_starts_with_its_first_argument_and_strings_follow_character_by_character() -> None:
    parser = replace(HERMES, new_id=lambda: "id").parser(AUTO)
    assert parser.feed('<tool_call>\n{"name": "f", "arguments": {') == []
    assert parser.feed('"x": "') == [ToolCallStart(0, "f", "id"), ToolCallArguments(0, '{"x": "')]
    for char in "yz":
        assert parser.feed(char) == [ToolCallArguments(0, char)]
    assert parser.feed('"') == []  # which may belong to the string
    assert parser.feed("}") == [ToolCallArguments(0, '"}')]
    assert parser.feed("}\n</tool_call>") == []
    assert parser.finish() == []


def test_arguments_come_out_as_they_were_written() -> None:
    written = '{ "x" :1.50,\n"y": "\\u00e9é"}'
    events = read(hermes(AUTO), [f'<tool_call>{{"name": "f", "arguments":{written}}}</tool_call>'])
    assert events == [ToolCallStart(0, "f", ""), ToolCallArguments(0, written)]
    assert json.loads(written) == {"x": 1.5, "y": "éé"}


def test_arguments_before_the_name_wait_for_it() -> None:
    parser = replace(HERMES, new_id=lambda: "id").parser(AUTO)
    assert parser.feed('<tool_call>{"arguments": {"x": 1}, ') == []
    assert parser.feed('"name": "f"}') == [ToolCallStart(0, "f", "id"), ToolCallArguments(0, '{"x": 1}')]


def test_ids_are_fresh_and_of_the_usual_form() -> None:
    ids = [event.id for event in hermes(AUTO).feed(CALL * 3) if isinstance(event, ToolCallStart)]
    assert len(set(ids)) == 3
    assert all(re.fullmatch(r"call_[0-9a-f]{24}", call_id) for call_id in ids)


def test_calls_are_numbered_and_the_space_between_them_is_no_content() -> None:
    events = read(hermes(AUTO), [f"Look: {CALL}\n{CALL}\n"])
    assert [type(event) for event in events] == [Text, ToolCallStart, ToolCallArguments, ToolCallStart, ToolCallArguments]
    assert [event.index for event in events if isinstance(event, ToolCallStart)] == [0, 1]
    assert events[0] == Text("Look: ")


def test_text_after_a_call_is_content() -> None:
    assert read(hermes(AUTO), [f"{CALL}\n done"])[-1] == Text("\n done")


def test_an_unclosed_last_block_is_a_call() -> None:
    whole = read(hermes(AUTO), [CALL])
    assert read(hermes(AUTO), [CALL.removesuffix("</tool_call>")]) == whole


def test_a_block_may_hold_an_array_of_calls() -> None:
    array = '<tool_call>\n[{"name": "f", "arguments": {}}, {"name": "g", "arguments": {"x": [1]}}]\n</tool_call>'
    events = read(hermes(AUTO), [f"Both: {array}"])
    assert [event.name for event in events if isinstance(event, ToolCallStart)] == ["f", "g"]
    assert [event.text for event in events if isinstance(event, Text)] == ["Both: "]
    check_parser(hermes, [array, "<tool_call> [1, {}]</tool_call>"], markers=MARKERS, turn=AUTO, max_examples=20)


def test_a_missing_outer_brace_is_forgiven() -> None:
    events = read(hermes(AUTO), ['<tool_call>{"name": "f", "arguments": {"x": 1}\n</tool_call>after'])
    assert events == [ToolCallStart(0, "f", ""), ToolCallArguments(0, '{"x": 1}'), Text("after")]


@pytest.mark.parametrize("body", ["not json", "{", "{}", '{"name": f}', '{"name": null, "arguments": {}}', '[{"a": "f"}]', ""])
def test_a_block_that_is_no_call_is_content(body: str) -> None:
    text = f"a <tool_call>{body}</tool_call> b"
    assert read(hermes(AUTO), [text]) == [Text(text)]


def test_a_call_after_a_block_that_is_none_is_still_read() -> None:
    events = read(hermes(AUTO), ["<tool_call>{<tool_call>" + '{"name": "f"}'])
    assert events == [Text("<tool_call>{"), ToolCallStart(0, "f", ""), ToolCallArguments(0, "{}")]


@pytest.mark.parametrize("arguments", ["oops", "{oops}", '{"x": 1', '"{}'])
def test_a_block_whose_arguments_never_begin_or_are_not_closed_is_content_or_mended(arguments: str) -> None:
    pieces = [SpecialText("<tool_call>"), f'{{"name": "f", "arguments": {arguments}', SpecialText("</tool_call>")]
    mended = [ToolCallStart(0, "f", ""), ToolCallArguments(0, '{"x": 1}')]
    assert read(hermes(TOKENS), pieces) == (mended if "x" in arguments else list(map(Text, pieces)))


def test_arguments_that_make_no_sense_are_closed_and_leave_the_rest_visible() -> None:
    events = read(hermes(AUTO), ['<tool_call>{"name": "f", "arguments": {"x": 1, oops}}</tool_call>'])
    assert events == [ToolCallStart(0, "f", ""), ToolCallArguments(0, '{"x": 1}'), Text(", oops}}</tool_call>")]


@pytest.mark.parametrize(
    ("broken", "items"),
    [
        ('{"name": oops, "x": "}"}', 1),
        ('{"arguments": {"x": [1]}, "name": oops}', 1),
        ('{"name": "f", "arguments": {"x": [1]}, "oops"}', 2),
        ('{"name": "f", "arguments": {"x": 1 "y": {"z": 2}}}', 2),
    ],
)
def test_calls_after_a_malformed_one_in_an_array_are_read(broken: str, items: int) -> None:
    text = f'<tool_call>[{broken}, {{"name": "g", "arguments": {{}}}}]</tool_call>'
    names = [event.name for event in read(hermes(AUTO), [text]) if isinstance(event, ToolCallStart)]
    assert names == ["f", "g"][2 - items :]
    check_parser(hermes, [text], markers=MARKERS, turn=AUTO, max_examples=20)


def test_a_quoted_marker_calls_nothing_where_the_vocabulary_has_it_as_a_token() -> None:
    assert read(hermes(TOKENS), [CALL]) == [Text(CALL)]
    pieces = [SpecialText("<tool_call>"), '{"name": "f"}', SpecialText("</tool_call>")]
    assert read(hermes(TOKENS), pieces) == [ToolCallStart(0, "f", ""), ToolCallArguments(0, "{}")]


def test_the_end_token_ends_a_block_even_inside_a_string() -> None:
    pieces = [SpecialText("<tool_call>"), '{"name": "f', SpecialText("</tool_call>"), "x"]
    assert read(hermes(TOKENS), pieces) == [Text("<tool_call>"), Text('{"name": "f'), Text("</tool_call>"), Text("x")]


def test_other_added_tokens_belong_to_the_arguments() -> None:
    pieces = [SpecialText("<tool_call>"), '{"name": "f", "arguments": {"x": "', SpecialText("<|end|>"), '"}}', SpecialText("</tool_call>")]
    assert read(hermes(TOKENS), pieces)[1] == ToolCallArguments(0, '{"x": "<|end|>"}')


@pytest.mark.parametrize(("token", "rest"), [("}}\n!", "\n!"), ("}!", "!"), ("}}", None)])
def test_an_added_token_that_ends_a_call_in_its_middle_is_read_once(token: str, rest: str | None) -> None:
    events = read(hermes(AUTO), ['<tool_call>{"name": "f", "arguments": {"x": 1', SpecialText(token)])
    assert events == [ToolCallStart(0, "f", ""), ToolCallArguments(0, '{"x": 1}'), *([Text(rest)] if rest else [])]


def test_with_tool_choice_none_markup_stays_content() -> None:
    assert read(hermes(Turn(tool_choice="none")), [CALL]) == [Text(CALL)]
