"""GigaChat 3: `<|function_call|>{"name": …, "arguments": …}`, and a message of the role `function call` in 3.0."""

from penstock.engine.format_info import FormatInfo
from penstock.engine.hooks import Register, hookimpl
from penstock.engine.structure import Marker
from penstock.engine.turn import Turn
from penstock.plugins.json_calls.call_envelope import CallEnvelope
from penstock.plugins.json_calls.json_tool_calls import JsonToolCalls
from penstock.plugins.json_calls.json_tool_format import JsonToolFormat

START = "<|function_call|>"
END = "<|message_sep|>\n\n"  # the line breaks are part of these tokens
ROLE = "function call<|role_sep|>\n"
ENVELOPE = CallEnvelope(openings=(START, END + ROLE, ROLE), closings=(END,))
TOKEN = JsonToolFormat(START, separator=(Marker(START),))
MESSAGE = JsonToolFormat(END + ROLE, separator=(Marker(END + ROLE),))


def gigachat3(turn: Turn) -> JsonToolCalls:
    """Both generations are read; how calls are written is told by the vocabulary."""
    is_older = END in turn.added_tokens and START not in turn.added_tokens
    return JsonToolCalls(turn, ENVELOPE, MESSAGE if is_older else TOKEN)


@hookimpl
def register_tool_parsers(register: Register) -> None:
    info = FormatInfo(
        models="GigaChat 3.0, GigaChat 3.1",
        markers=(START, END, ROLE),
        aliases=("gigachat31", "gigachat3.1"),
        signs=("<|role_sep|>", "function call"),
        example=f'{START}{{"name": "weather", "arguments": {{"city": "Oslo"}}}}',
    )
    register("gigachat3", gigachat3, info)
