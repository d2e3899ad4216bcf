"""MiniCPM5: `<function name="NAME"><param name="NAME"><![CDATA[VALUE]]></param></function>`, without anything around it."""

from penstock.engine.format_info import FormatInfo
from penstock.engine.hooks import Register, hookimpl
from penstock.engine.turn import Turn
from penstock.plugins.markup_calls.call_sections import CallSections
from penstock.plugins.markup_calls.parameter_calls import parameter_calls
from penstock.plugins.markup_calls.parameter_markup import ParameterMarkup, read_attribute_tag
from penstock.plugins.markup_calls.parameter_tool_format import ParameterToolFormat

MARKUP = ParameterMarkup(
    call="<function name=",
    call_end="</function>",
    parameter="<param name=",
    value_end="</param>",
    literal="<![CDATA[",
    literal_end="]]>",
    read_tag=read_attribute_tag,
    is_offered_only=True,
)
TOOL_FORMAT = ParameterToolFormat(
    markup=MARKUP,
    opening="<function name=",
    call='"NAME">',
    parameter='<param name="NAME">',
    call_end="</function>",
    separator="\n<function name=",
)
INFO = FormatInfo(
    models="MiniCPM5",
    markers=MARKUP.markers,
    quirks="CDATA is optional. What calls a tool that is not offered is content.",
    aliases=("minicpm5_xml",),
    signs=("<function name=", "<param name="),
    example='<function name="weather"><param name="city"><![CDATA[Oslo]]></param></function>',
)


def minicpm5(turn: Turn) -> CallSections:
    return parameter_calls(turn, MARKUP, TOOL_FORMAT)


@hookimpl
def register_tool_parsers(register: Register) -> None:
    register("minicpm5", minicpm5, INFO)
