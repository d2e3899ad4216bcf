"""Cohere Command: `<|START_ACTION|>[{"tool_call_id": …, "tool_name": …, "parameters": …}, …]<|END_ACTION|>`."""

import json

from penstock.engine.format_info import FormatInfo
from penstock.engine.grammar import GrammarKind, GrammarSpec
from penstock.engine.hooks import Register, hookimpl
from penstock.engine.structure import Literal, Marker, Sequence, Structure, Value
from penstock.engine.tool_format import CallableTool
from penstock.plugins.json_calls.json_call import CallKeys
from penstock.plugins.json_calls.json_call_array import json_call_array
from penstock.plugins.json_calls.json_tool_format import JsonToolFormat

START = "<|START_ACTION|>"
END = "<|END_ACTION|>"
_NUMBER = GrammarSpec(GrammarKind.REGEX, "0|[1-9][0-9]{0,3}", "tools")


def _call(tool: CallableTool) -> Structure:
    name = json.dumps(tool.name, ensure_ascii=False)
    return Sequence((Literal(f'", "tool_name": {name}, "parameters": '), Value(tool.arguments), Literal("}")))


FORMAT = JsonToolFormat(
    START,
    leading=(Literal("[\n    "),),
    before=(Literal('{"tool_call_id": "'), Value(_NUMBER)),
    call=_call,
    separator=(Literal(",\n    "),),
    closing=(Literal("\n]"), Marker(END)),
)
cohere = json_call_array((START,), (END,), FORMAT, CallKeys("tool_name", ("parameters", "arguments"), "tool_call_id"))


@hookimpl
def register_tool_parsers(register: Register) -> None:
    info = FormatInfo(
        models="Command R7B, Command A, Command 4",
        markers=(START, END),
        quirks="Ids are the model's own, `0` and up.",
        aliases=("cohere_command", "cohere_command3", "cohere_command4"),
        signs=(START, END),
        example='<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "weather", "parameters": {"city": "Oslo"}}\n]<|END_ACTION|>',
    )
    register("cohere", cohere, info)
