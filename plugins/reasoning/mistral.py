"""Magistral and Ministral: `[THINK]…[/THINK]`, and `<think>` as text with the older tokenizer."""

from penstock.engine.format_info import FormatInfo
from penstock.engine.hooks import Register, hookimpl
from penstock.engine.turn import Turn
from penstock.plugins.reasoning_blocks import ReasoningBlocks

START, END = "[THINK]", "[/THINK]"
TEXT_START, TEXT_END = "<think>", "</think>"

INFO = FormatInfo(
    models="Magistral, Ministral 3, Mistral Medium 3.5",
    markers=(START, END, TEXT_START, TEXT_END),
    quirks=(
        "switched by the system prompt or `reasoning_effort`; `<think>` only at the start; an end marker without reasoning is taken out; "
        "calls within the reasoning are not made"
    ),
    aliases=("magistral",),
    signs=(START, END),
    example=f"{START}why{END}because",
)


def mistral(turn: Turn) -> ReasoningBlocks:
    """The model decides, unless the prompt has opened or closed a block. Which spelling it writes is seen from the vocabulary."""
    phase = turn.phase((START, TEXT_START), (END, TEXT_END), ("[/INST]",))
    if START in turn.added_tokens:
        return ReasoningBlocks(phase, starts=[START], ends=[END], is_constrained=turn.is_constrained, added_tokens=turn.added_tokens)
    ends = [END, TEXT_END]
    return ReasoningBlocks(
        phase, starts=[START], first_starts=[TEXT_START], ends=ends, is_constrained=turn.is_constrained, added_tokens=turn.added_tokens
    )


@hookimpl
def register_reasoning_parsers(register: Register) -> None:
    register("mistral", mistral, INFO)
