"""Solar Open: calls between `<|tool_calls|>` and `<|calls|>`, each an id, a name and arguments in JSON."""

from penstock.engine.format_info import FormatInfo
from penstock.engine.grammar import GrammarKind, GrammarSpec
from penstock.engine.hooks import Register, hookimpl
from penstock.engine.structure import Literal, Marker, Sequence, Structure, Value
from penstock.engine.tool_format import CallableTool
from penstock.engine.turn import Turn
from penstock.plugins.json_calls.call_envelope import CallEnvelope
from penstock.plugins.json_calls.call_head import CallHead
from penstock.plugins.json_calls.json_tool_calls import JsonToolCalls
from penstock.plugins.json_calls.json_tool_format import JsonToolFormat

BEGIN, END = "<|tool_calls|>", "<|calls|>"
CALL_BEGIN, CALL_END = "<|tool_call:begin|>", "<|tool_call:end|>"
NAME, ARGUMENTS = "<|tool_call:name|>", "<|tool_call:args|>"
ENVELOPE = CallEnvelope(sections=(BEGIN,), openings=(CALL_BEGIN,), closings=(CALL_END, END))
HEAD = CallHead({"id": {NAME: "name"}, "name": {ARGUMENTS: None}})
_ID = GrammarSpec(GrammarKind.REGEX, "[a-z0-9]{10}", "tools")


def _call(tool: CallableTool) -> Structure:
    return Sequence((Literal(tool.name), Marker(ARGUMENTS), Value(tool.arguments)))


FORMAT = JsonToolFormat(
    BEGIN,
    before=(Marker(CALL_BEGIN), Value(_ID), Marker(NAME)),
    call=_call,
    after=(Marker(CALL_END),),
    closing=(Marker(END),),
)


def solar_open(turn: Turn) -> JsonToolCalls:
    return JsonToolCalls(turn, ENVELOPE, FORMAT, head=HEAD)


@hookimpl
def register_tool_parsers(register: Register) -> None:
    info = FormatInfo(
        models="Solar Open",
        markers=(BEGIN, CALL_BEGIN, NAME, ARGUMENTS, CALL_END, END),
        quirks="Ids are the model's own, ten letters and digits.",
        aliases=("solar-open",),
        signs=(CALL_BEGIN, NAME, ARGUMENTS),
        example=f'{BEGIN}{CALL_BEGIN}a1b2c3d4e5{NAME}weather{ARGUMENTS}{{"city": "Oslo"}}{CALL_END}{END}',
    )
    register("solar_open", solar_open, info)
