"""DeepSeek-R1: reasoning up to `</think>`, with or without a `<think>` in front."""

from penstock.engine.format_info import FormatInfo
from penstock.engine.hooks import Register, hookimpl
from penstock.engine.parsing import Phase
from penstock.engine.turn import Turn
from penstock.plugins.start_phase import start_phase
from penstock.plugins.think_tags import ThinkTags


def deepseek_r1(turn: Turn) -> ThinkTags:
    """Always on: reasons from the start, unless the prompt itself has closed the reasoning."""
    return ThinkTags(start_phase(turn, Phase.REASONING), is_constrained=turn.is_constrained, added_tokens=turn.added_tokens)


@hookimpl
def register_reasoning_parsers(register: Register) -> None:
    register(
        "deepseek_r1",
        deepseek_r1,
        FormatInfo(
            models="DeepSeek-R1 and its distillations, GLM-Z1, Step-5",
            markers=("<think>", "</think>"),
            quirks="Always reasons: without `</think>`, everything is reasoning. What follows the marker is kept as it stands.",
            aliases=("deepseek-r1", "step5"),
            signs=("split('</think>')[-1]", "<｜Assistant｜>"),
            prompt_tail="<think>\n",
            example="Capitals.\n</think>\n\nOslo.",
        ),
    )
