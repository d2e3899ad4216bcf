"""Apriel 1.5 and 1.6: `<tool_calls>[{"name": …, "arguments": …, "id": …}, …]</tool_calls>`."""

from penstock.engine.format_info import FormatInfo
from penstock.engine.hooks import Register, hookimpl
from penstock.plugins.json_calls.json_call import CallKeys
from penstock.plugins.json_calls.json_call_array import array_format, json_call_array

START = "<tool_calls>"
END = "</tool_calls>"

apriel = json_call_array((START,), (END,), array_format(START, END), CallKeys(id="id"))


@hookimpl
def register_tool_parsers(register: Register) -> None:
    info = FormatInfo(
        models="Apriel 1.5, Apriel 1.6",
        markers=(START, END),
        quirks="An id that comes before the arguments is the call's.",
        signs=(START, END, "<available_tools>"),
        example='<tool_calls>[{"name": "weather", "arguments": {"city": "Oslo"}}]</tool_calls>',
    )
    register("apriel", apriel, info)
