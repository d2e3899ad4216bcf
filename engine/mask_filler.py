"""Fills the masks of constrained sequences off the event loop, so that a slow grammar delays its own sequence alone."""

import ctypes
import threading
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from penstock.engine.grammars.bitmask import allocate_bitmask, num_words
from penstock.engine.grammars.mask_fill import MaskFill
from penstock.engine.grammars.mask_worker import MaskTask, MaskWorker
from penstock.engine.grammars.step_masks import StepMasks
from penstock.engine.sequence import SamplerRow, Sequence

GRACE = 0.01  # seconds beyond the forward pass
SLOW = 0.005  # seconds
NUM_MASKS_APART = 16
PATIENCE = 1.0  # seconds between two looks at whether a late mask is overdue


class MaskFiller:
    """Belongs to the thread that schedules. One worker fills a step's masks, and the step waits for it; another those of slow grammars.

    When a step's time is up, masks that have not begun are cancelled, and the worker finishes its current one alone; that sequence samples
    in a later step, when its mask is there. From then on its masks are filled apart, until `NUM_MASKS_APART` of them were quick.
    With `samples_first` quick grammars are only asked for the masks of tokens that they have refused.
    `wake` is called, in a worker's thread, when a late mask is there.
    """

    def __init__(self, grace: float = GRACE) -> None:
        self._grace = grace
        self.samples_first = False
        self._worker = MaskWorker()
        self._worker_apart = MaskWorker()
        self._under_way: list[tuple[Sequence, MaskFill]] = []
        self._news = threading.Event()
        self.wake: Callable[[], None] = self._news.set

    def begin(
        self, samplers: list[SamplerRow], drafts: Mapping[Sequence, list[int]], vocab_size: int, *, pin_memory: bool
    ) -> StepMasks | None:
        """The masks of a step's samplers, to be filled once the step begins; None where no row is constrained."""
        constrained = [
            (row, sampler.sequence)
            for row, sampler in enumerate(samplers)
            if _begins_constrained(sampler) and not self.samples_unmasked(sampler.sequence)
        ]
        if not constrained:
            return None
        for _, sequence in constrained:
            if sequence.mask is not None and not sequence.mask.is_done:
                sequence.mask.give_up()  # it is overdue, and has no place in this step's rows
        bitmask_BW = self._laid_out(constrained, len(samplers), vocab_size, pin_memory=pin_memory)
        fresh: list[MaskFill] = []
        fills: dict[range, MaskFill] = {}
        for row, sequence in constrained:
            draft = drafts.get(sequence, ())
            rows = range(row, row + 1 + len(draft))
            mask = sequence.mask
            if mask is None:
                assert sequence.gate is not None
                is_apart = sequence.num_masks_apart > 0
                mask = sequence.mask = MaskFill(sequence.gate, sequence.answer, bitmask_BW[row : rows.stop], draft, is_apart=is_apart)
                fresh.append(mask)
            elif mask is sequence.quick_mask:
                if mask.needs_no_sample:
                    fills[rows] = mask
                elif draft:
                    mask.look_ahead(bitmask_BW[row : rows.stop], draft)
                    fills[rows] = mask
                continue
            fills[rows] = mask
            self._under_way.append((sequence, mask))
        return StepMasks(bitmask_BW, fills, self._submit(fresh), self._worker, self._grace)

    def samples_unmasked(self, sequence: Sequence) -> bool:
        """Whether the sequence's next token is sampled without a mask, and checked by its grammar then."""
        return self.samples_first and sequence.mask is None and sequence.can_sample_first

    def fill_at_once(self, sequence: Sequence, vocab_size: int, *, only_forced: bool = False) -> MaskFill:
        """The next mask of a quick grammar, filled in this thread; with `only_forced`, forced tokens alone.

        The masks of a grammar that turns out slow are filled apart from then on.
        """
        mask = sequence.quick_mask
        if mask is None:
            assert sequence.gate is not None
            mask = sequence.quick_mask = MaskFill(sequence.gate, sequence.answer, allocate_bitmask(1, vocab_size))
        mask.run_at_once(only_forced=only_forced)
        if mask.seconds > SLOW:
            sequence.num_masks_apart = NUM_MASKS_APART
        sequence.mask = None if only_forced and not mask.needs_no_sample else mask
        return mask

    def _laid_out(self, constrained: list[tuple[int, Sequence]], num_rows: int, vocab_size: int, *, pin_memory: bool) -> Tensor:
        """A step's rows: copies of masks that are there, and all ones."""
        # Not by torch: each of its calls takes as long as all of this.
        num_bytes = num_words(vocab_size) * torch.int32.itemsize
        bitmask_BW = torch.empty(num_rows, num_words(vocab_size), dtype=torch.int32, pin_memory=pin_memory)
        address = bitmask_BW.data_ptr()
        there = {row: mask.address for row, sequence in constrained if (mask := sequence.mask) is not None and mask.is_done}
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
        for sequence, fill in self._under_way:
            if not fill.is_apart and fill.take():
                sequence.mask = None
                continue
            fill.on_done = self.wake
            is_late = not fill.is_done
            is_left_behind = is_left_behind or (is_late and not fill.is_apart)
            if is_late or fill.seconds > SLOW:
                sequence.num_masks_apart = NUM_MASKS_APART
            elif sequence.num_masks_apart and not fill.is_counted:
                fill.is_counted = True
                sequence.num_masks_apart -= 1
        self._under_way.clear()
        if is_left_behind:
            self._worker = self._worker.successor()

    def abandon(self, sequence: Sequence) -> None:
        """Drops the mask of a sequence that has ended, so that no other mask waits behind it."""
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
        """Submits masks of slow grammars to their worker, and returns the task that the step has to wait for."""
        for fill in fresh:
            if fill.is_apart:
                self._worker_apart.submit(MaskTask([fill]))
        awaited = [fill for fill in fresh if not fill.is_apart]
        return MaskTask(awaited) if awaited else None


def _begins_constrained(sampler: SamplerRow) -> bool:
    """Whether the row is the first of a constrained sequence's rows: its mask job fills those of the others."""
    return sampler.sampling.is_constrained and sampler.num_drafted == 0
