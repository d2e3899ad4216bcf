"""Each sequence of a request: tokens, blocks and state from arrival to the last token."""

import copy
import enum
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from penstock.engine.constraints.masks import MaskJob
from penstock.engine.constraints.state import CallDecision, ConstraintState
from penstock.engine.contracts.proposer import SequenceProposer
from penstock.engine.deltas import TokenLogprobs
from penstock.engine.kv_cache.blocks import BlockTable, RetentionRule, chain_hashes
from penstock.engine.kv_cache.persistence import PrefixLoad
from penstock.engine.request import Request
from penstock.engine.sampling.rows import SamplingState
from penstock.engine.text.answer import Answer, ThinkingBudget
from penstock.engine.text.streaming import StopSequences

LOGITS = "logits"  # the one output that no module has to be looked at for


@dataclass(slots=True)
class RowBuffer:
    """Rows of consecutive tokens, by output. `next_position` is that of the token whose row is still to come, if before `stop`."""

    next_position: int
    stop: int | None = None
    num_rows: int = 0
    parts: dict[str, list[Tensor]] = field(default_factory=dict)

    @property
    def is_whole(self) -> bool:
        return self.next_position == self.stop

    def add(self, first: int, rows: dict[str, Tensor]) -> None:
        """Takes rows of the tokens from position `first` on; those that are there already are passed over."""
        num_known = self.next_position - first
        assert num_known >= 0, "outputs are missing"
        num_wanted = None if self.stop is None else self.stop - first
        fresh = {name: part[num_known:num_wanted] for name, part in rows.items()}
        num_rows = min(map(len, fresh.values()), default=0)
        if num_rows:
            for name, part in fresh.items():
                self.parts.setdefault(name, []).append(part)
            self.num_rows += num_rows
            self.next_position += num_rows

    def first(self, num_rows: int) -> dict[str, Tensor]:
        return {name: rows[:num_rows] for name, rows in self.joined().items()}

    def take(self, num_rows: int) -> dict[str, Tensor]:
        """The first rows, which are kept no longer."""
        joined = self.joined()
        self.num_rows -= num_rows
        self.parts = {name: [rows[num_rows:]] for name, rows in joined.items()} if self.num_rows else {}
        return {name: rows[:num_rows] for name, rows in joined.items()}

    def joined(self) -> dict[str, Tensor]:
        """All rows that are there: the same tensors until there are more."""
        for parts in self.parts.values():
            if len(parts) > 1:
                parts[:] = [torch.cat(parts)]
        return {name: parts[0] for name, parts in self.parts.items()}


@dataclass(slots=True)
class ContextOutputs:
    """Those of the prompt, from its first token that had to be computed on. The n sequences of a request share them."""

    rows: RowBuffer
    first_token: int | None = None

    def add(self, first: int, rows: dict[str, Tensor]) -> None:
        if self.first_token is None:
            self.first_token = self.rows.next_position = first
        if not self.rows.is_whole:
            self.rows.add(first, rows)


@dataclass(slots=True)
class SequenceOutputs:
    """What one sequence has of the outputs that its request wants. `context` is None where the prompt's are not wanted.

    A generated token's row is that of the token before it: what the model had computed when it said it.
    """

    generated: RowBuffer
    context: ContextOutputs | None = None
    _num_said: int = 0

    @classmethod
    def for_all(cls, num_sequences: int, num_prompt_tokens: int, *, with_context: bool) -> "list[SequenceOutputs]":
        context = ContextOutputs(RowBuffer(0, stop=num_prompt_tokens)) if with_context else None
        return [cls(RowBuffer(num_prompt_tokens - 1), context) for _ in range(num_sequences)]

    @property
    def next_position(self) -> int:
        """Of the first token whose row is wanted and not there yet."""
        return self.generated.next_position if self.context is None or self.context.rows.is_whole else self.context.rows.next_position

    @property
    def num_reusable_tokens(self) -> int:
        """How many tokens at the beginning need not be computed where the cache has them: of the prompt, any while none has been."""
        has_begun = self.context is None or self.context.first_token is not None
        return self.next_position if has_begun else self.generated.next_position

    def add(self, first: int, rows: dict[str, Tensor]) -> None:
        """Rows of the tokens from position `first` on, which have been computed, perhaps not for the first time."""
        if self.context is not None:
            self.context.add(first, rows)
        self.generated.add(first, rows)

    def take(self, num_said: int) -> dict[str, Tensor]:
        """The rows for as many more generated tokens as have been said, as far as they are there."""
        self._num_said += num_said
        num_rows = min(self._num_said, self.generated.num_rows)
        self._num_said -= num_rows
        return self.generated.take(num_rows) if num_rows else {}

    def fork(self) -> "SequenceOutputs":
        """An independent copy."""
        own = copy.copy(self)
        own.generated = copy.copy(self.generated)
        own.generated.parts = {name: list(parts) for name, parts in self.generated.parts.items()}
        return own


class Status(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class SequenceGroup(ABC):
    """Sequences of one request that are decided on together, as the beams of a beam search are, or the lanes of exact sampling."""

    __slots__ = ()

    @property
    def first_to_come(self) -> int | None:
        """The first position that any of its sequences may come back to; None where they never do."""
        return None

    @property
    @abstractmethod
    def width(self) -> int:
        """How many sequences the group may come to run, and so has places for."""

    @abstractmethod
    def gather(self) -> "Sequence":
        """Makes the others wait on the first, without anything that was computed, and returns it."""


@dataclass(slots=True, eq=False, kw_only=True)
class Sequence:
    """Tokens known, tokens computed, and the blocks that hold their keys and values.

    `forks` are the request's other sequences. They have no blocks of their own until what they share with this one has been computed
    once, by this one: the prompt, and for the beams of a `search` perhaps more.
    `queue_seconds` is None until the sequence is first scheduled. `has_aged` once it has waited for so long that its priority does not
    count any more. `constraint` is None where no grammar decides on any of its tokens.
    `end_token_ids` end the answer; under a grammar all of the model's stop tokens do.
    `proposer` is None where the sequence never has draft tokens. `decision` is there until it is known whether the answer is tool calls or
    content, where it may be either, and `mark` is what it is rolled back to then.
    `stops` is None where no token sequence ends the answer.
    `pending_row` is the row of the step in flight that samples its next token, where another step is scheduled behind that one.
    `num_blocks_found` of its first blocks were not its own when it got them: cached ones, and those that it shares with its parent.
    While it waits, as many were found when it was last looked for.
    `table_row` is its row of the model's block tables, while it runs, which knows the first `num_blocks_sent` blocks of its `block_table`.
    That is the table of the first group of layers; `other_tables`, as long, are those of the others. Once `frees_at` tokens are computed, a
    block has left a sliding window.
    `state_slot` is where recurrent layers keep its states, while it runs.
    `sampler_row` is its row of the sampler in a step whose tokens are all known. `rope_delta` is what is added to the number of a token of
    its answer for its rotary position.
    """

    request: Request
    index: int
    arrival: int
    token_ids: list[int]
    max_tokens: int
    answer: Answer
    sampling: SamplingState
    end_token_ids: frozenset[int] = frozenset()
    constraint: ConstraintState | None = None
    decision: CallDecision | None = None
    mark: "Mark | None" = None
    thinking: ThinkingBudget | None = None
    proposer: SequenceProposer | None = None
    stops: StopSequences | None = None
    search: "SequenceGroup | None" = None
    forks: list["Sequence"] = field(default_factory=list)
    status: Status = Status.WAITING
    num_computed_tokens: int = 0
    pending_row: int | None = None
    num_cached_tokens: int = 0
    queued_at: float = 0.0
    has_aged: bool = False
    queue_seconds: float | None = None
    block_table: BlockTable = field(default_factory=BlockTable)
    other_tables: list[BlockTable] = field(default_factory=list)
    num_blocks_found: int = 0
    frees_at: int = 0
    table_row: int | None = None
    num_blocks_sent: int = 0
    state_slot: int | None = None
    block_hashes: list[bytes] = field(default_factory=list)
    load: PrefixLoad | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    outputs: SequenceOutputs | None = None
    sampler_row: "SamplerRow" = field(init=False)
    rope_delta: int = field(init=False)

    def __post_init__(self) -> None:
        self.rope_delta = 0 if self.request.rope is None else self.request.rope.delta
        self.sampler_row = SamplerRow(self, self.sampling)
        if self.constraint is not None or self.thinking is not None:
            self.sampling.must_follow()  # they block stop ids, depending on the answer

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - len(self.request.prompt_token_ids)

    @property
    def block_tables(self) -> list[BlockTable]:
        """Those of all groups of layers."""
        return [self.block_table, *self.other_tables]

    @block_tables.setter
    def block_tables(self, tables: list[BlockTable]) -> None:
        self.block_table, *self.other_tables = tables

    @property
    def adapter_name(self) -> str | None:
        return None if self.request.adapter is None else self.request.adapter.name

    @property
    def num_uncomputed_tokens(self) -> int:
        """Of the tokens that are known or, with a `pending_row`, will be."""
        return len(self.token_ids) + (self.pending_row is not None) - self.num_computed_tokens

    @property
    def ends_with_next_token(self) -> bool:
        """Whether the next token is its last one, whatever it is."""
        return len(self.token_ids) - len(self.request.prompt_token_ids) + 1 >= self.max_tokens

    @property
    def has_spent(self) -> bool:
        """Whether it has all the tokens that it may have."""
        return self.num_output_tokens >= self.max_tokens

    @property
    def samples_again(self) -> bool:
        """Whether the token that was sampled last is not taken, since the answer might not end in time after it."""
        return self.constraint is not None and self.constraint.closing is not None and self.constraint.closing.samples_again

    @property
    def is_plain(self) -> bool:
        """Whether the next token is read by the answer, and perhaps by a grammar, alone and comes with nothing else."""
        return (
            self.thinking is None
            and self.decision is None
            and self.stops is None
            and self.outputs is None
            and self.request.params.logprobs is None
            and self.request.params.repetition_detection is None
        )

    @property
    def num_reusable_tokens(self) -> int:
        """How many tokens need not be computed where the cache has them: never the last, whose logits the next sample needs."""
        num_tokens = len(self.token_ids) - 1
        return num_tokens if self.outputs is None else min(num_tokens, self.outputs.num_reusable_tokens)

    @property
    def order(self) -> tuple[bool, int, int, int]:
        """The scheduling order: sequences that have aged first, then lower priority values, then earlier arrival."""
        return (not self.has_aged, 0 if self.has_aged else self.request.priority, self.arrival, self.index)

    @property
    def is_background(self) -> bool:
        """Whether it is only computed while there are no other sequences than such. They are the last in the order."""
        return self.request.is_background

    @property
    def is_constrained(self) -> bool:
        """Whether a grammar decides on the next token."""
        return self.constraint is not None and self.constraint.is_open(self.answer)

    @property
    def mask(self) -> MaskJob | None:
        """The job of its next mask, where that has been asked for."""
        return None if self.constraint is None else self.constraint.mask

    @property
    def waits_for_mask(self) -> bool:
        """Whether nothing of it can be computed yet: its mask was late and is not there, or will be after a pending token."""
        if self.constraint is None:
            return False
        return self.constraint.waits_for_mask if self.pending_row is None else self.constraint.is_slow

    @property
    def is_loading(self) -> bool:
        """Whether its first blocks are on their way from disk."""
        return self.load is not None and not self.load.is_over

    @property
    def ready_proposer(self) -> SequenceProposer | None:
        """The proposer of draft tokens for the next step; None where the sequence gets none."""
        can_have_draft = self.constraint is None or self.constraint.can_have_draft(self.answer)
        return self.proposer if can_have_draft and self.num_output_tokens else None

    @property
    def stop_match(self) -> tuple[int, ...] | None:
        """The stop sequence that the output ends with."""
        return None if self.stops is None else self.stops.match

    @property
    def self_and_forks(self) -> list["Sequence"]:
        """The sequence and the forks of it that start once its prompt is computed."""
        return [self, *self.forks]

    @property
    def sampling_sequences(self) -> list["Sequence"]:
        """Those that sample from the logits of this sequence's last token. A beam's forks have other last tokens."""
        return self.self_and_forks if self.search is None else [self]

    @property
    def max_num_running(self) -> int:
        """How many running sequences it becomes at most."""
        return len(self.self_and_forks) if self.search is None else self.search.width

    def num_tokens_shared(self, other: "Sequence") -> int:
        """How many tokens, from the first, it has in common with another of its request."""
        start, stop = self.num_prompt_tokens, min(len(self.token_ids), len(other.token_ids))
        return next((place for place in range(start, stop) if self.token_ids[place] != other.token_ids[place]), stop)

    @property
    def num_tokens_shared_by_all(self) -> int:
        """How many tokens, from the first, all sequences of its search have in common, which are its forks."""
        return min(self.num_tokens_shared(fork) for fork in self.forks)

    @property
    def first_to_come(self) -> int:
        """The first position that will be computed on its blocks, by itself or by beams that part from it before its end."""
        if self.search is not None and (first := self.search.first_to_come) is not None:
            return min(self.num_computed_tokens, first)
        if self.search is None or not self.forks:
            return self.num_computed_tokens
        return min(self.num_computed_tokens, self.num_tokens_shared_by_all)

    def branch(self, index: int, constraint: ConstraintState | None) -> "Sequence":
        """Another sequence with the same tokens. It holds no blocks yet."""
        return Sequence(
            request=self.request,
            index=index,
            arrival=self.arrival,
            token_ids=list(self.token_ids),
            max_tokens=self.max_tokens,
            answer=self.answer,
            sampling=self.sampling.fork(),
            end_token_ids=self.end_token_ids,
            constraint=constraint,
            stops=None if self.stops is None else self.stops.copy(),
            search=self.search,
            queued_at=self.queued_at,
            outputs=None if self.outputs is None else self.outputs.fork(),
        )

    def hash_blocks(self, block_size: int) -> None:
        """Extends `block_hashes` to all blocks that are full."""
        if len(self.block_hashes) < len(self.token_ids) // block_size:
            ids, content_ids = self.token_ids, self.request.content_ids
            if content_ids is not self.request.prompt_token_ids:
                ids = content_ids + ids[len(content_ids) :]
            chain_hashes(ids, block_size, self.block_hashes, self.request.prefix_key)

    def hashes_to_come(self, num_scheduled: int, block_size: int) -> list[bytes]:
        """Of the prompt's blocks that it will fill in later steps than that of the `num_scheduled` tokens."""
        num_computed = self.num_computed_tokens + num_scheduled
        return self.block_hashes[num_computed // block_size :] if num_computed < self.num_prompt_tokens else []

    def retention_rules(self, block_size: int) -> Callable[[int], RetentionRule | None] | None:
        """The rule that the block at each place is retained by."""
        retention = self.request.retention
        if retention is None:
            return None
        return lambda place: retention.rule_of(place, block_size, self.num_prompt_tokens)

    def go_on_with(self, sampling: SamplingState) -> None:
        """Samples by another state from now on."""
        self.sampling = sampling
        self.sampler_row = SamplerRow(self, sampling)

    def append(self, token_id: int) -> None:
        self.token_ids.append(token_id)
        self.sampling.append(token_id)
        if self.constraint is not None and self.constraint.closing is not None:
            self.constraint.closing.took(token_id)
        if self.stops is not None:
            self.stops.append(token_id)


@dataclass(slots=True)
class Mark:
    """Where a sequence was before tokens that may be rolled back: how many it had, and what has followed them since."""

    num_tokens: int
    num_reasoning_tokens: int
    num_preamble_tokens: int
    sampling: SamplingState
    stops: StopSequences | None
    outputs: SequenceOutputs | None

    @classmethod
    def of(cls, sequence: "Sequence") -> "Mark":
        return cls(
            len(sequence.token_ids),
            sequence.answer.num_reasoning_tokens,
            sequence.answer.num_preamble_tokens,
            sequence.sampling.fork(),
            None if sequence.stops is None else sequence.stops.copy(),
            None if sequence.outputs is None else sequence.outputs.fork(),
        )


@dataclass(frozen=True, slots=True)
class SamplerRow:
    """The sequence's next token or, in the rows after that, the one after the first `num_drafted` tokens of its draft.

    `sampling` is the sequence's own state, or as it will be if the draft is right so far, or once the token that is pending is there.
    """

    sequence: Sequence
    sampling: SamplingState
    num_drafted: int = 0


def sampler_row_of(sequence: Sequence) -> SamplerRow:
    """The row for the sequence's next token."""
    sampling = sequence.sampling
    if sequence.pending_row is not None:
        return sequence.sampler_row if sampling.is_stationary else SamplerRow(sequence, sampling.after_any(sequence.pending_row))
    sampling.is_constrained = sequence.constraint is not None and sequence.constraint.is_open(sequence.answer)
    return sequence.sampler_row


def sampler_rows_of(sequence: Sequence, draft: Iterable[int]) -> list[SamplerRow]:
    """A row for the sequence's next token and one after each token of the draft; the forks of a prompt have one each."""
    if sequence.pending_row is not None:
        return [sampler_row_of(sequence)]
    rows = [sampler_row_of(member) for member in sequence.sampling_sequences]
    assert not draft or len(rows) == 1
    for num_drafted, token_id in enumerate(draft, start=1):
        rows.append(SamplerRow(sequence, rows[-1].sampling.after(token_id), num_drafted))
    return rows
