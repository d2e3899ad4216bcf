"""Fills the masks of constrained sequences off the event loop, so that a slow grammar holds up nobody but its own sequence."""

import threading
from collections.abc import Callable, Mapping

from penstock.engine.bitmask import allocate_bitmask
from penstock.engine.mask_fill import MaskFill
from penstock.engine.mask_worker import MaskTask, MaskWorker
from penstock.engine.sampler_row import SamplerRow
from penstock.engine.sequence import Sequence
from penstock.engine.step_masks import StepMasks

GRACE = 0.01  # seconds beyond the forward pass
SLOW = 0.005  # seconds
NUM_MASKS_APART = 16
PATIENCE = 1.0  # seconds between two looks at whether a late mask is overdue


class MaskFiller:
    """Belongs to the thread that schedules. One worker fills a step's masks, and the step waits for it; another those of slow grammars.

    When a step's time is up, what has not begun is taken back, and the worker is left alone with what it is at; that sequence samples
    in a later step, when its mask is there. From then on its masks are filled apart, until `NUM_MASKS_APART` of them were quick.
    `wake` is called, in a worker's thread, when a late mask is there.
    """

    def __init__(self, grace: float = GRACE) -> None:
        self._grace = grace
        self._worker = MaskWorker()
        self._worker_apart = MaskWorker()
        self._under_way: list[tuple[Sequence, MaskFill]] = []
        self._news = threading.Event()
        self.wake: Callable[[], None] = self._news.set

    def begin(
        self, samplers: list[SamplerRow], drafts: Mapping[Sequence, list[int]], vocab_size: int, *, pin_memory: bool
    ) -> StepMasks | None:
        """The masks of a step's samplers, to be filled once the step begins; None where no grammar has a say."""
        constrained = [(row, sampler.sequence) for row, sampler in enumerate(samplers) if _begins_constrained(sampler)]
        if not constrained:
            return None
        bitmask_BW = allocate_bitmask(len(samplers), vocab_size, pin_memory=pin_memory).fill_(-1)
        fresh: list[MaskFill] = []
        fills: dict[range, MaskFill] = {}
        for row, sequence in constrained:
            assert sequence.gate is not None
            draft = drafts.get(sequence, [])
            rows = range(row, row + 1 + len(draft))
            if sequence.mask is None:
                is_apart = sequence.num_masks_apart > 0
                sequence.mask = MaskFill(sequence.gate, sequence.answer, bitmask_BW[row : rows.stop], draft, is_apart=is_apart)
                fresh.append(sequence.mask)
            elif sequence.mask.is_done:
                bitmask_BW[row].copy_(sequence.mask.rows_DW[0])
            fills[rows] = sequence.mask
            self._under_way.append((sequence, sequence.mask))
        return StepMasks(bitmask_BW, fills, self._submit(fresh), self._worker, self._grace)

    def end(self) -> None:
        """The step is over, whether or not all its masks are there."""
        is_left_behind = False
        for sequence, fill in self._under_way:
            if not fill.is_apart and fill.take():
                sequence.mask = None
                continue
            fill.on_done = self.wake
            is_late = not fill.is_done
            is_left_behind = is_left_behind or (is_late and not fill.is_apart)
            if is_late or fill.seconds > SLOW:
                sequence.num_masks_apart = NUM_MASKS_APART
            elif sequence.num_masks_apart:
                sequence.num_masks_apart -= 1
        self._under_way.clear()
        if is_left_behind:
            self._worker = self._worker.successor()

    def abandon(self, sequence: Sequence) -> None:
        """The sequence has ended: nobody waits for its mask, and none of another sequence waits behind it."""
        fill, sequence.mask = sequence.mask, None
        if fill is not None and fill.is_apart and not fill.take() and not fill.is_done:
            self._worker_apart = self._worker_apart.successor()

    def wait(self) -> None:
        """Waits until a late mask is there, or may be overdue. Something may have come in before; then it returns at once."""
        self._news.wait(PATIENCE)
        self._news.clear()

    def close(self) -> None:
        """Fills nothing more; returns at once."""
        self._worker.close()
        self._worker_apart.close()

    def _submit(self, fresh: list[MaskFill]) -> MaskTask | None:
        """Gives those of slow grammars to their worker, and the task that the step has to wait for."""
        for fill in fresh:
            if fill.is_apart:
                self._worker_apart.submit(MaskTask([fill]))
        awaited = [fill for fill in fresh if not fill.is_apart]
        return MaskTask(awaited) if awaited else None


def _begins_constrained(sampler: SamplerRow) -> bool:
    """Whether the row is the first of a sequence's that a grammar decides: its mask brings those of the others."""
    return sampler.sampling.is_constrained and sampler.num_drafted == 0
