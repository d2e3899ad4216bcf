"""Repetition, presence and frequency penalties, and words that may not appear: what depends on the tokens so far."""

import copy
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.engine.device import to_device

FIRST_CAPACITY = 64


class Penalties(NamedTuple):
    """One row's penalties; the neutral values are 1, 0 and 0."""

    repetition: float
    presence: float
    frequency: float


class TokenCounts:
    """How often each token is in one sequence's output, kept up to date token by token.

    `ids` int64 [N] are the distinct tokens of prompt and output, `counts` float32 [N] their occurrences in the output, so 0 for a token
    that only the prompt holds. Both live on the device and are views that the next `append` may invalidate.
    """

    def __init__(self, prompt_token_ids: Iterable[int], device: torch.device) -> None:
        distinct = list(dict.fromkeys(prompt_token_ids))
        capacity = max(FIRST_CAPACITY, 2 * len(distinct))
        self._slots = {token_id: slot for slot, token_id in enumerate(distinct)}
        self._ids = torch.zeros(capacity, dtype=torch.int64, device=device)
        self._counts = torch.zeros(capacity, dtype=torch.float32, device=device)
        self._ids[: len(distinct)] = to_device(torch.tensor(distinct, dtype=torch.int64), device)

    @property
    def ids(self) -> Tensor:
        return self._ids[: len(self._slots)]

    @property
    def counts(self) -> Tensor:
        return self._counts[: len(self._slots)]

    def copy(self) -> "TokenCounts":
        """An independent copy."""
        other = copy.copy(self)
        other._slots = self._slots.copy()
        other._ids = self._ids.clone()
        other._counts = self._counts.clone()
        return other

    def append(self, token_id: int) -> None:
        slot = self._slots.get(token_id)
        if slot is None:
            slot = len(self._slots)
            if slot == len(self._ids):
                self._ids = torch.cat((self._ids, torch.zeros_like(self._ids)))
                self._counts = torch.cat((self._counts, torch.zeros_like(self._counts)))
            self._slots[token_id] = slot
            self._ids[slot] = token_id
        self._counts[slot] += 1


def apply_penalties(logits_BV: Tensor, rows: Sequence[int], counts: Sequence[TokenCounts], penalties: Sequence[Penalties]) -> None:
    """Changes float32 [B, V] logits in place; the three sequences belong together, one entry per penalised row.

    Repetition (CTRL, arXiv:1909.05858) divides positive logits and multiplies negative ones, for tokens of prompt and output.
    Presence and frequency, as OpenAI defines them, are subtracted for tokens of the output.
    """
    if not rows:
        return
    device = logits_BV.device
    ids = torch.cat([row_counts.ids for row_counts in counts])
    occurrences = torch.cat([row_counts.counts for row_counts in counts])
    lengths = torch.tensor([len(row_counts.ids) for row_counts in counts], device=device)
    row_index = torch.tensor(rows, device=device).repeat_interleave(lengths, output_size=len(ids))
    repetition, presence, frequency = (
        torch.tensor(penalties, dtype=torch.float32, device=device).repeat_interleave(lengths, dim=0, output_size=len(ids)).unbind(1)
    )
    logits = logits_BV[row_index, ids]
    logits = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits -= frequency * occurrences + presence * (occurrences > 0)
    logits_BV[row_index, ids] = logits


class BadWords:
    """Which tokens would complete a forbidden sequence now.

    A sequence is forbidden in the output alone: one that begins in the prompt is not caught. The caller tokenizes each word with and
    without a leading space, and gives both.
    """

    def __init__(self, sequences: Iterable[Sequence[int]]) -> None:
        self._last_ids: dict[tuple[int, ...], list[int]] = {}  # by what comes before them
        for sequence in sequences:
            if sequence:
                self._last_ids.setdefault(tuple(sequence[:-1]), []).append(sequence[-1])
        self._lengths = sorted({len(beginning) for beginning in self._last_ids})
        self._tail: deque[int] = deque(maxlen=max(self._lengths, default=0))

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self._last_ids)

    def append(self, token_id: int) -> None:
        self._tail.append(token_id)

    def copy(self) -> "BadWords":
        """An independent copy."""
        other = copy.copy(self)
        other._tail = self._tail.copy()
        return other

    def completing_ids(self) -> list[int]:
        tail = tuple(self._tail)
        beginnings = (tail[len(tail) - length :] for length in self._lengths if length <= len(tail))
        return [token_id for beginning in beginnings for token_id in self._last_ids.get(beginning, ())]
