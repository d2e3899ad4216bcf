"""xLAM: `[{"name": …, "arguments": …}, …]`, a bare array or one in any of the envelopes of other models."""

from penstock.engine.format_info import FormatInfo
from penstock.engine.hooks import Register, hookimpl
from penstock.engine.structure import Literal
from penstock.engine.turn import Turn
from penstock.plugins.json_calls.call_envelope import CallEnvelope
from penstock.plugins.json_calls.json_call import CallKeys, JsonCall
from penstock.plugins.json_calls.json_tool_calls import JsonToolCalls
from penstock.plugins.json_calls.json_tool_format import JsonToolFormat

OPENINGS = ("[TOOL_CALLS]", "<tool_call>", "```json", "```\n")
CLOSINGS = ("```", "</tool_call>")
BARE = ("[{", "[ {", "[\n")  # no more than tells an array of objects from a marker in brackets
KEYS = CallKeys(is_bare=True)
ENVELOPE = CallEnvelope(openings=OPENINGS, closings=CLOSINGS, bare=BARE, is_array=True)
OPENED = '{"name": "'
FORMAT = JsonToolFormat(f"[{OPENED}", opened=OPENED, separator=(Literal(f", {OPENED}"),), closing=(Literal("]"),))


def xlam(turn: Turn) -> JsonToolCalls:
    return JsonToolCalls(turn, ENVELOPE, FORMAT, call=lambda: JsonCall(KEYS))


@hookimpl
def register_tool_parsers(register: Register) -> None:
    info = FormatInfo(
        models="xLAM 2",
        markers=("[TOOL_CALLS]", "<tool_call>", "</tool_call>", "```json", "```"),
        quirks="A call has a name and arguments that are an object; any other array is content. So is text around the array.",
        signs=('[{"name": "tool_call_name"',),
        example='[{"name": "weather", "arguments": {"city": "Oslo"}}]',
    )
    register("xlam", xlam, info)
