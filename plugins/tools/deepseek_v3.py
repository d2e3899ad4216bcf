"""DeepSeek-V3 and R1: sections of calls whose arguments stand in a fence, ```` ```json ````."""

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
FENCE, FENCE_END = "```json", "```"
ENVELOPE = CallEnvelope(sections=(BEGIN,), openings=(CALL_BEGIN,), closings=(FENCE_END, CALL_END, END))
HEAD = CallHead({"kind": {SEPARATOR: "name"}, "name": {FENCE: None, "{": None}})


def _call(tool: CallableTool) -> Structure:
    return Sequence((Literal(f"{tool.name}\n{FENCE}\n"), Value(tool.arguments), Literal(f"\n{FENCE_END}")))


FORMAT = JsonToolFormat(
    BEGIN,
    before=(Marker(CALL_BEGIN), Literal("function"), Marker(SEPARATOR)),
    call=_call,
    after=(Marker(CALL_END),),
    separator=(Literal("\n"),),
    closing=(Marker(END),),
)


def deepseek_v3(turn: Turn) -> JsonToolCalls:
    return JsonToolCalls(turn, ENVELOPE, FORMAT, head=HEAD)


@hookimpl
def register_tool_parsers(register: Register) -> None:
    info = FormatInfo(
        models="DeepSeek-V2.5, V3, R1 and its distillations",
        markers=(BEGIN, CALL_BEGIN, SEPARATOR, CALL_END, END),
        quirks="What stands before the separator, `function`, is not looked at. The fence and the section may be missing.",
        aliases=("deepseekv3", "deepseek-v3"),
        signs=(BEGIN, FENCE),
        example=f'{BEGIN}{CALL_BEGIN}function{SEPARATOR}weather\n```json\n{{"city": "Oslo"}}\n```{CALL_END}{END}',
    )
    register("deepseek_v3", deepseek_v3, info)
