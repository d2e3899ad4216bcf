"""What beams would say, read as far as that ends an answer."""

from collections.abc import Callable

from penstock.engine.beam_search.beam_group import Ending, Hypothesis
from penstock.engine.events import Event
from penstock.engine.grammars.grammar_gate import UNFIT_START, GrammarGate
from penstock.engine.outputs import FinishReason, SequenceDelta
from penstock.engine.parsing import Phase
from penstock.engine.request import Request
from penstock.engine.sequence import Sequence
from penstock.engine.text.answer import Answer
from penstock.engine.text.tokenizer import Tokenizer


class ForbiddenToken(Exception):
    """The grammar does not take a token that its own mask allowed."""


class BeamReader:
    """Reads the beams of one request. `stop_token_ids` are the tokens that end its answers, `make_gate` makes what holds one to a grammar.

    Beams are read token by token only where that matters to the search: where a stop string may end them, or a grammar begins at the end of
    their reasoning. All else is read once the answer is known. Of the beams that go on from one, the first takes over its place in the
    grammar. The others get copies or, from grammars that make none, walk anew.
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
        self._reasons = request.grammar is not None and request.make_answer().end_marker is not None
        self._follows = self._reasons or bool(request.params.stop)
        self._answers: dict[tuple[Sequence, int], Answer] = {}

    def ending_of(self, parent: Sequence, token_id: int) -> Ending | None:
        """Whether the beam would end with this token, and why. Raises `ForbiddenToken`, and whatever a plug-in raises."""
        if token_id in self._stop_token_ids:
            named = token_id in self._request.params.stop_token_ids
            return Ending(FinishReason.STOP, token_id if named else None, is_token=True)
        answer, events = parent.answer, list[Event]()
        if self._follows:
            answer = self._answers[parent, token_id] = self._branch(parent)
            events = answer.feed(token_id)
            if answer.stop_match is not None:
                return Ending(FinishReason.STOP, answer.stop_match)
        if parent.stops is not None:
            stops = parent.stops.copy()
            stops.append(token_id)
            if stops.match is not None:
                return Ending(FinishReason.STOP, self._tokenizer.decode(list(stops.match), skip_special_tokens=False))
        if parent.gate is not None:
            _pass(parent.gate, parent.answer, token_id)
            self._shown(parent.gate, parent.answer.phase, answer, events)
            # A slow grammar must not be asked here, on the loop: its next mask will tell.
            is_finished = not parent.num_masks_apart and parent.gate.is_finished(answer)
            parent.gate.rollback(1)
            if is_finished:
                return Ending(FinishReason.STOP)
        return None

    def append(self, sequence: Sequence, parent: Sequence, before: Answer, token_id: int) -> None:
        """The sequence, which is where the parent was when its answer was `before`, goes on with a token that ends nothing."""
        sequence.answer = self._answers.get((parent, token_id), before)
        if sequence.gate is not None:
            _pass(sequence.gate, before, token_id)
            if _is_over(before.phase, sequence.answer):
                sequence.gate.begin(sequence.answer, [], self._tokenizer)  # how it is shown is found out at the end
        sequence.append(token_id)
        sequence.sampling.block_stop = must_go_on(sequence, before.phase)

    def gate_beside(self, parent: Sequence) -> GrammarGate | None:
        """Another in the place where the parent's is."""
        gate = None if parent.gate is None else parent.gate.fork()
        if gate is None and parent.gate is not None:
            answer = self._request.make_answer()
            gate = self._make_gate(answer)
            assert gate is not None
            for token_id in parent.token_ids[parent.num_prompt_tokens :]:
                if self._reasons:
                    self._feed(answer, gate, token_id)
                else:
                    _pass(gate, answer, token_id)
        return gate

    def forget(self) -> None:
        """The next step has begun."""
        self._answers.clear()

    def read(self, hypothesis: Hypothesis, index: int) -> SequenceDelta:
        """A whole answer, as the last delta of its sequence."""
        params, ending = self._request.params, hypothesis.ending
        answer = self._request.make_answer()
        gate = self._make_gate(answer) if self._reasons else None
        said = hypothesis.token_ids[:-1] if ending.is_token else hypothesis.token_ids
        events = [event for token_id in said for event in self._feed(answer, gate, token_id)]
        if ending.is_token and ending.stop_reason is not None and params.include_stop_str_in_output:
            events += answer.feed(hypothesis.token_ids[-1])
        events += answer.finish()
        reason = ending.reason
        stop_reason = params.length_stop_reason if reason is FinishReason.LENGTH else ending.stop_reason
        if reason is FinishReason.LENGTH and answer.has_ended:
            # What a parser had held back completed a stop string after all, or was a call too many.
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

    def _feed(self, answer: Answer, gate: GrammarGate | None, token_id: int) -> list[Event]:
        """Has the grammar and the answer take a token."""
        phase = answer.phase
        if gate is not None:
            _pass(gate, answer, token_id)
        events = answer.feed(token_id)
        return events if gate is None else self._shown(gate, phase, answer, events)

    def _shown(self, gate: GrammarGate, phase: Phase, answer: Answer, events: list[Event]) -> list[Event]:
        """The events of a token that followed on `phase`, as they are shown. At the end of the reasoning the grammar begins."""
        events = gate.shown(answer, events)
        if not _is_over(phase, answer):
            return events
        shown = gate.begin(answer, events, self._tokenizer)
        if shown is None:
            raise ForbiddenToken(UNFIT_START)
        return shown

    def _branch(self, parent: Sequence) -> Answer:
        answer = parent.answer.branch()
        if answer is None:
            answer = self._request.make_answer()
            for token_id in parent.token_ids[parent.num_prompt_tokens :]:
                answer.feed(token_id)
        return answer


def must_go_on(sequence: Sequence, phase: Phase) -> bool:
    """Whether the next token may be no end: there is reasoning, or its last token was in `phase` and ended it, and a grammar is to come."""
    gate = sequence.gate
    return gate is not None and (not gate.is_open(sequence.answer) or (_is_over(phase, sequence.answer) and not gate.has_begun))


def _is_over(phase: Phase, answer: Answer) -> bool:
    return phase is Phase.REASONING and answer.phase is Phase.CONTENT


def _pass(gate: GrammarGate, answer: Answer, token_id: int) -> None:
    if not gate.advance(answer, token_id):
        raise ForbiddenToken("the grammar does not allow the token that was chosen")
