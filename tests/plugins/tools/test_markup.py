"""Calls made of parameters in markup: what is particular to one family."""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from penstock.engine.contracts.parsing import Parser, SpecialText, Text, ToolCallArguments, ToolCallStart, ToolParser, Turn
from penstock.testing import check_cuts, check_tool_format, read
from penstock.testing.parser_check import check_cost, split_atoms
from tests.helpers.tool_parsers import format_info, tool_parser
from tests.plugins.tools.parameter_samples import AUTO, TOOLS, calls, content

qwen3_coder = tool_parser("qwen3_coder")
seed_oss = tool_parser("seed_oss")


def body(*parameters: str) -> str:
    return "\n".join(["<tool_call>", "<function=weather>", *parameters, "</function>", "</tool_call>"])


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        ((), {}),
        (("<parameter=city>\nNew\n\nYork\n</parameter>",), {"city": "New\n\nYork"}),
        (("<parameter=city>\n\n  Oslo\n\n</parameter>",), {"city": "\n  Oslo\n"}),
        (("<parameter=city>Oslo</parameter>",), {"city": "Oslo"}),
        (("<parameter=city>\n</parameter>",), {"city": ""}),
        (('<parameter=city>\nsay "a\\b" & <b>&lt;早安</b>\n</parameter>',), {"city": 'say "a\\b" & <b>&lt;早安</b>'}),
        (("<parameter=days>\n3\n</parameter>", "<parameter=exact>\nTrue\n</parameter>"), {"days": 3, "exact": True}),
        (("<parameter=note>\nnull\n</parameter>",), {"note": None}),
        (("<parameter=note>\nnullable\n</parameter>",), {"note": "nullable"}),
        (('<parameter=place>\n{"lat": 1.5,\n "lon": null}\n</parameter>',), {"place": {"lat": 1.5, "lon": None}}),
        (("<parameter=place>\n{'lat': 1}\n</parameter>",), {"place": {"lat": 1}}),
        (('<parameter=tags>\n["</parameter>", "<parameter=x>"]\n</parameter>',), {"tags": ["</parameter>", "<parameter=x>"]}),
        (("<parameter=zip>\n0150\n</parameter>",), {"zip": "0150"}),
        (("<parameter=city>\nOslo\n<parameter=days>\n3\n</parameter>",), {"city": "Oslo", "days": 3}),
        (("<parameter=city>\nOslo",), {"city": "Oslo"}),
        (("<parameter=city>\nOslo\n</parameter>", "<parameter=city>\nRome\n</parameter>"), {"city": "Oslo"}),
        (('<parameter="city">\nOslo\n</parameter>',), {"city": "Oslo"}),
    ],
)
def test_values_are_read_by_the_schema(parameters: tuple[str, ...], expected: dict[str, Any]) -> None:
    assert calls(qwen3_coder, body(*parameters)) == [("weather", expected)]
    assert content(qwen3_coder, body(*parameters)) == ""


def test_a_member_that_is_not_described_has_the_types_of_all_others() -> None:
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}, "additionalProperties": {"type": "integer"}}
    turn = Turn(tools=[{"type": "function", "function": {"name": "weather", "parameters": parameters}}], tool_choice="auto")
    events = read(qwen3_coder(turn), [body("<parameter=days>\n3\n</parameter>")])
    assert "".join(event.fragment for event in events if isinstance(event, ToolCallArguments)) == '{"days": 3}'


@pytest.mark.parametrize("value", ["Oslo", "New\n\nYork", "\nOslo\n", "\n", ""])
def test_seed_oss_writes_no_line_breaks_around_values(value: str) -> None:
    text = f"<seed:tool_call>\n<function=weather>\n<parameter=city>{value}</parameter>\n</function>\n</seed:tool_call>"
    assert calls(seed_oss, text) == [("weather", {"city": value})]
    assert content(seed_oss, text) == ""


def test_arguments_of_an_unknown_tool_are_strings() -> None:
    text = "<tool_call><function=other><parameter=x>1</parameter></function></tool_call>"
    assert calls(qwen3_coder, text) == [("other", {"x": "1"})]


def test_a_missing_opener_is_forgiven_at_the_beginning_of_a_line() -> None:
    bare = body("<parameter=city>\nOslo\n</parameter>").removeprefix("<tool_call>\n")
    assert calls(qwen3_coder, bare) == [("weather", {"city": "Oslo"})]
    text = f"I'll check.\n\n{bare}"
    assert calls(qwen3_coder, text) == [("weather", {"city": "Oslo"})]
    assert content(qwen3_coder, text) == "I'll check.\n\n"
    pieces = ["Look:\n", bare.removesuffix("</tool_call>"), SpecialText("</tool_call>")]
    turn = replace(AUTO, added_tokens=frozenset({"<tool_call>", "</tool_call>"}))
    assert [event for event in read(qwen3_coder(turn), pieces) if isinstance(event, Text)] == [Text("Look:\n")]


@pytest.mark.parametrize("before", ["Write `", "<function=other>\n", "- "])
def test_a_missing_opener_is_not_forgiven_in_the_middle_of_text_or_for_other_tools(before: str) -> None:
    name = "other" if before.startswith("<") else "weather"
    text = f"{before}<function={name}></function>" if name == "weather" else f"{before}</function>"
    assert content(qwen3_coder, text) == text


def test_a_missing_opener_is_not_forgiven_where_a_tool_is_strict() -> None:
    strict = Turn(tool_choice="auto", tools=[{"type": "function", "function": {"name": "weather", "strict": True}}])
    bare = "<function=weather></function>"
    assert content(qwen3_coder, bare, strict) == bare


def test_a_quotation_of_the_whole_markup_calls_nothing() -> None:
    turn = replace(AUTO, added_tokens=frozenset({"<tool_call>", "</tool_call>"}))
    text = body("<parameter=city>\nOslo\n</parameter>")
    assert read(qwen3_coder(turn), [text]) == [Text(text)]


def test_a_tag_that_is_not_closed_makes_no_call_and_the_next_one_is_read() -> None:
    broken = "<tool_call>\n<function=weather\n</function>\n</tool_call>\n"
    text = broken + body("<parameter=city>\nOslo\n</parameter>")
    assert calls(qwen3_coder, text) == [("weather", {"city": "Oslo"})]
    assert content(qwen3_coder, text) == broken


def test_what_follows_parameters_without_an_end_is_content() -> None:
    text = "<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\nThat is all."
    assert calls(qwen3_coder, text) == [("weather", {"city": "Oslo"})]
    assert content(qwen3_coder, text) == "\nThat is all."


def test_several_calls_may_stand_in_one_section() -> None:
    text = "<tool_call><function=weather></function>\n<function=weather></function></tool_call>"
    assert calls(qwen3_coder, text) == [("weather", {}), ("weather", {})]


INFO = format_info("hy_v3")
glm45 = tool_parser("glm45")
glm47 = tool_parser("glm47")
hy_v3 = tool_parser("hy_v3")
longcat = tool_parser("longcat")

LONGCAT_MARKERS = format_info("longcat").markers


@pytest.mark.parametrize(
    ("text", "name", "expected"),
    [
        ("<tool_call>weather\n</tool_call>", "weather", {}),
        ("<tool_call>weather</tool_call>", "weather", {}),
        ("<tool_call>\nweather\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n</tool_call>", "weather", {"city": "Oslo"}),
        ("<tool_call>weather<arg_key>days</arg_key><arg_value> 3\n</arg_value></tool_call>", "weather", {"days": 3}),
        ("<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value> New\nYork </arg_value></tool_call>", "weather", {"city": " New\nYork "}),
        ("<tool_call>weather<arg_key>city\n<arg_value>Oslo</arg_value></tool_call>", "weather", {"city": "Oslo"}),
        ("<tool_call>f<arg_key>x</arg_key>\n<arg_key>y</arg_key><arg_value>1</arg_value></tool_call>", "f", {"y": 1}),
        ("<tool_call>a.b/c<arg_key>x</arg_key><arg_value>42</arg_value></tool_call>", "a.b/c", {"x": 42}),
        ("<tool_call>f<arg_key>x</arg_key><arg_value>2025-08-01</arg_value></tool_call>", "f", {"x": "2025-08-01"}),
        ("<tool_call>f<arg_key>x</arg_key><arg_value>None</arg_value></tool_call>", "f", {"x": None}),
        ("<tool_call>f<arg_key>x</arg_key><arg_value>None of it</arg_value></tool_call>", "f", {"x": "None of it"}),
        ('<tool_call>f<arg_key>x</arg_key><arg_value>{"a": [1]}</arg_value></tool_call>', "f", {"x": {"a": [1]}}),
        ("<tool_call>f<arg_key>x</arg_key><arg_value></arg_value></tool_call>", "f", {"x": ""}),
    ],
)
def test_names_and_values_are_read_with_and_without_line_breaks(text: str, name: str, expected: dict[str, Any]) -> None:
    for factory in (glm45, glm47):
        assert calls(factory, text) == [(name, expected)]
        assert content(factory, text) == ""


@pytest.mark.parametrize(
    "text", ["<tool_call>   ", "<tool_call>weather", '<tool_call>{"name": "f"}</tool_call>', "<tool_call>what is it</tool_call>"]
)
def test_what_has_no_name_is_content(text: str) -> None:
    assert calls(glm45, text) == []
    assert content(glm45, text) == text


@pytest.mark.parametrize(("factory", "start"), [(glm45, "<tool_call>"), (glm47, "<tool_call>"), (longcat, "<longcat_tool_call>")])
def test_line_breaks_before_a_name_are_looked_at_once(factory: Callable[[Turn], Parser], start: str) -> None:
    check_cost(factory, start, AUTO)


def test_hunyuan_has_a_separator_after_the_name_and_a_section() -> None:
    inner = "<tool_call>weather<tool_sep>\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n</tool_call>\n"
    text = f"Checking.<tool_calls>\n{inner}<tool_call>weather<tool_sep></tool_call></tool_calls>"
    assert calls(hy_v3, text) == [("weather", {"city": "Oslo"}), ("weather", {})]
    assert content(hy_v3, text) == "Checking."


SUFFIX = ":opensource"


def with_suffix(text: str) -> str:
    return re.sub(r"<(/?[a-z_]+)>", rf"<\1{SUFFIX}>", text)


@pytest.mark.parametrize(
    "turn",
    [
        Turn(prompt_tail=f"<think{SUFFIX}></think{SUFFIX}>"),
        Turn(added_tokens=frozenset(map(with_suffix, INFO.markers))),
        Turn(added_tokens=frozenset({f"<think{SUFFIX}>"})),
    ],
)
def test_hunyuans_markers_have_the_suffix_of_the_prompt_or_of_the_vocabulary(turn: Turn) -> None:
    turn = replace(turn, tools=TOOLS, tool_choice="auto")
    events = read(hy_v3(turn), split_atoms(with_suffix(INFO.example), turn.added_tokens))
    assert events == [ToolCallStart(0, "weather", ""), ToolCallArguments(0, '{"city": "Oslo"}')]
    tool_format = hy_v3(turn).tool_format
    assert tool_format is not None
    assert tool_format.opening == f"<tool_calls{SUFFIX}>"
    quoted = "\n<tool_call>weather<tool_sep>\n</tool_call>"
    assert read(hy_v3(turn), split_atoms(quoted, turn.added_tokens)) == [Text(quoted)]


def test_what_hunyuans_grammar_allows_is_read_as_calls_with_the_suffix_too() -> None:
    def suffixed(turn: Turn) -> ToolParser:
        return hy_v3(replace(turn, prompt_tail=f"<think{SUFFIX}>"))

    check_tool_format(suffixed, markers=list(map(with_suffix, INFO.markers)), num_walks=2)


LONGCAT = """<longcat_tool_call>weather
<longcat_arg_key>city</longcat_arg_key>
<longcat_arg_value>Oslo</longcat_arg_value>
<longcat_arg_key>days</longcat_arg_key>
<longcat_arg_value>3</longcat_arg_value>
</longcat_tool_call>"""


def test_longcat_writes_the_same_with_names_of_its_own_or_json() -> None:
    as_json = '<longcat_tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</longcat_tool_call>'
    text = f"Both.\n{LONGCAT}\n{as_json}\n{LONGCAT}"
    expected = {"city": "Oslo", "days": 3}
    assert calls(longcat, text) == [("weather", expected), ("weather", {"city": "Rome"}), ("weather", expected)]
    check_cuts(longcat, [f"a {LONGCAT}{as_json}"], markers=LONGCAT_MARKERS, turn=AUTO, max_examples=20)


MARK = "]<]minimax[>["
dots = tool_parser("dots")
minimax_m2 = tool_parser("minimax_m2")
minimax_m3 = tool_parser("minimax_m3")
step3 = tool_parser("step3")

ORDER = {
    "type": "object",
    "properties": {
        "user": {"type": "integer"},
        "note": {"type": "string"},
        "shipping": {"type": "object", "properties": {"city": {"type": "string"}, "zip": {"type": "integer"}}},
        "items": {"type": "array", "items": {"type": "object", "properties": {"sku": {"type": "string"}, "qty": {"type": "integer"}}}},
        "meta": {"type": "object", "additionalProperties": {"type": "string"}},
        "any": {"type": "object"},
    },
}
TURN = Turn(tool_choice="auto", tools=({"type": "function", "function": {"name": "order", "parameters": ORDER}},))


def invoke(value: str) -> str:
    return f'<minimax:tool_call><invoke name="weather"><parameter name="city">{value}</parameter></invoke></minimax:tool_call>'


@pytest.mark.parametrize(
    "value", ["a &lt;b&gt; &amp; c", "    if x:\n        return 1\n", "hello\u00a0", '<parameter name="x">', "</invoke>", "\n"]
)
def test_entities_and_white_space_of_strings_stay_as_they_are(value: str) -> None:
    assert calls(minimax_m2, invoke(value)) == [("weather", {"city": value})]


@pytest.mark.parametrize("tag", ['<invoke name="weather">', "<invoke name='weather'>", "<invoke name=weather>"])
def test_names_may_be_quoted_in_any_way(tag: str) -> None:
    assert calls(minimax_m2, f"<minimax:tool_call>\n{tag}\n</invoke></minimax:tool_call>") == [("weather", {})]


def test_one_section_holds_several_calls() -> None:
    two = '<invoke name="a"><parameter name="x">1</parameter></invoke>\n<invoke name="b"></invoke>'
    assert calls(minimax_m2, f"<minimax:tool_call>{two}</minimax:tool_call>") == [("a", {"x": "1"}), ("b", {})]
    garbage = "<dots_function_call>garbage</dots_function_call>"
    text = f"{garbage}<dots_function_call>{two}</dots_function_call>"
    assert calls(dots, text) == [("a", {"x": "1"}), ("b", {})]
    assert content(dots, text) == garbage


def test_step3_passes_over_what_comes_before_the_tag_and_between_calls() -> None:
    call = '<steptml:invoke name="weather"><steptml:parameter name="city"> Oslo\n</steptml:parameter></steptml:invoke><｜tool_call_end｜>'
    first, second = f"<｜tool_call_begin｜>function<｜tool_sep｜>weather\n{call}", f"<｜tool_call_begin｜>{call}"
    text = f"See.<｜tool_calls_begin｜>{first}<｜tool_sep｜>{second}<｜tool_calls_end｜>\nDone."
    assert calls(step3, text) == [("weather", {"city": " Oslo\n"})] * 2
    assert content(step3, text) == "See.\nDone."


def element(name: str, *inner: str) -> str:
    return f"{MARK}<{name}>{''.join(inner)}{MARK}</{name}>"


def order(*arguments: str) -> str:
    return f'{MARK}<tool_call>\n{MARK}<invoke name="order">{"".join(arguments)}{MARK}</invoke>\n{MARK}</tool_call>'


ITEMS = element("items", element("item", element("sku", "7"), element("qty", "2")), element("item", element("sku", "b")))
ITEMS_READ = [{"sku": "7", "qty": 2}, {"sku": "b"}]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((), {}),
        ((element("user", "42"), element("note", "a < b > c\n")), {"user": 42, "note": "a < b > c\n"}),
        ((element("shipping", element("city", "Oslo"), element("zip", "018956")),), {"shipping": {"city": "Oslo", "zip": 18956}}),
        ((ITEMS, element("user", "1")), {"items": ITEMS_READ, "user": 1}),
        ((element("items", element("item", element("sku", "x"))),), {"items": [{"sku": "x"}]}),
        ((element("items"), element("any"), element("note")), {"items": [], "any": {}, "note": ""}),
        ((element("meta", element("source", "1"), element("b", "2")),), {"meta": {"source": "1", "b": "2"}}),
        ((element("any", element("tag", "a"), element("tag", "b")),), {"any": {"tag": ["a", "b"]}}),
        ((element("any", '{"a": 1}'),), {"any": {"a": 1}}),
        ((ITEMS.removesuffix(f"{MARK}</items>"), element("user", "1")), {"items": ITEMS_READ, "user": 1}),
        ((f"{MARK}</bogus>", element("user", "1")), {"user": 1}),
        ((element("user", "1"), element("user", "2")), {"user": 1}),
        ((f"{MARK}<user>1",), {"user": 1}),
        ((f"{MARK}\n<user>1{MARK} </user>",), {"user": 1}),
    ],
)
def test_elements_nest_as_the_schema_says(arguments: tuple[str, ...], expected: dict[str, Any]) -> None:
    text = f"Sure.\n{order(*arguments)}\n"
    assert calls(minimax_m3, text, TURN) == [("order", expected)]
    assert content(minimax_m3, text, TURN) == "Sure.\n"


NESTED = f"""{MARK}<tool_call>
{MARK}<invoke name="order">{MARK}<shipping>{MARK}<city>Oslo{MARK}</city>{MARK}<zip>150{MARK}</zip>{MARK}</shipping>\
{MARK}<items>{MARK}<item>{MARK}<sku>a{MARK}</sku>{MARK}</item>{MARK}<item>{MARK}<sku>bcd"""


@pytest.mark.parametrize(
    ("end", "arguments"),
    [
        ("", '{"shipping": {"city": "Oslo", "zip": 150}, "items": [{"sku": "a"}, {"sku": "bcd'),
        ("bcd", '{"shipping": {"city": "Oslo", "zip": 150}, "items": [{"sku": "a"}, {"sku": '),
        (f"<item>{MARK}<sku>bcd", '{"shipping": {"city": "Oslo", "zip": 150}, "items": [{"sku": "a"}'),
        (NESTED.partition("slo")[2], '{"shipping": {"city": "Oslo'),
        (NESTED.partition(f"50{MARK}")[2], '{"shipping": {"city": "Oslo", "zip": 150'),
    ],
)
def test_nested_elements_that_are_cut_are_not_closed(end: str, arguments: str) -> None:
    events = read(minimax_m3(TURN), [NESTED.removesuffix(end)])
    assert events == [ToolCallStart(0, "order", ""), ToolCallArguments(0, arguments)]


def test_nested_elements_may_be_cut_anywhere() -> None:
    check_cuts(minimax_m3, [NESTED], markers=(MARK, "<tool_call>"), turn=TURN, max_examples=10)


minicpm5 = tool_parser("minicpm5")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("Oslo", "Oslo"),
        (" Oslo\n", " Oslo\n"),
        ("<![CDATA[a </param> b\n]]>", "a </param> b\n"),
        ("\n<![CDATA[]]>\n", ""),
        ("&lt;&xxe;", "&lt;&xxe;"),
    ],
)
def test_a_string_stands_in_cdata_or_by_itself(value: str, expected: str) -> None:
    text = f'See.\n<function name="weather"><param name="city">{value}</param><param name="days">3</param></function>\nDone.'
    arguments: dict[str, Any] = {"city": expected, "days": 3}
    assert calls(minicpm5, text) == [("weather", arguments)]
    assert content(minicpm5, text) == "See.\n\nDone."


def test_what_calls_a_tool_that_is_not_offered_is_content() -> None:
    text = 'Write <function name="other"><param name="x">1</param></function>.'
    assert calls(minicpm5, text) == []
    assert content(minicpm5, text) == text
