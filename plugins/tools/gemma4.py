"""Gemma 4 tool calls: `<|tool_call>call:f{k:<|"|>v<|"|>,n:42}<tool_call|>`."""

from penstock.engine.format_info import FormatInfo
from penstock.engine.hooks import Register, hookimpl
from penstock.engine.turn import Turn
from penstock.plugins.expression_calls.notation_calls import NotationCalls
from penstock.plugins.expression_calls.notation_tool_format import NotationToolFormat

START, END, DELIMITER = "<|tool_call>", "<tool_call|>", '<|"|>'


class Gemma4(NotationCalls):
    """Strings stand between delimiters, keys without quotation marks; what has neither is read as JSON, or else as a string."""

    tool_format = NotationToolFormat(START, END, DELIMITER)

    def __init__(self, turn: Turn) -> None:
        super().__init__(turn, start=START, end=END, delimiter=DELIMITER)


INFO = FormatInfo(
    models="Gemma 4",
    markers=(START, END, DELIMITER),
    quirks="values are coerced by the tool's schema; strings in quotation marks, `None` and several calls between one pair of markers are "
    "read",
    aliases=("gemma-4",),
    signs=(START, END, DELIMITER),
    prompt_tail="<|turn>model\n",
    example=f"{START}call:weather{{city:{DELIMITER}Oslo{DELIMITER}}}{END}",
)


@hookimpl
def register_tool_parsers(register: Register) -> None:
    register("gemma4", Gemma4, INFO)
