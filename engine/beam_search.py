"""Beam search: the beams of one answer, the choice of their continuations in each step, and the finished hypotheses."""

import heapq
import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice

from torch import Tensor

from penstock.engine.constraints.masks import MaskJob
from penstock.engine.constraints.state import ConstraintState, is_end_of_reasoning
from penstock.engine.contracts.parsing import Event, Phase
from penstock.engine.deltas import BeamCandidate, FinishReason, PromptInfo, SequenceDelta
from penstock.engine.errors import InvalidRequest
from penstock.engine.output import ResultProcessor
from penstock.engine.request import Request
from penstock.engine.sampling.params import EarlyStopping, SamplingParams, parameters_of
from penstock.engine.sampling.sampler import NO_TOKEN_LEFT, SamplerOutput
from penstock.engine.scheduling.scheduler import Scheduler
from penstock.engine.sequence import Sequence, SequenceGroup, Status
from penstock.engine.text.answer import Answer
from penstock.engine.text.tokenizer import Tokenizer

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

    def advance(self, candidates: list[list[Candidate]], ending_of: Callable[[int, int], Ending | None]) -> list[Continuation]:
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

    def end_all(self, ending: Ending) -> None:
        """Ends all beams as they are."""
        ended = [
            Hypothesis(beam.token_ids, beam.cumulative_logprob, self._score(beam.cumulative_logprob, self.num_tokens), ending)
            for beam in self.beams
            if beam.token_ids
        ]
        self.beams = []
        self._keep(ended)

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


def _totals(parent: int, beam: BeamCandidate, candidates: list[Candidate]) -> Iterator[tuple[float, int, int | None]]:
    """The total log probability of the beam with each of its candidates."""
    return ((beam.cumulative_logprob + logprob, parent, token_id) for token_id, logprob in candidates)


MAX_CANDIDATES = 4096  # that one beam may bring to a step


def check_beam_request(request: Request, scheduler: Scheduler, stop_token_ids: frozenset[int], max_model_len: int) -> None:
    """Raises `InvalidRequest` naming the field of a request for beams that beam search cannot honour."""
    assert request.beam is not None
    params, width = request.params, request.beam.beam_width
    if width > scheduler.max_num_seqs:
        limit = f"at most {scheduler.max_num_seqs}, the number of sequences that run at once"
        raise InvalidRequest(f"`beam_width` must be {limit}, got {width}", "beam_width")
    if params.n > width:
        raise InvalidRequest(f"`n` must be at most `beam_width`, {width}, got {params.n}", "n")
    if params.max_tokens == 0:
        raise InvalidRequest("`max_tokens` must be at least 1 with beam search", "max_tokens")
    for name, declared in parameters_of(SamplingParams).items():
        if not declared.has_beam_search and declared.has_effect(getattr(params, name)):
            raise InvalidRequest(f"`{name}` has no meaning in beam search", name)
    if num_candidates(width, len(end_token_ids(request, stop_token_ids))) > MAX_CANDIDATES:
        raise InvalidRequest(f"`stop_token_ids` are too many for a `beam_width` of {width}", "stop_token_ids")
    num_prompt = len(request.prompt_token_ids)
    num_tokens = max_model_len if params.max_tokens is None else min(max_model_len, num_prompt + params.max_tokens)
    num_blocks = scheduler.num_blocks_for(num_prompt, num_tokens, width)
    if num_blocks > scheduler.pool.num_blocks:
        per_block = scheduler.block_size / scheduler.blocks.num_groups
        sizes = f"{int(num_blocks * per_block)} tokens, and the KV cache holds {int(scheduler.pool.num_blocks * per_block)}"
        raise InvalidRequest(f"{width} beams of {num_tokens - num_prompt} tokens after this prompt may need {sizes}", "beam_width")


def end_token_ids(request: Request, stop_token_ids: frozenset[int]) -> frozenset[int]:
    """The tokens that end its answers, where `stop_token_ids` are the model's. Where a grammar says when it is over, these always do."""
    ignores = request.params.ignore_eos and request.grammar is None
    return frozenset(request.params.stop_token_ids) | (frozenset() if ignores else stop_token_ids)


def num_candidates(width: int, num_end_tokens: int) -> int:
    """How many continuations a step looks at: enough for `width` beams to go on though every other one ends in each of these ways."""
    return max(2, 1 + num_end_tokens) * width


class BeamReader:
    """Reads the beams of one request. `stop_token_ids` are the tokens that end its answers, `make_constraint` makes the constraint of one.

    Beams are read token by token only where that matters to the search: where a stop string may end them, or a grammar begins at the end of
    their reasoning. All else is read once the answer is known. Of the beams that go on from one, the first takes over its place in the
    grammar. The others get copies or, from grammars that make none, walk anew.
    """

    def __init__(
        self,
        request: Request,
        tokenizer: Tokenizer,
        stop_token_ids: frozenset[int],
        make_constraint: Callable[[Answer], ConstraintState | None],
    ) -> None:
        self._request = request
        self._tokenizer = tokenizer
        self._stop_token_ids = stop_token_ids
        self._make_constraint = make_constraint
        self._reasons = request.grammar is not None and request.make_answer().end_marker is not None
        self._follows = self._reasons or bool(request.params.stop)
        self._answers: dict[tuple[Sequence, int], Answer] = {}

    def ending_of(self, parent: Sequence, token_id: int) -> Ending | None:
        """Whether the beam would end with this token, and why. Raises `ForbiddenToken`, and whatever a plug-in raises."""
        if token_id in self._stop_token_ids:
            named = token_id in self._request.params.stop_token_ids
            return Ending(FinishReason.STOP, token_id if named else None, is_token=True)
        if parent.constraint is None:
            return self._ending_after(parent, token_id)
        parent.constraint.take(parent.answer, token_id)
        ending = self._ending_after(parent, token_id)
        parent.constraint.rollback(1)
        return ending

    def _ending_after(self, parent: Sequence, token_id: int) -> Ending | None:
        """Reads a token that the constraint has taken."""
        constraint, answer = parent.constraint, parent.answer
        if self._follows:
            answer = self._answers[parent, token_id] = self._branch(parent)
            self._read(answer, constraint, token_id)
            if answer.stop_match is not None:
                return Ending(FinishReason.STOP, answer.stop_match)
        if parent.stops is not None:
            stops = parent.stops.copy()
            stops.append(token_id)
            if stops.match is not None:
                return Ending(FinishReason.STOP, self._tokenizer.decode(list(stops.match), skip_special_tokens=False))
        # A slow grammar must not be asked here, on the loop: its next mask will tell.
        if constraint is not None and not constraint.is_slow and constraint.finish_if_over(answer):
            return Ending(FinishReason.STOP)
        return None

    def append(self, sequence: Sequence, parent: Sequence, before: Answer, token_id: int) -> None:
        """The sequence, which is where the parent was when its answer was `before`, goes on with a token that ends nothing."""
        sequence.answer = self._answers.get((parent, token_id), before)
        if sequence.constraint is not None:
            sequence.constraint.take(before, token_id)
            if is_end_of_reasoning(before.phase, sequence.answer):
                sequence.constraint.begin(sequence.answer, [], self._tokenizer)  # how it is shown is found out at the end
        sequence.append(token_id)
        sequence.sampling.block_stop = must_not_stop(sequence, before.phase)

    def fork_constraint(self, parent: Sequence) -> ConstraintState | None:
        """A constraint in the same place as the parent's, with no mask."""
        constraint = None if parent.constraint is None else parent.constraint.fork()
        if constraint is None and parent.constraint is not None:
            answer = self._request.make_answer()
            constraint = self._make_constraint(answer)
            assert constraint is not None
            constraint.num_masks_apart = parent.constraint.num_masks_apart
            for token_id in parent.token_ids[parent.num_prompt_tokens :]:
                constraint.take(answer, token_id)
                if self._reasons:
                    constraint.read(answer, token_id, self._tokenizer)
        return constraint

    def forget(self) -> None:
        """Drops the answers that were read for the last step."""
        self._answers.clear()

    def read(self, hypothesis: Hypothesis, index: int) -> SequenceDelta:
        """A whole answer, as the last delta of its sequence."""
        params, ending = self._request.params, hypothesis.ending
        answer = self._request.make_answer()
        constraint = self._make_constraint(answer) if self._reasons else None
        said = hypothesis.token_ids[:-1] if ending.is_token else hypothesis.token_ids
        events = [event for token_id in said for event in self._take(answer, constraint, token_id)]
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

    def _take(self, answer: Answer, constraint: ConstraintState | None, token_id: int) -> list[Event]:
        if constraint is not None:
            constraint.take(answer, token_id)
        return self._read(answer, constraint, token_id)

    def _read(self, answer: Answer, constraint: ConstraintState | None, token_id: int) -> list[Event]:
        return answer.feed(token_id) if constraint is None else constraint.read(answer, token_id, self._tokenizer)

    def _branch(self, parent: Sequence) -> Answer:
        answer = parent.answer.branch()
        if answer is None:
            answer = self._request.make_answer()
            for token_id in parent.token_ids[parent.num_prompt_tokens :]:
                answer.feed(token_id)
        return answer


def must_not_stop(sequence: Sequence, before: Phase) -> bool:
    """Whether stop ids must be blocked: the answer is still reasoning, or its last token ended that, after the phase `before`."""
    constraint = sequence.constraint
    return constraint is not None and (not constraint.is_open(sequence.answer) or constraint.must_not_stop(before, sequence.answer))


@dataclass(slots=True, eq=False, kw_only=True)
class BeamSearch(SequenceGroup):
    """`sequences` are those of `group.beams`, in the same order: they run in the same batches as all other sequences.

    `candidates` are the continuations of those that have been computed; once they are all there the next beams are chosen. A beam that
    goes on twice shares its blocks with the other. All are preempted together: those that have been computed hold blocks that the last
    one may need. They come back as they first came in, the best before the others, which begin where what they share with it ends.
    `outputs` are those of the answers that are kept, by their tokens.
    """

    request: Request
    group: BeamGroup
    reader: BeamReader
    sequences: list[Sequence] = field(default_factory=list)
    candidates: dict[Sequence, list[Candidate]] = field(default_factory=dict)
    prompt: PromptInfo | None = None
    failure: str | None = None
    num_made: int = 1
    outputs: dict[tuple[int, ...], dict[str, Tensor]] = field(default_factory=dict)

    @property
    def width(self) -> int:
        """How many sequences it may come to run, and so has places for."""
        return self.group.width

    @property
    def is_ready(self) -> bool:
        """Whether all beams have been computed."""
        return len(self.candidates) == len(self.sequences)

    @property
    def best(self) -> list[Hypothesis]:
        """The answers to be given, best first; they may be fewer than were asked for."""
        return self.group.hypotheses[: self.request.params.n]

    def choose(self) -> list[Continuation]:
        """Chooses the next beams. Raises what a plug-in raises that reads them."""
        candidates = [self.candidates[sequence] for sequence in self.sequences]
        self.candidates.clear()
        continuations = self.group.advance(candidates, lambda parent, token_id: self.reader.ending_of(self.sequences[parent], token_id))
        self._keep_outputs()
        return continuations

    def end_all(self, ending: Ending) -> None:
        """Takes the beams for answers as they are."""
        self.group.end_all(ending)
        self._keep_outputs()

    def outputs_of(self, hypothesis: Hypothesis) -> dict[str, Tensor]:
        """The named outputs that were asked for, of all its tokens."""
        return self.outputs.get(tuple(hypothesis.token_ids), {})

    def _keep_outputs(self) -> None:
        """Keeps the outputs of the answers that are kept, which end with one of the beams or one token after it."""
        if not self.request.outputs:
            return
        beams = {tuple(sequence.token_ids[sequence.num_prompt_tokens :]): sequence.outputs for sequence in self.sequences}
        kept = {}
        for hypothesis in self.group.hypotheses:
            said = tuple(hypothesis.token_ids)
            beam = beams.get(said) or beams.get(said[:-1])
            if said in self.outputs:
                kept[said] = self.outputs[said]
            elif beam is not None:
                kept[said] = beam.generated.first(len(said))
        self.outputs = kept

    def branch(self, parent: Sequence) -> Sequence:
        """A copy of the parent, which holds no blocks yet."""
        sequence = parent.branch(self.num_made, self.reader.fork_constraint(parent))
        self.num_made += 1
        return sequence

    def gather(self) -> Sequence:
        """Makes the others wait on the best beam, without anything that was computed, and returns that beam."""
        self.candidates.clear()
        best, *others = self.sequences
        best.forks = others
        return best


def beam_search_of(sequence: Sequence) -> BeamSearch | None:
    """The beam search that the sequence is a beam of, if any."""
    assert sequence.search is None or isinstance(sequence.search, BeamSearch)
    return sequence.search


logger = logging.getLogger(__name__)

_NO_ANSWER = Hypothesis([], float("-inf"), float("-inf"), Ending(FinishReason.STOP))


@dataclass(slots=True)
class BeamProcessor:
    """Takes what was computed for each beam, and at the end of a step advances the searches whose beams are all there.

    An error in one beam ends its search; a beam that no token may follow ends alone. `outputs` processes all other sequences, and keeps the
    counts, prompts and blocks of beams as well.
    """

    outputs: ResultProcessor
    touched: dict[BeamSearch, None] = field(default_factory=dict)

    def take_samples(self, sequence: Sequence, samples: SamplerOutput, row: int) -> None:
        """Takes the candidates of a beam."""
        search = self._search_of(sequence)
        failure = samples.failures.get(row)
        if failure is not None and failure != NO_TOKEN_LEFT:
            search.failure = failure
        search.candidates[sequence] = [] if failure is not None else list(samples.candidates[row])

    def take_without_sample(self, sequence: Sequence, mask: MaskJob) -> None:
        """Takes what the grammar says where nothing is sampled: it failed, or the beam can only end."""
        search = self._search_of(sequence)
        if mask.error is not None:
            search.failure = mask.error
        search.candidates[sequence] = [(None, 0.0)]

    def take_deltas(self) -> dict[str, list[SequenceDelta]]:
        """The deltas of the step, by request."""
        deltas: dict[str, list[SequenceDelta]] = {}
        touched, self.touched = self.touched, {}
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
        search.end_all(Ending(FinishReason.TIMED_OUT))
        return self._finish_or_fail(search, missing=FinishReason.TIMED_OUT)

    def _search_of(self, sequence: Sequence) -> BeamSearch:
        search = beam_search_of(sequence)
        assert search is not None
        if sequence.constraint is not None:
            sequence.constraint.mask = None
        self.touched[search] = None
        return search

    def _advance_or_fail(self, search: BeamSearch) -> list[SequenceDelta]:
        try:
            prompt = None
            if search.prompt is None:
                prompt = search.prompt = self.outputs.prompt_info(search.sequences[0])
                self.outputs.count_prompt(search.sequences[0])
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
        self.touched.pop(search, None)  # by a step whose results could not be taken in as a whole
        for sequence in search.sequences:
            if sequence.status is not Status.FINISHED:
                self.outputs.retire(sequence)
