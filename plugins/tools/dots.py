"""dots: the markup of MiniMax-M2 inside `<dots_function_call>`."""

from dataclasses import replace

from penstock.engine.format_info import FormatInfo
from penstock.engine.hooks import Register, hookimpl
from penstock.engine.turn import Turn
from penstock.plugins.markup_calls.call_sections import CallSections
from penstock.plugins.markup_calls.parameter_calls import parameter_calls
from penstock.plugins.markup_calls.parameter_tool_format import ParameterToolFormat
from penstock.plugins.tools import minimax_m2

MARKUP = replace(minimax_m2.MARKUP, section="<dots_function_call>", section_end="</dots_function_call>")
TOOL_FORMAT = ParameterToolFormat(
    markup=MARKUP,
    opening="<dots_function_call>",
    call='<invoke name="NAME">',
    parameter='<parameter name="NAME">',
    call_end="</invoke>",
    closing="</dots_function_call>",
)
INFO = FormatInfo(
    models="dots",
    markers=MARKUP.markers,
    quirks="As MiniMax-M2.",
    signs=("<dots_function_call>",),
    example='<dots_function_call><invoke name="weather"><parameter name="city">Oslo</parameter></invoke></dots_function_call>',
)


def dots(turn: Turn) -> CallSections:
    return parameter_calls(turn, MARKUP, TOOL_FORMAT)


@hookimpl
def register_tool_parsers(register: Register) -> None:
    register("dots", dots, INFO)
