"""The most probable tokens of few rows without all of their logits, by a second output layer of fewer bits.

The output layer is a large part of what a step of one row reads: in 8 bits a third of a small model. `engine/native/greedy_head.h` says how
a weight of fewer bits and the norms of the differences tell which tokens need their true logits. That weight is the embedding's where a
file has the same matrix in two types; otherwise the output layer is rounded to 4 bits.

It pays where the output layer comes from memory. Where a processor's cache holds it, and where many tokens may be the most probable one,
all logits are there sooner: both ways are timed as steps go on, and the faster one is taken.
"""

import ctypes
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from penstock.engine.native.runtime import native_library
from penstock.engine.sampling.sampler import greedy_tokens
from penstock.engine.weights.linear import QuantizedEmbedding, QuantizedLinear, QuantizedPart, native_parts
from penstock.engine.weights.packed import GROUP_SIZE, ROUNDED, TILE, PackedWeight, WeightType, pack, quantized

MAX_ROWS = 3  # products with more take longer than reading the weight
MAX_DRAFT_ROWS = 8  # with drafts, behind whose wrong tokens no row is looked at
MIN_BITS_SAVED = 1.5  # of a weight: with fewer, true logits cost what is saved
MAX_ERROR = 0.15  # of a row, relative: 4 bits make about 0.09
ROWS_AT_ONCE = 512
ROUNDING = 1e-4  # of sums, relative to a row's norm, and more than that

NUM_TIMES = 5  # of the last calls, of which the median counts
RETRY_EVERY = 32  # calls: the way that was slower may have become the faster one

Run = Callable[[Callable[[], Tensor]], Tensor]


@dataclass(slots=True)
class FasterWay:
    """Which of two ways to the same result takes less time, as the last calls of either tell."""

    _times: tuple[deque[float], deque[float]] = field(default_factory=lambda: (deque(maxlen=NUM_TIMES), deque(maxlen=NUM_TIMES)))
    _num_calls: int = 0

    def next(self) -> bool:
        """Whether the next call is to go the second way: each at first, and now and then the slower one."""
        self._num_calls += 1
        first, second = self._times
        if min(len(first), len(second)) < NUM_TIMES:
            return len(second) < len(first)
        is_second = statistics.median(second) < statistics.median(first)
        return is_second if self._num_calls % RETRY_EVERY else not is_second

    def took(self, seconds: float, *, is_second: bool) -> None:
        self._times[is_second].append(seconds)


class _GreedyHead(ctypes.Structure):
    _fields_ = (
        ("exact", QuantizedPart),
        ("coarse", QuantizedPart),
        ("errors", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("num_groups", "vocab_size")),
    )


@dataclass(frozen=True, slots=True)
class MostProbable:
    """The first index of each row's highest logit; with all logits, [K, V], where these were computed."""

    token_ids: list[int]
    logits_KV: Tensor | None = None


class GreedyHead:
    """`errors_V` are at least the norms of the differences between the rows of the two weights."""

    def __init__(self, exact: PackedWeight, coarse: PackedWeight, errors_V: Tensor, vocab_size: int) -> None:
        assert exact.in_features == coarse.in_features
        assert exact.out_features == coarse.out_features >= vocab_size
        self._errors_V = nn.functional.pad(errors_V, (0, -len(errors_V) % TILE)).contiguous()
        self.weights = (exact, coarse)  # of whose blocks the native code has the addresses
        parts = native_parts(*zip(*((each.blocks, each.weight_type.number, each.out_features) for each in self.weights), strict=True))
        self._structure = _GreedyHead(*parts, self._errors_V.data_ptr(), exact.in_features // GROUP_SIZE, vocab_size)
        self._vocab_size = vocab_size
        self._faster: dict[tuple[int, bool], FasterWay] = {}  # for so many rows, without and with drafts

    @property
    def num_bytes(self) -> int:
        """That are read for each call, beside a few true logits' weights."""
        return self.weights[1].blocks.nbytes + self._errors_V.nbytes

    def most_probable(
        self, hidden_KH: Tensor, head: Callable[[Tensor], Tensor], drafted: Sequence[int] | None = None
    ) -> MostProbable | None:
        """As `tokens`, or by all logits, which `head` computes, where that is faster."""
        faster = self._faster.setdefault((len(hidden_KH), drafted is not None), FasterWay())
        has_all = faster.next()
        began_at = time.perf_counter()
        logits_KV = head(hidden_KH) if has_all else None
        token_ids = self.tokens(hidden_KH, drafted) if logits_KV is None else greedy_tokens(logits_KV, self._vocab_size)
        faster.took(time.perf_counter() - began_at, is_second=has_all)
        return None if token_ids is None else MostProbable(token_ids, logits_KV)

    def tokens(self, hidden_KH: Tensor, drafted: Sequence[int] | None = None) -> list[int] | None:
        """The first index of each row's highest logit, of bfloat16 rows; None where one is not finite.

        Where `drafted` has a draft token for a row, and not -1, the row after it follows on that token. Behind a draft token that is not
        the most probable one, rows are not looked at, and have any token.
        """
        library = native_library()
        assert library is not None
        assert hidden_KH.dtype == torch.bfloat16
        assert hidden_KH.is_contiguous()
        token_ids_K, num_rows = torch.empty(len(hidden_KH), dtype=torch.int64), len(hidden_KH)
        drafted_K = torch.tensor([-1] * num_rows if drafted is None else drafted, dtype=torch.int64)
        library.penstock_most_probable_tokens(
            token_ids_K.data_ptr(), ctypes.addressof(self._structure), hidden_KH.data_ptr(), num_rows, drafted_K.data_ptr()
        )
        ids: list[int] = token_ids_K.tolist()
        return ids if min(ids, default=0) >= 0 else None


def prepare_greedy_head(head: nn.Module, embedding: nn.Module, vocab_size: int, run: Run) -> GreedyHead | None:
    """None for an output layer of another kind, or of few bits. `run` calls a function of a few milliseconds in the thread of the model."""
    if not isinstance(head, QuantizedLinear) or head.bias is not None or head.order is not None or len(head.packed) != 1:
        return None
    if native_library() is None:
        return None
    (exact,) = head.packed
    coarse = _suitable(exact, embedding, run)
    if coarse is None and _saves(exact, ROUNDED[4]):
        coarse = _rounded(exact, run)
    if coarse is None:
        return None
    errors_V = torch.cat([run(partial(_errors, exact, coarse, rows)) for rows in _slices(exact)])
    return GreedyHead(exact, coarse, errors_V, vocab_size) if bool(errors_V.isfinite().all()) else None


def _suitable(exact: PackedWeight, embedding: nn.Module, run: Run) -> PackedWeight | None:
    """The embedding's weight, where it is close to the output layer's and has fewer bits."""
    weight = embedding.weight if isinstance(embedding, QuantizedEmbedding) else None
    if weight is None or (weight.in_features, weight.out_features) != (exact.in_features, exact.out_features):
        return None
    if not _saves(exact, weight.weight_type):
        return None
    rows = slice(0, min(ROWS_AT_ONCE, exact.out_features))
    ratio = run(lambda: _errors(exact, weight, rows).median() / _rows(exact, rows).norm(dim=1).median())
    return weight if ratio < MAX_ERROR else None


def _saves(exact: PackedWeight, coarse: WeightType) -> bool:
    return exact.weight_type.bits_per_weight - coarse.bits_per_weight >= MIN_BITS_SAVED


def _rounded(exact: PackedWeight, run: Run) -> PackedWeight:
    parts = [pack(quantized(run(partial(_rows, exact, rows)), 4)) for rows in _slices(exact)]
    return PackedWeight(parts[0].type_name, exact.out_features, torch.cat([part.blocks for part in parts]))


def _slices(weight: PackedWeight) -> list[slice]:
    """All of its rows, so many at once that `run` takes a few milliseconds."""
    return [slice(first, min(first + ROWS_AT_ONCE, weight.out_features)) for first in range(0, weight.out_features, ROWS_AT_ONCE)]


def _errors(exact: PackedWeight, coarse: PackedWeight, rows: slice) -> Tensor:
    exact_RI = _rows(exact, rows)
    errors_R: Tensor = torch.linalg.vector_norm(exact_RI - _rows(coarse, rows), dim=1) * 1.001
    errors_R += torch.linalg.vector_norm(exact_RI, dim=1) * ROUNDING
    return errors_R


def _rows(weight: PackedWeight, rows: slice) -> Tensor:
    found_RI: Tensor = QuantizedEmbedding(weight, torch.float32)(torch.arange(rows.start, rows.stop))
    return found_RI
