"""Log probabilities of tokens, and the most probable tokens beside them."""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.engine.deltas import TokenLogprobs
from penstock.engine.system.memory import index_on

LOGPROBS_CHUNK_ELEMENTS = 2**22  # 16 MB of float32 at a time, however long the prompt


@dataclass(frozen=True, slots=True)
class LaunchedLogprobs:
    """The log probabilities of one token in each row, on the device, with the row's `num_top[row]` most probable tokens.

    `packed_TN` is int64: token id, rank, log probability as the bits of a float64, ids of the top tokens, and the bits of theirs.
    """

    packed_TN: Tensor
    num_top: Sequence[int]

    @classmethod
    def launch(cls, logits_TV: Tensor, token_ids_T: Tensor, num_top: Sequence[int]) -> "LaunchedLogprobs":
        """Logits in any float dtype, computed in float32. Never waits for the device."""
        logprobs_TV = logits_TV.log_softmax(-1, dtype=torch.float32)
        chosen_T1 = logprobs_TV.gather(1, token_ids_T[:, None])
        # Comparing floats into floats vectorizes on the CPU.
        ranks_T1 = torch.gt(logprobs_TV, chosen_T1, out=torch.empty_like(logprobs_TV)).sum(-1, keepdim=True).long() + 1
        values_TK, ids_TK = _most_probable_with_ties(logprobs_TV, num_top)
        bits_TN = torch.cat([chosen_T1, values_TK], 1).double().view(torch.int64)
        return cls(torch.cat([token_ids_T[:, None], ranks_T1, bits_TN[:, :1], ids_TK, bits_TN[:, 1:]], 1), num_top)

    def read(self, packed_TN: Tensor) -> list[TokenLogprobs]:
        """From a copy of `packed_TN` on the CPU. Equal logits rank alike, and the lower id comes first among the top ones."""
        count = (packed_TN.shape[1] - 3) // 2
        chosen = packed_TN[:, 2:3].contiguous().view(torch.float64)[:, 0].tolist()
        values = packed_TN[:, 3 + count :].contiguous().view(torch.float64).tolist()
        rows = zip(packed_TN[:, : 3 + count].tolist(), chosen, values, self.num_top, strict=True)
        return [
            TokenLogprobs(ids[0], logprob, ids[1], _in_order(zip(ids[3 : 3 + num_top], row_values, strict=False)))
            for ids, logprob, row_values, num_top in rows
        ]


def _most_probable_with_ties(logprobs_TV: Tensor, num_top: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Values and ids of as many as the greatest of `num_top`, best first. Of a tie that is cut, they are the lowest ids."""
    device, (num_rows, vocab_size) = logprobs_TV.device, logprobs_TV.shape
    most = min(max(num_top, default=0), vocab_size)
    if not most:
        return logprobs_TV[:, :0], torch.empty(num_rows, 0, dtype=torch.int64, device=device)
    # One more than asked for: it tells whether a tie was cut.
    values_TK, ids_TK = logprobs_TV.topk(min(most + 1, vocab_size))
    last_T1 = index_on(device, [max(0, min(count, most) - 1) for count in num_top])[:, None]
    bound_T1 = values_TK.gather(1, last_T1)
    if device.type == "cpu" and not (values_TK.gather(1, (last_T1 + 1).clamp(max=values_TK.shape[1] - 1)) == bound_T1).any():
        return values_TK[:, :most], ids_TK[:, :most]
    # A GPU's topk cuts ties as it likes, and to look whether it did would be to wait.
    lowest_first_V = torch.arange(0, -vocab_size, -1, dtype=torch.float32, device=device)
    tied_TK = -torch.where(logprobs_TV == bound_T1, lowest_first_V, -torch.inf).topk(most).values
    num_above_T1 = (values_TK > bound_T1).sum(1, keepdim=True)
    place_K = torch.arange(most, device=device)
    tied_TK = tied_TK.gather(1, (place_K - num_above_T1).clamp(min=0)).nan_to_num(posinf=0).long()
    return values_TK[:, :most], torch.where(place_K < num_above_T1, ids_TK[:, :most], tied_TK)


def _in_order(pairs: Iterable[tuple[int, float]]) -> tuple[tuple[int, float], ...]:
    """Best first; the lower id of those that rank alike."""
    return tuple(sorted(pairs, key=lambda pair: (-pair[1], pair[0])))


def token_logprobs(logits_TV: Tensor, token_ids: Sequence[int], num_top: Sequence[int]) -> list[TokenLogprobs]:
    """One entry per row for `token_ids[row]`, with the row's `num_top[row]` most probable tokens."""
    if not token_ids:
        return []
    launched = LaunchedLogprobs.launch(logits_TV, index_on(logits_TV.device, token_ids), num_top)
    return launched.read(launched.packed_TN.cpu())


def read_columns(*parts_TN: Tensor) -> list[list[list[float]]]:
    """Each of the matrices as lists, of floats whatever its type, with one wait for the device. Integers are exact up to 2^53."""
    rows = torch.cat([part.double() for part in parts_TN], dim=1).tolist()
    ends = list(itertools.accumulate(part.shape[1] for part in parts_TN))
    return [[row[start:end] for row in rows] for start, end in itertools.pairwise([0, *ends])]


@dataclass(frozen=True, slots=True)
class LaunchedPromptLogprobs:
    """The log probabilities of a prompt's tokens, on the device, by chunks of tokens."""

    chunks: list[LaunchedLogprobs]

    @classmethod
    def launch(cls, logits_TV: Tensor, next_token_ids: Sequence[int], num_top: int) -> "LaunchedPromptLogprobs":
        """Of `next_token_ids[t]`, the token after position t. Logits [T, V], without the columns of padding. Never waits for the device."""
        chunk = max(1, LOGPROBS_CHUNK_ELEMENTS // logits_TV.shape[1])
        token_ids_T = index_on(logits_TV.device, next_token_ids)
        parts = zip(torch.split(logits_TV, chunk), torch.split(token_ids_T, chunk), strict=True)
        return cls([LaunchedLogprobs.launch(logits, token_ids, [num_top] * len(token_ids)) for logits, token_ids in parts])

    def packed(self) -> Tensor:
        """What `read` is to be given: int64, in one tensor because that is one copy."""
        return torch.cat([chunk.packed_TN for chunk in self.chunks]).flatten()

    def read(self, packed: Tensor) -> list[TokenLogprobs]:
        """From a copy of `packed` on the CPU."""
        rows_TN = packed.view(-1, self.chunks[0].packed_TN.shape[1])
        parts = torch.split(rows_TN, len(self.chunks[0].packed_TN))
        return [entry for chunk, part_TN in zip(self.chunks, parts, strict=True) for entry in chunk.read(part_TN)]


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
    return _in_order(pairs)
