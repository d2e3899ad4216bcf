"""Log probabilities of chosen tokens and of the most probable ones, from raw logits."""

from collections.abc import Sequence

import torch
from torch import Tensor

from penstock.engine.deltas import TokenLogprobs

CHUNK_ELEMENTS = 2**22  # 16 MB of float32 at a time, however long the prompt


def token_logprobs(logits_TV: Tensor, token_ids: Sequence[int], num_top: Sequence[int]) -> list[TokenLogprobs]:
    """One entry per row for `token_ids[row]`, with the row's `num_top[row]` most probable tokens.

    Logits in any float dtype, computed in float32. Equal logits rank alike, and the lower id comes first among the top ones.
    """
    if not token_ids:
        return []
    logprobs_TV = logits_TV.log_softmax(-1, dtype=torch.float32)
    chosen_T1 = logprobs_TV.gather(1, torch.tensor(token_ids, dtype=torch.int64, device=logits_TV.device)[:, None])
    most = min(max(num_top) + 1, logprobs_TV.shape[1])
    # One more than asked for: it tells whether a tie was cut.
    values, ids = logprobs_TV.topk(most) if max(num_top) else (chosen_T1, chosen_T1)
    tops = [
        top_pairs(logprobs_V, row_values, row_ids, count)
        for logprobs_V, row_values, row_ids, count in zip(logprobs_TV, values.tolist(), ids.tolist(), num_top, strict=True)
    ]
    chosen = chosen_T1[:, 0].tolist()
    ranks = logprobs_TV.gt_(chosen_T1).sum(-1).tolist()
    return [
        TokenLogprobs(token_id, logprob, int(rank) + 1, top)
        for token_id, logprob, rank, top in zip(token_ids, chosen, ranks, tops, strict=True)
    ]


def prompt_logprobs(logits_TV: Tensor, next_token_ids: Sequence[int], num_top: int) -> list[TokenLogprobs]:
    """The log probability of `next_token_ids[t]`, the token after position t. Logits [T, V], without the columns of padding."""
    chunk = max(1, CHUNK_ELEMENTS // logits_TV.shape[1])
    result: list[TokenLogprobs] = []
    for start in range(0, len(next_token_ids), chunk):
        token_ids = next_token_ids[start : start + chunk]
        result += token_logprobs(logits_TV[start : start + chunk], token_ids, [num_top] * len(token_ids))
    return result


def top_pairs(logprobs_V: Tensor, values: list[float], ids: list[int], count: int) -> tuple[tuple[int, float], ...]:
    """The first `count` of topk's answer, which orders ties and cuts them as it likes."""
    if count == 0:
        return ()
    if count < len(values) and values[count - 1] == values[count]:
        bound = values[count]
        pairs = [(token_id, value) for token_id, value in zip(ids, values, strict=True) if value > bound]
        tied = (logprobs_V == bound).nonzero()[: count - len(pairs), 0].tolist()
        pairs += [(token_id, bound) for token_id in tied]
    else:
        pairs = list(zip(ids, values, strict=True))[:count]
    return tuple(sorted(pairs, key=lambda pair: (-pair[1], pair[0])))
