import json
import re
from collections.abc import Callable

import pytest

from penstock.engine.events import SpecialText, Text, ToolCallArguments, ToolCallStart
from penstock.engine.format_info import FormatInfo
from penstock.engine.parsing import Parser
from penstock.engine.turn import Turn
from penstock.testing import check_parser, check_tool_format, read, split_atoms
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


@families
def test_any_cut_and_any_stop_give_the_same_answer(factory: Callable[[Turn], Parser], info: FormatInfo) -> None:
    example = content_of(info)
    broken = example.replace('"Oslo"', "oops")
    tricky = example.replace("Oslo", '[\\"{}\\"] </tool_call>, \\u00e9')
    check_parser(factory, [f"a {broken}", f"{tricky}\nb"], markers=info.markers, max_examples=10)


@pytest.mark.parametrize(("factory", "info"), [FAMILIES[name] for name in FORMATS], ids=FORMATS)
def test_what_the_format_allows_is_read_as_calls(factory: Callable[[Turn], Parser], info: FormatInfo) -> None:
    check_tool_format(factory, markers=sorted(tokens_of(info)), tools=TOOLS, num_walks=3)


@families
def test_the_example_is_one_call(factory: Callable[[Turn], Parser], info: FormatInfo) -> None:
    example = content_of(info)
    assert read(factory(AUTO), [example]) == WEATHER
    tokens = tokens_of(info)
    assert read(factory(Turn(tool_choice="auto", added_tokens=tokens)), split_atoms(example, tokens)) == WEATHER


@families
def test_text_around_a_call_stays(factory: Callable[[Turn], Parser], info: FormatInfo) -> None:
    events = read(factory(AUTO), [f"Let me see: {content_of(info)} That is all"])
    assert events == [Text("Let me see: "), *WEATHER, Text(" That is all")]


@families
def test_what_is_quoted_calls_nothing_where_the_markers_are_tokens(factory: Callable[[Turn], Parser], info: FormatInfo) -> None:
    example = content_of(info)
    tokens = tokens_of(info)
    if any(token in example for token in tokens):
        assert read(factory(Turn(tool_choice="auto", added_tokens=tokens)), [example]) == [Text(example)]


@families
def test_with_tool_choice_none_everything_is_text(factory: Callable[[Turn], Parser], info: FormatInfo) -> None:
    assert read(factory(Turn(tool_choice="none")), [info.example]) == [Text(info.example)]


@families
def test_string_arguments_stream_character_by_character(factory: Callable[[Turn], Parser], info: FormatInfo) -> None:
    parser = factory(AUTO)
    head, tail = content_of(info).split("Oslo")
    events = [*parser.feed(head)]
    assert isinstance(events[0], ToolCallStart)
    assert [event.fragment for event in events[1:] if isinstance(event, ToolCallArguments)] == ['{"city": "']
    for char in "Oslo":
        assert [*parser.feed(char)] == [ToolCallArguments(0, char)]
    assert [*parser.feed(tail), *parser.finish()] == [ToolCallArguments(0, '"}')]


@families
def test_a_call_that_is_cut_keeps_what_came(factory: Callable[[Turn], Parser], info: FormatInfo) -> None:
    cut = content_of(info).partition("slo")[0]
    assert read(factory(AUTO), [cut]) == [ToolCallStart(0, "weather", ""), ToolCallArguments(0, '{"city": "O')]


@families
def test_a_call_that_is_cut_before_its_name_is_text(factory: Callable[[Turn], Parser], info: FormatInfo) -> None:
    cut = content_of(info).partition("ther")[0]
    assert read(factory(AUTO), [cut]) == [Text(cut)]


@families
def test_all_kinds_of_arguments_come_out_as_they_were_written(factory: Callable[[Turn], Parser], info: FormatInfo) -> None:
    arguments = {"s": 'a "b" \\ \n', "i": 42, "f": -2e-3, "b": True, "n": None, "l": ["a", [], {}], "o": {"k": {}}, "u": "日本 🎉", "": ""}
    written = json.dumps(arguments, ensure_ascii=False)
    events = read(factory(AUTO), [content_of(info).replace('{"city": "Oslo"}', written)])
    assert events == [ToolCallStart(0, "weather", ""), ToolCallArguments(0, written)]
    empty = read(factory(AUTO), [content_of(info).replace('{"city": "Oslo"}', "{}")])
    assert empty == [ToolCallStart(0, "weather", ""), ToolCallArguments(0, "{}")]


@families
def test_a_line_break_and_a_tab_in_a_string_are_escaped(factory: Callable[[Turn], Parser], info: FormatInfo) -> None:
    events = read(factory(AUTO), [content_of(info).replace("Oslo", "New\n\tYork")])
    assert events == [ToolCallStart(0, "weather", ""), ToolCallArguments(0, r'{"city": "New\n\tYork"}')]


@families
def test_calls_are_numbered(factory: Callable[[Turn], Parser], info: FormatInfo) -> None:
    example = content_of(info)
    events = read(factory(AUTO), [f"{example}\n{example}"])
    assert events == [*WEATHER, ToolCallStart(1, "weather", ""), ToolCallArguments(1, '{"city": "Oslo"}')]


@families
def test_an_object_in_a_string_stands_for_itself(factory: Callable[[Turn], Parser], info: FormatInfo) -> None:
    example = content_of(info)
    assert read(factory(AUTO), [example.replace('{"city": "Oslo"}', r'"{\"city\": \"Oslo\"}"')]) == WEATHER


@families
@pytest.mark.parametrize("value", ['"Oslo"', "1", "[1]", "true"])
def test_arguments_that_are_no_object_make_it_content(factory: Callable[[Turn], Parser], info: FormatInfo, value: str) -> None:
    text = content_of(info).replace('{"city": "Oslo"}', value)
    assert read(factory(AUTO), [text]) == [Text(text)]


@families
@pytest.mark.parametrize("value", ["null", '""'])
def test_what_stands_for_no_arguments_is_an_empty_object(factory: Callable[[Turn], Parser], info: FormatInfo, value: str) -> None:
    events = read(factory(AUTO), [content_of(info).replace('{"city": "Oslo"}', value)])
    assert events == [ToolCallStart(0, "weather", ""), ToolCallArguments(0, "{}")]


WITH_KEYS = {name: family for name, family in FAMILIES.items() if re.search(r'"(arguments|parameters)": ', content_of(family[1]))}


@pytest.mark.parametrize(("factory", "info"), WITH_KEYS.values(), ids=WITH_KEYS)
@pytest.mark.parametrize("member", ['"args": {"city": "Oslo"}', '"Arguments": {"city": "Oslo"}', '"city": "Oslo"'])
def test_a_call_with_other_members_for_its_arguments_is_content(factory: Callable[[Turn], Parser], info: FormatInfo, member: str) -> None:
    text = re.sub(r'"(arguments|parameters)": \{"city": "Oslo"\}', member, content_of(info))
    assert read(factory(AUTO), [text]) == [Text(text)]
    cut = text.partition("slo")[0]
    assert read(factory(AUTO), [cut]) == [Text(cut)]


@families
def test_brackets_that_close_nothing_belong_to_the_format_before_its_end(factory: Callable[[Turn], Parser], info: FormatInfo) -> None:
    example = content_of(info)
    head, arguments, rest = example.partition('{"city": "Oslo"}')
    brackets = rest[: len(rest) - len(rest.lstrip("}]"))]
    end = rest.removeprefix(brackets)
    surplus = f"{head}{arguments}{brackets}}}}}"
    assert read(factory(AUTO), [f"{surplus} after"]) == [*WEATHER, Text("}} after")]
    if end.strip():
        assert read(factory(AUTO), [f"{surplus}{end} after"]) == [*WEATHER, Text(" after")]


@families
def test_an_end_token_in_the_middle_of_a_call_ends_it(factory: Callable[[Turn], Parser], info: FormatInfo) -> None:
    tokens = tokens_of(info)
    end = next((marker for marker in info.markers if marker in tokens and ("/" in marker or "end" in marker.lower())), None)
    if end is None:
        return
    head = content_of(info).partition("slo")[0]
    events = read(factory(Turn(tool_choice="auto", added_tokens=tokens)), [*split_atoms(head, tokens), SpecialText(end), " after"])
    assert events[:2] == [ToolCallStart(0, "weather", ""), ToolCallArguments(0, '{"city": "O"}')]
    assert events[-1] == Text(" after")
