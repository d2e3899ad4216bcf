"""FunctionGemma tool calls: `<start_function_call>call:f{k:<escape>v<escape>}<end_function_call>`."""

from penstock.engine.format_info import FormatInfo
from penstock.engine.hooks import Register, hookimpl
from penstock.engine.turn import Turn
from penstock.plugins.expression_calls.notation_call import SCALARS
from penstock.plugins.expression_calls.notation_calls import NotationCalls
from penstock.plugins.expression_calls.notation_tool_format import NotationToolFormat

START, END, DELIMITER = "<start_function_call>", "<end_function_call>", "<escape>"


class FunctionGemma(NotationCalls):
    """Numbers and constants stand between the delimiters too, so that only the tool's schema tells them from strings."""

    tool_format = NotationToolFormat(START, END, DELIMITER)

    def __init__(self, turn: Turn) -> None:
        super().__init__(turn, start=START, end=END, delimiter=DELIMITER, types_of_strings=SCALARS)


INFO = FormatInfo(
    models="FunctionGemma",
    markers=(START, END, DELIMITER),
    quirks="all values stand between delimiters: without a schema, what looks like a number or a constant is one",
    aliases=("function_gemma", "function-gemma"),
    signs=(START, END, DELIMITER),
    example=f"{START}call:weather{{city:{DELIMITER}Oslo{DELIMITER}}}{END}",
)


@hookimpl
def register_tool_parsers(register: Register) -> None:
    register("functiongemma", FunctionGemma, INFO)
