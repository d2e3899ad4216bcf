"""Granite 3: in 3.2 sentences of ordinary text announce reasoning and response, in 3.3 both stand in tags."""

import sys

from penstock.engine.format_info import FormatInfo
from penstock.engine.hooks import Register, hookimpl
from penstock.engine.parsing import Phase
from penstock.engine.turn import Turn
from penstock.plugins.content_wrapper import ContentWrapper
from penstock.plugins.start_phase import is_switched_off, start_phase
from penstock.plugins.think_tags import ThinkTags

STARTS = ("Here is my thought process:", "Here's my thought process:")
ENDS = ("Here is my response:", "Here's my response:")


def granite(turn: Turn) -> ThinkTags:
    """The model decides: an answer that does not announce its reasoning is content throughout, as it is with `thinking: false`."""
    untold = Phase.CONTENT if is_switched_off(turn, "thinking") else Phase.UNDECIDED
    return ThinkTags(
        start_phase(turn, untold, STARTS, ENDS),
        starts=STARTS,
        ends=ENDS,
        is_constrained=turn.is_constrained,
        added_tokens=turn.added_tokens,
    )


def granite_33(turn: Turn) -> ContentWrapper:
    """The model decides, and writes both pairs of tags itself."""
    untold = Phase.CONTENT if is_switched_off(turn, "thinking") else Phase.UNDECIDED
    parser = ThinkTags(
        start_phase(turn, untold),
        newlines_after_end=sys.maxsize,
        is_constrained=turn.is_constrained,
        added_tokens=turn.added_tokens,
    )
    return ContentWrapper(parser, "<response>", "</response>", turn.added_tokens)


@hookimpl
def register_reasoning_parsers(register: Register) -> None:
    register(
        "granite",
        granite,
        FormatInfo(
            models="Granite 3.2",
            markers=(*STARTS, *ENDS),
            quirks="Off unless `thinking` is true. The markers are ordinary text; an answer without them is content.",
            signs=(STARTS[0].removesuffix(":"), ENDS[0].removesuffix(":")),
            example=f"{STARTS[0]} Capitals.\n{ENDS[0]} Oslo.",
        ),
    )
    register(
        "granite_33",
        granite_33,
        FormatInfo(
            models="Granite 3.3",
            markers=("<think>", "</think>", "<response>", "</response>"),
            quirks="Off unless `thinking` is true. `<response>` around the content is taken out, as are line breaks after `</think>`.",
            aliases=("granite3.3", "granite-3.3"),
            signs=("<think>", "</think>", "<response>", "<|start_of_role|>"),
            example="<think>Capitals.</think>\n<response>Oslo.</response>",
        ),
    )
