"""Step 3: StepTML, `<steptml:invoke name="NAME"><steptml:parameter name="NAME">VALUE</steptml:parameter></steptml:invoke>`."""

from penstock.engine.format_info import FormatInfo
from penstock.engine.hooks import Register, hookimpl
from penstock.engine.turn import Turn
from penstock.plugins.markup_calls.call_sections import CallSections
from penstock.plugins.markup_calls.parameter_calls import parameter_calls
from penstock.plugins.markup_calls.parameter_markup import ParameterMarkup, read_attribute_tag
from penstock.plugins.markup_calls.parameter_tool_format import ParameterToolFormat

MARKUP = ParameterMarkup(
    section="<｜tool_calls_begin｜>",
    section_end="<｜tool_calls_end｜>",
    call="<｜tool_call_begin｜>",
    lead="<steptml:invoke name=",
    call_end="</steptml:invoke>",
    parameter="<steptml:parameter name=",
    value_end="</steptml:parameter>",
    read_tag=read_attribute_tag,
    skipped=("<｜tool_call_end｜>", "<｜tool_sep｜>"),
)
TOOL_FORMAT = ParameterToolFormat(
    markup=MARKUP,
    opening="<｜tool_calls_begin｜>",
    call='<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="NAME">',
    parameter='<steptml:parameter name="NAME">',
    call_end="</steptml:invoke><｜tool_call_end｜>",
    closing="<｜tool_calls_end｜>",
)
INFO = FormatInfo(
    models="Step 3",
    markers=MARKUP.markers,
    quirks="What stands between `<｜tool_call_begin｜>` and `<steptml:invoke` is passed over.",
    aliases=("step-3",),
    signs=("<｜tool_calls_begin｜>", "<｜tool_call_begin｜>"),
    example="<｜tool_calls_begin｜><｜tool_call_begin｜>function<｜tool_sep｜>"
    '<steptml:invoke name="weather"><steptml:parameter name="city">Oslo</steptml:parameter></steptml:invoke>'
    "<｜tool_call_end｜><｜tool_calls_end｜>",
)


def step3(turn: Turn) -> CallSections:
    return parameter_calls(turn, MARKUP, TOOL_FORMAT)


@hookimpl
def register_tool_parsers(register: Register) -> None:
    register("step3", step3, INFO)
