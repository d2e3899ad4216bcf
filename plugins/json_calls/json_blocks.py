"""Tool calls in blocks with one JSON object each, `START{"name": …, "arguments": …}END`, on lines of their own."""

from collections.abc import Callable

from penstock.engine.structure import Literal, Marker
from penstock.engine.turn import Turn
from penstock.plugins.json_calls.call_envelope import CallEnvelope
from penstock.plugins.json_calls.json_tool_calls import JsonToolCalls
from penstock.plugins.json_calls.json_tool_format import JsonToolFormat


def block_format(start: str, end: str) -> JsonToolFormat:
    """How models write these blocks, in lines."""
    return JsonToolFormat(start, before=(Literal("\n"),), after=(Literal("\n"), Marker(end)), separator=(Literal("\n"), Marker(start)))


def json_blocks(start: str, end: str) -> Callable[[Turn], JsonToolCalls]:
    """The factory of a parser for blocks between these markers."""
    envelope = CallEnvelope(openings=(start,), closings=(end,))
    tool_format = block_format(start, end)
    return lambda turn: JsonToolCalls(turn, envelope, tool_format)
