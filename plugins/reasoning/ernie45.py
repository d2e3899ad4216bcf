"""ERNIE-4.5-Thinking: reasoning up to `</think>`, then perhaps `<response>` … `</response>`."""

import sys

from penstock.engine.format_info import FormatInfo
from penstock.engine.hooks import Register, hookimpl
from penstock.engine.parsing import Phase
from penstock.engine.turn import Turn
from penstock.plugins.content_wrapper import ContentWrapper
from penstock.plugins.start_phase import start_phase
from penstock.plugins.think_tags import ThinkTags


def ernie45(turn: Turn) -> ContentWrapper:
    """Always on: reasons from the start, unless the prompt itself has closed the reasoning."""
    parser = ThinkTags(
        start_phase(turn, Phase.REASONING),
        newlines_after_end=sys.maxsize,
        is_constrained=turn.is_constrained,
        added_tokens=turn.added_tokens,
    )
    return ContentWrapper(parser, "<response>", "</response>", turn.added_tokens)


@hookimpl
def register_reasoning_parsers(register: Register) -> None:
    register(
        "ernie45",
        ernie45,
        FormatInfo(
            models="ERNIE-4.5-Thinking",
            markers=("<think>", "</think>", "<response>", "</response>"),
            quirks=(
                "Always reasons: without `</think>`, everything is reasoning. `<response>` around the content is taken out, as are line "
                "breaks after `</think>`."
            ),
            signs=("<think>", "<response>", "<global_setting>", "think_mode=True"),
            prompt_tail="<think>\n",
            example="Capitals.\n</think>\n\n<response>\nOslo.\n</response>\n",
        ),
    )
