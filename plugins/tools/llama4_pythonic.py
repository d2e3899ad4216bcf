"""Llama 4: a Python list of calls, perhaps between `<|python_start|>` and `<|python_end|>`."""

from penstock.engine.format_info import FormatInfo
from penstock.engine.hooks import Register, hookimpl
from penstock.engine.structure import Literal, Marker
from penstock.engine.turn import Turn
from penstock.plugins.expression_calls.python_calls import PythonCalls, PythonEnvelope
from penstock.plugins.expression_calls.python_tool_format import PythonToolFormat

START, END = "<|python_start|>", "<|python_end|>"
ENVELOPE = PythonEnvelope(start=START, end=END, is_bare=True)


class Llama4Pythonic(PythonCalls):
    """Without markers the list is the beginning of the answer; with them it may come anywhere."""

    tool_format = PythonToolFormat(START, before=(Literal("["),), closing=(Literal("]"), Marker(END)))

    def __init__(self, turn: Turn) -> None:
        super().__init__(turn, ENVELOPE)


INFO = FormatInfo(
    models="Llama 4",
    markers=(START, END),
    quirks="the markers may be missing where the answer begins with the list",
    aliases=("llama4-pythonic", "llama4"),
    signs=(START, END),
    example=f"{START}[weather(city='Oslo')]{END}",
)


@hookimpl
def register_tool_parsers(register: Register) -> None:
    register("llama4_pythonic", Llama4Pythonic, INFO)
