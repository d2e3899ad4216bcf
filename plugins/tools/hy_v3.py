"""Hunyuan 3 and 4: GLM's markup, with a `<tool_sep>` after the tool's name, in a section for all calls."""

from penstock.engine.format_info import FormatInfo
from penstock.engine.hooks import Register, hookimpl
from penstock.engine.turn import Turn
from penstock.plugins.markers import marker_suffix
from penstock.plugins.markup_calls.call_sections import CallSections
from penstock.plugins.markup_calls.parameter_calls import parameter_calls
from penstock.plugins.markup_calls.parameter_markup import Heads, ParameterMarkup, read_bare_tag
from penstock.plugins.markup_calls.parameter_tool_format import ParameterToolFormat


def _markup(suffix: str) -> ParameterMarkup:
    return ParameterMarkup(
        heads=Heads.LINES,
        section=f"<tool_calls{suffix}>",
        section_end=f"</tool_calls{suffix}>",
        call=f"<tool_call{suffix}>",
        call_end=f"</tool_call{suffix}>",
        name_ends=(f"<tool_sep{suffix}>",),
        parameter=f"<arg_key{suffix}>",
        name_end=f"</arg_key{suffix}>",
        value=f"<arg_value{suffix}>",
        value_end=f"</arg_value{suffix}>",
        read_tag=read_bare_tag,
        reads_untyped_json=True,
    )


def _tool_format(markup: ParameterMarkup) -> ParameterToolFormat:
    return ParameterToolFormat(
        markup=markup,
        opening=markup.section,
        call=f"\n{markup.call}NAME{markup.name_ends[0]}\n",
        parameter=f"{markup.parameter}NAME{markup.name_end}\n{markup.value}",
        after="\n",
        call_end=markup.call_end,
        closing=f"\n{markup.section_end}",
    )


INFO = FormatInfo(
    models="Tencent Hunyuan 3 and 4",
    markers=_markup("").markers,
    quirks="As GLM. Checkpoints may add a suffix to their markers, `<tool_calls:x>`: that of the prompt or of the vocabulary is read.",
    aliases=("hy_v4", "hunyuan_v3", "hunyuan"),
    signs=("toolsep_token", "argkey_begin_token", "argvalue_begin_token"),
    example="<tool_calls>\n<tool_call>weather<tool_sep>\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n</tool_call>\n</tool_calls>",
)


def hy_v3(turn: Turn) -> CallSections:
    """With the suffix that the checkpoint's own template chooses."""
    markup = _markup(marker_suffix(turn))
    return parameter_calls(turn, markup, _tool_format(markup))


@hookimpl
def register_tool_parsers(register: Register) -> None:
    register("hy_v3", hy_v3, INFO)
