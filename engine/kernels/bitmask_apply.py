"""Applying the bitmasks of grammars to the logits."""

from torch import Tensor

from penstock.engine.kernels.tuning import COMPILER_OPTIONS

TILE_WORDS = 128  # times 32 tokens: a program writes at most 16 KiB


def bitmask_apply(logits_BV: Tensor, bitmask_RW: Tensor, rows_R: Tensor) -> None:
    """Sets to -inf, in place, what row i of the bitmask forbids in row rows_R[i] of the logits.

    The bitmask is int32 [R, ceil(V / 32)]: bit t % 32 of word t // 32 is set where token t may come next; tokens beyond its last word are
    forbidden. `rows_R` (int32 or int64, no row twice) and the bitmask are on the device of the logits. Never waits for the device.
    """
    from penstock.engine.kernels.sampling_triton import bitmask_apply_kernel

    assert logits_BV.stride(-1) == bitmask_RW.stride(-1) == 1
    vocab_size = logits_BV.shape[1]
    num_rows, num_words = bitmask_RW.shape
    assert rows_R.shape == (num_rows,)
    if num_rows == 0:
        return
    num_tiles = -(-vocab_size // (32 * TILE_WORDS))
    bitmask_apply_kernel[(num_rows, num_tiles)](
        logits_BV,
        bitmask_RW,
        rows_R,
        vocab_size,
        num_words,
        logits_BV.stride(0),
        bitmask_RW.stride(0),
        TILE_WORDS=TILE_WORDS,
        num_warps=4,
        **COMPILER_OPTIONS,
    )
