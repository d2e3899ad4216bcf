"""The masks of constrained sequences: the job that fills one, the threads that run such jobs, and the masks of a step."""

import logging
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue

from torch import Tensor

from penstock.engine.constraints.state import GrammarGate
from penstock.engine.deltas import ClientFault, GrammarFault
from penstock.engine.errors import UnsupportedGrammar
from penstock.engine.text.answer import Answer

logger = logging.getLogger(__name__)

TIME_LIMIT = 5.0  # seconds
DRAFT_TIME = 0.002  # seconds, after which no mask for another drafted token is begun
TOO_SLOW = ClientFault("the constraint takes too long to say what may come next")


def failure_of(error: Exception) -> str:
    """Why a sequence ends whose grammar raised. `UnsupportedGrammar` is about the constraint; anything else is the plug-in's defect."""
    if isinstance(error, UnsupportedGrammar):
        return GrammarFault(error.message)
    logger.error("A grammar failed", exc_info=error)
    return f"the grammar raised {type(error).__name__}: {error}"


class MaskFill:
    """What a sequence may say next: `forced` where that is certain, else the bits of `row_W`, the first of int32 [1 + draft, ceil(V / 32)].

    The other rows say what may follow the tokens of the draft, as far as the grammar lets these pass and there is time.
    It is run by whoever takes it, and nobody else touches the gate's matcher until `is_done`, which is set last. `error` says why there
    is no result. `is_apart` says that the grammar is slow: no step waits for it, and whether it is finished is found out here as well.
    `is_counted` is whoever counts the quick ones to set: one that comes between sampling and a step's end is seen in the next step again.
    `on_done` is called at the end, in the thread that ran it, where it was set before `is_done` was.
    """

    __slots__ = (
        "_answer",
        "_begun_at",
        "_claim",
        "_draft",
        "_error",
        "_gate",
        "_is_given_up",
        "_num_filled",
        "address",
        "forced",
        "is_apart",
        "is_counted",
        "is_done",
        "is_finished",
        "on_done",
        "row_W",
        "rows_DW",
        "seconds",
    )

    def __init__(self, gate: GrammarGate, answer: Answer, rows_DW: Tensor, draft: Sequence[int] = (), *, is_apart: bool = False) -> None:
        self._gate = gate
        self._answer = answer
        self._claim = threading.Lock()
        self._begun_at: float | None = None
        self._draft = draft
        self._num_filled = 0
        self._error: str | None = None
        self._is_given_up = False
        self.rows_DW = rows_DW
        self.row_W = rows_DW[0]
        self.address = self.row_W.data_ptr()
        self.is_apart = is_apart
        self.is_counted = False
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
        if self._is_given_up or self.is_overdue:
            return TOO_SLOW
        return self._error if self.is_done else None

    def give_up(self) -> None:
        """It is too late for it now, even if it comes in the same moment."""
        self._is_given_up = True

    @property
    def needs_no_sample(self) -> bool:
        """Whether it says by itself how the sequence goes on, or that it does not."""
        return self.error is not None or (self.is_done and (self.is_finished or bool(self.forced)))

    @property
    def num_to_sample(self) -> int:
        """For how many of its rows it has said what may come next, where that is more than one token."""
        return self._num_filled if self.is_done and not self.needs_no_sample else 0

    def look_ahead(self, rows_DW: Tensor, draft: Sequence[int]) -> None:
        """Goes on from the mask that is there, of which the first of these rows is a copy, to those after the tokens of a late draft."""
        assert self._num_filled
        self._num_filled = 1
        self.rows_DW = rows_DW
        self._draft = draft
        if self._gate.may_look_ahead:
            self._ask_ahead(time.monotonic() + DRAFT_TIME)

    def run_at_once(self, *, only_forced: bool = False) -> None:
        """Asks what may come next in this thread, and again for each token of a sequence: `row_W` is used anew.

        With `only_forced` the bits are left alone: those who ask want to know only what is certain.
        """
        began_at = time.perf_counter()
        self._num_filled = 0
        self._draft = ()
        try:
            self._ask(only_forced=only_forced)
        except Exception as error:  # a plug-in's code: whatever it raises ends its own request
            self._fail(error)
        self.is_done = True
        self.seconds = time.perf_counter() - began_at

    def run(self) -> None:
        self._begun_at = time.monotonic()
        try:
            self._ask()
            self.seconds = time.monotonic() - self._begun_at
            if self._draft and self._num_filled and self._gate.may_look_ahead:
                self._ask_ahead(self._begun_at + DRAFT_TIME)
        except Exception as error:  # a plug-in's code: whatever it raises ends its own request
            self._fail(error)
        self.is_done = True
        if self.on_done is not None:
            self.on_done()

    def _fail(self, error: Exception) -> None:
        self._error = failure_of(error)

    def _ask(self, *, only_forced: bool = False) -> None:
        if self.is_apart and self._gate.is_finished(self._answer):
            self.is_finished = True
            return
        self.forced = self._gate.forced_tokens(self._answer)
        if not self.forced and not only_forced:
            self._gate.fill_bitmask(self._answer, self.row_W)
            self._num_filled = 1

    def _ask_ahead(self, deadline: float) -> None:
        """Lets the grammar take the draft, token by token, and take it back.

        What it fails at may never be said: that ends only the draft.
        """
        num_taken = 0
        try:
            for token_id, row_W in zip(self._draft, self.rows_DW[1:], strict=True):
                if time.monotonic() > deadline or self._gate.is_stop(token_id) or not self._gate.advance(self._answer, token_id):
                    break
                num_taken += 1
                if self._gate.is_finished(self._answer):
                    break
                self._gate.fill_bitmask(self._answer, row_W)
                self._num_filled += 1
        except Exception as error:
            self._gate.stop_guessing(error)
        self._gate.rollback(num_taken)


class MaskTask:
    """Masks to be filled one after the other. `is_begun` once a worker has been given it; `is_over` is set when none is left."""

    __slots__ = ("_fills", "is_begun", "is_over")

    def __init__(self, fills: list[MaskFill]) -> None:
        self._fills = fills
        self.is_begun = False
        self.is_over = threading.Event()

    def run(self) -> None:
        for fill in self._fills:
            if fill.take():
                fill.run()
        self.is_over.set()


class MaskWorker:
    """Runs tasks in the order they came. Its thread starts with the first, and ends when the worker is closed or let go.

    The thread is a daemon: nothing can stop a grammar that never comes back, and the process must be able to end all the same.
    """

    def __init__(self) -> None:
        self._tasks: SimpleQueue[MaskTask | None] = SimpleQueue()
        self._is_started = False
        self.close = weakref.finalize(self, self._tasks.put, None)

    def submit(self, task: MaskTask) -> None:
        if not self._is_started:
            self._is_started = True
            threading.Thread(target=_work, args=(self._tasks,), name="mask", daemon=True).start()
        self._tasks.put(task)

    def successor(self) -> "MaskWorker":
        """A worker that takes over what this one has not begun, and leaves it alone with what it is at."""
        successor = MaskWorker()
        while True:
            try:
                task = self._tasks.get_nowait()
            except Empty:
                break
            if task is not None:
                successor.submit(task)
        self.close()
        return successor


def _work(tasks: "SimpleQueue[MaskTask | None]") -> None:
    while (task := tasks.get()) is not None:
        task.run()
        del task  # it holds a step's masks


@dataclass(frozen=True, slots=True)
class StepMasks:
    """Filled while the model computes: its thread calls `begin` just before that, and `wait` just before it samples.

    `bitmask_BW` (int32 [B, ceil(V / 32)], pinned where the model is on a GPU) has a row for each of the sampler's, all ones where no
    grammar has a say. `fills` are those where one has, by a sequence's rows. `task` are those waited for, at most `grace` seconds, and
    `worker` is who fills them.
    """

    bitmask_BW: Tensor
    fills: dict[range, MaskFill]
    task: MaskTask | None
    worker: MaskWorker
    grace: float

    def begin(self) -> None:
        """Has the worker fill them. Sooner, it would hold the interpreter's lock while the step is on its way to the model."""
        if self.task is not None and not self.task.is_begun:
            self.task.is_begun = True
            self.worker.submit(self.task)

    def wait(self) -> list[int]:
        """The rows to be sampled: all but those whose mask is late or has failed or is none, and those where what comes next is certain."""
        self.begin()
        if self.task is not None:
            self.task.is_over.wait(self.grace)
        if not self.fills:
            return list(range(len(self.bitmask_BW)))
        others = {row for rows, fill in self.fills.items() for row in rows[fill.num_to_sample :]}
        return [row for row in range(len(self.bitmask_BW)) if row not in others]
