"""Qwen2.5 and Qwen2.5-Coder: Hermes' `<tool_call>` blocks, and the same objects bare, in fences and in `<tools>`."""

from functools import partial

from penstock.engine.format_info import FormatInfo
from penstock.engine.hooks import Register, hookimpl
from penstock.engine.parsing import ToolParser
from penstock.engine.structure import Literal
from penstock.engine.turn import Turn
from penstock.plugins.json_calls.call_envelope import CallEnvelope
from penstock.plugins.json_calls.json_call import CallKeys, JsonCall
from penstock.plugins.json_calls.json_tool_calls import JsonToolCalls
from penstock.plugins.json_calls.json_tool_format import JsonToolFormat
from penstock.plugins.parsers_in_turn import ParsersInTurn
from penstock.plugins.schema_types import ToolSchemas, has_strict_tool
from penstock.plugins.tools.hermes import END, START, Hermes

TOOLS, TOOLS_END = "<tools>", "</tools>"
FENCE, FENCE_END = "```json", "```"
OPENED = '{"name": "'
KEYS = CallKeys(is_bare=True)
# Without `<tool_call>` only an offered name tells a call from other JSON. `OPENED` counts anywhere: where calls are held to anything, it is
# what the grammar takes over at.
UNTAGGED = CallEnvelope(
    openings=(TOOLS, FENCE, "```\n"),
    closings=(TOOLS_END, FENCE_END),
    separators=(",",),
    bare=(OPENED,),
    first=("{", "["),
    following=("{", "["),
    may_be_array=True,
)
# What begins in another way is held to nothing, which a strict tool does not allow.
STRICT = CallEnvelope(
    sections=(START, TOOLS, FENCE, "```\n"), openings=(OPENED,), closings=(END, TOOLS_END, FENCE_END), separators=(",",), bare=(OPENED,)
)
FORMAT = JsonToolFormat(OPENED, opened=OPENED, separator=(Literal(f"\n{OPENED}"),))


class UntaggedCalls(ParsersInTurn):
    """Hermes' blocks, and the objects of offered tools that stand elsewhere."""

    tool_format = FORMAT

    def __init__(self, turn: Turn) -> None:
        call = partial(JsonCall, KEYS, ToolSchemas(turn.tools))
        super().__init__(Hermes(turn), lambda: JsonToolCalls(turn, UNTAGGED, call=call))


def qwen25_coder(turn: Turn) -> ToolParser:
    if has_strict_tool(turn.tools):
        return JsonToolCalls(turn, STRICT, FORMAT, call=partial(JsonCall, KEYS, ToolSchemas(turn.tools)))
    return UntaggedCalls(turn)


@hookimpl
def register_tool_parsers(register: Register) -> None:
    info = FormatInfo(
        models="Qwen2.5, Qwen2.5-Coder",
        markers=(START, END, TOOLS, TOOLS_END, FENCE, FENCE_END),
        quirks="Reads `hermes`' blocks, and what small models write in their place: the object of an offered tool in `<tools>`, in a "
        "fence, bare where the answer begins with it, after another call, or wherever it is spelled "
        f"`{OPENED}`, at which grammars take over; with a strict tool, only so. Any other JSON is content. Forced calls are written bare.",
        aliases=("qwen2.5-coder", "qwen2_5_coder"),
        signs=(START, "arguments", "You are Qwen, created by Alibaba Cloud"),
        counter_signs=("<function=", "<arg_key>", "<tool_calls>"),
        example='```json\n{\n  "name": "weather",\n  "arguments": {\n    "city": "Oslo"\n  }\n}\n```',
    )
    register("qwen25_coder", qwen25_coder, info)
