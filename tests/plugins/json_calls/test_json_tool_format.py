import json
from collections.abc import Callable, Iterable

import pytest

from penstock.engine.events import Event, SpecialText, Text, ToolCallArguments, ToolCallStart
from penstock.engine.grammar import GrammarKind, GrammarSpec
from penstock.engine.parsing import ToolParser
from penstock.engine.structure import Literal, Marker
from penstock.engine.structure import Sequence as Parts
from penstock.engine.tool_format import CallableTool
from penstock.engine.turn import Turn
from penstock.plugins.grammars.llguidance.backend import LlguidanceBackend
from penstock.plugins.json_calls.json_call import JsonCall
from penstock.plugins.json_calls.json_tool_format import JsonToolFormat
from penstock.plugins.markers import MarkerBuffer
from penstock.testing import check_tool_format
from penstock.testing.grammar_walks import accepts, byte_vocabulary, split_pieces

MISTRAL = JsonToolFormat("[TOOL_CALLS] [", separator=(Literal(", "),), closing=(Literal("]"),))
INTERN = JsonToolFormat(
    "<|action_start|>",
    before=(Literal("\n"),),
    after=(Marker("<|action_end|>"),),
    separator=(Marker("<|action_start|>"),),
    arguments_key="parameters",
)
BEGIN, END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_BEGIN, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
SECTION = JsonToolFormat(BEGIN, before=(Marker(CALL_BEGIN),), after=(Marker(CALL_END),), separator=(Literal("\n"),), closing=(Marker(END),))
SHAPES = {
    "array": (MISTRAL, ("[TOOL_CALLS]",), '[TOOL_CALLS] [{"name": "f", "arguments": {}}, {"name": "g", "arguments": {}}]'),
    "blocks": (
        INTERN,
        ("<|action_start|>", "<|action_end|>"),
        '<|action_start|>\n{"name": "f", "parameters": {}}<|action_end|><|action_start|>\n{"name": "g", "parameters": {}}<|action_end|>',
    ),
    "section": (
        SECTION,
        (BEGIN, CALL_BEGIN, CALL_END, END),
        f'{BEGIN}{CALL_BEGIN}{{"name": "f", "arguments": {{}}}}{CALL_END}\n{CALL_BEGIN}{{"name": "g", "arguments": {{}}}}{CALL_END}{END}',
    ),
}
shapes = pytest.mark.parametrize(("tool_format", "markers", "two_calls"), SHAPES.values(), ids=SHAPES)


class ObjectsAfter(ToolParser):
    """Reads the JSON objects between an opening and what cannot be a call any more: enough of a parser for every shape here."""

    def __init__(self, turn: Turn, tool_format: JsonToolFormat, closing: str) -> None:
        self.tool_format = tool_format
        self._opening = tool_format.opening
        self._closing = closing
        self._buffer = MarkerBuffer(turn.added_tokens)
        self._is_open = False
        self._calls = 0

    def feed(self, text: str) -> Iterable[Event]:
        self._buffer.feed(text)
        return []

    def finish(self) -> Iterable[Event]:
        events: list[Event] = []
        while True:
            pieces, marker = self._buffer.take_until(self._opening)
            events += map(Text, pieces)
            if marker is None:
                return events
            self._read_calls(events)

    def _read_calls(self, events: list[Event]) -> None:
        while (piece := self._buffer.peek()) is not None:
            start = self._buffer.offset
            brace = -1 if isinstance(piece, SpecialText) else piece.find("{", start)
            between = piece[start:] if brace < 0 else piece[start:brace]
            if self._closing in between:
                self._buffer.skip(between.index(self._closing) + len(self._closing))
                return
            self._buffer.skip(len(between))
            if brace >= 0:
                call = JsonCall()
                self._buffer.skip(call.feed(piece, brace) - brace)
                events += [ToolCallStart(self._calls, call.name or "", "id"), ToolCallArguments(self._calls, call.take_arguments())]
                self._calls += 1


def parser_of(tool_format: JsonToolFormat, closing: str) -> Callable[[Turn], ObjectsAfter]:
    return lambda turn: ObjectsAfter(turn, tool_format, closing)


def tool(name: str) -> CallableTool:
    schema = {"type": "object", "properties": {}, "additionalProperties": False}
    return CallableTool(name, GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(schema)))


@shapes
@pytest.mark.parametrize("are_tokens", [False, True])
def test_one_class_writes_every_shape(tool_format: JsonToolFormat, markers: tuple[str, ...], two_calls: str, are_tokens: bool) -> None:
    vocabulary = byte_vocabulary(markers if are_tokens else ())
    backend = LlguidanceBackend(vocabulary)
    for is_single in (False, True):
        structure = Parts((Marker(tool_format.opening), tool_format.calls([tool("f"), tool("g")], is_single=is_single)))
        grammar = backend.compile(GrammarSpec(GrammarKind.STRUCTURE, "", structure=structure))
        assert accepts(grammar.matcher(), vocabulary, split_pieces(two_calls, vocabulary)) == (not is_single)
        assert not accepts(grammar.matcher(), vocabulary, split_pieces(two_calls.replace('"g"', '"h"'), vocabulary))


@pytest.mark.parametrize(("shape", "closing"), [("array", "]"), ("section", END)])
def test_a_parser_reads_what_the_grammar_allows(shape: str, closing: str) -> None:
    tool_format, markers, _ = SHAPES[shape]
    check_tool_format(parser_of(tool_format, closing), markers=markers, num_walks=4)


def test_names_are_escaped_as_json() -> None:
    structure = JsonToolFormat("").calls([tool('a"\\\n字')], is_single=True)
    assert Literal('{"name": "a\\"\\\\\\n字", "arguments": ') in structure.parts[0].parts[0].parts[0].parts  # type: ignore[union-attr]
