"""PLaMo 3: a section of requests, each a name and arguments in JSON between markers of several tokens."""

from penstock.engine.format_info import FormatInfo
from penstock.engine.hooks import Register, hookimpl
from penstock.engine.structure import Literal, Marker, Sequence, Structure, Value
from penstock.engine.tool_format import CallableTool
from penstock.engine.turn import Turn
from penstock.plugins.json_calls.call_envelope import CallEnvelope
from penstock.plugins.json_calls.call_head import CallHead
from penstock.plugins.json_calls.json_tool_calls import JsonToolCalls
from penstock.plugins.json_calls.json_tool_format import JsonToolFormat


def _pair(name: str) -> tuple[str, str]:
    return f"<|plamo:begin_{name}:plamo|>", f"<|plamo:end_{name}:plamo|>"


BEGIN, END = _pair("tool_requests")
CALL_BEGIN, CALL_END = _pair("tool_request")
NAME_BEGIN, NAME_END = _pair("tool_name")
ARGUMENTS_BEGIN, ARGUMENTS_END = _pair("tool_arguments")
JSON = f"{ARGUMENTS_BEGIN}<|plamo:constrain|>json<|plamo:msg|>"
ENVELOPE = CallEnvelope(sections=(BEGIN,), openings=(CALL_BEGIN + NAME_BEGIN,), closings=(ARGUMENTS_END, CALL_END, END))
HEAD = CallHead({"name": {NAME_END: "between"}, "between": {JSON: None}})


def _call(tool: CallableTool) -> Structure:
    return Sequence((Literal(tool.name), Marker(NAME_END + JSON), Value(tool.arguments)))


FORMAT = JsonToolFormat(
    BEGIN, before=(Marker(CALL_BEGIN + NAME_BEGIN),), call=_call, after=(Marker(ARGUMENTS_END + CALL_END),), closing=(Marker(END),)
)


def plamo3(turn: Turn) -> JsonToolCalls:
    return JsonToolCalls(turn, ENVELOPE, FORMAT, head=HEAD)


@hookimpl
def register_tool_parsers(register: Register) -> None:
    info = FormatInfo(
        models="PLaMo 3",
        markers=(BEGIN, CALL_BEGIN, NAME_BEGIN, JSON, ARGUMENTS_END, CALL_END, END, NAME_END),
        signs=("<|plamo:begin_", "tool_request"),
        example=f'{BEGIN}{CALL_BEGIN}{NAME_BEGIN}weather{NAME_END}{JSON}{{"city": "Oslo"}}{ARGUMENTS_END}{CALL_END}{END}',
    )
    register("plamo3", plamo3, info)
