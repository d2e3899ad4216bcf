"""Calls that are JSON objects: what holds for every format, and what is particular to one."""

import json
import re
from collections.abc import Callable
from dataclasses import replace

import pytest

from penstock.engine.contracts.parsing import Event, FormatInfo, SpecialText, Text, ToolCallArguments, ToolCallStart, ToolParser, Turn
from penstock.plugins.tools.json_formats import HERMES
from penstock.testing import check_cuts, check_parser, check_tool_format, read, split_atoms
from tests.helpers.tool_parsers import format_info, tool_parser

NAMES = """
    apertus apriel cohere deepseek_v3 deepseek_v31 ernie45 gigachat3 granite granite4 granite-20b-fc hermes hunyuan_a13b inkling internlm
    jamba kimi_k2 llama3_json longcat minimax_m1 mistral nemotron_nano_v2 phi4_mini_json plamo3 solar_open xlam
"""
FORMATS = sorted({*NAMES.split()} - {"hermes", "granite4", "ernie45"})  # Hermes' is tested with it, and theirs is the same
AUTO = Turn(tool_choice="auto")


FAMILIES = {name: (tool_parser(name), format_info(name)) for name in NAMES.split()}
families = pytest.mark.parametrize(("factory", "info"), FAMILIES.values(), ids=FAMILIES)
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
TOOLS = {"f": NOTHING, "g-2": NOTHING | {"properties": {"x": {"enum": ["]}", "日本"]}}, "required": ["x"]}}
WEATHER = [ToolCallStart(0, "weather", ""), ToolCallArguments(0, '{"city": "Oslo"}')]


def content_of(info: FormatInfo) -> str:
    """The example without its reasoning, which another parser reads."""
    return info.example.rpartition("</think>")[2].strip()


def tokens_of(info: FormatInfo) -> frozenset[str]:
    return frozenset(marker for marker in info.markers if marker[0] in "<[" and not marker.endswith("["))


@pytest.mark.parametrize(("factory", "info"), [FAMILIES[name] for name in FORMATS], ids=FORMATS)
def test_what_the_format_allows_is_read_as_calls(factory: Callable[[Turn], ToolParser], info: FormatInfo) -> None:
    check_tool_format(factory, markers=sorted(tokens_of(info)), tools=TOOLS, num_walks=2)


@families
def test_the_example_is_one_call(factory: Callable[[Turn], ToolParser], info: FormatInfo) -> None:
    example = content_of(info)
    assert read(factory(AUTO), [example]) == WEATHER
    tokens = tokens_of(info)
    assert read(factory(Turn(tool_choice="auto", added_tokens=tokens)), split_atoms(example, tokens)) == WEATHER


@families
def test_text_around_a_call_stays(factory: Callable[[Turn], ToolParser], info: FormatInfo) -> None:
    events = read(factory(AUTO), [f"Let me see: {content_of(info)} That is all"])
    assert events == [Text("Let me see: "), *WEATHER, Text(" That is all")]


@families
def test_what_is_quoted_calls_nothing_where_the_markers_are_tokens(factory: Callable[[Turn], ToolParser], info: FormatInfo) -> None:
    example = content_of(info)
    tokens = tokens_of(info)
    if any(token in example for token in tokens):
        assert read(factory(Turn(tool_choice="auto", added_tokens=tokens)), [example]) == [Text(example)]


@families
def test_with_tool_choice_none_everything_is_text(factory: Callable[[Turn], ToolParser], info: FormatInfo) -> None:
    assert read(factory(Turn(tool_choice="none")), [info.example]) == [Text(info.example)]


@families
def test_string_arguments_stream_character_by_character(factory: Callable[[Turn], ToolParser], info: FormatInfo) -> None:
    parser = factory(AUTO)
    head, tail = content_of(info).split("Oslo")
    events = [*parser.feed(head)]
    assert isinstance(events[0], ToolCallStart)
    assert [event.fragment for event in events[1:] if isinstance(event, ToolCallArguments)] == ['{"city": "']
    for char in "Oslo":
        assert [*parser.feed(char)] == [ToolCallArguments(0, char)]
    assert [*parser.feed(tail), *parser.finish()] == [ToolCallArguments(0, '"}')]


@families
def test_a_call_that_is_cut_keeps_what_came(factory: Callable[[Turn], ToolParser], info: FormatInfo) -> None:
    cut = content_of(info).partition("slo")[0]
    assert read(factory(AUTO), [cut]) == [ToolCallStart(0, "weather", ""), ToolCallArguments(0, '{"city": "O')]


@families
def test_a_call_that_is_cut_before_its_name_is_text(factory: Callable[[Turn], ToolParser], info: FormatInfo) -> None:
    cut = content_of(info).partition("ther")[0]
    assert read(factory(AUTO), [cut]) == [Text(cut)]


@families
def test_all_kinds_of_arguments_come_out_as_they_were_written(factory: Callable[[Turn], ToolParser], info: FormatInfo) -> None:
    arguments = {"s": 'a "b" \\ \n', "i": 42, "f": -2e-3, "b": True, "n": None, "l": ["a", [], {}], "o": {"k": {}}, "u": "日本 🎉", "": ""}
    written = json.dumps(arguments, ensure_ascii=False)
    events = read(factory(AUTO), [content_of(info).replace('{"city": "Oslo"}', written)])
    assert events == [ToolCallStart(0, "weather", ""), ToolCallArguments(0, written)]
    empty = read(factory(AUTO), [content_of(info).replace('{"city": "Oslo"}', "{}")])
    assert empty == [ToolCallStart(0, "weather", ""), ToolCallArguments(0, "{}")]


@families
def test_a_line_break_and_a_tab_in_a_string_are_escaped(factory: Callable[[Turn], ToolParser], info: FormatInfo) -> None:
    events = read(factory(AUTO), [content_of(info).replace("Oslo", "New\n\tYork")])
    assert events == [ToolCallStart(0, "weather", ""), ToolCallArguments(0, r'{"city": "New\n\tYork"}')]


@families
def test_calls_are_numbered(factory: Callable[[Turn], ToolParser], info: FormatInfo) -> None:
    example = content_of(info)
    events = read(factory(AUTO), [f"{example}\n{example}"])
    assert events == [*WEATHER, ToolCallStart(1, "weather", ""), ToolCallArguments(1, '{"city": "Oslo"}')]


@families
def test_an_object_in_a_string_stands_for_itself(factory: Callable[[Turn], ToolParser], info: FormatInfo) -> None:
    example = content_of(info)
    assert read(factory(AUTO), [example.replace('{"city": "Oslo"}', r'"{\"city\": \"Oslo\"}"')]) == WEATHER


@families
@pytest.mark.parametrize("value", ['"Oslo"', "1", "[1]", "true"])
def test_arguments_that_are_no_object_make_it_content(factory: Callable[[Turn], ToolParser], info: FormatInfo, value: str) -> None:
    text = content_of(info).replace('{"city": "Oslo"}', value)
    assert read(factory(AUTO), [text]) == [Text(text)]


@families
@pytest.mark.parametrize("value", ["null", '""'])
def test_what_stands_for_no_arguments_is_an_empty_object(factory: Callable[[Turn], ToolParser], info: FormatInfo, value: str) -> None:
    events = read(factory(AUTO), [content_of(info).replace('{"city": "Oslo"}', value)])
    assert events == [ToolCallStart(0, "weather", ""), ToolCallArguments(0, "{}")]


WITH_KEYS = {name: family for name, family in FAMILIES.items() if re.search(r'"(arguments|parameters)": ', content_of(family[1]))}


@pytest.mark.parametrize(("factory", "info"), WITH_KEYS.values(), ids=WITH_KEYS)
@pytest.mark.parametrize("member", ['"args": {"city": "Oslo"}', '"Arguments": {"city": "Oslo"}', '"city": "Oslo"'])
def test_a_call_with_other_members_for_its_arguments_is_content(
    factory: Callable[[Turn], ToolParser], info: FormatInfo, member: str
) -> None:
    text = re.sub(r'"(arguments|parameters)": \{"city": "Oslo"\}', member, content_of(info))
    assert read(factory(AUTO), [text]) == [Text(text)]
    cut = text.partition("slo")[0]
    assert read(factory(AUTO), [cut]) == [Text(cut)]


@families
def test_brackets_that_close_nothing_belong_to_the_format_before_its_end(factory: Callable[[Turn], ToolParser], info: FormatInfo) -> None:
    example = content_of(info)
    head, arguments, rest = example.partition('{"city": "Oslo"}')
    brackets = rest[: len(rest) - len(rest.lstrip("}]"))]
    end = rest.removeprefix(brackets)
    surplus = f"{head}{arguments}{brackets}}}}}"
    assert read(factory(AUTO), [f"{surplus} after"]) == [*WEATHER, Text("}} after")]
    if end.strip():
        assert read(factory(AUTO), [f"{surplus}{end} after"]) == [*WEATHER, Text(" after")]


@families
def test_an_end_token_in_the_middle_of_a_call_ends_it(factory: Callable[[Turn], ToolParser], info: FormatInfo) -> None:
    tokens = tokens_of(info)
    end = next((marker for marker in info.markers if marker in tokens and ("/" in marker or "end" in marker.lower())), None)
    if end is None:
        return
    head = content_of(info).partition("slo")[0]
    events = read(factory(Turn(tool_choice="auto", added_tokens=tokens)), [*split_atoms(head, tokens), SpecialText(end), " after"])
    assert events[:2] == [ToolCallStart(0, "weather", ""), ToolCallArguments(0, '{"city": "O"}')]
    assert events[-1] == Text(" after")


hermes = tool_parser("hermes")

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
    check_parser(hermes, SAMPLES, markers=MARKERS, turn=Turn(tool_choice=tool_choice), max_examples=20)


def test_what_the_format_allows_is_read_as_calls_of_hermes() -> None:
    check_tool_format(hermes, markers=MARKERS, num_walks=3)


def test_a_call_starts_with_its_first_argument_and_strings_follow_character_by_character() -> None:
    parser = replace(HERMES, new_id=lambda: "id")(AUTO)
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
    parser = replace(HERMES, new_id=lambda: "id")(AUTO)
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
    check_cuts(hermes, [array, "<tool_call> [1, {}]</tool_call>"], markers=MARKERS, turn=AUTO, max_examples=20)


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
    check_cuts(hermes, [text], markers=MARKERS, turn=AUTO, max_examples=20)


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


cohere = tool_parser("cohere")

BLOCK = """<|START_ACTION|>
[
    {"tool_call_id": "0", "tool_name": "f", "parameters": {"name": "x", "tool_name": "y"}},
    {"tool_name": "g", "parameters": {}}
]
<|END_ACTION|>"""


def test_one_call_may_lack_the_brackets() -> None:
    call = '{"tool_call_id": "0", "tool_name": "f", "parameters": {"x": 1}}'
    events = read(cohere(Turn(tool_choice="auto")), [f"So: <|START_ACTION|>\n{call}\n<|END_ACTION|>"])
    assert events == [Text("So: "), ToolCallStart(0, "f", ""), ToolCallArguments(0, '{"x": 1}')]


def test_ids_are_the_models_own_where_it_writes_them() -> None:
    start, arguments, other, nothing = cohere(Turn(tool_choice="auto")).feed(BLOCK)
    assert start == ToolCallStart(0, "f", "0")
    assert arguments == ToolCallArguments(0, '{"name": "x", "tool_name": "y"}')
    assert isinstance(other, ToolCallStart)
    assert (other.index, other.name, other.id[:5]) == (1, "g", "call_")
    assert nothing == ToolCallArguments(1, "{}")


internlm = tool_parser("internlm")


@pytest.mark.parametrize("marker", ["<|action_start|><|plugin|>", "<|action_start|> <|plugin|>\n", "<|plugin|>"])
@pytest.mark.parametrize("key", ["parameters", "arguments"])
def test_both_spellings_of_the_opening_and_of_the_key_are_read(marker: str, key: str) -> None:
    text = f'{marker}{{"name": "f", "{key}": {{"x": 1}}}}<|action_end|>'
    assert read(internlm(AUTO), [f"hi {text}"]) == [Text("hi "), ToolCallStart(0, "f", ""), ToolCallArguments(0, '{"x": 1}')]


@pytest.mark.parametrize(
    "text",
    [
        "<|action_start|><|interpreter|>\nprint(1)<|action_end|>",
        "<|action_start|> <|plugin|>get_weather('par",
        '<|action_start|>{"name": "f"}',
        "<|action_start|><|plugin|>",
    ],
)
def test_what_is_no_call_is_content(text: str) -> None:
    assert read(internlm(AUTO), [text]) == [Text(text)]


TAG = "<|python_tag|>"
llama3_json = tool_parser("llama3_json")

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


xlam = tool_parser("xlam")

ARRAY = '[{"name": "f", "arguments": {"x": 1}}, {"name": "g", "arguments": {}}]'
CALLS: list[Event] = [
    ToolCallStart(0, "f", ""),
    ToolCallArguments(0, '{"x": 1}'),
    ToolCallStart(1, "g", ""),
    ToolCallArguments(1, "{}"),
]


@pytest.mark.parametrize(
    ("before", "text", "after"),
    [
        ("", ARRAY, ""),
        ("<think>Why.</think>", ARRAY, ""),
        ("I'll help.\n", f"```json\n{ARRAY}\n```", ""),
        ("I'll help.\n", f"```\n{ARRAY}\n```", "\nDone."),
        ("I'll help.", f"[TOOL_CALLS]{ARRAY}", ""),
        ("I'll help.", f"<tool_call>{ARRAY}</tool_call>", " Done."),
        ("", ARRAY.replace("[{", "[\n  {"), " [1]"),
    ],
)
def test_an_array_of_calls_may_stand_anywhere(before: str, text: str, after: str) -> None:
    expected = [*([Text(before)] if before else []), *CALLS, *([Text(after)] if after else [])]
    assert read(xlam(AUTO), [before + text + after]) == expected


@pytest.mark.parametrize(
    "text", ["[1, 2]", '[{"city": "Oslo"}]', '[{"name": "f"}]', '```json\n{"name": "f"}\n```', "```python\nx = [{}]\n```", "[TOOL_CALLS]"]
)
def test_any_other_array_is_content(text: str) -> None:
    assert read(xlam(AUTO), [text]) == [Text(text)]


def test_any_cut_and_any_stop_give_the_same_answer_of_xlam() -> None:
    samples = [f"Hm\n```json\n{ARRAY}\n``` ok", '[ {"city": "Oslo"}, {"name": "f", "arguments": {}}]']
    check_cuts(xlam, samples, markers=["[TOOL_CALLS]", "<tool_call>", "</tool_call>"], max_examples=25)
