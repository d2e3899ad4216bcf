"""The grammars' masks in one step."""

from dataclasses import dataclass

from torch import Tensor

from penstock.engine.grammars.mask_fill import MaskFill
from penstock.engine.grammars.mask_worker import MaskTask, MaskWorker


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
