"""Gemma 4: reasoning in a channel, `<|channel>thought … <channel|>`."""

from penstock.engine.format_info import FormatInfo
from penstock.engine.hooks import Register, hookimpl
from penstock.engine.turn import Turn
from penstock.plugins.reasoning_blocks import ReasoningBlocks

START, LABEL, END = "<|channel>", "thought", "<channel|>"
TURN_BOUNDARIES = ("<turn|>", "<|turn>")

INFO = FormatInfo(
    models="Gemma 4",
    markers=(f"{START}{LABEL}\n", END),
    quirks=(
        "off unless `enable_thinking`: the template then writes an empty block; a block may also stand in the middle of the content, "
        "and a tool call ends one"
    ),
    aliases=("gemma-4",),
    signs=(START, END),
    prompt_tail="<|turn>model\n",
    example=f"{START}{LABEL}\nwhy{END}because",
)


def gemma4(turn: Turn) -> ReasoningBlocks:
    """Starts as the prompt ends: with thinking off it has closed an empty block, else the model opens one itself."""
    phase = turn.phase(START, END, TURN_BOUNDARIES)
    return ReasoningBlocks(
        phase,
        starts=[START],
        ends=[END],
        label=LABEL,
        implicit_ends=["<|tool_call>"],
        is_constrained=turn.is_constrained,
        added_tokens=turn.added_tokens,
    )


@hookimpl
def register_reasoning_parsers(register: Register) -> None:
    register("gemma4", gemma4, INFO)
