"""Granite 20B for function calling: `<function_call> {"name": …, "arguments": …}`, the marker again before each call."""

from penstock.engine.format_info import FormatInfo
from penstock.engine.hooks import Register, hookimpl
from penstock.engine.structure import Literal, Marker
from penstock.engine.turn import Turn
from penstock.plugins.json_calls.call_envelope import CallEnvelope
from penstock.plugins.json_calls.json_tool_calls import JsonToolCalls
from penstock.plugins.json_calls.json_tool_format import JsonToolFormat

START = "<function_call>"
ENVELOPE = CallEnvelope(openings=(START,))
FORMAT = JsonToolFormat(START, before=(Literal(" "),), separator=(Literal(" "), Marker(START)))


def granite_20b_fc(turn: Turn) -> JsonToolCalls:
    return JsonToolCalls(turn, ENVELOPE, FORMAT)


@hookimpl
def register_tool_parsers(register: Register) -> None:
    info = FormatInfo(
        models="Granite-20B-FunctionCalling",
        markers=(START,),
        quirks="A call ends where its object does.",
        aliases=("granite_20b_fc",),
        signs=(f"{START} ",),  # with the space: MiniMax has the marker as a token
        example='<function_call> {"name": "weather", "arguments": {"city": "Oslo"}}',
    )
    register("granite-20b-fc", granite_20b_fc, info)
