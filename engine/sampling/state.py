"""The sampler's state of one sequence."""

import copy
from array import array
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from struct import pack
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.engine.contracts.logits_processor import ChosenProcessor, LogitsRow
from penstock.engine.sampling.params import SamplingParams
from penstock.engine.system.device import to_device


class Penalties(NamedTuple):
    """One row's penalties; the neutral values are 1, 0 and 0."""

    repetition: float
    presence: float
    frequency: float


@dataclass(slots=True)
class CountedTokens:
    """How often each token is in one sequence's output: the distinct tokens of prompt and output, and their occurrences in the output.

    A token that only the prompt holds occurs 0 times.
    """

    ids: "array[int]"
    counts: "array[float]"

    def snapshot(self) -> "CountedTokens":
        """A copy that stays as it is."""
        return CountedTokens(self.ids[:], self.counts[:])


class TokenCounts(CountedTokens):
    """Kept up to date token by token."""

    def __init__(self, prompt_token_ids: Iterable[int]) -> None:
        self._slots = {token_id: slot for slot, token_id in enumerate(dict.fromkeys(prompt_token_ids))}
        super().__init__(array("q", self._slots), array("f", bytes(4 * len(self._slots))))

    def copy(self) -> "TokenCounts":
        """An independent copy."""
        other = TokenCounts(self.ids)
        other.counts[:] = self.counts
        return other

    def append(self, token_id: int) -> None:
        slot = self._slots.setdefault(token_id, len(self.ids))
        if slot == len(self.ids):
            self.ids.append(token_id)
            self.counts.append(0.0)
        self.counts[slot] += 1


def apply_penalties(
    logits_BV: Tensor,
    rows: Sequence[int],
    counts: Sequence[CountedTokens],
    penalties: Sequence[Penalties],
    pending_R: Tensor | None = None,
) -> None:
    """Changes float32 [B, V] logits in place; the sequences belong together, one entry per penalised row. Never waits for the device.

    Repetition (CTRL, arXiv:1909.05858) divides positive logits and multiplies negative ones, for tokens of prompt and output.
    Presence and frequency, as OpenAI defines them, are subtracted for tokens of the output. `pending_R` are one more token of each row's
    output, -1 for none.
    """
    if not rows:
        return
    device = logits_BV.device
    all_ids, all_counts = array("q"), array("f")
    for row_counts in counts:
        all_ids += row_counts.ids
        all_counts += row_counts.counts
    lengths = [len(row_counts.ids) for row_counts in counts]
    rows_R, lengths_R = to_device(torch.tensor([rows, lengths]), device)
    penalties_R3 = to_device(torch.tensor(penalties, dtype=torch.float32), device)

    def penalised(logits: Tensor, occurrences: Tensor, penalties_N3: Tensor) -> Tensor:
        repetition, presence, frequency = penalties_N3.unbind(1)
        logits = torch.where(logits > 0, logits / repetition, logits * repetition)
        return logits - frequency * occurrences - presence * (occurrences > 0)

    place_N = torch.arange(len(rows), device=device).repeat_interleave(lengths_R, output_size=len(all_ids))
    is_known_R = torch.zeros(len(rows), dtype=torch.bool, device=device)
    if len(all_ids):
        ids_N = to_device(torch.frombuffer(all_ids, dtype=torch.int64), device)
        occurrences_N = to_device(torch.frombuffer(all_counts, dtype=torch.float32), device)
        if pending_R is not None:
            is_pending_N = ids_N == pending_R[place_N]
            occurrences_N = occurrences_N + is_pending_N
            is_known_R = torch.zeros(len(rows), device=device).index_add_(0, place_N, is_pending_N.float()) > 0
        logits_BV[rows_R[place_N], ids_N] = penalised(logits_BV[rows_R[place_N], ids_N], occurrences_N, penalties_R3[place_N])
    if pending_R is not None:
        ids_R = pending_R.clamp(min=0)
        logits_R = logits_BV[rows_R, ids_R]
        is_new_R = (pending_R >= 0) & ~is_known_R
        logits_BV[rows_R, ids_R] = torch.where(is_new_R, penalised(logits_R, torch.ones_like(logits_R), penalties_R3), logits_R)


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

    @property
    def single_ids(self) -> list[int]:
        """Those that complete a sequence whatever comes before them."""
        return self._last_ids.get((), [])

    def ids_completing_after(self) -> list[tuple[int, int]]:
        """Pairs of one more token, whose id is not known yet, and a token that completes a sequence after it."""
        tail = tuple(self._tail)
        return [
            (beginning[-1], token_id)
            for beginning, last_ids in self._last_ids.items()
            if beginning and len(tail) >= len(beginning) - 1 and tail[len(tail) - len(beginning) + 1 :] == beginning[:-1]
            for token_id in last_ids
        ]


MAX_LOGIT_BIAS = 100.0


class CounterRng:
    """Counter-based uniform numbers in [0, 1): a hash of the seed, the token's position in the answer, and the draws at that position.

    So what a seed gives does not depend on the number of draft tokens in a step, or on samples that are rejected.
    """

    __slots__ = ("_num_drawn", "_position", "_seed")

    def __init__(self, seed: int, position: int = 0) -> None:
        self._seed = seed % 2**64
        self._position = position
        self._num_drawn = 0

    def random(self) -> float:
        digest = blake2b(pack("<QQQ", self._seed, self._position, self._num_drawn), digest_size=8).digest()
        self._num_drawn += 1
        return (int.from_bytes(digest, "little") >> 11) * 2.0**-53

    def again(self) -> "CounterRng":
        """The numbers of the same position, from the first one on."""
        return CounterRng(self._seed, self._position)

    def at_next_position(self) -> "CounterRng":
        return CounterRng(self._seed, self._position + 1)


class SamplingState:
    """Parameters, penalties' counts and random numbers of one sequence. Nothing in it belongs to the cache: it survives preemption.

    `is_constrained` is set where a grammar decides on the next token; from then on `min_tokens` does not apply. `block_stop` keeps stop ids
    from being sampled, constrained or not, until the next token is appended. `seed_offset` tells the n sequences of a request apart.
    `processors` are those that the request has chosen. Where `num_candidates` is not 0, the row is not sampled from: beam search
    chooses among that many tokens. With a `pending_row`, one more token belongs to the output than is known: the one that the step before
    samples in that row.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt_token_ids: Sequence[int],
        *,
        vocab_size: int,
        stop_token_ids: frozenset[int],
        bad_words_ids: list[list[int]],
        processors: Sequence[ChosenProcessor],
        seed_offset: int,
        device: torch.device | str,
        request_id: str = "",
        client_id: int | str | None = None,
    ) -> None:
        device = torch.device(device)
        self.params = params
        self.is_constrained = False
        self.block_stop = False
        self.num_output_tokens = 0
        self.num_candidates = 0
        self.generator = None if params.seed is None else CounterRng(params.seed + seed_offset)
        self.token_ids = list(prompt_token_ids) if processors else []
        row = LogitsRow(request_id, seed_offset, client_id, self.token_ids)
        self.processors = [chosen.begin(row) for chosen in processors]
        self._vocab_size = vocab_size
        self._stop_token_ids = sorted(token_id for token_id in stop_token_ids if token_id < vocab_size)
        self._bad_words = BadWords(ids for ids in bad_words_ids if all(token_id < vocab_size for token_id in ids))
        self.penalties = Penalties(params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
        self.pending_row: int | None = None
        self.counts: CountedTokens | None = None
        if self.penalties != Penalties(1.0, 0.0, 0.0):
            # Placeholders of images and the like have ids beyond the vocabulary.
            in_vocabulary = (token_id for token_id in prompt_token_ids if 0 <= token_id < vocab_size)
            self.counts = TokenCounts(in_vocabulary if params.repetition_penalty != 1 else ())
        self.allowed_ids = _ids_tensor(params.allowed_token_ids, device)
        self.bias_ids = _ids_tensor(params.logit_bias, device)
        biases = torch.tensor(list(params.logit_bias.values()), dtype=torch.float64)
        self.biases = to_device(biases.clamp(-MAX_LOGIT_BIAS, MAX_LOGIT_BIAS).float(), device)

    @property
    def top_k(self) -> int | None:
        """The `top_k` that takes something away, else None."""
        return self.params.top_k if 0 < self.params.top_k < self._vocab_size else None

    @property
    def takes_first(self) -> bool:
        """Whether nothing is drawn for it."""
        return self.params.is_greedy or self.num_candidates > 0

    @property
    def num_logprobs(self) -> int | None:
        """How many alternatives go with the sampled token; None where no log probability is wanted, or nothing is sampled."""
        return None if self.num_candidates else self.params.logprobs

    @property
    def takes_most_probable(self) -> bool:
        """Whether the next token is the one that the model finds most probable, and nothing else is asked."""
        rules = (self.counts, self.allowed_ids, self.bias_ids, self.params.logprobs)
        is_plain = self.params.is_greedy and not self.num_candidates and not self.processors and all(rule is None for rule in rules)
        return is_plain and not self.masked_ids() and not self.masked_after_pending()

    @property
    def is_predictable(self) -> bool:
        """Whether the token after the next one can be sampled without the host's knowing the next one."""
        return not self.processors and not self.num_candidates

    @property
    def numbers(self) -> CounterRng | None:
        """For one draw of the next token. A step that is dropped has used up none of them."""
        return None if self.generator is None else self.generator.again()

    def append(self, token_id: int) -> None:
        """A token was added to the output, sampled or forced."""
        self.num_output_tokens += 1
        self.block_stop = False
        self.generator = None if self.generator is None else self.generator.at_next_position()
        self._bad_words.append(token_id)
        if isinstance(self.counts, TokenCounts) and token_id < self._vocab_size:
            self.counts.append(token_id)
        if self.processors:
            self.token_ids.append(token_id)

    def fork(self) -> "SamplingState":
        """An independent copy. What logits processors remember is copied, as far as `copy.deepcopy` finds it."""
        state = copy.copy(self)
        state._bad_words = self._bad_words.copy()
        state.counts = self.counts.copy() if isinstance(self.counts, TokenCounts) else None
        state.token_ids = list(self.token_ids)
        state.processors = [processor.fork(state.token_ids) for processor in self.processors]
        return state

    def after(self, token_id: int) -> "SamplingState":
        """A copy with the token appended. Not for sequences with logits processors, which are expensive to copy."""
        assert not self.processors
        state = self.fork()
        state.append(token_id)
        return state

    def after_any(self, pending_row: int) -> "SamplingState":
        """A copy as it will be after the next token, whichever that is: the step before samples it in this row."""
        assert self.is_predictable
        state = SamplingState.__new__(SamplingState)
        state.__dict__.update(self.__dict__)  # `copy.copy` takes four times as long, for each sequence of each step
        state.num_output_tokens += 1
        state.block_stop = False
        state.generator = None if self.generator is None else self.generator.at_next_position()
        state.pending_row = pending_row
        if self._bad_words:
            state._bad_words = self._bad_words.copy()
        if self.counts is not None:
            state.counts = self.counts.snapshot()
        return state

    def masked_ids(self) -> list[int]:
        """Tokens that may not come next: the last ones of bad words, and stop ids while they are blocked."""
        masked = self._bad_words.completing_ids() if self.pending_row is None else [*self._bad_words.single_ids]
        is_too_short = self.num_output_tokens < self.params.min_tokens and not self.is_constrained
        if self.block_stop or is_too_short:
            masked += self._stop_token_ids
        return masked

    def masked_after_pending(self) -> list[tuple[int, int]]:
        """Pairs of what the pending token may be, and a token that may not come next where it is that."""
        return [] if self.pending_row is None else self._bad_words.ids_completing_after()


def _ids_tensor(token_ids: Iterable[int], device: torch.device) -> Tensor | None:
    ids = list(token_ids)
    return to_device(torch.tensor(ids, dtype=torch.int64), device) if ids else None
