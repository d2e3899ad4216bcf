import json
import re
from dataclasses import replace

import pytest

from penstock.engine.contracts.grammar import GrammarKind, GrammarSpec
from penstock.engine.contracts.parsing import CallableTool, SpecialText, Text, ToolCallArguments, ToolCallStart, Turn
from penstock.engine.contracts.structure import Marker, Sequence
from penstock.engine.errors import UnsupportedGrammar
from penstock.plugins.grammars.llguidance.backend import LlguidanceBackend
from penstock.testing import check_cuts, check_tool_format, read
from penstock.testing.decoding import byte_vocabulary
from penstock.testing.parser_check import split_atoms
from tests.helpers.tool_parsers import format_info, tool_format, tool_parser
from tests.plugins.tools.parameter_samples import AUTO, MIXED, calls, content

NAMES = """
    deepseek_v32 deepseek_v4 deepseek_v41 dots glm45 glm47 hy_v3 minicpm5 minimax_m2 minimax_m3 qwen3_coder seed_oss step3
"""
FORMATS = {name: (tool_parser(name), format_info(name)) for name in NAMES.split()}
formats = pytest.mark.parametrize("name", FORMATS)


@formats
def test_what_the_format_allows_is_read_as_calls(name: str) -> None:
    factory, info = FORMATS[name]
    check_tool_format(factory, markers=info.markers, num_walks=1)


@pytest.mark.parametrize("name", ["qwen3_coder", "glm45", "deepseek_v32", "minimax_m2", "minimax_m3"])
def test_strings_may_be_left_out_between_other_parameters(name: str) -> None:
    factory, info = FORMATS[name]
    check_tool_format(factory, markers=info.markers, tools=MIXED, num_walks=1)


@formats
def test_the_example_is_a_call_in_both_vocabularies(name: str) -> None:
    factory, info = FORMATS[name]
    assert calls(factory, info.example) == [("weather", {"city": "Oslo"})]
    tokens = frozenset(info.markers)
    events = read(factory(replace(AUTO, added_tokens=tokens)), split_atoms(info.example, tokens))
    assert events == [ToolCallStart(0, "weather", ""), ToolCallArguments(0, '{"city": "Oslo"}')]


PARAMETERS = re.compile(r"<[^<>/]*(?:param|arg_key).*(?:param|parameter|arg_value)>", re.DOTALL)
WITH_BODIES = pytest.mark.parametrize("name", sorted(name for name in FORMATS if not name.startswith(("glm", "minimax_m3"))))


def with_body(name: str, body: str) -> str:
    """The example with this in the place of its parameters."""
    return PARAMETERS.sub(lambda parameters: body, FORMATS[name][1].example)


@WITH_BODIES
def test_the_arguments_may_be_one_json_object(name: str) -> None:
    factory, info = FORMATS[name]
    text = with_body(name, '{"city": "New\n<b>York</b>", "days": 3}')
    assert calls(factory, text) == [("weather", {"city": "New\n<b>York</b>", "days": 3})]
    assert content(factory, text) == ""
    check_cuts(factory, [f"a {text} b", with_body(name, '{"city": "a')], markers=info.markers, turn=AUTO, max_examples=3)


@WITH_BODIES
@pytest.mark.parametrize("body", ["prose", "{prose}", "{", "[1]"])
def test_what_has_no_arguments_in_the_place_of_parameters_is_content(name: str, body: str) -> None:
    factory, _ = FORMATS[name]
    text = with_body(name, f"{body} ")
    assert calls(factory, text) == []
    assert content(factory, text) == text


@formats
def test_calls_are_numbered_and_the_text_around_them_is_content(name: str) -> None:
    factory, info = FORMATS[name]
    text = f"Let me see. {info.example}\n{info.example}\nDone."
    assert calls(factory, text) == [("weather", {"city": "Oslo"})] * 2
    assert content(factory, text) == "Let me see. \nDone."


@formats
def test_a_string_comes_out_character_by_character_after_the_name(name: str) -> None:
    factory, info = FORMATS[name]
    start = info.example.index("Oslo")
    parser = factory(AUTO)
    first = [event for event in parser.feed(info.example[: start + 1]) if not isinstance(event, Text)]
    assert [type(event) for event in first] == [ToolCallStart, ToolCallArguments]
    assert [list(parser.feed(char)) for char in "slo"] == [[ToolCallArguments(0, char)] for char in "slo"]


@formats
def test_markup_in_prose_calls_nothing_where_its_markers_are_tokens(name: str) -> None:
    factory, info = FORMATS[name]
    turn = replace(AUTO, added_tokens=frozenset({"<tool_call>", "<seed:tool_call>", "｜DSML｜", *info.markers[:1]}))
    text = f"It writes\n{info.example}\nthen."
    assert content(factory, text, turn) == text


@formats
def test_with_tool_choice_none_markup_stays_content(name: str) -> None:
    factory, info = FORMATS[name]
    assert content(factory, info.example, Turn(tool_choice="none")) == info.example


@formats
def test_an_answer_that_stops_inside_a_value_keeps_what_came_and_one_that_stops_after_it_is_a_call(name: str) -> None:
    factory, info = FORMATS[name]
    end = info.example.index("Oslo") + 2
    assert read(factory(AUTO), [info.example[:end]])[-1] == ToolCallArguments(0, '{"city": "Os')
    for closing in {"</parameter>", "</arg_value>", "</steptml:parameter>"}.intersection(info.markers):
        assert calls(factory, info.example[: info.example.index(closing) + len(closing)]) == [("weather", {"city": "Oslo"})]


@formats
def test_a_block_that_is_no_call_is_content(name: str) -> None:
    factory, _ = FORMATS[name]
    opening = tool_format(name, AUTO).opening
    for text in (f"a {opening}", f"{opening}\n", f"{opening}{{}} b"):
        assert content(factory, text) == text


@formats
def test_a_strict_schema_that_cannot_be_kept_to_is_refused_by_its_path(name: str) -> None:
    written = tool_format(name, AUTO)
    schema = {"type": "object", "properties": {"x": {"type": "string", "pattern": "^a"}}, "minProperties": 1}
    for faulty, place in ((schema, "minProperties"), (_without(schema), "x.pattern")):
        with pytest.raises(UnsupportedGrammar) as refusal:
            written.calls([CallableTool("f", GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(faulty), "p"))], is_single=True)
        assert str(refusal.value.param).endswith(place)
    lenient = GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(schema), "p", is_lenient=True)
    structure = Sequence((Marker(written.opening), written.calls([CallableTool("f", lenient)], is_single=True)))
    LlguidanceBackend(byte_vocabulary()).compile(GrammarSpec(GrammarKind.STRUCTURE, "", structure=structure))


def _without(schema: dict[str, object]) -> dict[str, object]:
    return {keyword: value for keyword, value in schema.items() if keyword != "minProperties"}


def test_an_added_token_that_closes_the_section_ends_a_value_that_was_not_closed() -> None:
    turn = replace(AUTO, added_tokens=frozenset({"<tool_call>", "</tool_call>"}))
    pieces = [SpecialText("<tool_call>"), "\n<function=weather>\n<parameter=city>\nOslo\n", SpecialText("</tool_call>"), "x"]
    events = read(tool_parser("qwen3_coder")(turn), pieces)
    assert events == [ToolCallStart(0, "weather", ""), ToolCallArguments(0, '{"city": "Oslo"}'), Text("x")]
