"""One sequence's mask, from when it is asked for until it is there."""

import logging
import threading
import time
from collections.abc import Callable

from torch import Tensor

from penstock.engine.answer import Answer
from penstock.engine.grammar_gate import GrammarGate

logger = logging.getLogger(__name__)

TIME_LIMIT = 5.0  # seconds
TOO_SLOW = "the constraint takes too long to say what may come next"


class MaskFill:
    """What a sequence may say next: `forced` where that is certain, else the bits of `row_W`, int32 [ceil(V / 32)].

    It is run by whoever takes it, and nobody else touches the gate's matcher until `is_done`, which is set last. `error` says why there
    is no result. `is_apart` says that the grammar is slow: no step waits for it, and whether it is finished is found out here as well.
    `on_done` is called at the end, in the thread that ran it, where it was set before `is_done` was.
    """

    __slots__ = (
        "_answer",
        "_begun_at",
        "_claim",
        "_error",
        "_gate",
        "forced",
        "is_apart",
        "is_done",
        "is_finished",
        "on_done",
        "row_W",
        "seconds",
    )

    def __init__(self, gate: GrammarGate, answer: Answer, row_W: Tensor, *, is_apart: bool = False) -> None:
        self._gate = gate
        self._answer = answer
        self._claim = threading.Lock()
        self._begun_at: float | None = None
        self._error: str | None = None
        self.row_W = row_W
        self.is_apart = is_apart
        self.forced: list[int] = []
        self.seconds = 0.0
        self.is_finished = False
        self.is_done = False
        self.on_done: Callable[[], None] | None = None

    def take(self) -> bool:
        """True for the first who asks, in whatever thread: it is his to run, or to leave undone."""
        return self._claim.acquire(blocking=False)

    @property
    def is_overdue(self) -> bool:
        """Whether it has run for so long that nobody waits for it any more."""
        return not self.is_done and self._begun_at is not None and time.monotonic() - self._begun_at > TIME_LIMIT

    @property
    def is_pending(self) -> bool:
        """Whether it is worth waiting for."""
        return not self.is_done and not self.is_overdue

    @property
    def error(self) -> str | None:
        if self.is_overdue:
            return TOO_SLOW
        return self._error if self.is_done else None

    @property
    def needs_no_sample(self) -> bool:
        """Whether it says by itself how the sequence goes on, or that it does not."""
        return self.error is not None or (self.is_done and (self.is_finished or bool(self.forced)))

    def run(self) -> None:
        self._begun_at = time.monotonic()
        try:
            self._ask()
        except Exception as error:  # a plug-in's code: whatever it raises ends its own request
            logger.exception("A grammar failed")
            self._error = f"the grammar raised {type(error).__name__}: {error}"
        self.seconds = time.monotonic() - self._begun_at
        self.is_done = True
        if self.on_done is not None:
            self.on_done()

    def _ask(self) -> None:
        if self.is_apart and self._gate.is_finished(self._answer):
            self.is_finished = True
            return
        self.forced = self._gate.forced_tokens(self._answer)
        if not self.forced:
            self._gate.fill_bitmask(self._answer, self.row_W)
