"""Tokens for sequences that take the most probable one that a grammar leaves, if there is one: no copy of the logits, and one pass."""

import torch
from torch import Tensor

from penstock.engine.native.library import native_library

NATIVE_DTYPES = (torch.float32, torch.bfloat16)


def greedy_tokens(logits_BV: Tensor, vocab_size: int, bitmask_BW: Tensor | None = None) -> list[int] | None:
    """The first index of each row's maximum among those of its first `vocab_size` logits whose bits are set; without a mask, among all.

    None where the kernel does not apply, or a row's maximum is not finite.
    """
    library = native_library()
    if library is None or logits_BV.device.type != "cpu" or logits_BV.dtype not in NATIVE_DTYPES or logits_BV.stride(1) != 1:
        return None
    if bitmask_BW is not None and (bitmask_BW.device.type != "cpu" or bitmask_BW.stride(1) != 1):
        return None
    token_ids = torch.empty(len(logits_BV), dtype=torch.int64)
    words = (None, 0, 0) if bitmask_BW is None else (bitmask_BW.data_ptr(), bitmask_BW.shape[1], bitmask_BW.stride(0))
    library.penstock_most_probable(
        token_ids.data_ptr(),
        logits_BV.data_ptr(),
        len(logits_BV),
        vocab_size,
        logits_BV.stride(0),
        logits_BV.dtype == torch.bfloat16,
        *words,
    )
    ids: list[int] = token_ids.tolist()
    return ids if min(ids, default=0) >= 0 else None
