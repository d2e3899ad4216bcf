"""Kimi-K2: `<think>` … `</think>`, which a tool call may cut short."""

from penstock.engine.format_info import FormatInfo
from penstock.engine.hooks import Register, hookimpl
from penstock.engine.parsing import Phase
from penstock.engine.turn import Turn
from penstock.plugins.start_phase import is_switched_off, start_phase
from penstock.plugins.think_tags import ThinkTags

TOOL_CALLS = "<|tool_calls_section_begin|>"


def kimi_k2(turn: Turn) -> ThinkTags:
    """Starts as the prompt ends; where the prompt does not tell, the request may have switched reasoning off."""
    is_off = is_switched_off(turn, "thinking", "enable_thinking")
    return ThinkTags(
        start_phase(turn, Phase.CONTENT if is_off else Phase.UNDECIDED),
        implicit_ends=(TOOL_CALLS,),
        num_stray_ends=1,
        is_constrained=turn.is_constrained,
        added_tokens=turn.added_tokens,
    )


@hookimpl
def register_reasoning_parsers(register: Register) -> None:
    register(
        "kimi_k2",
        kimi_k2,
        FormatInfo(
            models="Kimi-K2-Thinking, Kimi-K2.5",
            markers=("<think>", "</think>"),
            quirks=f"On unless `thinking` or `enable_thinking` is false. `{TOOL_CALLS}` ends the reasoning.",
            aliases=("kimi-k2", "kimi_k25", "kimi-k25"),
            signs=("<think>", "</think>", "<|im_middle|>", TOOL_CALLS),
            prompt_tail="<think>",
            example="Capitals.</think>Oslo.",
        ),
    )
