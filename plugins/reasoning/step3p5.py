"""Step-3.5: reasoning up to `</think>`, which stands on a line of its own."""

from penstock.engine.format_info import FormatInfo
from penstock.engine.hooks import Register, hookimpl
from penstock.engine.parsing import Phase
from penstock.engine.turn import Turn
from penstock.plugins.start_phase import start_phase
from penstock.plugins.think_tags import ThinkTags


def step3p5(turn: Turn) -> ThinkTags:
    """Always on, whatever the request: reasons from the start, unless the prompt itself has closed the reasoning."""
    return ThinkTags(
        start_phase(turn, Phase.REASONING),
        ends=("</think>", "\n</think>"),
        implicit_ends=("<tool_call>",),
        num_stray_ends=1,
        newlines_after_end=1,
        is_constrained=turn.is_constrained,
        added_tokens=turn.added_tokens,
    )


@hookimpl
def register_reasoning_parsers(register: Register) -> None:
    register(
        "step3p5",
        step3p5,
        FormatInfo(
            models="Step-3.5, Step-3.7",
            markers=("<think>", "</think>"),
            quirks="Always reasons. One line break before `</think>` and one after it belong to it. `<tool_call>` ends the reasoning.",
            signs=("<think>", "</think>", "<|im_start|>", "<tool_call>", "<|im_start|>tool_response"),
            prompt_tail="<think>\n",
            example="Capitals.\n</think>\nOslo.",
        ),
    )
