"""LFM2 and LFM2.5: a Python list of calls between `<|tool_call_start|>` and `<|tool_call_end|>`, or JSON where the prompt asks for it."""

from penstock.engine.format_info import FormatInfo
from penstock.engine.hooks import Register, hookimpl
from penstock.engine.structure import Literal, Marker
from penstock.engine.turn import Turn
from penstock.plugins.expression_calls.python_calls import PythonCalls, PythonEnvelope
from penstock.plugins.expression_calls.python_tool_format import PythonToolFormat
from penstock.plugins.json_calls.call_envelope import CallEnvelope
from penstock.plugins.json_calls.json_tool_calls import JsonToolCalls
from penstock.plugins.parsers_in_turn import ParsersInTurn

START, END = "<|tool_call_start|>", "<|tool_call_end|>"
ENVELOPE = PythonEnvelope(start=START, end=END, may_lack_brackets=True)


JSON_ENVELOPE = CallEnvelope(openings=(START,), closings=(END,), may_be_array=True)


class Lfm2(ParsersInTurn):
    """Text may stand before and after the calls."""

    tool_format = PythonToolFormat(START, before=(Literal("["),), closing=(Literal("]"), Marker(END)))

    def __init__(self, turn: Turn) -> None:
        super().__init__(JsonToolCalls(turn, JSON_ENVELOPE), lambda: PythonCalls(turn, ENVELOPE))


INFO = FormatInfo(
    models="LFM2, LFM2.5",
    markers=(START, END),
    quirks="the brackets of the list may be missing; quotation marks inside strings of their own kind, line breaks in strings and numbers "
    "like `07` are read; so are calls in JSON",
    aliases=("lfm2.5",),
    signs=(START, END),
    other_signs=(("<|tool_list_start|>",), ("List of tools: [", "keep_past_thinking")),
    example=f"{START}[weather(city='Oslo')]{END}",
)


@hookimpl
def register_tool_parsers(register: Register) -> None:
    register("lfm2", Lfm2, INFO)
