"""Llama 3.2 and others: the whole answer is a Python list of calls, `[f(x=1), g()]`."""

from penstock.engine.format_info import FormatInfo
from penstock.engine.hooks import Register, hookimpl
from penstock.engine.turn import Turn
from penstock.plugins.expression_calls.python_calls import PythonCalls, PythonEnvelope

ENVELOPE = PythonEnvelope(is_bare=True)


class Pythonic(PythonCalls):
    """An answer that does not begin with a bracket calls nothing."""

    tool_format = None  # of a form that calls only at the very start of an answer, which no format can say

    def __init__(self, turn: Turn) -> None:
        super().__init__(turn, ENVELOPE)


INFO = FormatInfo(
    models="Llama 3.2 (1B, 3B), ToolACE, Gemma 3",
    markers=("[", "]"),
    quirks="only where the answer begins with the list; literals only, each by a keyword; the last bracket of a call may be missing",
    signs=("[func_name1(params_name1=params_value1, ",),
    example="[weather(city='Oslo')]",
)


@hookimpl
def register_tool_parsers(register: Register) -> None:
    register("pythonic", Pythonic, INFO)
