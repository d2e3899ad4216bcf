"""Seed-OSS: the markup of Qwen3-Coder inside `<seed:tool_call>`, values without line breaks around them."""

from dataclasses import replace

from penstock.engine.format_info import FormatInfo
from penstock.engine.hooks import Register, hookimpl
from penstock.engine.turn import Turn
from penstock.plugins.markup_calls.call_sections import CallSections
from penstock.plugins.markup_calls.parameter_calls import parameter_calls
from penstock.plugins.markup_calls.parameter_tool_format import ParameterToolFormat
from penstock.plugins.tools import qwen3_coder

MARKUP = replace(qwen3_coder.MARKUP, section="<seed:tool_call>", section_end="</seed:tool_call>", trims_newline=False)
TOOL_FORMAT = ParameterToolFormat(
    markup=MARKUP,
    opening="<seed:tool_call>",
    call="\n<function=NAME>\n",
    parameter="<parameter=NAME>",
    after="\n",
    call_end="</function>\n</seed:tool_call>",
    separator="\n<seed:tool_call>",
)
INFO = FormatInfo(
    models="Seed-OSS",
    markers=("<seed:tool_call>", "<function=", "<parameter=", "</parameter>", "</function>", "</seed:tool_call>"),
    quirks="As Qwen3-Coder, but that line breaks at the ends of a value belong to it.",
    aliases=("seed-oss",),
    signs=("<seed:tool_call>",),
    example="<seed:tool_call>\n<function=weather>\n<parameter=city>Oslo</parameter>\n</function>\n</seed:tool_call>",
)


def seed_oss(turn: Turn) -> CallSections:
    return parameter_calls(turn, MARKUP, TOOL_FORMAT)


@hookimpl
def register_tool_parsers(register: Register) -> None:
    register("seed_oss", seed_oss, INFO)
