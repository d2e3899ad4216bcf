"""The grammars' masks in one step."""

from dataclasses import dataclass

from torch import Tensor

from penstock.engine.mask_fill import MaskFill
from penstock.engine.mask_worker import MaskTask


@dataclass(frozen=True, slots=True)
class StepMasks:
    """Filled while the model computes; the model's thread calls `wait` just before it samples.

    `bitmask_BW` (int32 [B, ceil(V / 32)], pinned where the model is on a GPU) has a row for each of the sampler's, all ones where no
    grammar has a say. `fills` are those where one has, by a sequence's rows. `task` are those waited for, at most `grace` seconds.
    """

    bitmask_BW: Tensor
    fills: dict[range, MaskFill]
    task: MaskTask | None
    grace: float

    def wait(self) -> list[int]:
        """The rows to be sampled: all but those whose mask is late or has failed or is none, and those where what comes next is certain."""
        if self.task is not None:
            self.task.is_over.wait(self.grace)
        others = {row for rows, fill in self.fills.items() for row in rows[fill.num_to_sample :]}
        return [row for row in range(len(self.bitmask_BW)) if row not in others]
