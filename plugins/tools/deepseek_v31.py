"""DeepSeek-V3.1: sections of calls, each a name, a separator and the arguments."""

from penstock.engine.format_info import FormatInfo
from penstock.engine.hooks import Register, hookimpl
from penstock.engine.structure import Literal, Marker, Sequence, Structure, Value
from penstock.engine.tool_format import CallableTool
from penstock.engine.turn import Turn
from penstock.plugins.json_calls.call_envelope import CallEnvelope
from penstock.plugins.json_calls.call_head import CallHead
from penstock.plugins.json_calls.json_tool_calls import JsonToolCalls
from penstock.plugins.json_calls.json_tool_format import JsonToolFormat

BEGIN, END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_BEGIN, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
SEPARATOR = "<｜tool▁sep｜>"
ENVELOPE = CallEnvelope(sections=(BEGIN,), openings=(CALL_BEGIN,), closings=(CALL_END, END))
HEAD = CallHead({"name": {SEPARATOR: None}})


def _call(tool: CallableTool) -> Structure:
    return Sequence((Literal(tool.name), Marker(SEPARATOR), Value(tool.arguments)))


FORMAT = JsonToolFormat(BEGIN, before=(Marker(CALL_BEGIN),), call=_call, after=(Marker(CALL_END),), closing=(Marker(END),))


def deepseek_v31(turn: Turn) -> JsonToolCalls:
    return JsonToolCalls(turn, ENVELOPE, FORMAT, head=HEAD)


@hookimpl
def register_tool_parsers(register: Register) -> None:
    info = FormatInfo(
        models="DeepSeek-V3.1",
        markers=(BEGIN, CALL_BEGIN, SEPARATOR, CALL_END, END),
        quirks="A call outside of a section is read too. Text after the section is content.",
        aliases=("deepseekv31", "deepseek-v3.1"),
        signs=(BEGIN, f"'{SEPARATOR}' + tool"),  # V3 writes the function's type before its name there
        counter_signs=("```json",),
        example=f'{BEGIN}{CALL_BEGIN}weather{SEPARATOR}{{"city": "Oslo"}}{CALL_END}{END}',
    )
    register("deepseek_v31", deepseek_v31, info)
