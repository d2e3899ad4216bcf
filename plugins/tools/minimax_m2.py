"""MiniMax-M2: `<minimax:tool_call><invoke name="NAME"><parameter name="NAME">VALUE</parameter></invoke></minimax:tool_call>`."""

from penstock.engine.format_info import FormatInfo
from penstock.engine.hooks import Register, hookimpl
from penstock.engine.turn import Turn
from penstock.plugins.markup_calls.call_sections import CallSections
from penstock.plugins.markup_calls.parameter_calls import parameter_calls
from penstock.plugins.markup_calls.parameter_markup import ParameterMarkup, read_attribute_tag
from penstock.plugins.markup_calls.parameter_tool_format import ParameterToolFormat

MARKUP = ParameterMarkup(
    section="<minimax:tool_call>",
    section_end="</minimax:tool_call>",
    call="<invoke name=",
    call_end="</invoke>",
    parameter="<parameter name=",
    value_end="</parameter>",
    read_tag=read_attribute_tag,
)
TOOL_FORMAT = ParameterToolFormat(
    markup=MARKUP,
    opening="<minimax:tool_call>",
    call='\n<invoke name="NAME">\n',
    parameter='<parameter name="NAME">',
    after="\n",
    call_end="</invoke>",
    closing="\n</minimax:tool_call>",
)
INFO = FormatInfo(
    models="MiniMax-M2",
    markers=MARKUP.markers,
    quirks="XML entities stay as they are written, and so does white space around a string.",
    aliases=("minimax-m2",),
    signs=("<minimax:tool_call>",),
    example='<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Oslo</parameter>\n</invoke>\n</minimax:tool_call>',
)


def minimax_m2(turn: Turn) -> CallSections:
    return parameter_calls(turn, MARKUP, TOOL_FORMAT)


@hookimpl
def register_tool_parsers(register: Register) -> None:
    register("minimax_m2", minimax_m2, INFO)
