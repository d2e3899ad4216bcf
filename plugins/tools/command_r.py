"""Command R and R+: `Action:` and a fence with an array, ```` ```json [{"tool_name": …, "parameters": …}, …] ``` ````."""

from functools import partial

from penstock.engine.format_info import FormatInfo
from penstock.engine.hooks import Register, hookimpl
from penstock.engine.structure import Literal
from penstock.engine.turn import Turn
from penstock.plugins.json_calls.call_envelope import CallEnvelope
from penstock.plugins.json_calls.json_call import CallKeys, JsonCall
from penstock.plugins.json_calls.json_tool_calls import JsonToolCalls
from penstock.plugins.json_calls.json_tool_format import JsonToolFormat
from penstock.plugins.schema_types import ToolSchemas

START = "Action:\n```json"
FENCE_END = "```"
KEYS = CallKeys("tool_name", ("parameters",))
ENVELOPE = CallEnvelope(openings=("Action:```json", "Action: ```json", START), closings=(FENCE_END,), is_array=True)
FORMAT = JsonToolFormat(
    START,
    leading=(Literal("\n[\n    "),),
    separator=(Literal(",\n    "),),
    closing=(Literal(f"\n]{FENCE_END}"),),
    name_key="tool_name",
    arguments_key="parameters",
)


def command_r(turn: Turn) -> JsonToolCalls:
    return JsonToolCalls(turn, ENVELOPE, FORMAT, call=partial(JsonCall, KEYS, ToolSchemas(turn.tools)))


@hookimpl
def register_tool_parsers(register: Register) -> None:
    info = FormatInfo(
        models="Command R, Command R+",
        markers=(START, FENCE_END),
        quirks="What calls a tool that is not offered is content: the model writes `directly-answer` where it calls nothing.",
        aliases=("command-r", "command_r_plus"),
        signs=("Action:", "`directly-answer`"),
        example='Action:\n```json\n[\n    {\n        "tool_name": "weather",\n        "parameters": {"city": "Oslo"}\n    }\n]```',
    )
    register("command_r", command_r, info)
