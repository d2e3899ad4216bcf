"""Holo2: `<think>` … `</think>`, unless the request switches it off."""

from penstock.engine.format_info import FormatInfo
from penstock.engine.hooks import Register, hookimpl
from penstock.engine.parsing import Phase
from penstock.engine.turn import Turn
from penstock.plugins.start_phase import is_switched_off, start_phase
from penstock.plugins.think_tags import ThinkTags


def holo2(turn: Turn) -> ThinkTags:
    """Starts as the prompt ends; switched off, all is content, markers too."""
    is_off = is_switched_off(turn, "thinking", "enable_thinking")
    return ThinkTags(
        start_phase(turn, Phase.CONTENT if is_off else Phase.UNDECIDED), is_constrained=turn.is_constrained, added_tokens=turn.added_tokens
    )


@hookimpl
def register_reasoning_parsers(register: Register) -> None:
    register(
        "holo2",
        holo2,
        FormatInfo(
            models="Holo2, and models that are not listed but mark their reasoning so",
            markers=("<think>", "</think>"),
            quirks="As `deepseek_v3`, but on unless `thinking` or `enable_thinking` is false.",
            signs=("<think>", "</think>"),
            prompt_tail="<think>\n",
            example="Capitals.\n</think>\n\nOslo.",
        ),
    )
