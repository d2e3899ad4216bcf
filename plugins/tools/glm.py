"""GLM: `<tool_call>NAME<arg_key>NAME</arg_key><arg_value>VALUE</arg_value></tool_call>`, up to GLM-4.6 a line for each."""

from penstock.engine.format_info import FormatInfo
from penstock.engine.hooks import Register, hookimpl
from penstock.engine.turn import Turn
from penstock.plugins.markup_calls.call_sections import CallSections
from penstock.plugins.markup_calls.parameter_calls import parameter_calls
from penstock.plugins.markup_calls.parameter_markup import Heads, ParameterMarkup, read_bare_tag
from penstock.plugins.markup_calls.parameter_tool_format import ParameterToolFormat

MARKUP = ParameterMarkup(
    heads=Heads.LINES,
    call="<tool_call>",
    call_end="</tool_call>",
    parameter="<arg_key>",
    name_end="</arg_key>",
    value="<arg_value>",
    value_end="</arg_value>",
    read_tag=read_bare_tag,
    reads_untyped_json=True,
)
LINES = ParameterToolFormat(
    markup=MARKUP,
    opening="<tool_call>",
    call="NAME\n",
    parameter="<arg_key>NAME</arg_key>\n<arg_value>",
    after="\n",
    call_end="</tool_call>",
    separator="\n<tool_call>",
)
TAGS = ParameterToolFormat(
    markup=MARKUP,
    opening="<tool_call>",
    call="NAME",
    parameter="<arg_key>NAME</arg_key><arg_value>",
    call_end="</tool_call>",
    separator="<tool_call>",
)
MARKERS = ("<tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "</tool_call>")
QUIRKS = "Values whose type the schema does not tell are read as JSON where they are, else as strings. Line breaks are optional on reading."


def glm45(turn: Turn) -> CallSections:
    return parameter_calls(turn, MARKUP, LINES)


def glm47(turn: Turn) -> CallSections:
    return parameter_calls(turn, MARKUP, TAGS)


@hookimpl
def register_tool_parsers(register: Register) -> None:
    lines = FormatInfo(
        models="GLM-4.5, GLM-4.6",
        markers=MARKERS,
        quirks=QUIRKS,
        aliases=("glm", "glm4_moe", "glm46", "poolside_v1"),
        signs=("<arg_key>", "<arg_value>"),
        counter_signs=("<tool_sep>",),
        example="<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n</tool_call>",
    )
    tags = FormatInfo(
        models="GLM-4.7, GLM-5",
        markers=MARKERS,
        quirks=QUIRKS,
        aliases=("glm47_moe", "glm5", "ling3"),
        signs=("<arg_key>", "<arg_value>", "{function-name}<arg_key>"),
        counter_signs=("<tool_sep>",),
        example="<tool_call>weather<arg_key>city</arg_key><arg_value>Oslo</arg_value></tool_call>",
    )
    register("glm45", glm45, lines)
    register("glm47", glm47, tags)
