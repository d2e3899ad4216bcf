"""InternLM: `<|action_start|><|plugin|>{"name": …, "parameters": …}<|action_end|>`, one block for each call."""

from penstock.engine.format_info import FormatInfo
from penstock.engine.hooks import Register, hookimpl
from penstock.engine.structure import Literal, Marker
from penstock.engine.turn import Turn
from penstock.plugins.json_calls.call_envelope import CallEnvelope
from penstock.plugins.json_calls.json_tool_calls import JsonToolCalls
from penstock.plugins.json_calls.json_tool_format import JsonToolFormat

ACTION = "<|action_start|>"
PLUGIN = "<|plugin|>"
END = "<|action_end|>"
ENVELOPE = CallEnvelope(sections=(ACTION,), openings=(PLUGIN,), closings=(END,))
FORMAT = JsonToolFormat(
    ACTION,
    before=(Marker(PLUGIN), Literal("\n")),
    after=(Marker(END),),
    separator=(Literal("\n"), Marker(ACTION)),
    arguments_key="parameters",
)


def internlm(turn: Turn) -> JsonToolCalls:
    return JsonToolCalls(turn, ENVELOPE, FORMAT)


@hookimpl
def register_tool_parsers(register: Register) -> None:
    info = FormatInfo(
        models="InternLM 2, 2.5, 3, Intern-S1",
        markers=(ACTION, PLUGIN, END),
        quirks="`parameters` or `arguments`. Intern-S1 writes a space before the second marker. Code for `<|interpreter|>` is content.",
        aliases=("internlm2", "interns1", "intern-s1"),
        signs=(ACTION, PLUGIN),
        example='<|action_start|><|plugin|>\n{"name": "weather", "parameters": {"city": "Oslo"}}<|action_end|>',
    )
    register("internlm", internlm, info)
