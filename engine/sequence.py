"""One sequence of tokens and everything that is known of it. A request has n of them."""

import enum
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from penstock.engine.grammars.grammar_gate import GrammarGate
from penstock.engine.grammars.mask_fill import MaskFill
from penstock.engine.outputs import TokenLogprobs
from penstock.engine.parsing import Phase
from penstock.engine.request import Request
from penstock.engine.sampling.state import SamplingState
from penstock.engine.sequence_outputs import SequenceOutputs
from penstock.engine.speculation.ngram_proposer import NgramProposer
from penstock.engine.text.answer import Answer, ThinkingBudget
from penstock.engine.text.stops import StopSequences

if TYPE_CHECKING:
    from penstock.engine.beam_search.beam_search import BeamSearch


class Status(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False, kw_only=True)
class Sequence:
    """Tokens known, tokens computed, and the blocks that hold their keys and values.

    `forks` are the request's other sequences. They have no blocks of their own until what they share with this one has been computed
    once, by this one: the prompt, and for the beams of a `search` perhaps more.
    `queue_seconds` is None until the sequence is first scheduled. `mask` is what the grammar allows next, from when that is asked for until
    it has been used; the next `num_masks_apart` masks hold up no step. `quick_mask` is filled again and again, where the grammar is quick.
    `proposer` is None where nothing is ever to be tried ahead.
    `stops` is None where no token sequence ends the answer.
    `pending_row` is the row of the step under way that samples its next token, where another step is scheduled behind that one.
    """

    request: Request
    index: int
    arrival: int
    token_ids: list[int]
    max_tokens: int
    answer: Answer
    sampling: SamplingState
    gate: GrammarGate | None = None
    mask: MaskFill | None = None
    quick_mask: MaskFill | None = None
    num_masks_apart: int = 0
    thinking: ThinkingBudget | None = None
    proposer: NgramProposer | None = None
    stops: StopSequences | None = None
    search: "BeamSearch | None" = None
    forks: list["Sequence"] = field(default_factory=list)
    status: Status = Status.WAITING
    num_computed_tokens: int = 0
    pending_row: int | None = None
    num_cached_tokens: int = 0
    queued_at: float = field(default_factory=time.monotonic)
    queue_seconds: float | None = None
    block_table: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    outputs: SequenceOutputs | None = None

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        """Of the tokens that are known or, with a `pending_row`, will be."""
        return len(self.token_ids) + (self.pending_row is not None) - self.num_computed_tokens

    @property
    def ends_with_next_token(self) -> bool:
        """Whether the next token is its last one, whatever it is."""
        return self.num_output_tokens + 1 >= self.max_tokens

    @property
    def is_predictable(self) -> bool:
        """Whether it goes on after its next token, if it does, by rules that do not depend on what that token is."""
        return self.gate is None and self.thinking is None and not self.forks and self.sampling.is_predictable

    @property
    def num_reusable_tokens(self) -> int:
        """How many tokens need not be computed where the cache has them: never the last, whose logits the next sample needs."""
        num_tokens = len(self.token_ids) - 1
        return num_tokens if self.outputs is None else min(num_tokens, self.outputs.num_reusable_tokens)

    @property
    def order(self) -> tuple[int, int, int]:
        """Who goes first: lower priority, then earlier arrival."""
        return (self.request.priority, self.arrival, self.index)

    @property
    def is_constrained(self) -> bool:
        """Whether the next token is a grammar's to decide."""
        return self.gate is not None and self.gate.is_open(self.answer)

    @property
    def has_quick_grammar(self) -> bool:
        """Whether its masks are filled as soon as a token is there: not the first one, which may take longer."""
        return self.gate is not None and self.gate.is_quick and self.gate.has_begun and self.num_masks_apart == 0

    @property
    def can_sample_first(self) -> bool:
        """Whether the next token may be sampled without a mask and then shown to the grammar: with one, it would be the same.

        So it is where nothing is drawn. What is most probable of all tokens and allowed, is most probable of the allowed ones.
        """
        may_sample = self.gate is not None and self.gate.may_force and self.gate.may_look_ahead and self.sampling.params.is_greedy
        return may_sample and self.has_quick_grammar and self.answer.phase is not Phase.REASONING

    @property
    def is_held_up(self) -> bool:
        """Whether its mask was late and is not there yet: until then there is nothing to compute."""
        return self.mask is not None and self.mask.is_pending

    @property
    def ready_proposer(self) -> NgramProposer | None:
        """Who may propose tokens to be tried in the next step.

        Nobody before there is an answer, for a slow grammar, which would have masks to fill for them all, with a mask that came late and
        whose other rows are those of an earlier draft, or while the model may yet open its reasoning.
        """
        is_late = self.mask is not None and self.mask is not self.quick_mask
        is_slow = self.num_masks_apart > 0 or (self.mask is not None and not self.has_quick_grammar)
        is_undecided = self.gate is not None and self.answer.phase is Phase.UNDECIDED and not self.gate.has_begun
        return None if is_late or is_slow or is_undecided or self.num_output_tokens == 0 else self.proposer

    @property
    def stop_match(self) -> tuple[int, ...] | None:
        """The stop sequence that the output ends with."""
        return None if self.stops is None else self.stops.match

    @property
    def family(self) -> list["Sequence"]:
        """The sequence and those that wait on it."""
        return [self, *self.forks]

    @property
    def sampling_sequences(self) -> list["Sequence"]:
        """Those that sample from the logits of this sequence's last token. A beam's forks have other last tokens."""
        return self.family if self.search is None else [self]

    @property
    def num_places(self) -> int:
        """How many sequences may come of it."""
        return len(self.family) if self.search is None else self.search.width

    def num_tokens_shared(self, other: "Sequence") -> int:
        """How many tokens, from the first, it has in common with another of its request."""
        start, stop = self.num_prompt_tokens, min(len(self.token_ids), len(other.token_ids))
        return next((place for place in range(start, stop) if self.token_ids[place] != other.token_ids[place]), stop)

    def branch(self, index: int, gate: GrammarGate | None) -> "Sequence":
        """Another sequence that has said the same. It holds no blocks yet."""
        return Sequence(
            request=self.request,
            index=index,
            arrival=self.arrival,
            token_ids=list(self.token_ids),
            max_tokens=self.max_tokens,
            answer=self.answer,
            sampling=self.sampling.fork(),
            gate=gate,
            num_masks_apart=self.num_masks_apart,
            stops=None if self.stops is None else self.stops.copy(),
            search=self.search,
            queued_at=self.queued_at,
            outputs=None if self.outputs is None else self.outputs.fork(),
        )

    def append(self, token_id: int) -> None:
        self.token_ids.append(token_id)
        self.sampling.append(token_id)
        if self.stops is not None:
            self.stops.append(token_id)
