"""Processes a step's results in beam search: once all beams of a request have been computed, the next beams are chosen."""

import logging
from dataclasses import dataclass, field

from penstock.engine.beams.group import Continuation, Ending, Hypothesis
from penstock.engine.beams.search import BeamSearch, beam_search_of
from penstock.engine.constraints.state import MaskJob
from penstock.engine.deltas import FinishReason, SequenceDelta
from penstock.engine.output import OutputProcessor
from penstock.engine.sampling.sampler import NO_TOKEN_LEFT, SamplerOutput
from penstock.engine.sequence import Sequence, Status

logger = logging.getLogger(__name__)

_NO_ANSWER = Hypothesis([], float("-inf"), float("-inf"), Ending(FinishReason.STOP))


@dataclass(slots=True)
class BeamProcessor:
    """Takes what was computed for each beam, and at the end of a step advances the searches whose beams are all there.

    An error in one beam ends its search; a beam that no token may follow ends alone. `outputs` processes all other sequences, and keeps the
    counts, prompts and blocks of beams as well.
    """

    outputs: OutputProcessor
    _touched: dict[BeamSearch, None] = field(default_factory=dict)

    def take_samples(self, sequence: Sequence, samples: SamplerOutput, row: int) -> None:
        """Takes the candidates of a beam."""
        search = self._search_of(sequence)
        failure = samples.failures.get(row)
        if failure is not None and failure != NO_TOKEN_LEFT:
            search.failure = failure
        search.candidates[sequence] = [] if failure is not None else list(samples.candidates[row])

    def take_mask(self, sequence: Sequence, mask: MaskJob) -> None:
        """Takes a mask that needs no sample: the grammar failed, or the beam can only end."""
        search = self._search_of(sequence)
        if mask.error is not None:
            search.failure = mask.error
        search.candidates[sequence] = [(None, 0.0)]

    def settle(self) -> dict[str, list[SequenceDelta]]:
        """The deltas of the step, by request."""
        deltas: dict[str, list[SequenceDelta]] = {}
        touched, self._touched = self._touched, {}
        for search in touched:
            if search.failure is not None:
                deltas[search.request.request_id] = self.fail(search, search.failure)
            elif search.is_ready:
                deltas[search.request.request_id] = self._advance_or_fail(search)
        return deltas

    def fail(self, search: BeamSearch, reason: str) -> list[SequenceDelta]:
        """Ends the search without an answer."""
        self.outputs.report(search.request, reason)
        self._retire(search)
        return [SequenceDelta(index, finish_reason=FinishReason.ERROR, error=reason) for index in range(search.request.params.n)]

    def time_out(self, search: BeamSearch) -> list[SequenceDelta]:
        """Ends the search where it is, with the best that has been found."""
        search.give_up(Ending(FinishReason.TIMED_OUT))
        return self._finish_or_fail(search, missing=FinishReason.TIMED_OUT)

    def _search_of(self, sequence: Sequence) -> BeamSearch:
        search = beam_search_of(sequence)
        assert search is not None
        if sequence.constraint is not None:
            sequence.constraint.mask = None
        self._touched[search] = None
        return search

    def _advance_or_fail(self, search: BeamSearch) -> list[SequenceDelta]:
        try:
            prompt = None
            if search.prompt is None:
                prompt = search.prompt = self.outputs.prompt_info(search.sequences[0])
            continuations = search.choose()
            if not search.group.is_done:
                self._replace(search, continuations)
                return [SequenceDelta(0, prompt=prompt, beams=search.group.beams)]
        except Exception as error:  # a plug-in's parser or grammar: whatever it raises ends its own request
            logger.exception("A beam could not be read")
            return self.fail(search, f"reading a beam raised {type(error).__name__}: {error}")
        if not search.group.hypotheses:
            return self.fail(search, NO_TOKEN_LEFT)
        return self._finish_or_fail(search, is_first=prompt is not None)

    def _finish_or_fail(
        self, search: BeamSearch, *, is_first: bool = False, missing: FinishReason = FinishReason.STOP
    ) -> list[SequenceDelta]:
        try:
            deltas = [search.reader.read(hypothesis, index) for index, hypothesis in enumerate(search.best)]
        except Exception as error:  # as above
            logger.exception("An answer could not be read")
            return self.fail(search, f"reading the answer raised {type(error).__name__}: {error}")
        for delta, hypothesis in zip(deltas, search.best, strict=True):
            delta.outputs = search.outputs_of(hypothesis)
        for index in range(len(deltas), search.request.params.n):
            score = _NO_ANSWER.score
            deltas.append(SequenceDelta(index, finish_reason=missing, cumulative_logprob=score, beam_score=score))
        for delta in deltas:
            if delta.index > 0 or is_first:
                delta.prompt = search.prompt
        self._retire(search)
        return deltas

    def _replace(self, search: BeamSearch, continuations: list[Continuation]) -> None:
        """Makes the search's sequences those of its beams: the first continuation of a beam keeps its sequence, the others get new ones."""
        # `branch` comes first: a plug-in may raise there, and then nothing has been changed.
        parents = [search.sequences[continuation.parent] for continuation in continuations]
        made: dict[int, Sequence] = {}
        for place, parent in enumerate(parents):
            if parent in parents[:place]:
                made[place] = search.branch(parent)
        dropped = [sequence for sequence in search.sequences if sequence not in parents]
        for place, sequence in made.items():
            self.outputs.scheduler.branch(parents[place], sequence)
        search.sequences[:] = [made.get(place, parent) for place, parent in enumerate(parents)]
        for sequence in dropped:
            self.outputs.retire(sequence)
        before = [parent.answer for parent in parents]
        for sequence, parent, answer, continuation in zip(search.sequences, parents, before, continuations, strict=True):
            search.reader.append(sequence, parent, answer, continuation.token_id)
        search.reader.forget()
        self.outputs.num_generation_tokens += len(continuations)

    def _retire(self, search: BeamSearch) -> None:
        self._touched.pop(search, None)  # by a step whose results could not be taken in as a whole
        for sequence in search.sequences:
            if sequence.status is not Status.FINISHED:
                self.outputs.retire(sequence)
