"""Declarations of wire formats: what follows from a row, and that each field of one is of use."""

import json
from collections.abc import Iterator
from dataclasses import MISSING, fields
from typing import Any

import pytest

from penstock.engine.contracts.grammar import GrammarKind, GrammarSpec
from penstock.engine.contracts.parsing import CallableTool
from penstock.engine.contracts.structure import Literal, Marker
from penstock.engine.contracts.structure import Sequence as Parts
from penstock.plugins.calls.elements import ElementFormat
from penstock.plugins.calls.expression_formats import NotationFormat, PythonFormat
from penstock.plugins.calls.json_call import CallKeys
from penstock.plugins.calls.json_format import JsonFormat
from penstock.plugins.calls.json_stream import CallEnvelope, CallHead
from penstock.plugins.calls.markup_format import MarkupFormat
from penstock.plugins.calls.markup_reader import ParameterMarkup
from penstock.plugins.calls.stream import CallFormat
from penstock.plugins.grammars.llguidance.backend import LlguidanceBackend
from penstock.plugins.tools import code_formats, json_formats
from penstock.testing import check_parser, check_tool_format
from penstock.testing.decoding import accepts, byte_vocabulary, split_pieces
from tests.plugins.tools.parameter_samples import AUTO, calls

KINDS = (JsonFormat, MarkupFormat, ElementFormat, PythonFormat, NotationFormat)


def rows_in(value: Any) -> Iterator[CallFormat]:
    if isinstance(value, CallFormat):
        yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from rows_in(item)


ROWS = [row for module in (json_formats, code_formats) for value in vars(module).values() for row in rows_in(value)]
OPTIONS = [(kind, field.name) for kind in KINDS for field in fields(kind) if field.default is not MISSING]


@pytest.mark.parametrize(("kind", "name"), OPTIONS, ids=[f"{kind.__name__}.{name}" for kind, name in OPTIONS])
def test_some_row_makes_use_of_every_field(kind: type[CallFormat], name: str) -> None:
    default = next(field.default for field in fields(kind) if field.name == name)
    of_base = name in {field.name for field in fields(CallFormat)}
    assert any(getattr(row, name) != default for row in ROWS if of_base or isinstance(row, kind))


# What is declared inside of a row, and what follows from one.
PARTS = [
    part
    for row in ROWS
    for part in (*(getattr(row, field.name) for field in fields(row)), getattr(row, "markup", None))
    if isinstance(part, CallEnvelope | CallHead | CallKeys | ParameterMarkup)
]
PART_OPTIONS = [
    (kind, field.name)
    for kind in (CallEnvelope, CallHead, CallKeys, ParameterMarkup)
    for field in fields(kind)
    if field.default is not MISSING
]


@pytest.mark.parametrize(("kind", "name"), PART_OPTIONS, ids=[f"{kind.__name__}.{name}" for kind, name in PART_OPTIONS])
def test_some_row_makes_use_of_every_field_of_its_parts(kind: type[Any], name: str) -> None:
    default = next(field.default for field in fields(kind) if field.name == name)
    assert any(getattr(part, name) != default for part in PARTS if isinstance(part, kind))


BEGIN, END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_BEGIN, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
SHAPES = {
    "array": (
        JsonFormat(block="[TOOL_CALLS] [{calls}]", separator=", ", trigger="[TOOL_CALLS] [", markers=("[TOOL_CALLS]",)),
        '[TOOL_CALLS] [{"name": "f", "arguments": {}}, {"name": "g", "arguments": {}}]',
    ),
    "blocks": (
        JsonFormat(call="<|action_start|>\n{object}<|action_end|>", keys=CallKeys(arguments=("parameters",))),
        '<|action_start|>\n{"name": "f", "parameters": {}}<|action_end|><|action_start|>\n{"name": "g", "parameters": {}}<|action_end|>',
    ),
    "section": (
        JsonFormat(call=f"{CALL_BEGIN}{{object}}{CALL_END}", block=f"{BEGIN}{{calls}}{END}", separator="\n"),
        f'{BEGIN}{CALL_BEGIN}{{"name": "f", "arguments": {{}}}}{CALL_END}\n{CALL_BEGIN}{{"name": "g", "arguments": {{}}}}{CALL_END}{END}',
    ),
    "named": (
        JsonFormat(call="<call>{name}<args>{arguments}</call>"),
        "<call>f<args>{}</call><call>g<args>{}</call>",
    ),
}
shapes = pytest.mark.parametrize(("row", "two_calls"), SHAPES.values(), ids=SHAPES)


def tool(name: str) -> CallableTool:
    schema = {"type": "object", "properties": {}, "additionalProperties": False}
    return CallableTool(name, GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(schema)))


@shapes
@pytest.mark.parametrize("are_tokens", [False, True])
def test_a_row_of_json_writes_every_shape(row: JsonFormat, two_calls: str, are_tokens: bool) -> None:
    vocabulary = byte_vocabulary(row.all_markers if are_tokens else ())
    backend = LlguidanceBackend(vocabulary)
    for is_single in (False, True):
        structure = Parts((Marker(row.opening), row.calls([tool("f"), tool("g")], is_single=is_single)))
        grammar = backend.compile(GrammarSpec(GrammarKind.STRUCTURE, "", structure=structure))
        assert accepts(grammar.matcher(), vocabulary, split_pieces(two_calls, vocabulary)) == (not is_single)
        other = two_calls.replace('"g"', '"h"').replace(">g<", ">h<")
        assert not accepts(grammar.matcher(), vocabulary, split_pieces(other, vocabulary))


@shapes
def test_its_parser_reads_what_its_grammar_allows(row: JsonFormat, two_calls: str) -> None:
    assert calls(row, two_calls) == [("f", {}), ("g", {})]
    check_tool_format(row, markers=row.all_markers, num_walks=2)


def test_names_are_escaped_as_json() -> None:
    structure = JsonFormat(call="<x>{object}").calls([tool('a"\\\n字')], is_single=True)
    assert Literal('a\\"\\\\\\n字", "arguments": ') in structure.parts[0].parts[1].parts[0].parts  # type: ignore[union-attr]


def test_the_markers_and_the_example_of_markup_follow_from_its_templates() -> None:
    row = MarkupFormat(
        models="mine",
        call='<call name="{name}">{parameters}</call>',
        parameter='<arg name="{name}">{value}</arg>\n',
        block="<calls>\n{calls}\n</calls>",
    )
    markers = ("<calls>", "<call name=", "<arg name=", "</arg>", "</call>", "</calls>")
    example = '<calls>\n<call name="weather"><arg name="city">Oslo</arg>\n</call>\n</calls>'
    assert (row.info.markers, row.info.example) == (markers, example)
    assert calls(row, example, AUTO) == [("weather", {"city": "Oslo"})]
    check_parser(row, [f"a{example}b"], markers=markers, max_examples=15)
    check_tool_format(row, markers=markers, num_walks=1)


def test_a_declaration_that_cannot_be_read_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"'mine' has to hold \{object\}"):
        JsonFormat(name="mine", call="<call>{arguments}</call>")
    with pytest.raises(ValueError, match="'mine' has no marker before its calls"):
        JsonFormat(name="mine", call="[CALL]{object}")(AUTO)
    assert calls(JsonFormat(call="[CALL]{object}", markers=("[CALL]",)), '[CALL]{"name": "f"}') == [("f", {})]
