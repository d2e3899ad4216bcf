"""Hunyuan-A13B: `<tool_calls>[{"name": …, "arguments": …}, …]</tool_calls>`."""

from penstock.engine.format_info import FormatInfo
from penstock.engine.hooks import Register, hookimpl
from penstock.plugins.json_calls.json_call_array import array_format, json_call_array

START = "<tool_calls>"
END = "</tool_calls>"

hunyuan_a13b = json_call_array((START,), (END,), array_format(START, END))


@hookimpl
def register_tool_parsers(register: Register) -> None:
    info = FormatInfo(
        models="Hunyuan-A13B",
        markers=(START, END),
        signs=(START, END, "<|startoftext|>"),
        example='<tool_calls>[{"name": "weather", "arguments": {"city": "Oslo"}}]</tool_calls>',
    )
    register("hunyuan_a13b", hunyuan_a13b, info)
