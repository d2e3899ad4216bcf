"""DeepSeek-V3.2 and V4: DSML, in which each parameter says itself whether it is a string."""

from collections.abc import Callable
from dataclasses import replace

from penstock.engine.format_info import FormatInfo
from penstock.engine.hooks import Register, hookimpl
from penstock.engine.turn import Turn
from penstock.plugins.markup_calls.call_sections import CallSections
from penstock.plugins.markup_calls.parameter_calls import parameter_calls
from penstock.plugins.markup_calls.parameter_markup import ParameterMarkup, read_attribute_tag
from penstock.plugins.markup_calls.parameter_tool_format import ParameterToolFormat
from penstock.plugins.parsers_in_turn import ParsersInTurn

TOKEN = "｜DSML｜"


def _markup(section: str, space: str = "") -> ParameterMarkup:
    return ParameterMarkup(
        section=f"<{TOKEN}{section}>",
        section_end=f"</{TOKEN}{section}>",
        call=f"<{TOKEN}{space}invoke name=",
        call_end=f"</{TOKEN}{space}invoke>",
        parameter=f"<{TOKEN}{space}parameter name=",
        value_end=f"</{TOKEN}{space}parameter>",
        read_tag=read_attribute_tag,
        implied_ends=(f"<{TOKEN}{space}parameter name=", f"</{TOKEN}{space}invoke>"),
        may_lack_section=True,
        wrappers=("arguments", "input"),
    )


def _tool_format(markup: ParameterMarkup) -> ParameterToolFormat:
    return ParameterToolFormat(
        markup=markup,
        opening=markup.section,
        call=f'\n{markup.call}"NAME">\n',
        parameter=f'{markup.parameter}"NAME" string="IS_STRING">',
        after="\n",
        call_end=markup.call_end,
        closing=f"\n{markup.section_end}",
    )


def _parser(markup: ParameterMarkup) -> Callable[[Turn], CallSections]:
    tool_format = _tool_format(markup)

    def dsml(turn: Turn) -> CallSections:
        return parameter_calls(turn, markup, tool_format)

    return dsml


def _info(
    markup: ParameterMarkup, models: str, aliases: tuple[str, ...], signs: tuple[str, ...], other_signs: tuple[tuple[str, ...], ...] = ()
) -> FormatInfo:
    call = f'{markup.call}"weather">\n{markup.parameter}"city" string="true">Oslo{markup.value_end}\n{markup.call_end}'
    return FormatInfo(
        models=models,
        markers=markup.markers,
        quirks='`string="true"` is a string where the schema allows one, `string="false"` is JSON. What stands in a parameter `arguments` '
        "or `input`, which the tool does not have, are the arguments. The section may be missing at the beginning of a line, unless a tool "
        "is strict.",
        aliases=aliases,
        signs=signs,
        other_signs=other_signs,
        example=f"{markup.section}\n{call}\n{markup.section_end}",
    )


V32 = _markup("function_calls")
V32_SECTION = replace(V32, may_lack_section=False)
V4 = _markup("tool_calls")
V41 = _markup(" calls", space=" ")
deepseek_v32 = _parser(V32)
deepseek_v41 = _parser(V41)


class DeepSeekV4(ParsersInTurn):
    """Reads V3.2's section too, which the model writes now and then. A grammar allows its own alone."""

    tool_format = _tool_format(V4)

    def __init__(self, turn: Turn) -> None:
        in_v32_section = parameter_calls(replace(turn, tool_choice="none") if turn.is_constrained else turn, V32_SECTION, None)
        super().__init__(in_v32_section, lambda: parameter_calls(turn, V4, self.tool_format))


@hookimpl
def register_tool_parsers(register: Register) -> None:
    register("deepseek_v32", deepseek_v32, _info(V32, "DeepSeek-V3.2", ("deepseekv32", "deepseek-v32"), (TOKEN,)))
    v4 = _info(V4, "DeepSeek-V4", ("deepseekv4", "deepseek-v4"), (TOKEN, "<｜latest_reminder｜>"), ((TOKEN, "tool_calls>"),))
    v4 = replace(v4, markers=(*v4.markers, V32.section, V32.section_end), quirks=f"{v4.quirks} V3.2's section is read as well.")
    register("deepseek_v4", DeepSeekV4, v4)
    register("deepseek_v41", deepseek_v41, _info(V41, "DeepSeek-V4.1", ("deepseekv41", "deepseek-v41"), (TOKEN, V41.section, V41.call)))
