"""Granite 3.2: reasoning and response are announced by sentences, which are ordinary text."""

from penstock.engine.hooks import Register, hookimpl
from penstock.engine.parsing import Phase
from penstock.engine.turn import Turn
from penstock.plugins.think_tags import ThinkTags

STARTS = ("Here is my thought process:", "Here's my thought process:")
ENDS = ("Here is my response:", "Here's my response:")


def granite(turn: Turn) -> ThinkTags:
    """The model decides: an answer that does not announce its reasoning is content throughout, as it is with `thinking: false`."""
    phase = turn.phase(STARTS, ENDS)
    if phase is Phase.UNDECIDED and turn.chat_template_kwargs.get("thinking") is False:
        phase = Phase.CONTENT
    return ThinkTags(phase, starts=STARTS, ends=ENDS, added_tokens=turn.added_tokens)


@hookimpl
def register_reasoning_parsers(register: Register) -> None:
    register("granite", granite)
