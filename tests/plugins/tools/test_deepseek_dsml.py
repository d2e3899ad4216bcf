from dataclasses import replace
from typing import Any

import pytest

from penstock.engine.contracts.hooks import ToolParserFactory
from penstock.engine.contracts.parsing import SpecialText, Text, ToolCallArguments, ToolCallStart, Turn
from penstock.plugins.tools.code_formats import DEEPSEEK_V4 as V4
from penstock.plugins.tools.code_formats import DEEPSEEK_V32 as V32
from penstock.plugins.tools.code_formats import DSML_TOKEN as TOKEN
from penstock.testing import check_cuts, read
from tests.helpers.tool_parsers import tool_parser
from tests.plugins.tools.parameter_samples import AUTO, TOOLS, calls, content

deepseek_v32 = tool_parser("deepseek_v32")
deepseek_v4 = tool_parser("deepseek_v4")
deepseek_v41 = tool_parser("deepseek_v41")


def block(parameters: str, tool: str = "weather") -> str:
    return f'<｜DSML｜tool_calls>\n<｜DSML｜invoke name="{tool}">\n{parameters}\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>'


def parameter(name: str, value: str, is_string: str) -> str:
    return f'<｜DSML｜parameter name="{name}" string="{is_string}">{value}</｜DSML｜parameter>'


V32_BLOCK = block(parameter("city", "Oslo", "true")).replace("tool_calls", "function_calls")


@pytest.mark.parametrize(
    ("name", "value", "is_string", "expected"),
    [
        ("city", "Oslo", "true", "Oslo"),
        ("city", " a\n", "true", " a\n"),
        ("city", "42", "true", "42"),
        ("city", "null", "false", "null"),
        ("city", '"Oslo"', "false", "Oslo"),
        ("days", "3", "false", 3),
        ("days", "3", "true", 3),
        ("days", "soon", "false", "soon"),
        ("note", "null", "false", None),
        ("note", "null", "true", "null"),
        ("note", "hello", "false", "hello"),
        ("place", '{"lat": 1}', "true", {"lat": 1}),
        ("tags", '["a", "b"]', "false", ["a", "b"]),
        ("other", "42", "false", 42),
        ("other", "42", "true", "42"),
        ("other", "[1", "false", "[1"),
    ],
)
def test_the_tag_says_whether_a_value_is_a_string_as_far_as_the_schema_allows(name: str, value: str, is_string: str, expected: Any) -> None:
    assert calls(deepseek_v4, block(parameter(name, value, is_string))) == [("weather", {name: expected})]


def test_v32s_section_is_read_where_no_grammar_holds_the_answer() -> None:
    text = f"a{V32_BLOCK}b"
    assert (calls(deepseek_v4, text), content(deepseek_v4, text)) == ([("weather", {"city": "Oslo"})], "ab")
    assert read(deepseek_v4(replace(AUTO, is_constrained=True)), ["a", V32.markup.section]) == [Text(f"a{V32.markup.section}")]
    check_cuts(deepseek_v4, [text], markers=(*V4.markup.markers, V32.markup.section, V32.markup.section_end), turn=AUTO, max_examples=20)


def test_v32s_section_in_an_argument_is_part_of_it() -> None:
    assert calls(deepseek_v4, block(parameter("city", V32.markup.section, "true"))) == [("weather", {"city": V32.markup.section})]


def test_a_parameter_that_holds_all_arguments_is_unwrapped() -> None:
    for wrapper, is_string in (("arguments", "false"), ("input", "true")):
        text = block(parameter(wrapper, '{"city": "Oslo", "days": 3}', is_string))
        assert calls(deepseek_v4, text) == [("weather", {"city": "Oslo", "days": 3})]
    assert calls(deepseek_v4, block(parameter("arguments", '{"other": 1}', "false"))) == [("weather", {"arguments": {"other": 1}})]


def test_the_arguments_may_be_one_json_object_in_the_place_of_parameters() -> None:
    assert calls(deepseek_v4, block('{"city": "a</｜DSML｜invoke>b", "x": [1]}')) == [
        ("weather", {"city": "a</｜DSML｜invoke>b", "x": [1]})
    ]
    assert calls(deepseek_v4, block('{"city": Oslo,}')) == [("weather", {"city": "Oslo"})]
    assert content(deepseek_v4, block("{city}")) == block("{city}")
    check_cuts(deepseek_v4, [block('{"city": "a"}'), block('{"city": a}')], markers=V4.markup.markers, turn=AUTO, max_examples=20)


@pytest.mark.parametrize(
    ("factory", "rewritten"),
    [
        (deepseek_v32, lambda text: text.replace("tool_calls", "function_calls")),
        (deepseek_v4, lambda text: text),
        (
            deepseek_v41,
            lambda text: text.replace("｜tool_calls", "｜ calls").replace("｜invoke", "｜ invoke").replace("｜parameter", "｜ parameter"),
        ),
    ],
)
def test_each_version_has_its_own_spelling(factory: ToolParserFactory, rewritten: Any) -> None:
    text = rewritten(block(parameter("city", "Oslo", "true")))
    assert calls(factory, f"Sure! {text}") == [("weather", {"city": "Oslo"})]
    assert content(factory, f"Sure! {text}") == "Sure! "


def test_a_call_may_lack_its_section_at_the_beginning_of_a_line() -> None:
    bare = block(parameter("city", "Oslo", "true")).removeprefix("<｜DSML｜tool_calls>\n")
    assert calls(deepseek_v4, bare) == [("weather", {"city": "Oslo"})]
    assert content(deepseek_v4, f"Sure!\n{bare}") == "Sure!\n"
    assert calls(deepseek_v4, f"Such as {bare}") == []
    assert calls(deepseek_v4, bare.replace("weather", "other")) == []
    assert calls(deepseek_v41, bare) == []
    check_cuts(deepseek_v4, [bare], markers=V4.markup.markers, turn=AUTO, max_examples=20)


def test_the_next_tag_ends_a_parameter_that_was_not_closed() -> None:
    closed = block(parameter("city", "a<b>", "true") + parameter("days", "3", "false"))
    assert calls(deepseek_v4, closed.replace("</｜DSML｜parameter>", "")) == [("weather", {"city": "a<b>", "days": 3})]
    assert calls(deepseek_v4, closed.replace("</｜DSML｜parameter>", "", 1)) == [("weather", {"city": "a<b>", "days": 3})]


def test_the_token_inside_the_tags_is_looked_for_as_such() -> None:
    turn = Turn(tool_choice="auto", tools=TOOLS, added_tokens=frozenset({TOKEN}))
    text = block(parameter("city", "a </parameter> b", "true"))
    pieces = [piece for part in text.split(TOKEN) for piece in (part, SpecialText(TOKEN))][:-1]
    assert read(deepseek_v4(turn), pieces) == [ToolCallStart(0, "weather", ""), ToolCallArguments(0, '{"city": "a </parameter> b"}')]
    assert content(deepseek_v4, text, turn) == text
