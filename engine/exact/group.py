"""Exact sampling in the engine: the lanes that compute a trie's nodes, and the draws of the n answers over it."""

import logging
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from penstock.engine.constraints.masks import MaskJob
from penstock.engine.constraints.state import ConstraintState
from penstock.engine.contracts.parsing import Phase
from penstock.engine.deltas import ExactDraws, FinishReason, PromptInfo, SequenceDelta
from penstock.engine.errors import InvalidRequest
from penstock.engine.exact.trie import Draw, Node, Outcome, Trie
from penstock.engine.output import ResultProcessor
from penstock.engine.request import Request
from penstock.engine.sampling.distribution import Distribution, MaskPlace
from penstock.engine.sampling.params import SamplingParams, parameters_of
from penstock.engine.sampling.rows import CounterRng, SamplingState
from penstock.engine.sampling.sampler import NO_TOKEN_LEFT, SamplerOutput
from penstock.engine.scheduling.scheduler import Scheduler
from penstock.engine.sequence import SamplerRow, Sequence, SequenceGroup, Status

logger = logging.getLogger(__name__)

MAX_LANES = 32
WINDOW = 200  # draws, of which fewer than `MIN_ACCEPTED` accepted ones end exact sampling
MIN_ACCEPTED = 2  # 1 %
MAX_MOVES = 1024  # of draws in one step, each token of an accepted answer being one more: all on the event loop
LOW_ACCEPTANCE = f"fewer than 1 % of {WINDOW} draws were accepted"
TIME_PASSED = "the request's time limit passed before a draw was accepted"
NO_VALID_ANSWER = "no valid answer of at most `max_tokens` tokens has any probability under these parameters"


NOTHING = Distribution(np.empty(0, np.int64), np.empty(0))


def check_exact_request(request: Request, scheduler: Scheduler) -> None:
    """Raises `InvalidRequest` naming the field of a request for exact sampling that this cannot honour."""
    params, exact = request.params, '`structured_outputs.sampling` "exact"'
    if request.grammar is None:
        raise InvalidRequest(f"{exact} needs a constraint", "structured_outputs.sampling")
    if scheduler.states is not None:
        message = f"{exact} goes back to earlier tokens, which a model with recurrent layers cannot"
        raise InvalidRequest(message, "structured_outputs.sampling")
    if request.beam is not None:
        raise InvalidRequest(f"{exact} is not for beam search", "use_beam_search")
    if params.is_greedy:
        name = "temperature" if params.temperature == 0 else "top_k"
        raise InvalidRequest(f"{exact} draws answers, and `{name}` leaves nothing to draw", name)
    for name in ("stop", "stop_token_ids", "logprobs", "thinking_token_budget", "min_tokens", "repetition_detection"):
        if parameters_of(SamplingParams)[name].has_effect(getattr(params, name)):
            raise InvalidRequest(f"`{name}` cannot be combined with {exact}", name)
    for name, given in (
        ("stop_sequences", request.stop_sequences),
        ("logits_processors", request.logits_processors),  # which may remember what they saw, in whatever order
        ("outputs", request.outputs),
        ("prediction", request.prediction),
        ("structured_outputs.mode", request.preamble),
        ("structured_outputs.pressure", request.measures_pressure),
    ):
        if given:
            raise InvalidRequest(f"`{name}` cannot be combined with {exact}", name)
    if params.max_tokens == 0:
        raise InvalidRequest(f"`max_tokens` must be at least 1 with {exact}", "max_tokens")
    if request.make_answer().phase is not Phase.CONTENT:
        message = f"{exact} needs answers that begin with the constraint, and this one may begin with reasoning: turn that off"
        raise InvalidRequest(message, "structured_outputs.sampling")


def num_lanes(request: Request, scheduler: Scheduler, max_model_len: int) -> int:
    """How many sequences compute nodes: one for each answer, as far as there are places and blocks for so many."""
    num_prompt = len(request.prompt_token_ids)
    num_tokens = max_model_len if request.params.max_tokens is None else min(max_model_len, num_prompt + request.params.max_tokens)
    width = min(request.params.n, MAX_LANES, scheduler.max_num_seqs)
    while width > 1 and scheduler.num_blocks_for(num_prompt, num_tokens, width) > scheduler.pool.num_blocks:
        width -= 1
    return width


@dataclass(slots=True, eq=False)
class Slot:
    """One of the n answers to come, its random numbers, and the draw that may become it."""

    index: int
    rng: CounterRng | random.Random
    draw: Draw
    num_draws: int = 1


@dataclass(slots=True, eq=False, kw_only=True)
class ExactGroup(SequenceGroup):
    """The draws of one request's answers, and the `sequences`, its lanes, that compute the nodes that these come to.

    `computing` has the node of each lane in the current round, None for one that computes anything at all: there must be another round.
    Once the `results` of all are there, the next round begins: every draw moves as far as it needs no model, in the order of `queue`, and
    others `wait` for a node. So what a seed gives does not depend on what else runs. `to_compute` are nodes without a lane, in order.
    `sampling` is the state of a sequence without tokens. All lanes are preempted together.

    `fallback` says why answers are sampled under masks from then on. The draws of the current window are counted in `num_drawn`; of those
    that a node rejects, only the first.
    """

    request: Request
    trie: Trie
    sampling: SamplingState
    make_constraint: Callable[[], ConstraintState]
    num_lanes: int
    sequences: list[Sequence]
    slots: list[Slot] = field(default_factory=list)
    queue: deque[Slot] = field(default_factory=deque)
    waiting: dict[Node, list[Slot]] = field(default_factory=dict)
    to_compute: deque[Node] = field(default_factory=deque)
    computing: dict[Sequence, Node | None] = field(default_factory=dict)
    results: dict[Sequence, Distribution] = field(default_factory=dict)
    prompt: PromptInfo | None = None
    failure: str | None = None
    fallback: str | None = None
    num_drawn: int = 0
    num_accepted: int = 0
    num_made: int = 1

    @classmethod
    def of(cls, first: Sequence, make_constraint: Callable[[], ConstraintState], stop_ids: frozenset[int], lanes: int) -> "ExactGroup":
        """A group with one lane, which is to compute the prompt."""
        params = first.request.params
        first.sampling.mask_place = MaskPlace.AFTER
        trie = Trie(stop_ids, first.max_tokens)
        group = cls(
            request=first.request,
            trie=trie,
            sampling=first.sampling.fork(),
            make_constraint=make_constraint,
            num_lanes=lanes,
            sequences=[first],
            computing={first: trie.root},
        )
        for index in range(params.n):
            rng = random.Random() if params.seed is None else CounterRng(params.seed + index)
            group.slots.append(Slot(index, rng, trie.begin()))
        group.waiting[trie.root] = list(group.slots)
        return group

    @property
    def width(self) -> int:
        return self.num_lanes

    @property
    def first_to_come(self) -> int:
        """A lane may go back to the end of the prompt."""
        return self.sequences[0].num_prompt_tokens - 1 if self.sequences else 0

    @property
    def is_ready(self) -> bool:
        return len(self.results) == len(self.computing)

    def gather(self) -> Sequence:
        """Makes the others wait on the first lane, without anything that was computed. Lanes that compute nothing end."""
        self.results.clear()
        for sequence in self.sequences:
            if sequence not in self.computing:
                sequence.status = Status.FINISHED
        self.sequences[:] = [sequence for sequence in self.sequences if sequence in self.computing]
        first, *others = self.sequences
        first.forks = others
        return first

    def begin_round(self) -> None:
        """Takes what the lanes have computed."""
        for sequence in self.sequences:
            node = self.computing.get(sequence)
            if node is not None:
                self.trie.take(node, self.results[sequence])
                self.queue += self.waiting.pop(node)
        self.computing.clear()
        self.results.clear()

    def move(self) -> list[tuple[Slot, list[int], Outcome]]:
        """Moves the draws on; returns the slots that have their answers, with their tokens, stop tokens included."""
        ended: list[tuple[Slot, list[int], Outcome]] = []
        budget = MAX_MOVES
        while self.queue and budget > 0:
            slot = self.queue.popleft()
            draw = slot.draw
            if self.trie.is_dead:
                self.fall_back(slot, NO_VALID_ANSWER)
                continue
            if draw.needs_model:
                if draw.node not in self.waiting:
                    self.waiting[draw.node] = []
                    self.to_compute.append(draw.node)
                self.waiting[draw.node].append(slot)
                continue
            budget -= 1
            outcome = self.trie.move(draw, slot.rng.random)
            if outcome is Outcome.MOVED:
                self.queue.appendleft(slot)
                continue
            if outcome is not Outcome.REJECTED:
                self._count(is_accepted=True)
            else:
                if not draw.node.has_rejected:  # others that were on their way here cost nothing, and are no sign of more to come
                    draw.node.has_rejected = True
                    self._count(is_accepted=False)
                slot.num_draws += 1
                slot.draw = self.trie.begin()
                if self._is_low:
                    self.fall_back(slot, LOW_ACCEPTANCE)
                else:
                    self.queue.appendleft(slot)
                continue
            token_ids = draw.node.path
            if draw.last_token_id is not None:
                token_ids.append(draw.last_token_id)
            budget -= len(token_ids)
            self.slots.remove(slot)
            ended.append((slot, token_ids, outcome))
        self.trie.forget_tails()
        return ended

    @property
    def _is_low(self) -> bool:
        """Whether a window has ended with too few accepted draws."""
        return self.fallback is None and self.num_drawn == 0 and self.num_accepted < MIN_ACCEPTED

    def _count(self, *, is_accepted: bool) -> None:
        if self.num_drawn == 0:
            self.num_accepted = 0
        self.num_drawn = (self.num_drawn + 1) % WINDOW
        self.num_accepted += is_accepted

    def fall_back(self, slot: Slot, reason: str) -> None:
        """Begins all answers that are not there yet anew, under masks. `slot` is the one whose turn it is."""
        assert slot in self.slots
        self.fallback = reason
        self.trie = Trie(self.trie.stop_token_ids, self.trie.max_tokens, is_exact=False)
        self.sampling.mask_place = MaskPlace.BEFORE
        self.waiting.clear()
        self.to_compute.clear()
        self.queue.clear()
        for each in self.slots:
            each.draw = self.trie.begin()
            self.queue.append(each)

    def draws_of(self, slot: Slot) -> ExactDraws:
        return ExactDraws(slot.num_draws, self.fallback)

    def branch(self, parent: Sequence) -> Sequence:
        """Another lane where the parent is, which holds no blocks yet."""
        assert parent.constraint is not None
        constraint = parent.constraint.fork()
        if constraint is None:
            constraint = self.make_constraint()
            for token_id in _path(parent):
                constraint.take(parent.answer, token_id)
        sequence = parent.branch(self.num_made, constraint)
        self.num_made += 1
        return sequence


def _path(sequence: Sequence) -> list[int]:
    return sequence.token_ids[sequence.num_prompt_tokens :]


def _num_shared(path: list[int], other: list[int]) -> int:
    stop = min(len(path), len(other))
    return next((place for place in range(stop) if path[place] != other[place]), stop)


@dataclass(slots=True)
class ExactProcessor:
    """Takes what was computed for each lane, and at the end of a step begins the next round of the groups whose lanes are all there.

    `outputs` processes all other sequences, and keeps the counts, prompts and blocks of lanes as well.
    """

    outputs: ResultProcessor
    touched: dict[ExactGroup, None] = field(default_factory=dict)

    def take_samples(self, sequence: Sequence, samples: SamplerOutput, row: int) -> None:
        """Takes the distribution after a lane's node."""
        group = self._group_of(sequence)
        failure = samples.failures.get(row)
        if failure is not None and (failure != NO_TOKEN_LEFT or not group.trie.is_exact):
            group.failure = failure
        group.results[sequence] = NOTHING if failure is not None else samples.distributions[row]

    def take_without_sample(self, sequence: Sequence, mask: MaskJob) -> None:
        """The grammar has failed: nothing else is certain where every token is drawn."""
        group = self._group_of(sequence)
        group.failure = mask.error or "the grammar gave no mask"
        group.results[sequence] = NOTHING

    def take_deltas(self) -> dict[str, list[SequenceDelta]]:
        """The deltas of the step, by request."""
        deltas: dict[str, list[SequenceDelta]] = {}
        touched, self.touched = self.touched, {}
        for group in touched:
            if group.failure is not None:
                deltas[group.request.request_id] = self.fail(group, group.failure)
            elif group.is_ready:
                deltas[group.request.request_id] = self._advance(group)
        return deltas

    def fail(self, group: ExactGroup, reason: str) -> list[SequenceDelta]:
        """Ends the answers that are not there yet."""
        self.outputs.report(group.request, reason)
        self._retire(group)
        return [SequenceDelta(slot.index, finish_reason=FinishReason.ERROR, error=reason) for slot in group.slots]

    def time_out(self, group: ExactGroup) -> list[SequenceDelta]:
        """Ends the answers that are not there yet, without a text: what has been drawn of them is none."""
        self._retire(group)
        return [
            SequenceDelta(slot.index, finish_reason=FinishReason.TIMED_OUT, exact=ExactDraws(slot.num_draws, TIME_PASSED))
            for slot in group.slots
        ]

    def _group_of(self, sequence: Sequence) -> ExactGroup:
        assert isinstance(sequence.search, ExactGroup)
        assert sequence.constraint is not None
        sequence.constraint.mask = None
        self.touched[sequence.search] = None
        return sequence.search

    def _advance(self, group: ExactGroup) -> list[SequenceDelta]:
        deltas: list[SequenceDelta] = []
        try:
            if group.prompt is None:
                group.prompt = self.outputs.prompt_info(group.sequences[0])
                self.outputs.count_prompt(group.sequences[0])
            group.begin_round()
            deltas += [self._read_or_fail(group, slot, token_ids, outcome) for slot, token_ids, outcome in group.move()]
            if not group.slots:
                self._retire(group)
            else:
                self._assign(group)
        except Exception as error:  # a plug-in's grammar: whatever it raises ends its own request
            logger.exception("A grammar failed")
            deltas += self.fail(group, f"the grammar raised {type(error).__name__}: {error}")
        return deltas

    def _read_or_fail(self, group: ExactGroup, slot: Slot, token_ids: list[int], outcome: Outcome) -> SequenceDelta:
        """A whole answer, as the only delta of its sequence."""
        try:
            return self._read(group, slot, token_ids, outcome)
        except Exception as error:  # a plug-in's parser: whatever it raises ends its own sequence
            logger.exception("An answer could not be read")
            reason = f"reading the answer raised {type(error).__name__}: {error}"
            return SequenceDelta(slot.index, finish_reason=FinishReason.ERROR, error=reason)

    def _read(self, group: ExactGroup, slot: Slot, token_ids: list[int], outcome: Outcome) -> SequenceDelta:
        answer = group.request.make_answer()
        said = token_ids[:-1] if outcome is Outcome.ACCEPTED else token_ids
        events = [event for token_id in said for event in answer.feed(token_id)] + answer.finish()
        self.outputs.num_generation_tokens += len(token_ids)
        is_cut = outcome is Outcome.CUT
        return SequenceDelta(
            slot.index,
            token_ids=token_ids,
            events=events,
            finish_reason=FinishReason.LENGTH if is_cut else FinishReason.STOP,
            stop_reason=group.request.params.length_stop_reason if is_cut else None,
            prompt=group.prompt,
            num_reasoning_tokens=answer.num_reasoning_tokens,
            exact=group.draws_of(slot),
        )

    def _assign(self, group: ExactGroup) -> None:
        """Gives each node that is to be computed a lane, as far as there are lanes."""
        idle = list(group.sequences)
        while group.to_compute and (idle or len(group.sequences) < group.num_lanes):
            node = group.to_compute.popleft()
            path = node.path
            lane = max(idle, key=lambda one: _num_shared(_path(one), path), default=None)
            if len(group.sequences) < group.num_lanes and (lane is None or _num_shared(_path(lane), path) < len(path) - 1):
                # One more lane: what this one has computed may be wanted later, and the new one shares the beginning of its path.
                parent = max(group.sequences, key=lambda one: _num_shared(_path(one), path))
                lane = group.branch(parent)
                self.outputs.scheduler.branch(parent, lane)
                group.sequences.append(lane)
            else:
                assert lane is not None
                idle.remove(lane)
            self._go_to(group, lane, path)
            group.computing[lane] = node
        if not group.computing:  # draws are left that need no model
            lane = idle.pop(0)
            self._go_to(group, lane, _path(lane))
            group.computing[lane] = None
        while idle and len(group.sequences) > max(1, len(group.slots)):
            lane = idle.pop()
            group.sequences.remove(lane)
            self.outputs.retire(lane)

    def _go_to(self, group: ExactGroup, lane: Sequence, path: list[int]) -> None:
        """Has the lane compute what follows on the path, with what it has computed of that already."""
        before, constraint = _path(lane), lane.constraint
        num_shared = _num_shared(before, path)
        assert constraint is not None
        constraint.rollback(len(before) - num_shared)
        for token_id in path[num_shared:]:
            constraint.take(lane.answer, token_id)
        lane.sampling = group.sampling.fork()
        for token_id in path:
            lane.sampling.append(token_id)
        lane.sampler_row = SamplerRow(lane, lane.sampling)
        self.outputs.scheduler.rewind(lane, lane.num_prompt_tokens + num_shared)
        lane.token_ids[lane.num_prompt_tokens :] = path
        lane.num_computed_tokens = min(lane.num_computed_tokens, len(lane.token_ids) - 1)

    def _retire(self, group: ExactGroup) -> None:
        self.touched.pop(group, None)  # by a step whose results could not be taken in as a whole
        for sequence in group.sequences:
            if sequence.status is not Status.FINISHED:
                self.outputs.retire(sequence)
