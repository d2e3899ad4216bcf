"""Granite 3: `<|tool_call|>[{"name": …, "arguments": …}, …]`, an array with no end of its own."""

from penstock.engine.format_info import FormatInfo
from penstock.engine.hooks import Register, hookimpl
from penstock.plugins.json_calls.json_call_array import array_format, json_call_array

START = "<|tool_call|>"
TEXT_START = "<tool_call>"

granite = json_call_array((START, TEXT_START), (), array_format(START))


@hookimpl
def register_tool_parsers(register: Register) -> None:
    info = FormatInfo(
        models="Granite 3.0, 3.1, 3.2, 3.3",
        markers=(START, TEXT_START),
        quirks="3.1 may write `<tool_call>`, as plain text. The arguments may come before the name. Text around the array is content.",
        signs=(START, "<|start_of_role|>"),
        example='<|tool_call|>[{"name": "weather", "arguments": {"city": "Oslo"}}]',
    )
    register("granite", granite, info)
