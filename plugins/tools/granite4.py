"""Granite 4: `<tool_call>{"name": …, "arguments": …}</tool_call>`, one block for each call."""

from penstock.engine.format_info import FormatInfo
from penstock.engine.hooks import Register, hookimpl
from penstock.plugins.json_calls.json_blocks import json_blocks

START = "<tool_call>"
END = "</tool_call>"

granite4 = json_blocks(START, END)


@hookimpl
def register_tool_parsers(register: Register) -> None:
    info = FormatInfo(
        models="Granite 4.0, 4.1",
        markers=(START, END),
        quirks="The arguments may be a string that holds an object as JSON: they are given out as that object.",
        signs=(START, "<|start_of_role|>"),
        example='<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>',
    )
    register("granite4", granite4, info)
