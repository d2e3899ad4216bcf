"""LongCat-Flash: `<longcat_tool_call>{"name": …, "arguments": …}</longcat_tool_call>`, or GLM's markup with names of its own."""

from penstock.engine.format_info import FormatInfo
from penstock.engine.hooks import Register, hookimpl
from penstock.engine.turn import Turn
from penstock.plugins.json_calls.json_blocks import block_format, json_blocks
from penstock.plugins.markup_calls.parameter_calls import parameter_calls
from penstock.plugins.markup_calls.parameter_markup import Heads, ParameterMarkup, read_bare_tag
from penstock.plugins.parsers_in_turn import ParsersInTurn

START = "<longcat_tool_call>"
END = "</longcat_tool_call>"

MARKUP = ParameterMarkup(
    heads=Heads.LINES,
    call=START,
    call_end=END,
    parameter="<longcat_arg_key>",
    name_end="</longcat_arg_key>",
    value="<longcat_arg_value>",
    value_end="</longcat_arg_value>",
    read_tag=read_bare_tag,
    reads_untyped_json=True,
)
_json_calls = json_blocks(START, END)


class Longcat(ParsersInTurn):
    """Every block is one call, written in either way."""

    tool_format = block_format(START, END)

    def __init__(self, turn: Turn) -> None:
        super().__init__(_json_calls(turn), lambda: parameter_calls(turn, MARKUP, None))


@hookimpl
def register_tool_parsers(register: Register) -> None:
    info = FormatInfo(
        models="LongCat-Flash",
        markers=(START, END, *MARKUP.markers[1:-1]),
        quirks="A block holds an object or, as LongCat-2.0 writes it, a name and pairs of `<longcat_arg_key>` and `<longcat_arg_value>`.",
        signs=(START,),
        example='<longcat_tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</longcat_tool_call>',
    )
    register("longcat", Longcat, info)
