"""Mistral: `[TOOL_CALLS] [{…}, …]` up to tokenizer v7, then `[TOOL_CALLS]f{…}` and `[TOOL_CALLS]f[ARGS]{…}`."""

from penstock.engine.format_info import FormatInfo
from penstock.engine.hooks import Register, hookimpl
from penstock.engine.structure import Literal, Marker, Sequence, Structure, Value
from penstock.engine.tool_format import CallableTool
from penstock.engine.turn import Turn
from penstock.plugins.call_ids import new_short_call_id
from penstock.plugins.json_calls.call_envelope import CallEnvelope
from penstock.plugins.json_calls.call_head import CallHead
from penstock.plugins.json_calls.json_tool_calls import JsonToolCalls
from penstock.plugins.json_calls.json_tool_format import JsonToolFormat

START = "[TOOL_CALLS]"
ID = "[CALL_ID]"
ARGUMENTS = "[ARGS]"
ENVELOPE = CallEnvelope(openings=(START,), is_array=True)
HEAD = CallHead({"name": {ID: "id", ARGUMENTS: None, "{": None}, "id": {ARGUMENTS: None, "{": None}})


def _call(tool: CallableTool) -> Structure:
    return Sequence((Literal(tool.name), Marker(ARGUMENTS), Value(tool.arguments)))


ARRAY = JsonToolFormat(START, leading=(Literal(" ["),), separator=(Literal(", "),), closing=(Literal("]"),))
NAMED = JsonToolFormat(START, call=_call, separator=(Marker(START),))


def mistral(turn: Turn) -> JsonToolCalls:
    """Every generation is read; how calls are written is told by the vocabulary."""
    tool_format = NAMED if ARGUMENTS in turn.added_tokens else ARRAY
    return JsonToolCalls(turn, ENVELOPE, tool_format, head=HEAD, new_id=new_short_call_id)


@hookimpl
def register_tool_parsers(register: Register) -> None:
    info = FormatInfo(
        models="Mistral, Mixtral, Ministral, Devstral, Magistral",
        markers=(START, ID, ARGUMENTS),
        quirks="Ids are nine letters and digits: fresh ones, or the model's own after `[CALL_ID]`. The array may lack its brackets.",
        signs=(START,),
        example='[TOOL_CALLS]weather[ARGS]{"city": "Oslo"}',
    )
    register("mistral", mistral, info)
