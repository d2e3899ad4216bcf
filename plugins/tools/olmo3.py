"""OLMo 3: Python calls, one to a line, between `<function_calls>` and `</function_calls>`."""

from penstock.engine.format_info import FormatInfo
from penstock.engine.hooks import Register, hookimpl
from penstock.engine.structure import Literal, Marker
from penstock.engine.turn import Turn
from penstock.plugins.expression_calls.python_calls import PythonCalls, PythonEnvelope
from penstock.plugins.expression_calls.python_tool_format import PythonToolFormat

START, END = "<function_calls>", "</function_calls>"
ENVELOPE = PythonEnvelope(start=START, end=END, has_list=False)


class Olmo3(PythonCalls):
    """JSON's names of constants are read as well as Python's."""

    tool_format = PythonToolFormat(START, separator=(Literal("\n"),), closing=(Marker(END),))

    def __init__(self, turn: Turn) -> None:
        super().__init__(turn, ENVELOPE)


INFO = FormatInfo(
    models="OLMo 3",
    markers=(START, END),
    quirks="JSON's `true`, `false` and `null` are read too",
    aliases=("olmo-3",),
    signs=(START, END),
    example=f'{START}weather(city="Oslo"){END}',
)


@hookimpl
def register_tool_parsers(register: Register) -> None:
    register("olmo3", Olmo3, INFO)
