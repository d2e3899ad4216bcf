"""Grammar bitmasks and sampling on the device: the launchers of the kernels in `sampling_triton.py`."""

import torch
from torch import Tensor

from penstock.engine.kernels.tuning import COMPILER_OPTIONS, next_power_of_two

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


WIDEST_TILE = 8192  # logits


def sample(
    logits_BV: Tensor,
    temperatures_B: Tensor,
    top_ps_B: Tensor,
    min_ps_B: Tensor,
    seeds_B: Tensor,
    *,
    top_ks_B: Tensor | None = None,
    max_top_k: int = 0,
) -> tuple[Tensor, Tensor]:
    """A token for each row, int64 [B], and whether the row had any to give, bool [B]: without that its token means nothing.

    At temperature 0 it is the first of the most probable tokens. Else it is drawn: `top_ks_B` (int64; at least the vocabulary's size takes
    nothing away) keeps the k most probable and all that tie with the last of them, `top_ps_B` of these the nucleus, with ties as well, and
    `min_ps_B` what is at least that share as probable as the most probable one. No k is above `max_top_k` but for those that take nothing
    away. Parameters are float32, on the device of the logits. The same `seeds_B` (int64) give the same tokens.
    Draws by rejection as `choice.draw` does: exact, one draw for most rows. Never waits for the device.
    """
    from penstock.engine.kernels.sampling_triton import sample_kernel

    assert logits_BV.stride(-1) == 1
    num_rows, vocab_size = logits_BV.shape
    token_ids_B = torch.empty(num_rows, dtype=torch.int64, device=logits_BV.device)
    is_possible_B = torch.empty(num_rows, dtype=torch.int8, device=logits_BV.device)
    if num_rows:
        sample_kernel[(num_rows,)](
            token_ids_B,
            is_possible_B,
            logits_BV,
            temperatures_B,
            top_ps_B,
            min_ps_B,
            _floors(logits_BV, top_ks_B, max_top_k),
            seeds_B,
            vocab_size,
            logits_BV.stride(0),
            TILE=min(WIDEST_TILE, next_power_of_two(vocab_size)),
            num_warps=16,
            **COMPILER_OPTIONS,
        )
    return token_ids_B, is_possible_B.bool()


def _floors(logits_BV: Tensor, top_ks_B: Tensor | None, max_top_k: int) -> Tensor:
    """The k-th greatest logit of each row, float32 [B]; -inf where every token may come."""
    everything_B = torch.full((len(logits_BV),), -torch.inf, device=logits_BV.device)
    if top_ks_B is None or max_top_k == 0:
        return everything_B
    greatest_BK = logits_BV.topk(max_top_k).values.float()
    kth_B = greatest_BK.gather(1, top_ks_B.clamp(max=max_top_k)[:, None] - 1)[:, 0]
    return torch.where(top_ks_B < logits_BV.shape[1], kth_B, everything_B)
