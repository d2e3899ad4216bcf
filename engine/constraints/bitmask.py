"""Packed masks of the tokens that may come next: one bit for each token of the vocabulary, 32 to a word."""

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from penstock.engine.native.library import native_library
from penstock.engine.system.device import index_on

BITS_PER_WORD = 32


def num_words(vocab_size: int) -> int:
    return -(-vocab_size // BITS_PER_WORD)


def allocate_bitmask(num_rows: int, vocab_size: int, *, pin_memory: bool = False) -> Tensor:
    """int32 [num_rows, ceil(V / 32)] on the CPU, nothing allowed. `pin_memory` lets its copy to a GPU overlap with other work."""
    return torch.zeros(num_rows, num_words(vocab_size), dtype=torch.int32, pin_memory=pin_memory)


def apply_bitmask(logits_BV: Tensor, bitmask_BW: Tensor, rows: Sequence[int] | None = None) -> None:
    """Sets logits to -inf in place wherever the token's bit is not set.

    Row i of `bitmask_BW` (int32, on the logits' device) is for row `rows[i]` of the logits, or row i without `rows`; other rows stay
    as they are. Tokens that the mask is too narrow to hold a bit for, as in a padded vocabulary, are masked; its bits beyond V are ignored.
    """
    if logits_BV.is_cuda:
        from penstock.engine.kernels.launch import bitmask_apply  # needs triton

        device = logits_BV.device
        bitmask_apply(logits_BV, bitmask_BW, torch.arange(len(bitmask_BW), device=device) if rows is None else index_on(device, rows))
        return
    library = native_library() if logits_BV.device.type == "cpu" and logits_BV.dtype == torch.float32 else None
    if library is not None and logits_BV.stride(-1) == bitmask_BW.stride(-1) == 1:
        places_R = torch.arange(len(bitmask_BW)) if rows is None else torch.tensor(rows, dtype=torch.int64)
        assert len(places_R) == len(bitmask_BW)
        assert all(0 <= row < len(logits_BV) for row in rows or ()), "a row that is not there"
        sizes = (len(places_R), logits_BV.shape[-1], bitmask_BW.shape[-1], logits_BV.stride(0), bitmask_BW.stride(0))
        library.penstock_apply_bitmask(logits_BV.data_ptr(), bitmask_BW.data_ptr(), places_R.data_ptr(), *sizes)
        return
    apply_bitmask_with_torch(logits_BV, bitmask_BW, range(len(logits_BV)) if rows is None else rows)


def apply_bitmask_with_torch(logits_BV: Tensor, bitmask_BW: Tensor, rows: Sequence[int]) -> None:
    """`apply_bitmask` without a kernel."""
    vocab_size = logits_BV.shape[-1]
    num_held = min(vocab_size, bitmask_BW.shape[-1] * BITS_PER_WORD)
    ceilings = _ceilings(logits_BV.dtype, logits_BV.device)
    # Looking up each byte takes a third of the time that shifting bits does. Row by row: one row's expanded bits stay in the cache.
    for row, words in zip(rows, bitmask_BW[:, : num_words(num_held)], strict=True):
        allowed = ceilings[words.view(torch.uint8).int()].flatten()[:num_held]
        logits = logits_BV[row]
        torch.minimum(logits[:num_held], allowed, out=logits[:num_held])
        logits[num_held:] = -torch.inf


@cache
def _ceilings(dtype: torch.dtype, device: torch.device) -> Tensor:
    """[256, 8]: for each bit of each byte, lowest first, +inf where it is set and -inf where it is not."""
    is_set = torch.arange(256).unsqueeze(1) >> torch.arange(8) & 1
    return torch.where(is_set.bool(), torch.inf, -torch.inf).to(device, dtype)
