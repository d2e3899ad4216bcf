"""Where an answer starts: as the prompt says, and where it does not, as the request or the family does."""

from collections.abc import Sequence

from penstock.engine.parsing import Phase
from penstock.engine.turn import Turn


def start_phase(
    turn: Turn,
    untold: Phase = Phase.UNDECIDED,
    starts: str | Sequence[str] = "<think>",
    ends: str | Sequence[str] = "</think>",
    boundaries: Sequence[str] = (),
) -> Phase:
    """What the prompt has opened or closed; `untold` where it has done neither."""
    phase = turn.phase(starts, ends, boundaries)
    return untold if phase is Phase.UNDECIDED else phase


def is_switched_off(turn: Turn, *names: str) -> bool:
    """Whether the request has set one of these arguments of the template to false."""
    return any(turn.chat_template_kwargs.get(name) is False for name in names)
