"""LongCat-Flash: `<longcat_tool_call>{"name": …, "arguments": …}</longcat_tool_call>`, one block for each call."""

from penstock.engine.format_info import FormatInfo
from penstock.engine.hooks import Register, hookimpl
from penstock.plugins.json_calls.json_blocks import json_blocks

START = "<longcat_tool_call>"
END = "</longcat_tool_call>"

longcat = json_blocks(START, END)


@hookimpl
def register_tool_parsers(register: Register) -> None:
    info = FormatInfo(
        models="LongCat-Flash",
        markers=(START, END),
        signs=(START,),
        example='<longcat_tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</longcat_tool_call>',
    )
    register("longcat", longcat, info)
