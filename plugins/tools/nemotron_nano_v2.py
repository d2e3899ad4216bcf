"""Nemotron-Nano 2: `<TOOLCALL>[{"name": …, "arguments": …}, …]</TOOLCALL>`."""

from penstock.engine.format_info import FormatInfo
from penstock.engine.hooks import Register, hookimpl
from penstock.plugins.json_calls.json_call_array import array_format, json_call_array

START = "<TOOLCALL>"
END = "</TOOLCALL>"

nemotron_nano_v2 = json_call_array((START,), (END,), array_format(START, END))


@hookimpl
def register_tool_parsers(register: Register) -> None:
    info = FormatInfo(
        models="Nemotron-Nano-v2, Nemotron-H, Llama-Nemotron",
        markers=(START, END),
        aliases=("nemotron_json", "nemotron-nano-v2"),
        signs=(START, END),
        example='<TOOLCALL>[{"name": "weather", "arguments": {"city": "Oslo"}}]</TOOLCALL>',
    )
    register("nemotron_nano_v2", nemotron_nano_v2, info)
