"""Hunyuan 3 and 4: GLM's markup, with a `<tool_sep>` after the tool's name, in a section for all calls."""

from dataclasses import replace

from penstock.engine.format_info import FormatInfo
from penstock.engine.hooks import Register, hookimpl
from penstock.engine.turn import Turn
from penstock.plugins.markup_calls.call_sections import CallSections
from penstock.plugins.markup_calls.parameter_calls import parameter_calls
from penstock.plugins.markup_calls.parameter_tool_format import ParameterToolFormat
from penstock.plugins.tools import glm

MARKUP = replace(glm.MARKUP, section="<tool_calls>", section_end="</tool_calls>", name_ends=("<tool_sep>",))
TOOL_FORMAT = ParameterToolFormat(
    markup=MARKUP,
    opening="<tool_calls>",
    call="\n<tool_call>NAME<tool_sep>\n",
    parameter="<arg_key>NAME</arg_key>\n<arg_value>",
    after="\n",
    call_end="</tool_call>",
    closing="\n</tool_calls>",
)
INFO = FormatInfo(
    models="Tencent Hunyuan 3 and 4",
    markers=MARKUP.markers,
    quirks="As GLM.",
    aliases=("hy_v4", "hunyuan_v3", "hunyuan"),
    signs=("toolsep_token", "argkey_begin_token", "argvalue_begin_token"),
    example="<tool_calls>\n<tool_call>weather<tool_sep>\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n</tool_call>\n</tool_calls>",
)


def hy_v3(turn: Turn) -> CallSections:
    return parameter_calls(turn, MARKUP, TOOL_FORMAT)


@hookimpl
def register_tool_parsers(register: Register) -> None:
    register("hy_v3", hy_v3, INFO)
