"""Intern-S1: `<think>` … `</think>`, in the midst of which the model may call tools."""

from penstock.engine.format_info import FormatInfo
from penstock.engine.hooks import Register, hookimpl
from penstock.engine.parsing import Phase
from penstock.engine.turn import Turn
from penstock.plugins.start_phase import is_switched_off, start_phase
from penstock.plugins.think_tags import ThinkTags

ACTION = {"<|action_start|>": "<|action_end|>"}


def interns1(turn: Turn) -> ThinkTags:
    """Starts as the prompt ends; where the prompt does not tell, `enable_thinking: false` starts in content."""
    untold = Phase.CONTENT if is_switched_off(turn, "enable_thinking") else Phase.UNDECIDED
    return ThinkTags(
        start_phase(turn, untold),
        content_blocks=ACTION,
        num_stray_ends=1,
        is_constrained=turn.is_constrained,
        added_tokens=turn.added_tokens,
    )


@hookimpl
def register_reasoning_parsers(register: Register) -> None:
    register(
        "interns1",
        interns1,
        FormatInfo(
            models="Intern-S1",
            markers=("<think>", "</think>"),
            quirks="On unless `enable_thinking` is false. A call within the reasoning, `<|action_start|>` … `<|action_end|>`, is content.",
            aliases=("intern-s1", "intern_s1"),
            signs=("<think>", "</think>", *ACTION),
            prompt_tail="<think>",
            example="Capitals.</think>Oslo.",
        ),
    )
