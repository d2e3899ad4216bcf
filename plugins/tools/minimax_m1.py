"""MiniMax-M1: `<tool_calls>` and `</tool_calls>` around calls in JSON, one to a line."""

from penstock.engine.format_info import FormatInfo
from penstock.engine.hooks import Register, hookimpl
from penstock.engine.structure import Literal, Marker
from penstock.engine.turn import Turn
from penstock.plugins.json_calls.call_envelope import CallEnvelope
from penstock.plugins.json_calls.json_tool_calls import JsonToolCalls
from penstock.plugins.json_calls.json_tool_format import JsonToolFormat

START = "<tool_calls>"
END = "</tool_calls>"
ENVELOPE = CallEnvelope(openings=(START,), closings=(END,), following=("{",))
FORMAT = JsonToolFormat(START, leading=(Literal("\n"),), separator=(Literal("\n"),), closing=(Literal("\n"), Marker(END)))


def minimax_m1(turn: Turn) -> JsonToolCalls:
    return JsonToolCalls(turn, ENVELOPE, FORMAT)


@hookimpl
def register_tool_parsers(register: Register) -> None:
    info = FormatInfo(
        models="MiniMax-M1",
        markers=(START, END),
        aliases=("minimax", "minimax-m1"),
        signs=(START, END, "<beginning_of_sentence>ai name=assistant"),
        example='<tool_calls>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_calls>',
    )
    register("minimax_m1", minimax_m1, info)
