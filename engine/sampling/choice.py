"""Choosing one token per row under its mask, the most probable or a random one, without ever sorting a vocabulary.

Rows are seen as blocks of `BLOCK` columns. A token is found by its block first, so that one pass over the row, which vectorizes, is
followed by work on a few hundred numbers. All sums are per row and per block: what a row gives does not depend on its neighbours.
"""

from collections.abc import Callable, Sequence
from functools import cache
from random import Random

import torch
from torch import Tensor

from penstock.engine.constraints.masks import BITS_PER_WORD, num_words
from penstock.engine.kernels.launch import sample
from penstock.engine.native.library import native_library
from penstock.engine.sampling.state import SamplingState
from penstock.engine.system.device import index_on, to_device

BLOCK = 256
SPANS_PER_BLOCK = 4
SPAN = BLOCK // SPANS_PER_BLOCK
NATIVE_DTYPES = (torch.float32, torch.bfloat16)
SEEDS = 2**53  # as many as `random()` tells apart


def padded_width(vocab_size: int) -> int:
    """The number of columns, a multiple of `BLOCK`, that every function here expects; the last ones are to hold -inf or 0."""
    return -(-vocab_size // BLOCK) * BLOCK


def most_probable(logits_BV: Tensor) -> Tensor:
    """The first index of each row's maximum, int64 [B]. NaN counts as greater than any number."""
    blocks = logits_BV.view(len(logits_BV), -1, BLOCK)
    block = blocks.amax(-1).argmax(-1)
    rows = torch.arange(len(blocks), device=blocks.device)
    return block * BLOCK + blocks[rows, block].argmax(-1)


def most_probable_k(logits_BV: Tensor, ks: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Each row's `ks[row]` most probable tokens, with all that tie with the last of them, so that topk's order of ties does not matter.

    Gives logits [B, K] and token ids [B, K], ids ascending; K is a multiple of `BLOCK`, and logits that are not among them are -inf.
    The k greatest lie in the k spans with the greatest maxima: all but those few are looked at only once.
    """
    spans = logits_BV.view(len(logits_BV), -1, SPAN)
    maxima = spans.amax(-1)
    last_B1 = torch.tensor(ks, device=logits_BV.device)[:, None] - 1
    num_spans = max(ks) + 1
    while True:
        num_spans = min(-(-num_spans // SPANS_PER_BLOCK) * SPANS_PER_BLOCK, maxima.shape[1])
        greatest, index = maxima.topk(num_spans)
        index = index.sort(-1).values
        logits_BK = spans.gather(1, index[:, :, None].expand(-1, -1, SPAN)).flatten(1)
        kth_B1 = logits_BK.topk(max(ks)).values.gather(1, last_B1)
        # A span left out may hold a tie where its maximum is not below the k-th.
        if num_spans == maxima.shape[1] or ((greatest[:, -1:] < kth_B1) | kth_B1.isneginf()).all():
            break
        num_spans *= 2
    ids_BK = (index[:, :, None] * SPAN + torch.arange(SPAN, device=index.device)).flatten(1)
    return logits_BK.masked_fill_(logits_BK < kth_B1, -torch.inf), ids_BK


def draw(probs_BV: Tensor, top_ps: Sequence[float], uniforms: Sequence[Callable[[], float]]) -> Tensor:
    """Draws one token per row from its nucleus, int64 [B].

    The nucleus is the set of tokens such that the more probable ones together stay below top_p: the smallest set that reaches top_p
    (arXiv:1904.09751), with every token that ties with its last one. Instead of sorting to find it, a token is drawn from the whole
    row and rejected where it lies outside; then all others that are no more probable lie outside as well, and the next draw is among
    the rest. The distribution is exact. `uniforms[row]` gives numbers in [0, 1), one per draw, so that a row's random numbers depend
    on that row alone.

    `probs_BV` are float32, each row with sum 1, or less where tokens outside every nucleus have been removed. A row of NaN gives any id.
    """
    device = probs_BV.device
    token_ids = _invert_rows(probs_BV, torch.tensor([uniform() for uniform in uniforms], dtype=torch.float64, device=device))
    rows = [row for row, top_p in enumerate(top_ps) if top_p < 1]
    if not rows:
        return token_ids
    drawn = token_ids
    if len(rows) < len(top_ps):
        probs_BV, drawn = probs_BV[rows], token_ids[rows]
    while True:
        likelier_BV = _likelier(probs_BV, drawn)
        mass = likelier_BV.view(len(rows), -1, BLOCK).sum(-1).double().sum(-1).tolist()
        rejected = [index for index, row in enumerate(rows) if mass[index] >= top_ps[row]]
        if not rejected:
            return token_ids
        rows = [rows[index] for index in rejected]
        probs_BV = likelier_BV[rejected]
        drawn = _invert_rows(probs_BV, torch.tensor([uniforms[row]() for row in rows], dtype=torch.float64, device=device))
        token_ids[rows] = drawn


def _likelier(probs_BV: Tensor, token_ids_B: Tensor) -> Tensor:
    """Each row without the tokens that are no more probable than the given one."""
    # Comparing floats into floats vectorizes on the CPU; a boolean mask is four times slower.
    return probs_BV.clone().gt_(probs_BV.gather(1, token_ids_B[:, None])).mul_(probs_BV)


def _invert_rows(weights_BV: Tensor, uniforms_B: Tensor) -> Tensor:
    """The token at which each row's running sum passes the uniform share of its total."""
    blocks = weights_BV.view(len(weights_BV), -1, BLOCK)
    block, within = _invert(blocks.sum(-1), uniforms_B)
    rows = torch.arange(len(blocks), device=blocks.device)
    column, _ = _invert(blocks[rows, block], within)
    return block * BLOCK + column


def _invert(weights_BN: Tensor, uniforms_B: Tensor) -> tuple[Tensor, Tensor]:
    """Index drawn from weights, and how far into that index's share the uniform number lies, itself uniform in [0, 1).

    An index of weight 0 is never given, however the sums round.
    """
    cumulative = weights_BN.double().cumsum(-1)
    total = cumulative[:, -1:].contiguous()
    target = uniforms_B[:, None] * total
    last = torch.searchsorted(cumulative, total)
    index = torch.searchsorted(cumulative, target, right=True).minimum(last).clamp_(max=cumulative.shape[1] - 1)
    share = weights_BN.gather(1, index).double()
    within = 1 - (cumulative.gather(1, index) - target) / share
    return index[:, 0], within[:, 0].clamp(0, 1)


def greedy_tokens(logits_BV: Tensor, vocab_size: int, bitmask_BW: Tensor | None = None) -> list[int] | None:
    """The first index of each row's maximum among those of its first `vocab_size` logits whose bits are set; without a mask, among all.

    None where the kernel does not apply, or a row's maximum is not finite.
    """
    if logits_BV.device.type != "cpu" or logits_BV.dtype not in NATIVE_DTYPES or logits_BV.stride(1) != 1:
        return None
    if bitmask_BW is not None and (bitmask_BW.device.type != "cpu" or bitmask_BW.stride(1) != 1):
        return None
    library = native_library()  # last: the first call builds it
    if library is None:
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
    seeds = [0 if state.takes_first else int((state.fresh_rng or shared_generator).random() * SEEDS) for state in states]
    temperatures_B, top_ps_B, min_ps_B = to_device(torch.tensor(reals, dtype=torch.float32), work_BV.device)
    top_ks_B, seeds_B = to_device(torch.tensor([top_ks, seeds], dtype=torch.int64), work_BV.device)
    max_top_k = max((top_k for top_k in top_ks if top_k < vocab_size), default=0)
    token_ids_B, is_possible_B = sample(
        work_BV, temperatures_B, top_ps_B, min_ps_B, seeds_B, top_ks_B=top_ks_B if max_top_k else None, max_top_k=max_top_k
    )
    return token_ids_B, is_possible_B.long()


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
