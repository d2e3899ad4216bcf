"""Tool calls or content: an answer that may be either under a grammar begins free, so that the model's own distribution decides."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from penstock.engine.constraints.state import ConstraintState
from penstock.engine.contracts.parsing import Event, Parser
from penstock.engine.contracts.proposer import SequenceProposer
from penstock.engine.deltas import SequenceDelta
from penstock.engine.text.answer import Answer
from penstock.engine.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from penstock.engine.sampling.state import SamplingState
    from penstock.engine.sequence import Sequence, SequenceOutputs
    from penstock.engine.text.patterns import StopSequences


@dataclass(slots=True)
class Mark:
    """Where a sequence was before tokens that may be taken back: how many it had, and what has followed them since."""

    num_tokens: int
    num_reasoning_tokens: int
    num_preamble_tokens: int
    sampling: "SamplingState"
    stops: "StopSequences | None"
    outputs: "SequenceOutputs | None"

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


@dataclass(slots=True)
class CallDecision:
    """Whether one sequence's answer is tool calls or content. It is open while the model generates freely, and nothing of that is shown.

    With one mask for both, the model's probability of anything that neither allows, such as a refusal in text, would go to the calls as
    well. So the first token of a call, or of other text, decides, as the tool parser reads it. What was generated for a call is kept as far
    as the grammar of calls allows it; else, and for content, its tokens are taken back and sampled again under the grammar. `mark` is where
    these began: at first, after reasoning, and in a preamble after all text that belongs to no call. They are `held` until then.

    The makers are for what follows: the constraint of calls, a parser that reads them, and the proposer of calls or of content.
    """

    make_constraint: Callable[[], ConstraintState]
    make_tool_parser: Callable[[], Parser]
    make_proposer: Callable[[bool], SequenceProposer | None]
    held: SequenceDelta
    mark: Mark | None = field(default=None)

    def flush(self, delta: SequenceDelta) -> None:
        """Adds what was held to a delta."""
        held = self.held
        delta.token_ids += held.token_ids
        delta.events += held.events
        delta.logprobs += held.logprobs
        delta.finish_reason, delta.stop_reason = held.finish_reason, held.stop_reason
        delta.num_reasoning_tokens = max(delta.num_reasoning_tokens, held.num_reasoning_tokens)
        delta.num_preamble_tokens = max(delta.num_preamble_tokens, held.num_preamble_tokens)
        self.held = SequenceDelta(held.index)


def read_kept(constraint: ConstraintState, answer: Answer, token_ids: list[int], tokenizer: Tokenizer) -> list[Event] | None:
    """Has both take the tokens of a call that was generated freely, and gives its events; None where the grammar forbids them.

    White space before the call is none of the grammar's.
    """
    lead = 0
    while lead < len(token_ids) and tokenizer.decode(token_ids[lead : lead + 1], skip_special_tokens=False).isspace():
        lead += 1
    if lead == len(token_ids) or not all(constraint.advance_guess(answer, token_id) for token_id in token_ids[lead:]):
        return None
    events: list[Event] = []
    for token_id in token_ids:
        if not answer.has_ended:
            events += answer.feed(token_id)
    return events
