"""Qwen3-Coder and its kin: `<tool_call><function=NAME><parameter=NAME>VALUE</parameter></function></tool_call>`."""

from penstock.engine.format_info import FormatInfo
from penstock.engine.hooks import Register, hookimpl
from penstock.engine.turn import Turn
from penstock.plugins.markup_calls.call_sections import CallSections
from penstock.plugins.markup_calls.parameter_calls import parameter_calls
from penstock.plugins.markup_calls.parameter_markup import ParameterMarkup, read_bare_tag
from penstock.plugins.markup_calls.parameter_tool_format import ParameterToolFormat

MARKUP = ParameterMarkup(
    section="<tool_call>",
    section_end="</tool_call>",
    call="<function=",
    call_end="</function>",
    parameter="<parameter=",
    value_end="</parameter>",
    read_tag=read_bare_tag,
    implied_ends=("<parameter=", "</function>"),
    may_lack_section=True,
    trims_newline=True,
)
TOOL_FORMAT = ParameterToolFormat(
    markup=MARKUP,
    opening="<tool_call>",
    call="\n<function=NAME>\n",
    parameter="<parameter=NAME>",
    around="\n",
    after="\n",
    call_end="</function>\n</tool_call>",
    separator="\n<tool_call>",
)
INFO = FormatInfo(
    models="Qwen3-Coder, Qwen3.5, Qwen3.6, MiMo, Nemotron 3, Step 3.5, MiniCPM-V",
    markers=("<tool_call>", "<function=", "<parameter=", "</parameter>", "</function>", "</tool_call>"),
    quirks="One line break at either end of a value belongs to the markup. A missing `<tool_call>` is forgiven at the beginning of a line, "
    "unless a tool is strict, and so is a missing `</parameter>`.",
    aliases=("qwen3_xml", "qwen3-coder", "qwen3_5", "mimo", "nemotron_v3", "nemotron_3", "step3p5", "step5", "minicpmv"),
    signs=("<tool_call>", "<function=", "<parameter="),
    example="<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n</function>\n</tool_call>",
)


def qwen3_coder(turn: Turn) -> CallSections:
    return parameter_calls(turn, MARKUP, TOOL_FORMAT)


@hookimpl
def register_tool_parsers(register: Register) -> None:
    register("qwen3_coder", qwen3_coder, INFO)
