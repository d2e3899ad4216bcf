"""Apertus: `<|tools_prefix|>[{"f": {…}}, …]<|tools_suffix|>`, the name as the key of the arguments."""

from penstock.engine.format_info import FormatInfo
from penstock.engine.hooks import Register, hookimpl
from penstock.engine.structure import Literal, Marker
from penstock.plugins.json_calls.json_call import CallKeys
from penstock.plugins.json_calls.json_call_array import json_call_array
from penstock.plugins.json_calls.json_tool_format import JsonToolFormat

START = "<|tools_prefix|>"
END = "<|tools_suffix|>"

FORMAT = JsonToolFormat(START, leading=(Literal("["),), name_key=None, separator=(Literal(", "),), closing=(Literal("]"), Marker(END)))
apertus = json_call_array((START,), (END,), FORMAT, CallKeys(name=None))


@hookimpl
def register_tool_parsers(register: Register) -> None:
    info = FormatInfo(
        models="Apertus",
        markers=(START, END),
        aliases=("apertus2509",),
        signs=(START, END),
        example='<|tools_prefix|>[{"weather": {"city": "Oslo"}}]<|tools_suffix|>',
    )
    register("apertus", apertus, info)
