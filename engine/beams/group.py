"""Beam search as decisions alone: which beams go on, which answers are kept, and when to stop. Knows no model and no cache."""

import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

from penstock.engine.deltas import BeamCandidate, FinishReason
from penstock.engine.sampling.params import EarlyStopping

Candidate = tuple[int | None, float]
"""A token and its log probability after one beam; None where the beam ends as it is."""


@dataclass(frozen=True, slots=True)
class Ending:
    """Why an answer ends where it does. `is_token` says that its last token is no text but the end itself."""

    reason: FinishReason
    stop_reason: int | str | None = None
    is_token: bool = False


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """An answer that has ended. `token_ids` hold the stop token, where one ended it."""

    token_ids: list[int]
    cumulative_logprob: float
    score: float
    ending: Ending


@dataclass(frozen=True, slots=True)
class Continuation:
    """A beam of the next step: one of this step's, by its place among them, and one more token."""

    parent: int
    token_id: int


@dataclass(slots=True, kw_only=True)
class BeamGroup:
    """The beams of one request, best first, and the best answers that have ended so far.

    Beams are compared by the sum of their log probabilities, ended answers by that sum divided by length ** `length_penalty`. The best
    `num_candidates` continuations of a step are looked at. Of these, endings are kept only from the best `width`; whatever does not end
    goes on, up to `width` of them. All of it is as in `transformers`, so that scores and sequences are the same; there as here a width of
    1 is greedy decoding, which stops at the first ending.
    """

    width: int
    max_tokens: int
    num_candidates: int
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = False
    beams: list[BeamCandidate] = field(default_factory=lambda: [BeamCandidate([], 0.0)])
    hypotheses: list[Hypothesis] = field(default_factory=list)
    num_tokens: int = 0

    def advance(self, candidates: Sequence[Sequence[Candidate]], ending_of: Callable[[int, int], Ending | None]) -> list[Continuation]:
        """Chooses the beams of the next step, best first, from each beam's candidates, best first.

        `ending_of(parent, token_id)` says whether that continuation ends the answer, for anything but its length. It is asked at most once
        about each, in order, and only as far as it matters.
        """
        # Each beam's are in order: all of them together would take tens of milliseconds to sort, on the event loop.
        totals = [_totals(parent, beam, own) for parent, (beam, own) in enumerate(zip(self.beams, candidates, strict=True))]
        ranked = heapq.merge(*totals, key=lambda candidate: -candidate[0])
        continuations: list[Continuation] = []
        beams: list[BeamCandidate] = []
        ended: list[Hypothesis] = []
        self.num_tokens += 1
        for rank, (total, parent, token_id) in enumerate(islice(ranked, self.num_candidates)):
            if len(beams) == self.width and rank >= self.width:
                break
            ending = Ending(FinishReason.STOP) if token_id is None else ending_of(parent, token_id)
            if ending is None and self.num_tokens >= self.max_tokens:
                ending = Ending(FinishReason.LENGTH)
            before = self.beams[parent].token_ids
            token_ids = before if token_id is None else [*before, token_id]
            if ending is not None:
                if rank < self.width:
                    ended.append(Hypothesis(token_ids, total, self._score(total, len(token_ids)), ending))
            elif token_id is not None and len(beams) < self.width:
                beams.append(BeamCandidate(token_ids, total))
                continuations.append(Continuation(parent, token_id))
        self.beams = beams
        self._keep(ended)
        return continuations

    def give_up(self, ending: Ending) -> None:
        """Ends all beams as they are."""
        given_up = [
            Hypothesis(beam.token_ids, beam.cumulative_logprob, self._score(beam.cumulative_logprob, self.num_tokens), ending)
            for beam in self.beams
            if beam.token_ids
        ]
        self.beams = []
        self._keep(given_up)

    @property
    def is_done(self) -> bool:
        """Whether no beam is worth computing any more."""
        if not self.beams:
            return True
        if len(self.hypotheses) < self.width:
            return False
        if self.early_stopping is True or self.width == 1:
            return True
        # The sum of log probabilities only falls, but divided by a greater length it may rise.
        is_patient = self.early_stopping == "never" and self.length_penalty > 0
        best_possible = self._score(self.beams[0].cumulative_logprob, self.max_tokens if is_patient else self.num_tokens)
        return best_possible <= self.hypotheses[-1].score

    def _keep(self, ended: list[Hypothesis]) -> None:
        self.hypotheses = sorted([*self.hypotheses, *ended], key=lambda hypothesis: -hypothesis.score)[: self.width]

    def _score(self, cumulative_logprob: float, num_tokens: int) -> float:
        return cumulative_logprob / math.pow(max(1, num_tokens), self.length_penalty)


def _totals(parent: int, beam: BeamCandidate, candidates: Sequence[Candidate]) -> Iterator[tuple[float, int, int | None]]:
    """The total log probability of the beam with each of its candidates."""
    return ((beam.cumulative_logprob + logprob, parent, token_id) for token_id, logprob in candidates)
