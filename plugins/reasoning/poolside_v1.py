"""Poolside's Laguna: `<think>` … `</think>`, only where the request asks for it."""

from penstock.engine.format_info import FormatInfo
from penstock.engine.hooks import Register, hookimpl
from penstock.engine.parsing import Phase
from penstock.engine.turn import Turn
from penstock.plugins.start_phase import start_phase
from penstock.plugins.think_tags import ThinkTags


def poolside_v1(turn: Turn) -> ThinkTags:
    """As DeepSeek-V3.1; what an earlier turn has closed does not count. The model may write an end marker first, as the prompt does."""
    is_on = any(turn.chat_template_kwargs.get(name) for name in ("thinking", "enable_thinking"))
    untold = Phase.UNDECIDED if is_on else Phase.CONTENT
    return ThinkTags(
        start_phase(turn, untold, boundaries=("<assistant>",)),
        implicit_ends=("<tool_call>",),
        drops_leading_end=True,
        num_stray_ends=1,
        is_constrained=turn.is_constrained,
        added_tokens=turn.added_tokens,
    )


@hookimpl
def register_reasoning_parsers(register: Register) -> None:
    register(
        "poolside_v1",
        poolside_v1,
        FormatInfo(
            models="Laguna",
            markers=("<think>", "</think>"),
            quirks=(
                "Off unless `thinking` or `enable_thinking` is true. `<tool_call>` ends the reasoning. An end marker that leads the "
                "answer, or comes once more, is taken out."
            ),
            signs=("<think>", "</think>", "<tool_call>", "<assistant>", "</assistant>", "<arg_key>"),
            prompt_tail="<think>",
            example="Capitals.</think>Oslo.",
        ),
    )
