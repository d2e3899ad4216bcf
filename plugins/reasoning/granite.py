"""Granite 3.2: reasoning and response are announced by sentences, which are ordinary text."""

from penstock.engine.format_info import FormatInfo
from penstock.engine.hooks import Register, hookimpl
from penstock.engine.parsing import Phase
from penstock.engine.turn import Turn
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
