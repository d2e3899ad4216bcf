"""Llama 3 and 4: `{"name": …, "parameters": …}` anywhere in the answer, after `<|python_tag|>` or not; more of them after `; `."""

from penstock.engine.format_info import FormatInfo
from penstock.engine.hooks import Register, hookimpl
from penstock.engine.structure import Literal
from penstock.engine.turn import Turn
from penstock.plugins.json_calls.call_envelope import CallEnvelope
from penstock.plugins.json_calls.json_call import CallKeys, JsonCall
from penstock.plugins.json_calls.json_tool_calls import JsonToolCalls
from penstock.plugins.json_calls.json_tool_format import JsonToolFormat

TAG = "<|python_tag|>"
KEYS = CallKeys(is_bare=True)
ENVELOPE = CallEnvelope(sections=(TAG,), openings=("{",), separators=(";",), bare=("{",))
OPENED = '{"name": "'
FORMAT = JsonToolFormat(OPENED, opened=OPENED, separator=(Literal(f"; {OPENED}"),), arguments_key="parameters")


def llama3_json(turn: Turn) -> JsonToolCalls:
    return JsonToolCalls(turn, ENVELOPE, FORMAT, call=lambda: JsonCall(KEYS))


@hookimpl
def register_tool_parsers(register: Register) -> None:
    info = FormatInfo(
        models="Llama 3.1, 3.2, 3.3, 4",
        markers=(TAG,),
        quirks="An object is a call where it has a name, and `parameters` or `arguments` that are an object; any other JSON is content, "
        "with all that is in it. So are text around calls and code after the tag.",
        aliases=("llama4_json", "llama3"),
        signs=("Environment: ipython", '"parameters": '),
        other_signs=(("<|header_start|>ipython<|header_end|>", '"parameters": '),),
        counter_signs=("<function=",),
        example='{"name": "weather", "parameters": {"city": "Oslo"}}',
    )
    register("llama3_json", llama3_json, info)
