"""Tool calls in one JSON array after a marker, `START[{"name": …, "arguments": …}, …]END`."""

from collections.abc import Callable

from penstock.engine.structure import Literal, Marker
from penstock.engine.turn import Turn
from penstock.plugins.json_calls.call_envelope import CallEnvelope
from penstock.plugins.json_calls.json_call import USUAL_KEYS, CallKeys, JsonCall
from penstock.plugins.json_calls.json_tool_calls import JsonToolCalls
from penstock.plugins.json_calls.json_tool_format import JsonToolFormat


def array_format(start: str, end: str | None = None, *, indent: str = "") -> JsonToolFormat:
    """The array in one line, or with each call in a line of its own that begins with `indent`."""
    line = f"\n{indent}" if indent else ""
    closing = Literal("\n]" if indent else "]")
    return JsonToolFormat(
        start,
        leading=(Literal(f"[{line}"),),
        separator=(Literal(f",{line}" if indent else ", "),),
        closing=(closing,) if end is None else (closing, Marker(end)),
    )


def json_call_array(
    openings: tuple[str, ...], closings: tuple[str, ...], tool_format: JsonToolFormat, keys: CallKeys = USUAL_KEYS
) -> Callable[[Turn], JsonToolCalls]:
    """The factory of a parser for arrays between these markers, of which the last is optional; one call may lack the brackets."""
    envelope = CallEnvelope(openings=openings, closings=closings, may_be_array=True)
    return lambda turn: JsonToolCalls(turn, envelope, tool_format, call=lambda: JsonCall(keys))
