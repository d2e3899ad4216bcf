"""The mask pool: fills the masks of constrained sequences off the event loop, so that a slow grammar delays its own sequence alone."""

import ctypes
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue

import torch
from torch import Tensor

from penstock.engine.constraints.bitmask import num_words
from penstock.engine.constraints.state import ConstraintState, MaskJob
from penstock.engine.text.answer import Answer

GRACE = 0.01  # seconds beyond the forward pass
SLOW = 0.005  # seconds
NUM_MASKS_APART = 16
PATIENCE = 1.0  # seconds between two checks whether a late mask is over its time limit


@dataclass(frozen=True, slots=True)
class ConstrainedRows:
    """The rows of a step's sampler that belong to one constrained sequence: that of its next token, and one after each draft token."""

    constraint: ConstraintState
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


def _work(tasks: "SimpleQueue[Callable[[], None] | None]") -> None:
    while (task := tasks.get()) is not None:
        task()
        del task  # it holds a step's masks


@dataclass(slots=True)
class StepMasks:
    """Filled while the model computes: its thread calls `begin` just before that, and `rows_to_sample` just before it samples.

    `bitmask_BW` (int32 [B, ceil(V / 32)], pinned where the model is on a GPU) has a row for each of the sampler's, all ones where a row is
    unconstrained. `jobs` are those of the constrained sequences, by their rows. `awaited` are those waited for, at most `grace` seconds,
    and filled by `thread`.
    """

    bitmask_BW: Tensor
    jobs: dict[range, MaskJob]
    awaited: list[MaskJob]
    thread: MaskThread
    grace: float
    _is_begun: bool = False
    _is_over: threading.Event = field(default_factory=threading.Event)

    def begin(self) -> None:
        """Starts filling in the thread. Sooner, it would hold the GIL while the step is launched."""
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
        self.begin()
        if self.awaited:
            self._is_over.wait(self.grace)
        if not self.jobs:
            return list(range(len(self.bitmask_BW)))
        others = {row for rows, job in self.jobs.items() for row in rows[job.num_to_sample :]}
        return [row for row in range(len(self.bitmask_BW)) if row not in others]


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
        self._in_flight: list[tuple[ConstraintState, MaskJob]] = []
        self._news = threading.Event()
        self.wake: Callable[[], None] = self._news.set

    def begin(self, constrained: Iterable[ConstrainedRows], num_rows: int, vocab_size: int, *, pin_memory: bool) -> StepMasks | None:
        """The masks of a step whose sampler has `num_rows`, to be filled once the step begins; None where no row needs one."""
        masked = [one for one in constrained if not self.samples_unmasked(one.constraint, one.answer)]
        if not masked:
            return None
        for one in masked:
            if one.constraint.mask is not None:
                one.constraint.mask.fail()  # unless it is done: it is over its time limit, and has no place in this step's rows
        bitmask_BW = self._laid_out(masked, num_rows, vocab_size, pin_memory=pin_memory)
        awaited: list[MaskJob] = []
        jobs: dict[range, MaskJob] = {}
        for one in masked:
            job = one.constraint.mask
            rows_DW = bitmask_BW[one.rows.start : one.rows.stop]
            if job is not None and job.is_quick:
                if one.draft and not job.needs_no_sample:
                    job.look_ahead(rows_DW, one.draft)
                if one.draft or job.needs_no_sample:
                    jobs[one.rows] = job
                continue
            if job is None:
                job = MaskJob(one.constraint, one.answer, rows_DW, one.draft, is_apart=one.constraint.is_slow)
                job.queue()
                one.constraint.mask = job
                if job.is_apart:
                    self._thread_apart.submit(job.run)
                else:
                    awaited.append(job)
            jobs[one.rows] = job
            self._in_flight.append((one.constraint, job))
        return StepMasks(bitmask_BW, jobs, awaited, self._thread, self._grace)

    def samples_unmasked(self, constraint: ConstraintState, answer: Answer) -> bool:
        """Whether the sequence's next token is sampled without a mask, and checked by its grammar then."""
        return self.samples_first and constraint.mask is None and constraint.can_sample_first(answer)

    def fill_at_once(self, constraint: ConstraintState, answer: Answer, vocab_size: int, *, only_forced: bool = False) -> MaskJob:
        """The next mask of a quick grammar, filled in this thread; with `only_forced`, forced tokens alone.

        The masks of a grammar that turns out slow are filled apart from then on.
        """
        job = constraint.fill_at_once(answer, vocab_size, only_forced=only_forced)
        if job.seconds > SLOW:
            constraint.num_masks_apart = NUM_MASKS_APART
        return job

    def _laid_out(self, masked: list[ConstrainedRows], num_rows: int, vocab_size: int, *, pin_memory: bool) -> Tensor:
        """A step's rows: copies of masks that are there, and all ones."""
        # Not by torch: each of its calls takes as long as all of this.
        num_bytes = num_words(vocab_size) * torch.int32.itemsize
        bitmask_BW = torch.empty(num_rows, num_words(vocab_size), dtype=torch.int32, pin_memory=pin_memory)
        address = bitmask_BW.data_ptr()
        there = {one.first_row: mask.address for one in masked if (mask := one.constraint.mask) is not None and mask.is_done}
        for row in range(num_rows):
            target = address + row * num_bytes
            if row in there:
                ctypes.memmove(target, there[row], num_bytes)
            else:
                ctypes.memset(target, 0xFF, num_bytes)
        return bitmask_BW

    def end(self) -> None:
        """The step is over, whether or not all its masks are there."""
        is_left_behind = False
        for constraint, job in self._in_flight:
            if not job.is_apart and job.cancel():
                constraint.mask = None
                continue
            job.on_done = self.wake
            job.mark_late()
            is_late = not job.is_done
            is_left_behind = is_left_behind or (is_late and not job.is_apart)
            if is_late or job.seconds > SLOW:
                constraint.num_masks_apart = NUM_MASKS_APART
            elif constraint.num_masks_apart and not job.is_counted:
                job.is_counted = True
                constraint.num_masks_apart -= 1
        self._in_flight.clear()
        if is_left_behind:
            self._thread = self._thread.successor()

    def abandon(self, constraint: ConstraintState) -> None:
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
        addresses = [job.address for _, job in self._in_flight]
        assert len(set(addresses)) == len(addresses), "two masks are written into one row"
        assert len({id(constraint) for constraint, _ in self._in_flight}) == len(self._in_flight), "a constraint has two masks in flight"

    def close(self) -> None:
        """Stops filling masks; returns at once."""
        self._thread.close()
        self._thread_apart.close()
