"""Who looks on while the engine computes."""

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from penstock.engine.deltas import SequenceDelta
    from penstock.engine.scheduler import Step


class StepObserver(Protocol):
    """Called on the engine's loop, twice for each step: must be quick and not raise. A step may begin before the last one has ended."""

    def begin(self, step: "Step") -> None:
        """The step has been scheduled, and nothing of it computed."""

    def end(self, step: "Step", deltas: "dict[str, list[SequenceDelta]]") -> None:
        """What it computed has been taken in. `deltas` are its news by request, empty where it was put off."""
