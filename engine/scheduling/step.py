"""A step as it is scheduled: the tokens of each sequence, what is copied before and after them, how many tokens a step may have, and the
draft tokens in it: how many each sequence gets by what they cost and how many are accepted, and the blocks for them.

Drafts get the tokens and blocks that nothing else in the step needs, and no sequence is preempted for them.
"""

import heapq
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul
from typing import TYPE_CHECKING, Protocol

from penstock.engine.config import DRAFT, MTP, EngineConfig
from penstock.engine.contracts.hooks import ProposerFactory
from penstock.engine.contracts.proposer import MAX_DRAFT, DraftedSequence, GuardedProposer, Proposer, SequenceProposer
from penstock.engine.deltas import SequenceDelta
from penstock.engine.errors import ConfigurationError
from penstock.engine.kv_cache.blocks import BlockPool, KVCacheManager
from penstock.engine.multimodal.inputs import PromptEmbeds, spans_within
from penstock.engine.sequence import Sequence, Status
from penstock.engine.speculation.proposers import BUILT_IN, DraftModelProposer, NgramProposer, Prediction, SequencePrediction, draft_of
from penstock.engine.system.process import Histogram

if TYPE_CHECKING:
    from penstock.engine.scheduling.scheduler import Scheduler


SHORT_CHUNK = 8  # a chunk of at most so many tokens goes through the decode kernel, which is faster for so few
MIN_CHUNK = 128  # a long prompt's share of a step never falls below this while others wait: smaller matrices waste the processor
STEPS_UNTIL_LARGER = 256  # that a step's size stays lowered for: memory that others took may be free again
STEP_BOUNDS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)  # tokens


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The states after the first `position` tokens of a sequence, which a step copies to a slot."""

    sequence: Sequence
    position: int
    slot: int


@dataclass(slots=True)
class Step:
    """One pass over the model: tokens per sequence (decodes first), and blocks (source, target) to copy before it.

    `promised` are the blocks that the pass fills and that others may count on already, in the same pass: every layer writes the keys and
    values of all tokens before any of them attends. With each comes the generation that it has in the pool. `num_held_up` counts the
    sequences passed over because their mask, or blocks from disk, are not there yet. `drafts` are the draft tokens of sequences. They are
    not in `num_tokens`. `num_wanted` is how many of the next ones a draft model is to propose.
    `is_counted` says that its tokens are among the computed ones of their sequences, although the step may still be under way.
    `snapshots` are those of recurrent layers' states that the pass takes.
    `dropped` were scheduled while the step before was in flight, and continue otherwise than was assumed: their rows count for nothing.
    """

    num_tokens: dict[Sequence, int] = field(default_factory=dict)
    copies: list[tuple[int, int]] = field(default_factory=list)
    promised: dict[int, int] = field(default_factory=dict)
    num_held_up: int = 0
    drafts: dict[Sequence, list[int]] = field(default_factory=dict)
    num_wanted: dict[Sequence, int] = field(default_factory=dict)
    snapshots: list[Snapshot] = field(default_factory=list)
    is_counted: bool = False
    dropped: set[Sequence] = field(default_factory=set)

    def __bool__(self) -> bool:
        return bool(self.num_tokens)

    def count_computed(self) -> None:
        """Its tokens are computed, or will be before anything that is scheduled from now on."""
        if self.is_counted:
            return
        self.is_counted = True
        for sequence, num_tokens in self.num_tokens.items():
            if sequence.status is Status.RUNNING:
                sequence.num_computed_tokens += num_tokens

    def still_promised(self, pool: BlockPool) -> list[int]:
        """The promised blocks that hold, or will hold, what they were promised with.

        A sequence that ends while the step is in flight frees its blocks, and a step scheduled ahead may publish them for another sequence.
        """
        return [block for block, generation in self.promised.items() if pool.generation(block) == generation]


def is_chunk(sequence: Sequence, num_tokens: int) -> bool:
    """Whether these next tokens of the sequence go through the prefill kernel, which alone knows attention in both directions."""
    if num_tokens == 1 or not sequence.request.embeds:
        return num_tokens > SHORT_CHUNK
    first = sequence.num_computed_tokens
    return num_tokens > SHORT_CHUNK or any(spans_within(sequence.request.embeds, first, first + num_tokens))


@dataclass(slots=True)
class TokenBudget:
    """The tokens one step may compute; lives for one call of `schedule`. As many may be those of images that begin in the step."""

    left: int
    _num_image_tokens: int = 0
    _max_image_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        self._max_image_tokens = self.left

    def take(self, wanted: int, num_others: int) -> int:
        """What one sequence may have of it. A long prompt takes half at most, so that it does not shut out those behind it."""
        share = max(MIN_CHUNK, self.left // 2) if num_others else self.left
        granted = min(wanted, share, self.left)
        self.left -= granted
        return granted

    def fit_images(self, sequence: Sequence, granted: int) -> int:
        """How many tokens the sequence computes where so many were granted: none of an image that has to wait for a later step, and of
        those whose tokens attend in both directions all or none.

        One image is always computed, however large it is.
        """
        if not sequence.request.embeds:
            return granted
        return self._with_whole_spans(sequence, self._before_image(sequence, granted))

    def _with_whole_spans(self, sequence: Sequence, granted: int) -> int:
        first = sequence.num_computed_tokens
        end = first + granted
        for start, stop in spans_within(sequence.request.embeds, first, end):
            if stop > end and (stop - end <= self.left or stop - start > self._max_image_tokens):
                self.left = max(0, self.left - (stop - end))
                return stop - first
            if stop > end:
                num_tokens = max(0, start - first)
                self.left += granted - num_tokens
                return num_tokens
        return granted

    def _before_image(self, sequence: Sequence, granted: int) -> int:
        first = sequence.num_computed_tokens
        for source in sequence.request.embeds:
            start, size = source.positions[0], len(source.positions)
            if isinstance(source, PromptEmbeds) or not first <= start < first + granted:
                continue
            if self._num_image_tokens and self._num_image_tokens + size > self._max_image_tokens:
                self.left += granted - (start - first)
                return start - first
            self._num_image_tokens += size
        return granted


@dataclass(slots=True)
class StepSize:
    """The most tokens of a step: as many as were asked for, or fewer for a while after a step that ran out of memory.

    `tokens` are those of the steps so far.
    """

    scheduler: "Scheduler"
    tokens: Histogram = field(default_factory=lambda: Histogram(STEP_BOUNDS))
    _usual: int = field(init=False)
    _num_steps_left: int = 0

    def __post_init__(self) -> None:
        self._usual = self.scheduler.max_num_batched_tokens

    def halve(self, num_tokens: int) -> int:
        """Of a step of so many tokens; returns what is left."""
        self.scheduler.max_num_batched_tokens = max(1, num_tokens // 2)
        self._num_steps_left = STEPS_UNTIL_LARGER
        return self.scheduler.max_num_batched_tokens

    def count_step(self, num_tokens: int) -> None:
        """A step of so many tokens has been computed."""
        self.tokens.observe(num_tokens)
        if self.scheduler.max_num_batched_tokens == self._usual:
            return
        self._num_steps_left -= 1
        if self._num_steps_left == 0:
            self.scheduler.max_num_batched_tokens = min(self._usual, 2 * self.scheduler.max_num_batched_tokens)
            self._num_steps_left = STEPS_UNTIL_LARGER


class StepObserver(Protocol):
    """Called on the engine's loop, twice for each step: must be quick and not raise. A step may begin before the previous one has ended."""

    def begin(self, step: Step) -> None:
        """The step has been scheduled, and not computed yet."""

    def end(self, step: Step, deltas: dict[str, list[SequenceDelta]]) -> None:
        """The step's results have been processed. `deltas` are those by request, empty where the step was cancelled."""


FIRST_HOST_SHARE = 0.2
MAX_HOST_SHARE = 10.0
HOST_MEMORY = 0.95  # the weight of the share so far, in its moving average
CALIBRATION_TOKENS = 8.0  # until drafts have been expected to bring more than a few, they are taken to do as expected
CALIBRATION_MEMORY = 0.99  # of each draft
USUAL_DRAFT = 12  # of each sequence where all of them draft
# Drafts that take a step beyond so many rows cost a row more than they have. On a CPU, a step of 9 rows takes 1.12 to 1.14 times as long as
# one of 8 on one thread and 1.07 on two, with two quantized models; one of 10, between 1.03 and 1.11 times as long as one of 9.
FEW_ROWS = 8
MIN_MAX_ROWS = 32  # what a step may have with drafts, however few sequences may run at once
UNWEIGHED_PASSES = 4  # of a draft model, where its tokens need not pay for them
PREDICTION = "prediction"


@dataclass(slots=True)
class DraftCounts:
    """Draft tokens, and drafts by how many of their tokens were accepted, none of them first (`lengths`)."""

    num_drafted: int = 0
    lengths: list[int] = field(default_factory=lambda: [0] * (MAX_DRAFT + 1))

    def copy(self) -> "DraftCounts":
        return DraftCounts(self.num_drafted, list(self.lengths))

    @property
    def num_drafts(self) -> int:
        return sum(self.lengths)

    @property
    def accepted_by_place(self) -> list[int]:
        """In how many drafts the first token was accepted, the first two, and so on."""
        return [sum(self.lengths[place:]) for place in range(1, len(self.lengths))]

    @property
    def num_accepted(self) -> int:
        return sum(self.accepted_by_place)


@dataclass(slots=True)
class Speculation:
    """Decides how many draft tokens each sequence gets in a step, by what they cost and how accurate its proposer has been.

    A step over R rows takes about as long as `rows_for_weights` + R rows would if the weights cost nothing to read. With S sequences and
    R rows without drafts, the engine gets S tokens in such a time, and a draft's row a token with the probability that it and all before
    it are right. So it is worth its time where that probability is above S / (`rows_for_weights` + R), the tokens that its time would
    bring otherwise. The likeliest come first, and all together they make a step at most half as long again, or are no more than one
    sequence may have, or where most sequences draft, than `USUAL_DRAFT` for each. Their cost together
    must not exceed what they gain either.

    `proposer` makes the drafts, and `name` is its name; with a `vocab_size` it is a plug-in's, whose errors are caught. `counts` are of
    drafts by what made them. Without `is_adaptive`, drafts need not pay: every sequence with a guess gets some, as far as a step has
    rows for them. `host_share` is how long the host works for a step, over how long the device does. `has_device`: the model
    runs on another processor than the host's work. `draft_cost` is that of a pass of the draft model, over that of a step, and
    `draft_context` how many tokens of a sequence the draft model takes.
    """

    rows_for_weights: float
    has_device: bool = True
    host_share: float = FIRST_HOST_SHARE
    proposer: Proposer = field(default_factory=NgramProposer)
    name: str = "ngram"
    vocab_size: int | None = None
    draft_cost: float = 0.0
    draft_context: int = sys.maxsize
    is_adaptive: bool = True
    counts: dict[str, DraftCounts] = field(default_factory=dict)
    _num_expected: float = 0.0
    _num_accepted: float = 0.0

    def begin(self, sequence: DraftedSequence, prediction: Prediction | None) -> SequenceProposer:
        """The proposer of a sequence."""
        if self.vocab_size is None:
            made = self.proposer.begin(sequence)
        else:
            made = GuardedProposer(self.proposer, sequence, self.vocab_size, self.name)
        return made if prediction is None else SequencePrediction(sequence, prediction, made)

    def share(self, proposers: list[SequenceProposer], limit: int, *, num_rows: int, num_sequences: int) -> list[int]:
        """How many tokens each may propose, at most `limit` in all, in a step of `num_rows` rows without them for `num_sequences`."""
        lengths = [0] * len(proposers)
        queue = [
            (-proposer.accuracy, index)
            for index, proposer in enumerate(proposers)
            if proposer.read() and proposer.has_guess and self.may_draft(proposer)
        ]
        heapq.heapify(queue)
        limit = min(limit, self._max_rows(len(queue), num_rows=num_rows, num_sequences=num_sequences))
        num_gained = 0.0
        for _ in range(limit):
            if not queue:
                break
            if self.is_adaptive and -queue[0][0] * (self.rows_for_weights + num_rows) <= num_sequences:
                break
            probability, index = queue[0]
            lengths[index] += 1
            num_gained -= probability  # which the queue has negated
            if lengths[index] < MAX_DRAFT:
                heapq.heapreplace(queue, (probability * proposers[index].accuracy_after(lengths[index]), index))
            else:
                heapq.heappop(queue)
        if self.is_adaptive:
            num_drafted = sum(lengths)
            cost = num_drafted + (num_rows + num_drafted > FEW_ROWS)
            if num_gained * (self.rows_for_weights + num_rows) <= num_sequences * cost:
                return [0] * len(proposers)
        return lengths

    def may_draft(self, proposer: SequenceProposer) -> bool:
        """Whether its recent guesses were good enough for more."""
        return not self.is_adaptive or proposer.accuracy >= proposer.min_accuracy

    def _max_rows(self, num_drafting: int, *, num_rows: int, num_sequences: int) -> int:
        # Sequences without drafts only wait for others' drafts, so a step may have more rows the more of its sequences have drafts.
        shared = min(MIN_MAX_ROWS, USUAL_DRAFT * num_drafting**2 // max(1, num_sequences))
        return max(MAX_DRAFT, shared, int((self.rows_for_weights + num_rows) / 2))

    def num_passes(self, accuracies: list[float], *, num_sequences: int) -> int:
        """For how many tokens a draft model is worth running, behind a step of `num_sequences`, where its tokens have been so accurate.

        A pass takes `draft_cost` of a step, and gains what its tokens gain, less their rows in the next step.
        """
        if not self.is_adaptive:
            return UNWEIGHED_PASSES if accuracies else 0
        cost = self.draft_cost * num_sequences + num_sequences * len(accuracies) / (self.rows_for_weights + num_sequences)
        return next((place for place in range(MAX_DRAFT) if sum(accuracy ** (place + 1) for accuracy in accuracies) <= cost), MAX_DRAFT)

    def is_worthwhile(self, proposers: list[SequenceProposer], limit: int, *, num_sequences: int) -> bool:
        """Whether a step of `num_sequences` rows is better drafted for than scheduled ahead: a draft waits for the tokens before it.

        Drafts make a step longer by their rows and by the host's time, and bring the tokens that are expected to be accepted. Without, the
        step takes as long as the device or the host does, whichever takes longer.
        """
        if limit <= 0 or not proposers or not num_sequences:
            return False
        lengths = self.share(proposers, limit, num_rows=num_sequences, num_sequences=num_sequences)
        if not self.has_device or not self.is_adaptive:  # the host's work takes its time from the model's threads, ahead or not
            return any(lengths)
        num_gained = sum(_expected_tokens(proposer, length) for proposer, length in zip(proposers, lengths, strict=True))
        drafted = 1 + sum(lengths) / (self.rows_for_weights + num_sequences) + self.host_share
        return (1 + self._calibration * num_gained / num_sequences) * max(1.0, self.host_share) > drafted

    @property
    def _calibration(self) -> float:
        """How many draft tokens are accepted for each that is expected to be: the surest proposers are chosen, and then do worse."""
        return (self._num_accepted + CALIBRATION_TOKENS) / (self._num_expected + CALIBRATION_TOKENS)

    def observe(self, host_seconds: float, step_seconds: float, *, is_ahead: bool) -> None:
        """Measures a step: how long the host worked for it, and the time from the end of the step before. `is_ahead`: both at once."""
        device_seconds = step_seconds if is_ahead else step_seconds - host_seconds
        if device_seconds > 0:
            share = min(host_seconds / device_seconds, MAX_HOST_SHARE)
            self.host_share = HOST_MEMORY * self.host_share + (1 - HOST_MEMORY) * share

    def expect(self, proposer: SequenceProposer, num_tokens: int) -> None:
        """A draft of so many tokens is computed."""
        self._num_expected += _expected_tokens(proposer, num_tokens)

    def count(self, num_drafted: int, num_accepted: int, *, is_predicted: bool = False) -> None:
        self._num_expected *= CALIBRATION_MEMORY
        self._num_accepted = CALIBRATION_MEMORY * self._num_accepted + num_accepted
        counts = self.counts.setdefault(PREDICTION if is_predicted else self.name, DraftCounts())
        counts.num_drafted += num_drafted
        counts.lengths[num_accepted] += 1


def _expected_tokens(proposer: SequenceProposer, length: int) -> float:
    """How many tokens of a draft are accepted on average, each with the probability of its proposer where all before it were."""
    expected: float = sum(accumulate((proposer.accuracy_after(place) for place in range(length)), mul))
    return expected


def speculation_of(
    config: EngineConfig,
    device_type: str,
    vocab_size: int,
    proposers: Mapping[str, ProposerFactory],
    draft_cost: float = 0.0,
    draft_context: int = sys.maxsize,
) -> Speculation | None:
    """Raises `ConfigurationError` for a proposer that is not among these, or cannot be made."""
    name = config.speculation
    if name == "none":
        return None
    if name in (DRAFT, MTP):
        assert draft_cost, "there is no draft model"
        return Speculation(
            config.rows_for_weights(device_type),
            proposer=DraftModelProposer(),
            name=name,
            draft_cost=draft_cost,
            draft_context=draft_context,
            has_device=False,
            is_adaptive=config.adaptive_speculation,
        )
    if name not in proposers:
        raise ConfigurationError(
            f"--speculation {name}: there is no proposer of that name; there are {', '.join([*proposers, DRAFT, MTP, 'none'])}"
        )
    try:
        proposer = proposers[name]()
    except Exception as error:  # a plug-in's
        raise ConfigurationError(f"--speculation {name}: the proposer cannot be made: {type(error).__name__}: {error}") from error
    if not isinstance(proposer, Proposer):
        raise ConfigurationError(
            f"--speculation {name}: its factory made a {type(proposer).__name__}, which does not derive from `penstock.Proposer`"
        )
    is_built_in = proposers[name] is BUILT_IN.get(name)
    return Speculation(
        config.rows_for_weights(device_type),
        has_device=device_type == "cuda",
        proposer=proposer,
        name=name,
        vocab_size=None if is_built_in else vocab_size,
        is_adaptive=config.adaptive_speculation,
    )


@dataclass(frozen=True, slots=True)
class DraftScheduler:
    """Decides how many draft tokens the sequences of a step get. `num_tokens` are those that the step computes of each sequence."""

    speculation: Speculation
    blocks: KVCacheManager
    max_num_seqs: int

    def is_worth_waiting(self, num_tokens: Mapping[Sequence, int], num_sequences: int) -> bool:
        """Whether drafts for those that a step in flight samples from are worth waiting for its tokens; so many sequences are active."""
        limit = self._max_num_rows(num_sequences)
        if limit <= 0:
            return False
        proposers = [
            sequence.proposer
            for sequence, number in num_tokens.items()
            if sequence.status is Status.RUNNING
            and sequence.proposer is not None
            and number == sequence.num_uncomputed_tokens
            and not sequence.ends_with_next_token
        ]
        return self.speculation.is_worthwhile(proposers, limit, num_sequences=num_sequences)

    def schedule(
        self, num_tokens: Mapping[Sequence, int], num_left: int, num_running: int, *, is_weighed: bool
    ) -> dict[Sequence, list[int]]:
        """The drafts, of at most `num_left` tokens, with blocks for them.

        With `is_weighed` only if they are worth more than scheduling the next step ahead, which they prevent.
        """
        ready = {
            sequence: proposer
            for sequence, number in num_tokens.items()
            if number == sequence.num_uncomputed_tokens
            and not is_chunk(sequence, number)
            and (proposer := sequence.ready_proposer) is not None
        }
        limit = min(num_left, self._max_num_rows(len(num_tokens)))
        proposers = list(ready.values())
        if is_weighed and not self.speculation.is_worthwhile(proposers, limit, num_sequences=len(num_tokens)):
            return {}
        lengths = self.speculation.share(
            proposers,
            limit,
            num_rows=sum(num_tokens.values()),
            num_sequences=sum(number == sequence.num_uncomputed_tokens for sequence, number in num_tokens.items()),
        )
        drafts: dict[Sequence, list[int]] = {}
        for (sequence, proposer), length in zip(ready.items(), lengths, strict=True):
            room = min(self._room(sequence, num_running), sequence.max_tokens - sequence.num_output_tokens - 1)
            if min(length, room) > 0 and (draft := proposer.propose(min(length, room))):
                self._extend_blocks(sequence, num_tokens[sequence] + len(draft))
                drafts[sequence] = draft
                self.speculation.expect(proposer, len(draft))
        return drafts

    def schedule_draft_model(
        self, num_tokens: Mapping[Sequence, int], drafts: Mapping[Sequence, list[int]], num_running: int
    ) -> dict[Sequence, int]:
        """How many tokens a draft model is to propose behind the step, with blocks for them."""
        if not self.speculation.draft_cost:
            return {}
        drafting = {
            sequence: draft
            for sequence, number in num_tokens.items()
            if number == sequence.num_uncomputed_tokens
            and len(sequence.token_ids) < self.speculation.draft_context
            and not sequence.forks
            and (draft := draft_of(sequence.proposer)) is not None
            and self.speculation.may_draft(draft)
            and self.blocks.pool.are_drafted(sequence.block_table)
        }
        num_passes = self.speculation.num_passes([draft.accuracy for draft in drafting.values()], num_sequences=len(num_tokens))
        num_wanted: dict[Sequence, int] = {}
        for sequence in drafting if num_passes else ():
            num_drafted = len(drafts.get(sequence, ()))
            room = min(self._room(sequence, num_running), sequence.max_tokens - sequence.num_output_tokens - 2)
            room = min(room, self.speculation.draft_context - len(sequence.token_ids)) - num_drafted
            number = min(num_passes, room)
            if number > 0:
                self._extend_blocks(sequence, num_tokens[sequence] + num_drafted + number)
                num_wanted[sequence] = number
        return num_wanted

    def _max_num_rows(self, num_sequences: int) -> int:
        return max(self.max_num_seqs, MIN_MAX_ROWS) - num_sequences

    def _room(self, sequence: Sequence, num_running: int) -> int:
        """How many more tokens the sequence may have: a block is left to each that runs, for what it will certainly say."""
        num_free = self.blocks.pool.num_free // self.blocks.num_groups
        return (len(sequence.block_table) + max(0, num_free - num_running)) * self.blocks.block_size - len(sequence.token_ids)

    def _extend_blocks(self, sequence: Sequence, num_tokens: int) -> None:
        self.blocks.extend(sequence.block_tables, -(-(sequence.num_computed_tokens + num_tokens) // self.blocks.block_size))
