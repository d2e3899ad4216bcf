import json
from collections.abc import Sequence as Tools
from typing import Any

import pytest

from penstock.engine.contracts.grammar import GrammarKind, GrammarSpec
from penstock.engine.contracts.parsing import CallableTool, ToolFormat
from penstock.engine.contracts.structure import Either, FreeText, Literal, Marker, Repeat, Sequence, Structure, TextUntil, Value
from penstock.engine.errors import InvalidRequest, UnsupportedGrammar
from penstock.plugins.grammars.llguidance.backend import LlguidanceBackend
from penstock.plugins.tools.json_formats import BARE, QWEN25
from penstock.serving.constraints.schemas import JsonReading
from penstock.serving.tools import ToolUse, answer_grammar
from penstock.testing.decoding import accepts, byte_vocabulary, split_pieces
from tests.serving.test_tools import allowed, named, use_of

TOOLS = [named("f", {"properties": {"b": {}, "a": {}}}), named("g")]
STRICT = [TOOLS[0], {"function": {"name": "g", "strict": True}}]
REGEX = GrammarSpec(GrammarKind.REGEX, "a+", "guided_regex")
FORMAT = GrammarSpec(GrammarKind.JSON_OBJECT, "", "response_format")
LLAMA3 = BARE[0]


class Slashes:
    """`/f {...}`, once or again and again."""

    opening = "/"

    def calls(self, tools: Tools[CallableTool], *, is_single: bool) -> Structure:
        return Literal(f"{[tool.name for tool in tools]} {'once' if is_single else 'or more'}")


def calls(*names: str, times: str = "or more") -> Structure:
    return Literal(f"{list(names)} {times}")


def structure_of(constraint: GrammarSpec | None = None, **fields: Any) -> Structure | None:
    spec = answer_grammar(use_of(**fields), constraint, Slashes(), "slashes")
    if spec is None:
        return None
    assert spec.kind is GrammarKind.STRUCTURE
    return spec.structure


def test_an_answer_is_free_where_nothing_is_promised() -> None:
    assert structure_of(tools=TOOLS) is None
    assert structure_of(tools=TOOLS, parallel_tool_calls=True) is None
    assert answer_grammar(use_of(), None, None, None) is None


def test_a_constraint_applies_alone_where_there_is_nothing_to_call() -> None:
    assert answer_grammar(use_of(), REGEX, None, None) is REGEX
    assert answer_grammar(use_of(tools=TOOLS, tool_choice="none"), REGEX, Slashes(), None) is REGEX


def accepted(spec: GrammarSpec | None, text: str) -> bool:
    assert spec is not None
    vocabulary = byte_vocabulary()
    return accepts(LlguidanceBackend(vocabulary).compile(spec).matcher(), vocabulary, split_pieces(text, vocabulary))


@pytest.mark.parametrize(("tool_format", "separator"), [(QWEN25.tool_format, "\n"), (LLAMA3.tool_format, "; ")])
def test_calls_that_are_bare_objects_are_values_beside_json(tool_format: ToolFormat, separator: str) -> None:
    """Their text and other JSON could not be told apart."""
    tools = [named("f", {"properties": {"a": {"type": "integer"}}}), named("g")]
    schema = {"type": "object", "properties": {"answer": {"type": "string"}}, "additionalProperties": False}
    content = GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(schema), "response_format")
    spec = answer_grammar(use_of(tools=tools), content, tool_format, "bare")
    key = "parameters" if separator == "; " else "arguments"
    calls = [f'{{"name": "f", "{key}": {{"a": 1}}}}', f'{{"name":"g","{key}":{{}}}}']
    for text in ('{"answer": "a"}', *calls, separator.join(calls)):
        assert accepted(spec, text)
    for text in (calls[0].replace("1", '"1"'), calls[1].replace("g", "h"), '{"answer": 1}', f'{{"answer": "a"}}{separator}{calls[1]}'):
        assert not accepted(spec, text)
    single = answer_grammar(use_of(tools=tools, parallel_tool_calls=False), content, tool_format, "bare")
    assert accepted(single, calls[0])
    assert not accepted(single, separator.join(calls))
    with pytest.raises(UnsupportedGrammar, match="cannot be told apart"):
        accepted(answer_grammar(use_of(tools=[TOOLS[0], STRICT[1]]), content, tool_format, "bare"), "")


def test_a_forced_call_leaves_nothing_else() -> None:
    for choice in ("required", allowed("f", "g", mode="required")):
        assert structure_of(tools=TOOLS, tool_choice=choice) == Sequence((Marker("/"), calls("f", "g")))
    once = Sequence((Marker("/"), calls("g", times="once")))
    assert structure_of(tools=TOOLS, tool_choice=named("g")) == once
    assert structure_of(tools=TOOLS, tool_choice=allowed("g", mode="required"), parallel_tool_calls=False) == once
    assert structure_of(FORMAT, tools=TOOLS, tool_choice=named("g")) == once, "no content has any format"


def test_text_and_calls_are_held_to_the_tools_from_the_opening_on() -> None:
    text = FreeText(without=("/",))
    several = Sequence((Repeat(Sequence((TextUntil("/"), calls("f", "g")))), text))
    assert structure_of(tools=STRICT) == several
    assert structure_of(tools=TOOLS, tool_choice=allowed("f", "g")) == several
    assert structure_of(tools=STRICT, parallel_tool_calls=False) == Either(
        (text, Sequence((TextUntil("/"), calls("f", "g", times="once"))))
    )


def test_beside_a_constraint_the_answer_is_either_that_or_calls() -> None:
    for constraint in (REGEX, FORMAT):
        assert structure_of(constraint, tools=TOOLS) == Either((Value(constraint), Sequence((Marker("/"), calls("f", "g")))))


def test_arguments_are_exact_where_the_tool_is_strict_and_always_an_object() -> None:
    given: list[CallableTool] = []

    class Recording(Slashes):
        def calls(self, tools: Tools[CallableTool], *, is_single: bool) -> Structure:
            given.extend(tools)
            return super().calls(tools, is_single=is_single)

    tools = [*STRICT, named("h", {"type": ["object", "null"], "title": "H"}), named("i", {})]
    spec = answer_grammar(use_of(tools=tools), None, Recording(), None)
    assert [tool.arguments.is_lenient for tool in given] == [True, False, True, True]
    assert [tool.arguments.param for tool in given] == [f"tools[{index}].function.parameters" for index in range(4)]
    assert [tool.arguments.text for tool in given] == [
        '{"type": "object", "properties": {"b": {}, "a": {}}}',
        '{"type": "object", "properties": {}, "additionalProperties": false}',
        '{"type": "object", "title": "H"}',
        '{"type": "object"}',
    ]
    assert answer_grammar(use_of(tools=json.loads(json.dumps(tools))), None, Recording(), None) == spec
    assert {tool.arguments.whitespace_pattern for tool in given} == {None}
    given.clear()
    answer_grammar(use_of(tools=tools), None, Recording(), None, JsonReading(""))
    assert {tool.arguments.whitespace_pattern for tool in given} == {""}


@pytest.mark.parametrize(
    ("fields", "constraint", "param"),
    [
        ({"tool_choice": "required"}, None, "tool_choice"),
        ({"tool_choice": named("f")}, None, "tool_choice"),
        ({"tool_choice": allowed("f")}, None, "tool_choice"),
        ({"tools": STRICT}, None, "tools[1].function.strict"),
        ({"parallel_tool_calls": False}, None, "parallel_tool_calls"),
        ({}, REGEX, "guided_regex"),
    ],
)
def test_a_parser_that_does_not_say_how_calls_are_written_promises_nothing(
    fields: dict[str, Any], constraint: GrammarSpec | None, param: str
) -> None:
    with pytest.raises(InvalidRequest, match=r"the tool parser `older` has no `tool_format`") as caught:
        answer_grammar(use_of(**({"tools": TOOLS} | fields)), constraint, None, "older")
    assert caught.value.param == param


def test_a_constraint_on_content_contradicts_a_forced_call() -> None:
    tags = GrammarSpec(GrammarKind.STRUCTURE, "", "response_format", structure=Literal("x"))
    for constraint in (REGEX, tags):
        with pytest.raises(InvalidRequest, match="use `tool_choice` `auto`") as caught:
            structure_of(constraint, tools=TOOLS, tool_choice="required")
        assert caught.value.param == constraint.param


def test_arguments_that_nest_too_deeply_are_refused() -> None:
    schema: dict[str, Any] = {}
    for _ in range(20_000):
        schema = {"properties": {"a": schema}}
    use = use_of(tools=STRICT)
    deep = ToolUse(shown=use.shown, callable=(type(use.callable[0])("f", schema, True, "tools[0]"),), choice="auto")
    with pytest.raises(InvalidRequest, match="nested too deeply") as caught:
        answer_grammar(deep, None, Slashes(), None)
    assert caught.value.param == "tools[0].function.parameters"


def test_arguments_are_closed_in_the_closed_reading() -> None:
    given: list[CallableTool] = []

    class Recording(Slashes):
        def calls(self, tools: Tools[CallableTool], *, is_single: bool) -> Structure:
            given.extend(tools)
            return super().calls(tools, is_single=is_single)

    tools = [*STRICT, named("h", {"type": "object", "properties": {}}), named("i", {})]
    answer_grammar(use_of(tools=tools), None, Recording(), None, JsonReading(additional_properties="closed"))
    assert [tool.arguments.text for tool in given] == [
        '{"type": "object", "properties": {"b": {}, "a": {}}, "additionalProperties": false}',
        '{"type": "object", "properties": {}, "additionalProperties": false}',
        '{"type": "object", "properties": {}, "additionalProperties": false}',
        '{"type": "object"}',
    ]
