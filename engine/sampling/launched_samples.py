"""Tokens that are being sampled on the device, while nobody waits for them."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.engine.sampling.sampler import SamplerOutput


@dataclass(frozen=True, slots=True)
class LaunchedSamples:
    """One entry per row, all of it on the device. `is_possible_B` is 0 where a row has no token; as the ids, it is int64.

    `work_BV` are the float32 logits that were sampled from, and `reason` says of a row's raw ones and these why there is no token.
    """

    token_ids_B: Tensor
    is_possible_B: Tensor
    work_BV: Tensor
    reason: Callable[[Tensor, Tensor], str]

    def packed_2B(self) -> Tensor:
        """What `read` is to be given: int64, in one tensor because that is one copy."""
        return torch.stack([self.token_ids_B, self.is_possible_B])

    def read(self, packed_2B: Tensor) -> SamplerOutput:
        """From a copy of `packed_2B` on the CPU."""
        token_ids, is_possible = packed_2B.tolist()
        failed = [row for row, possible in enumerate(is_possible) if not possible]
        failures = {row: self.reason(self.work_BV[row], self.work_BV[row]) for row in failed}
        return SamplerOutput(token_ids, [None] * len(token_ids), failures)
