"""Jamba 1.5 and later: `<tool_calls>[{"name": …, "arguments": …}, …]</tool_calls>`."""

from penstock.engine.format_info import FormatInfo
from penstock.engine.hooks import Register, hookimpl
from penstock.plugins.json_calls.json_call_array import array_format, json_call_array

START = "<tool_calls>"
END = "</tool_calls>"

jamba = json_call_array((START,), (END,), array_format(START, END, indent="    "))


@hookimpl
def register_tool_parsers(register: Register) -> None:
    info = FormatInfo(
        models="Jamba 1.5, 1.6, 1.7",
        markers=(START, END),
        quirks="The markers are tokens of these models; where a vocabulary lacks them, plain text is read.",
        signs=(START, END, "<tool_definitions>"),
        example='<tool_calls>[\n    {"name": "weather", "arguments": {"city": "Oslo"}}\n]</tool_calls>',
    )
    register("jamba", jamba, info)
