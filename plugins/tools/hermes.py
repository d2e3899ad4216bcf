"""Hermes and Qwen tool calls: `<tool_call>{"name": …, "arguments": …}</tool_call>`, one block for each call."""

from collections.abc import Callable

from penstock.engine.format_info import FormatInfo
from penstock.engine.hooks import Register, hookimpl
from penstock.engine.turn import Turn
from penstock.plugins.call_ids import new_call_id
from penstock.plugins.json_calls.call_envelope import CallEnvelope
from penstock.plugins.json_calls.json_blocks import block_format
from penstock.plugins.json_calls.json_tool_calls import JsonToolCalls

START = "<tool_call>"
END = "</tool_call>"


class Hermes(JsonToolCalls):
    """A parser of Hermes' blocks, which other families write as well."""

    tool_format = block_format(START, END)

    def __init__(self, turn: Turn, new_id: Callable[[], str] = new_call_id) -> None:
        super().__init__(turn, CallEnvelope(openings=(START,), closings=(END,), may_be_array=True), new_id=new_id)


@hookimpl
def register_tool_parsers(register: Register) -> None:
    info = FormatInfo(
        models="Hermes 2 Pro, Hermes 3, Qwen2.5, QwQ, Qwen3, and many others",
        markers=(START, END),
        quirks="The last block may be left open, and the outer brace forgotten; a block may hold an array of calls. Text before and after "
        "blocks is content.",
        aliases=("qwen", "qwen25", "qwen3_json", "nanbeige", "trinity"),
        signs=(START, "arguments"),
        counter_signs=("<function=", "<arg_key>", "<tool_calls>"),
        example='<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>',
    )
    register("hermes", Hermes, info)
