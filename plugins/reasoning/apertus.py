"""Apertus: `<|inner_prefix|>…<|inner_suffix|>`, with tool calls possibly inside."""

from penstock.engine.format_info import FormatInfo
from penstock.engine.hooks import Register, hookimpl
from penstock.engine.turn import Turn
from penstock.plugins.reasoning_blocks import ReasoningBlocks

START, END = "<|inner_prefix|>", "<|inner_suffix|>"
TOOLS_START, TOOLS_END = "<|tools_prefix|>", "<|tools_suffix|>"

INFO = FormatInfo(
    models="Apertus",
    markers=(START, END),
    quirks="tool calls inside the block are left for the tool parser, and the block goes on after them",
    aliases=("apertus2509",),
    signs=(START, END),
    prompt_tail="<|assistant_start|>",
    example=f"{START}why{END}because",
)


def apertus(turn: Turn) -> ReasoningBlocks:
    """The model decides, unless the prompt has opened or closed a block."""
    phase = turn.phase(START, END, ("<|assistant_start|>", "<|assistant_end|>"))
    return ReasoningBlocks(
        phase,
        starts=[START],
        ends=[END],
        asides={TOOLS_START: TOOLS_END},
        is_constrained=turn.is_constrained,
        added_tokens=turn.added_tokens,
    )


@hookimpl
def register_reasoning_parsers(register: Register) -> None:
    register("apertus", apertus, INFO)
