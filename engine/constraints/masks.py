"""The masks of constrained sequences: jobs that fill them, and the pool that runs these off the event loop, so that a slow grammar delays
its own sequence alone. A mask has one bit for each token of the vocabulary that may come next, 32 to a word.
"""

import ctypes
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from penstock.engine.contracts.grammar import CompiledGrammar
from penstock.engine.deltas import ClientFault, GrammarFault
from penstock.engine.errors import UnsupportedGrammar
from penstock.engine.system.memory import index_on, to_device
from penstock.engine.text.answer import Answer

if TYPE_CHECKING:
    from penstock.engine.constraints.state import ConstraintState

logger = logging.getLogger(__name__)

GRACE = 0.01  # seconds beyond the forward pass
SLOW = 0.005  # seconds
NUM_MASKS_APART = 16
SETTLE_SECONDS = 30.0  # the loop is stuck, or gone; the rows are computed again
PATIENCE = 1.0  # seconds between two checks whether a late mask is over its time limit
TIME_LIMIT = 5.0  # seconds
DRAFT_TIME = 0.002  # seconds, after which no mask for another draft token is begun
TOO_SLOW = ClientFault("the constraint takes too long to say what may come next")


class MaskState(Enum):
    """The states of a mask job."""

    IDLE = "idle"  # not requested
    QUEUED = "queued"  # waiting for a thread
    RUNNING = "running"
    READY = "ready"  # the mask is there
    FORCED = "forced"  # no mask is needed: the next tokens, or the end of the answer, are certain
    LATE = "late"  # still running, and its step is over: the sequence samples in a later one
    FAILED = "failed"  # the grammar raised, or took too long


MASK_TRANSITIONS: Mapping[MaskState, frozenset[MaskState]] = {
    MaskState.IDLE: frozenset({MaskState.QUEUED, MaskState.RUNNING}),
    # Back to IDLE where the step is over before a thread has claimed the job.
    MaskState.QUEUED: frozenset({MaskState.RUNNING, MaskState.IDLE, MaskState.FAILED}),
    # Back to IDLE where only forced tokens were asked for and nothing is forced.
    MaskState.RUNNING: frozenset({MaskState.READY, MaskState.FORCED, MaskState.LATE, MaskState.FAILED, MaskState.IDLE}),
    MaskState.LATE: frozenset({MaskState.READY, MaskState.FORCED, MaskState.FAILED}),
    # A quick grammar's job is run again for each token.
    MaskState.READY: frozenset({MaskState.RUNNING}),
    MaskState.FORCED: frozenset({MaskState.RUNNING}),
    MaskState.FAILED: frozenset(),
}

_PENDING = (MaskState.QUEUED, MaskState.RUNNING, MaskState.LATE)
_CLAIMED = (MaskState.RUNNING, MaskState.LATE)


class MaskJob:
    """Fills a sequence's next mask: `forced` where what comes next is certain, else the bits of the first row of `rows_DW`.

    These are int32 [1 + draft, ceil(V / 32)]. The other rows are for what follows the draft tokens, as far as the grammar accepts these and
    there is time. The thread that claims the job first runs it, and no other uses the matcher until it `has_returned`. `error` says why it
    failed. One that `is_quick` is run on the event loop, again for each token, in a row of its own. `is_apart` says that the grammar is
    slow: no step waits for the job, which also finds out whether the grammar `is_finished`. It `has_searched` where it looked for an ending
    of the answer, too. `is_counted` is for the pool, which counts quick masks: one that comes between sampling and a step's end is seen in
    the next step again. `on_done` is called at the end, in the thread that ran the job, where it was set before the job was done.
    """

    __slots__ = (
        "_answer",
        "_begun_at",
        "_draft",
        "_lock",
        "_num_filled",
        "address",
        "constraint",
        "error",
        "forced",
        "has_returned",
        "has_searched",
        "is_apart",
        "is_counted",
        "is_finished",
        "is_quick",
        "on_done",
        "row_W",
        "rows_DW",
        "seconds",
        "state",
    )

    def __init__(
        self,
        constraint: "ConstraintState",
        answer: Answer,
        rows_DW: Tensor,
        draft: Sequence[int] = (),
        *,
        is_apart: bool = False,
        is_quick: bool = False,
    ) -> None:
        self.constraint = constraint
        self._answer = answer
        self._lock = threading.Lock()
        self._begun_at: float | None = None
        self._draft = draft
        self._num_filled = 0
        self.rows_DW = rows_DW
        self.row_W = rows_DW[0]
        self.address = self.row_W.data_ptr()
        self.is_apart = is_apart
        self.has_searched = False
        self.is_counted = False
        self.is_quick = is_quick
        self.state = MaskState.IDLE
        self.forced: list[int] = []
        self.error: str | None = None
        self.seconds = 0.0  # of the processor: a thread that waits for one, or for the GIL, says nothing about its grammar
        self.is_finished = False
        self.has_returned = False
        self.on_done: Callable[[], None] | None = None

    @property
    def is_done(self) -> bool:
        return self.state in (MaskState.READY, MaskState.FORCED, MaskState.FAILED)

    @property
    def is_over_limit(self) -> bool:
        """Whether it has run for so long that its request must end."""
        return self.state in _CLAIMED and self._begun_at is not None and time.monotonic() - self._begun_at > TIME_LIMIT

    @property
    def is_pending(self) -> bool:
        """Whether it is worth waiting for."""
        return self.state in _PENDING and not self.is_over_limit

    @property
    def needs_no_sample(self) -> bool:
        """Whether it says by itself how the sequence goes on, or that it does not."""
        return self.state in (MaskState.FORCED, MaskState.FAILED)

    @property
    def num_to_sample(self) -> int:
        """How many of its rows are masks to sample under."""
        return self._num_filled if self.state is MaskState.READY else 0

    def queue(self) -> None:
        is_queued = self._move((MaskState.IDLE,), MaskState.QUEUED)
        assert is_queued

    def cancel(self) -> bool:
        """Cancels the job before a thread claims it; False where one has."""
        return self._move((MaskState.QUEUED,), MaskState.IDLE)

    def mark_late(self) -> bool:
        """Its step is over. False where it is not running."""
        return self._move((MaskState.RUNNING,), MaskState.LATE)

    def fail(self) -> bool:
        """Fails the job unless it is done: its thread's later result is ignored."""
        return self._move(_PENDING, MaskState.FAILED, TOO_SLOW)

    def look_ahead(self, rows_DW: Tensor, draft: Sequence[int]) -> None:
        """Goes on from the mask that is there, of which the first of these rows is a copy, to those after the tokens of a late draft."""
        assert self.state is MaskState.READY
        self._num_filled = 1
        self.rows_DW = rows_DW
        self._draft = draft
        if self.constraint.may_look_ahead:
            self._ask_ahead(time.monotonic() + DRAFT_TIME)

    def run_at_once(self, *, only_forced: bool = False, has_choice: bool = False) -> None:
        """Asks what may come next in this thread, and again for each token of a sequence: the first row is used anew.

        With `only_forced` the bits are left alone, and the job is IDLE where nothing is forced. Where the grammar `has_choice`, nothing is.
        """
        # No other thread has a quick job, so that its state takes no lock.
        assert self.is_quick, "another thread may have the job"
        assert MaskState.RUNNING in MASK_TRANSITIONS[self.state], f"from {self.state} to running"
        cpu_time_before = time.thread_time()
        self._num_filled = 0
        self._draft = ()
        try:
            self.state, self.error = self._ask(only_forced=only_forced, has_choice=has_choice), None
        except Exception as error:  # a plug-in's code: whatever it raises ends its own request
            self.state, self.error = MaskState.FAILED, failure_of(error)
        self.seconds = time.thread_time() - cpu_time_before

    def run(self) -> None:
        """Runs the job, unless another thread has claimed it or it was cancelled."""
        if not self._move((MaskState.QUEUED,), MaskState.RUNNING):
            return
        self._begun_at = time.monotonic()
        cpu_time_before = time.thread_time()
        try:
            state = self._ask()
            self.seconds = time.thread_time() - cpu_time_before
            if self._draft and self._num_filled and self.constraint.may_look_ahead:
                self._ask_ahead(self._begun_at + DRAFT_TIME)
            self._end(state)
        except Exception as error:  # a plug-in's code: whatever it raises ends its own request
            self._end(MaskState.FAILED, failure_of(error))
        self.has_returned = True
        if self.on_done is not None:
            self.on_done()

    def _move(self, sources: tuple[MaskState, ...], target: MaskState, error: str | None = None) -> bool:
        """One transition, unless the job is not in one of the `sources`: another thread may have moved it just before."""
        with self._lock:
            if self.state not in sources:
                return False
            assert target in MASK_TRANSITIONS[self.state], f"from {self.state} to {target}"
            self.error = error
            self.state = target
            return True

    def _end(self, state: MaskState, error: str | None = None) -> None:
        is_counted = self._move(_CLAIMED, state, error)
        assert is_counted or self.state is MaskState.FAILED  # `fail` was called meanwhile

    def _ask(self, *, only_forced: bool = False, has_choice: bool = False) -> MaskState:
        if self.is_apart and not self.constraint.samples_end and self.constraint.finish_if_over(self._answer):
            self.is_finished = True
            return MaskState.FORCED
        self.forced = [] if has_choice else self.constraint.forced_tokens(self._answer)
        if self.forced:
            return MaskState.FORCED
        if only_forced:
            return MaskState.IDLE
        self.has_searched = self.constraint.closing is not None and self.constraint.closing.is_due
        self.constraint.prepare_closing(self._answer)
        self.constraint.fill_bitmask(self._answer, self.row_W)
        self.constraint.restrict(self._answer, self.row_W)
        self._num_filled = 1
        return MaskState.READY

    def _ask_ahead(self, deadline: float) -> None:
        """Advances the grammar by the draft, token by token, and rolls it back."""
        num_taken = 0
        try:
            for token_id, row_W in zip(self._draft, self.rows_DW[1:], strict=True):
                if time.monotonic() > deadline or self.constraint.is_stop(token_id) or not self.constraint.advance(self._answer, token_id):
                    break
                num_taken += 1
                if self.constraint.finish_if_over(self._answer):
                    break
                self.constraint.fill_bitmask(self._answer, row_W)
                self._num_filled += 1
        except Exception as error:  # what it fails at may never be said: that ends only the draft
            self.constraint.stop_guessing(error)
        self.constraint.rollback(num_taken)


def failure_of(error: Exception) -> str:
    """Why a sequence ends whose grammar raised. `UnsupportedGrammar` is about the constraint; anything else is the plug-in's defect."""
    if isinstance(error, UnsupportedGrammar):
        return GrammarFault(error.message)
    logger.error("A grammar failed", exc_info=error)
    return f"the grammar raised {type(error).__name__}: {error}"


@dataclass(slots=True)
class ConstrainedRows:
    """The rows of a step's sampler that belong to one constrained sequence: that of its next token, and one after each draft token."""

    constraint: "ConstraintState"
    answer: Answer
    first_row: int
    draft: Sequence[int] = ()

    @property
    def rows(self) -> range:
        return range(self.first_row, self.first_row + 1 + len(self.draft))


class MaskThread:
    """Runs tasks in order of submission. The thread starts with the first, and ends when this is closed or no longer referenced.

    It is a daemon, since nothing can stop a grammar that never returns and the process must still be able to exit.
    """

    def __init__(self) -> None:
        self._tasks: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._is_started = False
        self.close = weakref.finalize(self, self._tasks.put, None)

    def submit(self, task: Callable[[], None]) -> None:
        """Queues a task, which must not raise."""
        if not self._is_started:
            self._is_started = True
            threading.Thread(target=_work, args=(self._tasks,), name="mask", daemon=True).start()
        self._tasks.put(task)

    def successor(self) -> "MaskThread":
        """A new thread, which takes over the tasks that have not begun; this one finishes its current task."""
        successor = MaskThread()
        while True:
            try:
                task = self._tasks.get_nowait()
            except Empty:
                break
            if task is not None:
                successor.submit(task)
        self.close()
        return successor


def _warm_up(constraints: Sequence["ConstraintState"], grammar: CompiledGrammar, vocab_size: int) -> None:
    try:
        matcher = grammar.matcher()  # not those of the answers, which begin whether or not this has ended
        matcher.forced_tokens()
        matcher.fill_bitmask(allocate_bitmask(1, vocab_size)[0])
    except Exception:  # a plug-in's code: it fails again where the answer begins
        logger.info("A grammar could not be warmed up", exc_info=True)
        return
    for constraint in constraints:
        constraint.is_warm = True


def _work(tasks: "SimpleQueue[Callable[[], None] | None]") -> None:
    while (task := tasks.get()) is not None:
        task()
        del task  # it holds a step's masks


@dataclass(slots=True, eq=False)
class StepMasks:
    """The masks of one step in flight, filled while the model computes: its thread calls `begin` just before that, and `rows_to_sample`
    just before it samples.

    Of the sampler's `num_rows`, `bitmask_CW` (int32 [C + 1, ceil(V / 32)], pinned where the model is on a GPU) has one for each that may be
    constrained, at the place that `places` names, and a last one of all ones for the others. `jobs` are those of the constrained
    sequences, by their rows. `awaited` are those waited for, at most `grace` seconds, and filled by `thread`.

    Where the step was built before the tokens of the one before it were known, `deferred` are the rows that these may constrain. They are
    `settled` once the tokens are known: the forward pass does not wait for that, sampling does.
    """

    num_rows: int
    bitmask_CW: Tensor
    places: dict[int, int]
    thread: MaskThread
    grace: float
    jobs: dict[range, MaskJob] = field(default_factory=dict)
    awaited: list[MaskJob] = field(default_factory=list)
    deferred: list[ConstrainedRows] = field(default_factory=list)
    _dropped: set[int] = field(default_factory=set)
    _is_begun: bool = False
    _is_complete: threading.Event | None = None
    _is_over: threading.Event = field(default_factory=threading.Event)

    @property
    def jobs_in_threads(self) -> list[MaskJob]:
        """Those that mask threads run; quick ones were run on the event loop."""
        return [job for job in self.jobs.values() if not job.is_quick]

    def rows_of(self, one: ConstrainedRows) -> Tensor:
        """A sequence's masks, int32 [1 + draft, ceil(V / 32)]."""
        first = self.places[one.first_row]
        return self.bitmask_CW[first : first + len(one.rows)]

    def copy_row(self, row: int, address: int) -> None:
        """Copies the mask there to this row of the sampler. Not by torch, which takes several times as long for a view of it."""
        num_bytes = self.bitmask_CW.shape[1] * self.bitmask_CW.element_size()
        ctypes.memmove(self.bitmask_CW.data_ptr() + self.places[row] * num_bytes, address, num_bytes)

    def begin(self) -> None:
        """Starts filling in the thread. Sooner, it would hold the GIL while the step is launched. Deferred masks begin by themselves."""
        if self._is_complete is None:
            self._submit()

    def defer(self, constrained: Iterable[ConstrainedRows]) -> None:
        """Has sampling wait for `fill_deferred`."""
        self.deferred += constrained
        self._is_complete = threading.Event()

    def fill_deferred(self, thread: MaskThread, dropped: Iterable[ConstrainedRows]) -> None:
        """All jobs of the step are there. `dropped` are not sampled."""
        assert self._is_complete is not None
        self.thread = thread
        self._dropped.update(row for one in dropped for row in one.rows)
        self._submit()
        self._is_complete.set()

    def _submit(self) -> None:
        if self.awaited and not self._is_begun:
            self._is_begun = True
            self.thread.submit(self.fill)

    def fill(self) -> None:
        """Runs the jobs one after the other, except those that were cancelled."""
        for job in self.awaited:
            job.run()
        self._is_over.set()

    def rows_to_sample(self) -> list[int]:
        """Waits for the masks, at most `grace` seconds, and returns the rows to be sampled.

        The others have no mask to sample under: theirs is late or has failed, or the next token is forced.
        """
        if self._is_complete is not None and not self._is_complete.wait(SETTLE_SECONDS):
            self._dropped.update(row for one in self.deferred for row in one.rows)
        self.begin()
        if self.awaited:
            self._is_over.wait(self.grace)
        if not self.jobs and not self._dropped:
            return list(range(self.num_rows))
        others = self._dropped | {row for rows, job in self.jobs.items() for row in rows[job.num_to_sample :]}
        return [row for row in range(self.num_rows) if row not in others]

    def of(self, rows: list[int], device: torch.device) -> Tensor:
        """The masks of these rows of the sampler, int32 [len(rows), ceil(V / 32)], on the device."""
        num_places = len(self.places)
        places = [self.places.get(row, num_places) for row in rows]
        bitmask_CW = to_device(self.bitmask_CW, device)
        return bitmask_CW[:num_places] if places == list(range(num_places)) else bitmask_CW[index_on(device, places)]


class MaskPool:
    """Owned by the scheduling thread. One thread fills the masks that a step waits for, another those of slow grammars.

    When a step's time is up, jobs that have not begun are cancelled, and the thread finishes its current one alone; that sequence samples
    in a later step, when its mask is there. From then on its masks are filled apart, until `NUM_MASKS_APART` of them were quick.
    With `samples_first` quick grammars are only asked for the masks of tokens that they have rejected.
    `wake` is called, in a mask thread, when a late mask is there.
    """

    def __init__(self, grace: float = GRACE) -> None:
        self._grace = grace
        self.samples_first = False
        self._thread = MaskThread()
        self._thread_apart = MaskThread()
        self._in_flight: list[StepMasks] = []
        self._deferred: StepMasks | None = None
        self._news = threading.Event()
        self.wake: Callable[[], None] = self._news.set

    def begin(
        self, constrained: list[ConstrainedRows], num_rows: int, vocab_size: int, *, pin_memory: bool, is_ahead: bool = False
    ) -> StepMasks | None:
        """The masks of a step whose sampler has `num_rows`, to be filled once the step begins; None where no row needs one.

        With `is_ahead` they are deferred until `fill_deferred`.
        """
        masked = constrained if is_ahead else [one for one in constrained if not self.samples_unmasked(one.constraint, one.answer)]
        if not masked:
            return None
        places = {row: place for place, row in enumerate(row for one in masked for row in one.rows)}
        # Not by torch: each of its calls takes as long as all of this.
        bitmask_CW = torch.empty(len(places) + 1, num_words(vocab_size), dtype=torch.int32, pin_memory=pin_memory)
        ctypes.memset(bitmask_CW.data_ptr(), 0xFF, bitmask_CW.nbytes)
        masks = StepMasks(num_rows, bitmask_CW, places, self._thread, self._grace)
        if is_ahead:
            assert self._deferred is None, "two steps are ahead"
            self._deferred = masks
            masks.defer(masked)
        else:
            self._ask(masked, masks)
        return masks

    def fill_deferred(self, constrained: list[ConstrainedRows], dropped: list[ConstrainedRows]) -> None:
        """The tokens are known that the deferred masks of a step depend on: some rows are constrained, and some are not sampled at all."""
        masks, self._deferred = self._deferred, None
        assert masks is not None
        self._ask(constrained, masks)
        masks.fill_deferred(self._thread, dropped)

    def cancel_deferred(self) -> None:
        """The step before has failed, or the engine ends: no row whose mask is deferred is sampled."""
        if self._deferred is not None:
            self.fill_deferred([], self._deferred.deferred)

    def _ask(self, constrained: list[ConstrainedRows], masks: StepMasks) -> None:
        for one in constrained:
            self._add(one, masks)
        if masks.jobs:
            self._in_flight.append(masks)

    def _add(self, one: ConstrainedRows, masks: StepMasks) -> None:
        """Has a step sample under the mask that is there, or asks for it."""
        job = one.constraint.mask
        if job is not None:
            job.fail()  # unless it is done: it is over its time limit, and has no place in this step's rows
            if job.is_done:
                masks.copy_row(one.first_row, job.address)
            if job.is_quick:
                if one.draft and not job.needs_no_sample:
                    job.look_ahead(masks.rows_of(one), one.draft)
                if one.draft or job.needs_no_sample:
                    masks.jobs[one.rows] = job
                return
        else:
            job = MaskJob(one.constraint, one.answer, masks.rows_of(one), one.draft, is_apart=one.constraint.is_slow)
            job.queue()
            one.constraint.mask = job
            if job.is_apart:
                self._thread_apart.submit(job.run)
            else:
                masks.awaited.append(job)
        masks.jobs[one.rows] = job

    def samples_unmasked(self, constraint: "ConstraintState", answer: Answer) -> bool:
        """Whether the sequence's next token is sampled without a mask, and checked by its grammar then."""
        return self.samples_first and constraint.mask is None and constraint.can_sample_first(answer)

    def warm_up(self, constraints: Sequence["ConstraintState"], grammar: CompiledGrammar, vocab_size: int) -> None:
        """Has a thread work out how answers may begin, while the free text that precedes them is computed."""
        if grammar.has_quick_masks:
            self._thread.submit(partial(_warm_up, constraints, grammar, vocab_size))

    def fill_at_once(
        self, constraint: "ConstraintState", answer: Answer, vocab_size: int, *, only_forced: bool = False, has_choice: bool = False
    ) -> MaskJob:
        """The next mask of a quick grammar, filled in this thread; with `only_forced`, forced tokens alone: none where it `has_choice`.

        The masks of a grammar that turns out slow are filled apart from then on.
        """
        job = constraint.fill_at_once(answer, vocab_size, only_forced=only_forced, has_choice=has_choice)
        if job.seconds > SLOW * max(1, len(job.forced)):
            constraint.num_masks_apart = NUM_MASKS_APART
        return job

    def end(self, masks: StepMasks | None = None) -> None:
        """The step is over, whether or not all its masks are there: the one with these masks, where several are in flight."""
        is_left_behind = False
        over = [step for step in self._in_flight if masks is None or step is masks]
        for job in [job for step in over for job in step.jobs_in_threads]:
            constraint = job.constraint
            if not job.is_apart and job.cancel():
                constraint.mask = None
                continue
            job.on_done = self.wake
            job.mark_late()
            is_late = not job.is_done
            is_left_behind = is_left_behind or (is_late and not job.is_apart)
            if is_late or job.seconds > SLOW:
                # What a search for an ending takes says nothing of the masks that follow.
                constraint.num_masks_apart = max(1, constraint.num_masks_apart) if job.has_searched else NUM_MASKS_APART
            elif constraint.num_masks_apart and not job.is_counted:
                job.is_counted = True
                constraint.num_masks_apart -= 1
        self._in_flight = [step for step in self._in_flight if step not in over]
        if is_left_behind:
            self._thread = self._thread.successor()

    def abandon(self, constraint: "ConstraintState") -> None:
        """Drops the mask of a sequence that has ended, so that no other mask waits behind it."""
        job, constraint.mask = constraint.mask, None
        if job is not None and job.is_apart and not job.cancel() and not job.has_returned:
            self._thread_apart = self._thread_apart.successor()

    def wait(self) -> None:
        """Waits until a late mask is ready or may be over its time limit. Returns at once if one became ready since the last call."""
        self._news.wait(PATIENCE)
        self._news.clear()

    def check_integrity(self) -> None:
        """Asserts that each job in flight has rows of its own, and belongs to one constraint. For tests."""
        jobs = [job for masks in self._in_flight for job in masks.jobs_in_threads]
        assert len({job.address for job in jobs}) == len(jobs), "two masks are written into one row"
        assert len({id(job.constraint) for job in jobs}) == len(jobs), "a constraint has two masks in flight"

    def close(self) -> None:
        """Stops filling masks; returns at once."""
        self.cancel_deferred()
        self._thread.close()
        self._thread_apart.close()


BITS_PER_WORD = 32


def num_words(vocab_size: int) -> int:
    return -(-vocab_size // BITS_PER_WORD)


def allocate_bitmask(num_rows: int, vocab_size: int, *, pin_memory: bool = False) -> Tensor:
    """int32 [num_rows, ceil(V / 32)] on the CPU, nothing allowed. `pin_memory` lets its copy to a GPU overlap with other work."""
    return torch.zeros(num_rows, num_words(vocab_size), dtype=torch.int32, pin_memory=pin_memory)
