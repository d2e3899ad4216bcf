"""Choosing tokens on a GPU: what differs from row to row goes there in two copies, one kernel draws, and nothing waits for it."""

from collections.abc import Sequence
from random import Random

import torch
from torch import Tensor

from penstock.engine.device import sent
from penstock.engine.kernels.sampling import sample
from penstock.engine.sampling.sampling_state import SamplingState

SEEDS = 2**53  # as many as `random()` tells apart


def choose_on_device(work_BV: Tensor, states: Sequence[SamplingState], shared_generator: Random) -> tuple[Tensor, Tensor]:
    """A token for each row of float32 logits, and whether the row had any to give: int64 [B] both, on the device.

    Seeds give other tokens than on a CPU; there as here, a row's token depends on that row and its seed alone.
    """
    params = [state.params for state in states]
    vocab_size = work_BV.shape[1]
    reals = [
        [0.0 if state.takes_first else state.params.temperature for state in states],
        [row.top_p for row in params],
        [row.min_p for row in params],
    ]
    top_ks = [state.top_k or vocab_size for state in states]
    seeds = [0 if state.takes_first else int((state.numbers or shared_generator).random() * SEEDS) for state in states]
    temperatures_B, top_ps_B, min_ps_B = sent(torch.tensor(reals, dtype=torch.float32), work_BV.device)
    top_ks_B, seeds_B = sent(torch.tensor([top_ks, seeds], dtype=torch.int64), work_BV.device)
    max_top_k = max((top_k for top_k in top_ks if top_k < vocab_size), default=0)
    token_ids_B, is_possible_B = sample(
        work_BV, temperatures_B, top_ps_B, min_ps_B, seeds_B, top_ks_B=top_ks_B if max_top_k else None, max_top_k=max_top_k
    )
    return token_ids_B, is_possible_B.long()
