"""Tool calls or content: an answer that may be either under a grammar begins free, so that the model's own distribution decides."""

from collections.abc import Callable
from dataclasses import dataclass

from penstock.engine.constraints.state import ConstraintState
from penstock.engine.contracts.parsing import Event, Parser
from penstock.engine.contracts.proposer import SequenceProposer
from penstock.engine.deltas import SequenceDelta
from penstock.engine.text.answer import Answer
from penstock.engine.text.tokenizer import Tokenizer


@dataclass(slots=True)
class CallDecision:
    """Whether one sequence's answer is tool calls or content. It is open while the model generates freely, and nothing of that is shown.

    With one mask for both, the model's probability of anything that neither allows, such as a refusal in text, would go to the calls as
    well. So the first token of a call, or of other text, decides, as the tool parser reads it. What was generated for a call is kept as
    far as the grammar of calls allows it; else, and for content, its tokens are rolled back and sampled again under the grammar. They are
    `held` until then. The sequence's mark is where they began: at first, after reasoning, in a preamble after what belongs to no call.

    The makers are for what follows: the constraint of calls, a parser that reads them, and the proposer of calls or of content.
    """

    make_constraint: Callable[[], ConstraintState]
    make_tool_parser: Callable[[], Parser]
    make_proposer: Callable[[bool], SequenceProposer | None]
    held: SequenceDelta

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
