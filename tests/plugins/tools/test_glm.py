import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from penstock.engine.events import Text, ToolCallArguments, ToolCallStart
from penstock.engine.parsing import Parser
from penstock.engine.turn import Turn
from penstock.testing import check_parser, check_tool_format, read
from penstock.testing.answers import split_atoms
from penstock.testing.cost_check import check_cost
from tests.helpers.tool_parsers import format_info, tool_parser
from tests.plugins.tools.parameter_samples import AUTO, TOOLS, calls, content

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
    def suffixed(turn: Turn) -> Parser:
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
    check_parser(longcat, [f"a {LONGCAT}{as_json}"], markers=LONGCAT_MARKERS, turn=AUTO, max_examples=20)
