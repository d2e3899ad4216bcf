"""Inkling: blocks `<|content_invoke_tool_json|>{"name": …, "args": …}<|end_message|>`, each a message of the model."""

from penstock.engine.format_info import FormatInfo
from penstock.engine.hooks import Register, hookimpl
from penstock.engine.structure import Marker
from penstock.engine.turn import Turn
from penstock.plugins.json_calls.call_envelope import CallEnvelope
from penstock.plugins.json_calls.json_call import CallKeys, JsonCall
from penstock.plugins.json_calls.json_tool_calls import JsonToolCalls
from penstock.plugins.json_calls.json_tool_format import JsonToolFormat
from penstock.plugins.schema_types import ToolSchemas

MESSAGE, END = "<|message_model|>", "<|end_message|>"
INVOKE = "<|content_invoke_tool_json|>"
KEYS = CallKeys(arguments=("args", "arguments", "parameters"))
FORMAT = JsonToolFormat(INVOKE, after=(Marker(END),), separator=(Marker(MESSAGE), Marker(INVOKE)), arguments_key="args")


def inkling(turn: Turn) -> JsonToolCalls:
    named = (f"{name}{INVOKE}" for name in ToolSchemas(turn.tools).names)
    envelope = CallEnvelope(sections=(MESSAGE,), openings=(INVOKE, *named), closings=(END,))
    return JsonToolCalls(turn, envelope, FORMAT, call=lambda: JsonCall(KEYS))


@hookimpl
def register_tool_parsers(register: Register) -> None:
    info = FormatInfo(
        models="Inkling",
        markers=(MESSAGE, INVOKE, END),
        quirks="An offered tool's name may stand before the second marker too.",
        signs=(INVOKE,),
        example=f'{INVOKE}{{"name": "weather", "args": {{"city": "Oslo"}}}}{END}',
    )
    register("inkling", inkling, info)
