"""The rows of the logits: the sampling state of each row's sequence (token counts for penalties, bad words, counter-based random
numbers), and the choice of one token per row under its mask, the most probable or a random one, without ever sorting a vocabulary.

To choose, rows are seen as blocks of `BLOCK` columns. A token is found by its block first, so that one pass over the row, which vectorizes,
is followed by work on a few hundred numbers. All sums are per row and per block: what a row gives does not depend on its neighbours.
"""

import copy
from array import array
from collections.abc import Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from functools import cache
from hashlib import blake2b
from random import Random
from struct import pack
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from penstock.engine.constraints.masks import BITS_PER_WORD, num_words
from penstock.engine.contracts.logits_processor import ChosenProcessor, LogitsRow
from penstock.engine.kernels.launch import sample
from penstock.engine.native.runtime import native_library
from penstock.engine.sampling.distribution import MaskPlace
from penstock.engine.sampling.params import SamplingParams
from penstock.engine.system.memory import index_on, to_device
from penstock.engine.text.streaming import PatternState, compile_sequences

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
        self._stop_token_ids = sorted(token_id for token_id in stop_token_ids if 0 <= token_id < vocab_size)
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


BLOCK = 256
SPANS_PER_BLOCK = 4
SPAN = BLOCK // SPANS_PER_BLOCK
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
