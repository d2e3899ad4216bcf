"""OLMo 3: `<think>` … `</think>` as ordinary text."""

from penstock.engine.format_info import FormatInfo
from penstock.engine.hooks import Register, hookimpl
from penstock.engine.turn import Turn
from penstock.plugins.start_phase import start_phase
from penstock.plugins.think_tags import ThinkTags


def olmo3(turn: Turn) -> ThinkTags:
    """Starts as the prompt ends; where the prompt does not tell, an answer without markers is content."""
    return ThinkTags(start_phase(turn), is_constrained=turn.is_constrained, added_tokens=turn.added_tokens)


@hookimpl
def register_reasoning_parsers(register: Register) -> None:
    register(
        "olmo3",
        olmo3,
        FormatInfo(
            models="OLMo 3 Think",
            markers=("<think>", "</think>"),
            quirks="The markers are ordinary text, each of several tokens.",
            aliases=("olmo-3",),
            signs=("<|im_start|>", "<think>", "<functions>"),
            prompt_tail="<think>",
            example="Capitals.</think>Oslo.",
        ),
    )
