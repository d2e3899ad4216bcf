"""The sampler's state of one sequence: token counts for penalties, bad words, and counter-based random numbers."""

import copy
from array import array
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from hashlib import blake2b
from struct import pack
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from penstock.engine.contracts.logits_processor import ChosenProcessor, LogitsRow
from penstock.engine.sampling.distribution import MaskPlace
from penstock.engine.sampling.params import SamplingParams
from penstock.engine.system.device import to_device
from penstock.engine.text.patterns import PatternState, compile_sequences

if TYPE_CHECKING:
    from penstock.engine.constraints.closing import Closing


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
        other = copy.copy(self)
        other._slots, other.ids, other.counts = self._slots.copy(), self.ids[:], self.counts[:]
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
            is_known_R = torch.zeros(len(rows), dtype=torch.float32, device=device).index_add_(0, place_N, is_pending_N.float()) > 0
        logits_BV[rows_R[place_N], ids_N] = penalised(logits_BV[rows_R[place_N], ids_N], occurrences_N, penalties_R3[place_N])
    if pending_R is not None:
        ids_R = pending_R.clamp(min=0)
        logits_R = logits_BV[rows_R, ids_R]
        is_new_R = (pending_R >= 0) & ~is_known_R
        logits_BV[rows_R, ids_R] = torch.where(is_new_R, penalised(logits_R, torch.ones_like(logits_R), penalties_R3), logits_R)


MAX_LOGIT_BIAS = 100.0
SECOND_SEED = 0x9E3779B97F4A7C15  # 2^64 over the golden ratio: seeds that clients choose side by side stay apart


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

    def again(self, attempt: int = 0) -> "CounterRng":
        """The numbers of the same position, from the first one on; others in each `attempt`."""
        rng = CounterRng(self._seed, self._position)
        rng._num_drawn = attempt << 32
        return rng

    def apart(self) -> "CounterRng":
        """Numbers of another sequence, independent of these, from the same position on."""
        return CounterRng(self._seed ^ SECOND_SEED, self._position)

    def at_next_position(self) -> "CounterRng":
        return CounterRng(self._seed, self._position + 1)


@dataclass(frozen=True, slots=True)
class TokenRules:
    """What a request's parameters say of single tokens, as the sampler reads it.

    There may be hundreds of thousands of them, so they are prepared once for all sequences of a request, off the event loop.
    `bad_words` reads the output alone: a word that begins in the prompt is not caught.
    """

    bad_words: PatternState[int]
    allowed_ids: Tensor | None
    bias_ids: Tensor | None
    biases: Tensor

    @classmethod
    def of(cls, params: SamplingParams, bad_words_ids: Iterable[Sequence[int]], vocab_size: int) -> "TokenRules":
        """On the CPU. `bad_words_ids` are token ids that the output may not have in a row."""
        bad_words = tuple(tuple(ids) for ids in bad_words_ids if ids and max(ids) < vocab_size)
        biases = torch.tensor(list(params.logit_bias.values()), dtype=torch.float64).clamp(-MAX_LOGIT_BIAS, MAX_LOGIT_BIAS).float()
        allowed_ids, bias_ids = _ids_tensor(params.allowed_token_ids), _ids_tensor(params.logit_bias)
        return cls(compile_sequences(bad_words), allowed_ids, bias_ids, biases)

    def on(self, device: torch.device) -> "TokenRules":
        """The same on that device."""
        allowed_ids, bias_ids = (None if ids is None else to_device(ids, device) for ids in (self.allowed_ids, self.bias_ids))
        return replace(self, allowed_ids=allowed_ids, bias_ids=bias_ids, biases=to_device(self.biases, device))


class SamplingState:
    """Parameters, penalties' counts and random numbers of one sequence. Nothing in it belongs to the cache: it survives preemption.

    `is_constrained` is set where a grammar decides on the next token; from then on `min_tokens` does not apply. `block_stop` keeps stop ids
    from being sampled, constrained or not, until the next token is appended. `seed_offset` tells the n sequences of a request apart.
    `processors` are those that the request has chosen. Where `num_candidates` is not 0, the row is not sampled from: beam search
    chooses among that many tokens. Nor is it where there is a `mask_place`: exact sampling draws from its whole distribution. It
    `measures_pressure` where the request asks for that. With a `pending_row`, one more token belongs to the output than is known: the one
    that the step before samples in that row. Where it `is_stationary`, nothing in it changes from the next token on. `counts` are those of
    a sequence with the same prompt and no output yet, to be copied. Prompt tokens at the positions `placeholders` count for nothing.
    Where a `closing` has refused tokens that were drawn in this place, others are drawn with other numbers.
    `first_token_id` is what the first token has to be, where another process has sampled it.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt_token_ids: Sequence[int],
        *,
        placeholders: AbstractSet[int] = frozenset(),
        vocab_size: int,
        stop_token_ids: frozenset[int],
        rules: TokenRules,
        processors: Sequence[ChosenProcessor],
        seed_offset: int,
        request_id: str = "",
        client_id: int | str | None = None,
        counts: CountedTokens | None = None,
        first_token_id: int | None = None,
    ) -> None:
        self.params = params
        self.is_constrained = False
        self.block_stop = False
        self.num_output_tokens = 0
        self.num_candidates = 0
        self.mask_place: MaskPlace | None = None
        self.measures_pressure = False
        self.closing: Closing | None = None
        self.rng = None if params.seed is None else CounterRng(params.seed + seed_offset)
        self.token_ids = list(prompt_token_ids) if processors else []
        row = LogitsRow(request_id, seed_offset, client_id, self.token_ids)
        self.processors = [chosen.begin(row) for chosen in processors]
        self._vocab_size = vocab_size
        self._stop_token_ids = sorted(token_id for token_id in stop_token_ids if token_id < vocab_size)
        self._rules = rules
        self._bad_words = rules.bad_words
        self.allowed_ids, self.bias_ids, self.biases = rules.allowed_ids, rules.bias_ids, rules.biases
        if first_token_id is not None:
            self.allowed_ids = _ids_tensor([first_token_id])
        self.penalties = Penalties(params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
        self.pending_row: int | None = None
        self.counts: CountedTokens | None = None
        if self.penalties != Penalties(1.0, 0.0, 0.0):
            tokens = (token_id for position, token_id in enumerate(prompt_token_ids) if position not in placeholders)
            known = (token_id for token_id in tokens if 0 <= token_id < vocab_size) if params.repetition_penalty != 1 else ()
            self.counts = counts.copy() if isinstance(counts, TokenCounts) else TokenCounts(known)
        self._follows_tokens = bool(self.counts is not None or self.rng is not None or self.processors or rules.bad_words.has_patterns)
        self.is_stationary = not self._follows_tokens and params.min_tokens == 0 and first_token_id is None

    @property
    def top_k(self) -> int | None:
        """The `top_k` that takes something away, else None."""
        return self.params.top_k if 0 < self.params.top_k < self._vocab_size else None

    @property
    def takes_first(self) -> bool:
        """Whether nothing is drawn for it."""
        return self.params.is_greedy or self.num_candidates > 0 or self.mask_place is not None

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
        return not self.processors and not self.num_candidates and self.mask_place is None

    @property
    def wants_pressure(self) -> bool:
        """Whether it is to be measured how probable the tokens are that the next one's mask leaves."""
        return self.measures_pressure and self.is_constrained

    def must_follow(self) -> None:
        """The request has rules beyond these parameters that depend on the tokens so far: it never `is_stationary`."""
        self._follows_tokens = True
        self.is_stationary = False

    @property
    def fresh_rng(self) -> CounterRng | None:
        """A copy of `rng` for one draw of the next token, so that a step that is dropped has used up none of its numbers."""
        if self.rng is None:
            return None
        return self.rng.again(0 if self.closing is None else self.closing.num_refused)

    def append(self, token_id: int) -> None:
        """A token was added to the output, sampled or forced."""
        self.num_output_tokens += 1
        self.block_stop = False
        if self.is_stationary:
            return
        self.allowed_ids = self._rules.allowed_ids
        self.is_stationary = not self._follows_tokens and self.num_output_tokens >= self.params.min_tokens
        self.rng = None if self.rng is None else self.rng.at_next_position()
        self._bad_words = self._bad_words.step(token_id)
        if isinstance(self.counts, TokenCounts) and token_id < self._vocab_size:
            self.counts.append(token_id)
        if self.processors:
            self.token_ids.append(token_id)

    def fork(self) -> "SamplingState":
        """An independent copy. What logits processors remember is copied, as far as `copy.deepcopy` finds it."""
        state = copy.copy(self)
        state.counts = self.counts.copy() if isinstance(self.counts, TokenCounts) else None
        state.token_ids = list(self.token_ids)
        state.processors = [processor.fork(state.token_ids) for processor in self.processors]
        return state

    def apart(self) -> "SamplingState":
        """A copy for other tokens than were sampled here: with random numbers of its own, as those have decided against them."""
        state = self.fork()
        state.rng = None if self.rng is None else self.rng.apart()
        state.allowed_ids = self._rules.allowed_ids
        return state

    def after(self, token_id: int) -> "SamplingState":
        """As it will be with the token appended: a copy, unless stationary. Not for those with logits processors, whose copies are dear."""
        assert not self.processors
        if self.is_stationary:
            return self
        state = self.fork()
        state.append(token_id)
        state.closing = None
        return state

    def after_any(self, pending_row: int) -> "SamplingState":
        """As it will be after the next token, whichever that is: the step before samples it in this row. A copy, unless stationary."""
        assert self.is_predictable
        if self.is_stationary:
            return self
        state = SamplingState.__new__(SamplingState)
        state.__dict__.update(self.__dict__)  # `copy.copy` takes four times as long, for each sequence of each step
        state.num_output_tokens += 1
        state.block_stop = False
        state.allowed_ids = self._rules.allowed_ids
        state.rng = None if self.rng is None else self.rng.at_next_position()
        state.pending_row = pending_row
        state.closing = None
        if self.counts is not None:
            state.counts = self.counts.snapshot()
        return state

    def masked_ids(self) -> list[int]:
        """Tokens that may not come next: the last ones of bad words, and stop ids while they are blocked."""
        if self.is_stationary and not self.block_stop:
            return []
        masked = self._bad_words.completing if self.pending_row is None else self._rules.bad_words.completing
        is_too_short = self.num_output_tokens < self.params.min_tokens and not self.is_constrained
        if self.block_stop or is_too_short:
            masked += self._stop_token_ids
        return masked

    def masked_after_pending(self) -> list[tuple[int, int]]:
        """Pairs of what the pending token may be, and a token that may not come next where it is that."""
        return [] if self.pending_row is None else self._bad_words.completing_after


def _ids_tensor(token_ids: Iterable[int]) -> Tensor | None:
    ids = list(token_ids)
    return torch.tensor(ids, dtype=torch.int64) if ids else None
