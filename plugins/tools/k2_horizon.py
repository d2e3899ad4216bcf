"""K2-Horizon: GLM's markup under names of its own, in a section for all calls; JSON in its place where the request wants it."""

from dataclasses import replace

from penstock.engine.format_info import FormatInfo
from penstock.engine.hooks import Register, hookimpl
from penstock.engine.structure import Literal, Marker
from penstock.engine.tool_format import ToolFormat
from penstock.engine.turn import Turn
from penstock.plugins.json_calls.call_envelope import CallEnvelope
from penstock.plugins.json_calls.json_tool_calls import JsonToolCalls
from penstock.plugins.json_calls.json_tool_format import JsonToolFormat
from penstock.plugins.markup_calls.parameter_calls import parameter_calls
from penstock.plugins.markup_calls.parameter_tool_format import ParameterToolFormat
from penstock.plugins.parsers_in_turn import ParsersInTurn
from penstock.plugins.tools import glm

START, END = "<ifm|tool_calls>", "</ifm|tool_calls>"
CALL, CALL_END = "<ifm|tool_call>", "</ifm|tool_call>"
MARKUP = replace(
    glm.MARKUP,
    section=START,
    section_end=END,
    call=CALL,
    call_end=CALL_END,
    parameter="<ifm|arg_key>",
    name_end="</ifm|arg_key>",
    type_start="<ifm|arg_type>",
    type_end="</ifm|arg_type>",
    value="<ifm|arg_value>",
    value_end="</ifm|arg_value>",
    reads_untyped_json=False,
)
PARAMETERS = ParameterToolFormat(
    markup=MARKUP,
    opening=START,
    call=f"{CALL}NAME",
    parameter="<ifm|arg_key>NAME</ifm|arg_key><ifm|arg_value>",
    call_end=CALL_END,
    separator="\n",
    closing=END,
)
JSON_ENVELOPE = CallEnvelope(sections=(START,), openings=(CALL,), closings=(CALL_END, END))
JSON = JsonToolFormat(START, before=(Marker(CALL),), after=(Marker(CALL_END),), separator=(Literal("\n"),), closing=(Marker(END),))


class K2Horizon(ParsersInTurn):
    """All forms are read; the request's `tool_call_format` says which one its prompt asks for."""

    def __init__(self, turn: Turn) -> None:
        super().__init__(JsonToolCalls(turn, JSON_ENVELOPE), lambda: parameter_calls(turn, MARKUP, PARAMETERS))
        self.tool_format: ToolFormat = JSON if turn.chat_template_kwargs.get("tool_call_format") == "json" else PARAMETERS


@hookimpl
def register_tool_parsers(register: Register) -> None:
    info = FormatInfo(
        models="K2-Horizon",
        markers=MARKUP.markers,
        quirks="As GLM, with a type in `<ifm|arg_type>` where `tool_call_format` is `xml_typed`; with `json`, calls are objects with a "
        "name and arguments. All three are read.",
        aliases=("k2-horizon",),
        signs=(START, CALL),
        example=f"{START}{CALL}weather<ifm|arg_key>city</ifm|arg_key><ifm|arg_value>Oslo</ifm|arg_value>{CALL_END}{END}",
    )
    register("k2_horizon", K2Horizon, info)
