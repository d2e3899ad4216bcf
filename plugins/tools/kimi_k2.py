"""Kimi K2: sections of calls, each an id that holds the name, `functions.f:0`, and the arguments."""

import re
from collections.abc import Mapping

from penstock.engine.format_info import FormatInfo
from penstock.engine.grammar import GrammarKind, GrammarSpec
from penstock.engine.hooks import Register, hookimpl
from penstock.engine.structure import Literal, Marker, Sequence, Structure, Value
from penstock.engine.tool_format import CallableTool
from penstock.engine.turn import Turn
from penstock.plugins.json_calls.call_envelope import CallEnvelope
from penstock.plugins.json_calls.call_head import CallHead, Identity
from penstock.plugins.json_calls.json_tool_calls import JsonToolCalls
from penstock.plugins.json_calls.json_tool_format import JsonToolFormat

BEGIN, END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
MISSPELT_BEGIN, MISSPELT_END = "<|tool_call_section_begin|>", "<|tool_call_section_end|>"
CALL_BEGIN, CALL_END = "<|tool_call_begin|>", "<|tool_call_end|>"
ARGUMENTS = "<|tool_call_argument_begin|>"
ENVELOPE = CallEnvelope(sections=(BEGIN, MISSPELT_BEGIN), openings=(CALL_BEGIN,), closings=(CALL_END, END, MISSPELT_END))
_ID = re.compile(r"(?:functions\.)?(.+):\d+")
# Numbers go on from turn to turn, and the model knows those of the turns before.
_NUMBER = GrammarSpec(GrammarKind.REGEX, "0|[1-9][0-9]{0,3}", "tools")


def _identify(fields: Mapping[str, str]) -> Identity | None:
    found = _ID.fullmatch(fields["id"])
    return None if found is None else (found[1], fields["id"])


def _call(tool: CallableTool) -> Structure:
    return Sequence((Literal(f"functions.{tool.name}:"), Value(_NUMBER), Marker(ARGUMENTS), Value(tool.arguments)))


HEAD = CallHead({"id": {ARGUMENTS: None}}, _identify)
FORMAT = JsonToolFormat(BEGIN, before=(Marker(CALL_BEGIN),), call=_call, after=(Marker(CALL_END),), closing=(Marker(END),))


def kimi_k2(turn: Turn) -> JsonToolCalls:
    return JsonToolCalls(turn, ENVELOPE, FORMAT, head=HEAD)


@hookimpl
def register_tool_parsers(register: Register) -> None:
    info = FormatInfo(
        models="Kimi K2, K2-Thinking, K2.5",
        markers=(BEGIN, CALL_BEGIN, ARGUMENTS, CALL_END, END),
        quirks="The id is the model's own, numbered on through the conversation; `functions.` may be missing and names may have dots. "
        "An id without a number is no call. Text after the section is content.",
        aliases=("kimi-k2",),
        signs=(BEGIN,),
        example=f'{BEGIN}{CALL_BEGIN}functions.weather:0{ARGUMENTS}{{"city": "Oslo"}}{CALL_END}{END}',
    )
    register("kimi_k2", kimi_k2, info)
