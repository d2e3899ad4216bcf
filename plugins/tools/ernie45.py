"""ERNIE 4.5: `<tool_call>{"name": …, "arguments": …}</tool_call>` after the reasoning, one block for each call."""

from penstock.engine.format_info import FormatInfo
from penstock.engine.hooks import Register, hookimpl
from penstock.plugins.json_calls.json_blocks import json_blocks

START = "<tool_call>"
END = "</tool_call>"

ernie45 = json_blocks(START, END)


@hookimpl
def register_tool_parsers(register: Register) -> None:
    info = FormatInfo(
        models="ERNIE-4.5-21B-A3B-Thinking",
        markers=(START, END),
        quirks="Read from the content: a block before `</think>` is part of the reasoning.",
        signs=(START, "<tool_output>", "<response>"),
        prompt_tail="<think>\n",
        example='The user asks for Oslo.\n</think>\n\n<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>\n',
    )
    register("ernie45", ernie45, info)
