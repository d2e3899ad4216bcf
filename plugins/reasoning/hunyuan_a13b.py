"""Hunyuan-A13B: `<think>` and `<answer>`, each on lines of their own."""

from penstock.engine.format_info import FormatInfo
from penstock.engine.hooks import Register, hookimpl
from penstock.engine.turn import Turn
from penstock.plugins.content_wrapper import ContentWrapper
from penstock.plugins.start_phase import start_phase
from penstock.plugins.think_tags import ThinkTags


def hunyuan_a13b(turn: Turn) -> ContentWrapper:
    """The model opens its reasoning itself. The line breaks around markers belong to them."""
    parser = ThinkTags(
        start_phase(turn),
        ends=("</think>", "\n</think>"),
        newlines_after_start=1,
        newlines_after_end=1,
        is_constrained=turn.is_constrained,
        added_tokens=turn.added_tokens,
    )
    return ContentWrapper(parser, "<answer>", "</answer>", turn.added_tokens)


@hookimpl
def register_reasoning_parsers(register: Register) -> None:
    register(
        "hunyuan_a13b",
        hunyuan_a13b,
        FormatInfo(
            models="Hunyuan-A13B",
            markers=("<think>", "</think>", "<answer>", "</answer>"),
            quirks="`<answer>` around the content is taken out. Line breaks next to a marker belong to it.",
            aliases=("hunyuan-a13b", "hunyuan"),
            signs=("<think>", "</think>", "<answer>", "</answer>"),
            example="<think>\nCapitals.\n</think>\n<answer>\nOslo.\n</answer>",
        ),
    )
