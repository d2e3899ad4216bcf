"""Phi-4-mini: `functools[{"name": …, "arguments": …}, …]`, which is plain text."""

from penstock.engine.format_info import FormatInfo
from penstock.engine.hooks import Register, hookimpl
from penstock.engine.structure import Literal
from penstock.plugins.json_calls.json_call_array import json_call_array
from penstock.plugins.json_calls.json_tool_format import JsonToolFormat

START = "functools"
TOKEN_START = "<|tool_call|>"
TOKEN_END = "<|/tool_call|>"

FORMAT = JsonToolFormat(f"{START}[", separator=(Literal(", "),), closing=(Literal("]"),))
phi4_mini_json = json_call_array((START, TOKEN_START), (TOKEN_END,), FORMAT)


@hookimpl
def register_tool_parsers(register: Register) -> None:
    info = FormatInfo(
        models="Phi-4-mini, Firefunction v2",
        markers=(f"{START}[", TOKEN_START, TOKEN_END),
        quirks="The same array between the model's own tokens is read too. The word alone, without an array of calls after it, is content.",
        aliases=("phi4_mini",),
        signs=(START,),
        example='functools[{"name": "weather", "arguments": {"city": "Oslo"}}]',
    )
    register("phi4_mini_json", phi4_mini_json, info)
