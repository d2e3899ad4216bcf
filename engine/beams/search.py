"""The beams of one request: whether the request can be served, and the beams' texts and sequences."""

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from penstock.engine.beams.group import BeamGroup, Candidate, Continuation, Ending, Hypothesis
from penstock.engine.constraints.state import ConstraintState, is_end_of_reasoning
from penstock.engine.deltas import FinishReason, PromptInfo, SequenceDelta
from penstock.engine.errors import InvalidRequest
from penstock.engine.events import Event
from penstock.engine.parsing import Phase
from penstock.engine.request import Request
from penstock.engine.sampling.params import SamplingParams, parameters_of
from penstock.engine.scheduler import Scheduler
from penstock.engine.sequence import Sequence, SequenceGroup
from penstock.engine.text.answer import Answer
from penstock.engine.text.tokenizer import Tokenizer

MAX_CANDIDATES = 4096  # that one beam may bring to a step


def check_beam_request(request: Request, scheduler: Scheduler, stop_token_ids: frozenset[int], max_model_len: int) -> None:
    """Raises `InvalidRequest` naming the field that beam search cannot honour. Does nothing where the request asks for no beams."""
    if request.beam is None:
        return
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
        sizes = f"{num_blocks * scheduler.block_size} tokens, and the KV cache holds {scheduler.pool.num_blocks * scheduler.block_size}"
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
        if constraint is not None and not constraint.is_slow and constraint.is_finished(answer):
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
        sequence.sampling.block_stop = must_go_on(sequence, before.phase)

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


def must_go_on(sequence: Sequence, before: Phase) -> bool:
    """Whether the next token may be no end: there is reasoning, or its last token followed on the phase `before` and ended that."""
    constraint = sequence.constraint
    return constraint is not None and (not constraint.is_open(sequence.answer) or constraint.must_begin(before, sequence.answer))


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

    def give_up(self, ending: Ending) -> None:
        """Takes the beams for answers as they are."""
        self.group.give_up(ending)
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
