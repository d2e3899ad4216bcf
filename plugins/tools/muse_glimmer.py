"""Muse: MiniMax-M2's markup under names of its own, `<atem:invoke name="NAME">`, in messages to the tool."""

from dataclasses import replace

from penstock.engine.format_info import FormatInfo
from penstock.engine.hooks import Register, hookimpl
from penstock.engine.turn import Turn
from penstock.plugins.markup_calls.call_sections import CallSections
from penstock.plugins.markup_calls.parameter_calls import parameter_calls
from penstock.plugins.markup_calls.parameter_tool_format import ParameterToolFormat
from penstock.plugins.tools import minimax_m2

MARKUP = replace(
    minimax_m2.MARKUP,
    section="<atem:function_calls>",
    section_end="</atem:function_calls>",
    call="<atem:invoke name=",
    call_end="</atem:invoke>",
    parameter="<atem:parameter name=",
    value_end="</atem:parameter>",
    reads_untyped_json=True,
)
TOOL_FORMAT = ParameterToolFormat(
    markup=MARKUP,
    opening=MARKUP.section,
    call='\n<atem:invoke name="NAME">\n',
    parameter='<atem:parameter name="NAME">',
    after="\n",
    call_end=MARKUP.call_end,
    closing=f"\n{MARKUP.section_end}",
)
INFO = FormatInfo(
    models="Muse Glimmer, Muse Spark",
    markers=MARKUP.markers,
    quirks="Values whose type the schema does not tell are read as JSON where they are, else as strings. The reasoning parser of the same "
    "name takes the headers of messages out.",
    aliases=("muse", "muse-glimmer"),
    signs=(MARKUP.section,),
    example='<atem:function_calls>\n<atem:invoke name="weather">\n<atem:parameter name="city">Oslo</atem:parameter>\n</atem:invoke>\n'
    "</atem:function_calls>",
)


def muse_glimmer(turn: Turn) -> CallSections:
    return parameter_calls(turn, MARKUP, TOOL_FORMAT)


@hookimpl
def register_tool_parsers(register: Register) -> None:
    register("muse_glimmer", muse_glimmer, INFO)
