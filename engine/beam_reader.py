"""What beams would say, read as far as that ends an answer."""

from collections.abc import Callable

from penstock.engine.answer import Answer
from penstock.engine.beam_group import Ending, Hypothesis
from penstock.engine.grammar_gate import GrammarGate
from penstock.engine.outputs import FinishReason, SequenceDelta
from penstock.engine.request import Request
from penstock.engine.sequence import Sequence
from penstock.engine.tokenizer import Tokenizer


class ForbiddenToken(Exception):
    """The grammar does not take a token that its own mask allowed."""


class BeamReader:
    """Reads the beams of one request. `stop_token_ids` are the tokens that end its answers, `make_gate` makes what holds one to a grammar.

    Beams are read token by token only where that may end them, at a stop string; all else is read once the answer is known. Of the beams
    that go on from one, the first takes over its place in the grammar. The others get copies or, from grammars that make none, walk anew.
    """

    def __init__(
        self,
        request: Request,
        tokenizer: Tokenizer,
        stop_token_ids: frozenset[int],
        make_gate: Callable[[Answer], GrammarGate | None],
    ) -> None:
        self._request = request
        self._tokenizer = tokenizer
        self._stop_token_ids = stop_token_ids
        self._make_gate = make_gate
        self._follows = bool(request.params.stop)
        self._answers: dict[tuple[Sequence, int], Answer] = {}

    def ending_of(self, parent: Sequence, token_id: int) -> Ending | None:
        """Whether the beam would end with this token, and why. Raises `ForbiddenToken`, and whatever a plug-in raises."""
        if token_id in self._stop_token_ids:
            named = token_id in self._request.params.stop_token_ids
            return Ending(FinishReason.STOP, token_id if named else None, is_token=True)
        if self._follows:
            answer = self._answers[parent, token_id] = self._branch(parent)
            answer.feed(token_id)
            if answer.stop_match is not None:
                return Ending(FinishReason.STOP, answer.stop_match)
        if parent.stops is not None:
            stops = parent.stops.copy()
            stops.append(token_id)
            if stops.match is not None:
                return Ending(FinishReason.STOP, self._tokenizer.decode(list(stops.match), skip_special_tokens=False))
        if parent.gate is not None:
            if not parent.gate.advance(parent.answer, token_id):
                raise ForbiddenToken("the grammar does not allow the token that was chosen")
            # A slow grammar must not be asked here, on the loop: its next mask will tell.
            is_finished = not parent.num_masks_apart and parent.gate.is_finished(parent.answer)
            parent.gate.rollback(1)
            if is_finished:
                return Ending(FinishReason.STOP)
        return None

    def answer_after(self, parent: Sequence, token_id: int) -> Answer:
        """The reading of a beam that goes on."""
        return self._answers.get((parent, token_id), parent.answer)

    def gate_beside(self, parent: Sequence) -> GrammarGate | None:
        """Another in the place where the parent's is."""
        if parent.gate is None:
            return None
        gate = parent.gate.fork()
        if gate is None:
            gate = self._make_gate(parent.answer)
            assert gate is not None
            for token_id in parent.token_ids[parent.num_prompt_tokens :]:
                if not gate.advance(parent.answer, token_id):
                    raise ForbiddenToken("the grammar does not allow what it allowed before")
        return gate

    def forget(self) -> None:
        """The next step has begun."""
        self._answers.clear()

    def read(self, hypothesis: Hypothesis, index: int) -> SequenceDelta:
        """A whole answer, as the last delta of its sequence."""
        params, ending = self._request.params, hypothesis.ending
        answer = self._request.make_answer()
        is_shown = not ending.is_token or (ending.stop_reason is not None and params.include_stop_str_in_output)
        shown = hypothesis.token_ids if is_shown else hypothesis.token_ids[:-1]
        events = [event for token_id in shown for event in answer.feed(token_id)]
        events += answer.finish()
        reason, stop_reason = ending.reason, ending.stop_reason
        if reason is FinishReason.LENGTH and answer.stop_match is not None:  # what a parser had held back completed a stop string after all
            reason, stop_reason = FinishReason.STOP, answer.stop_match
        return SequenceDelta(
            index,
            token_ids=hypothesis.token_ids,
            events=events,
            finish_reason=reason,
            stop_reason=stop_reason,
            num_reasoning_tokens=answer.num_reasoning_tokens,
            cumulative_logprob=hypothesis.cumulative_logprob,
            beam_score=hypothesis.score,
        )

    def _branch(self, parent: Sequence) -> Answer:
        answer = parent.answer.branch()
        if answer is None:
            answer = self._request.make_answer()
            for token_id in parent.token_ids[parent.num_prompt_tokens :]:
                answer.feed(token_id)
        return answer
