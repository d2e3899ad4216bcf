"""Whatever arrives or is aborted, and whenever: every answer is the one that its request gets alone, and nothing is lost."""

from dataclasses import dataclass, field, replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engine.batch import Batch
from penstock.engine.core import EngineCore
from penstock.engine.deltas import FinishReason, SequenceDelta
from penstock.engine.kv_cache.blocks import max_blocks_held
from penstock.engine.request import BACKGROUND, Request
from penstock.engine.runner import StepHandle
from penstock.engine.sampling.params import BeamSearchParams
from penstock.engine.scheduling.step import Step
from tests.fakes import LETTERS, generate, letter_like_before, make_core, make_request, runner_of, tokens

MAX_MODEL_LEN = 40
PROMPTS = st.builds(
    lambda head, length, tail: (head * 40)[:length] + tail,
    st.sampled_from([LETTERS[:1], LETTERS[:3]]),  # few different beginnings, so that many are shared
    st.integers(1, 22),
    st.lists(st.sampled_from(LETTERS[:2]), max_size=2),
)


@dataclass
class Arrival:
    """A request as arguments of `make_request`, so that it can be made again."""

    prompt: list[int]
    params: dict[str, Any]
    priority: int
    cache_salt: str
    leaves_at: int | None  # this many half-steps after it came
    beam: BeamSearchParams | None = None
    deltas: list[SequenceDelta] = field(default_factory=list)

    def make(self, name: str, **options: Any) -> Request:
        return replace(make_request(name, self.prompt, **options, **self.params), beam=self.beam)


@st.composite
def arrivals(draw: st.DrawFn) -> Arrival:
    params: dict[str, Any] = {"max_tokens": draw(st.sampled_from([0, 1, 5, 12, 16, 16])), "n": draw(st.integers(1, 3))}
    if draw(st.booleans()):
        params |= {"temperature": 1.5, "seed": draw(st.integers(0, 3))}
    if draw(st.integers(0, 3)) == 0:
        params["prompt_logprobs"] = 1
    beam = None
    if draw(st.integers(0, 2)) == 0:
        beam = BeamSearchParams(draw(st.integers(params["n"], 3)), early_stopping=draw(st.booleans()))
        params["max_tokens"] = draw(st.integers(1, 9))
    leaves_at = draw(st.one_of(st.none(), st.none(), st.integers(0, 12)))
    return Arrival(
        draw(PROMPTS), params, draw(st.sampled_from([-1, 0, 1, BACKGROUND])), draw(st.sampled_from(["", "salt"])), leaves_at, beam
    )


def said_alone(arrival: Arrival) -> list[SequenceDelta]:
    core = make_core(letter_like_before, max_model_len=MAX_MODEL_LEN, enable_prefix_caching=False, max_num_batched_tokens=1000)
    deltas = generate(core, arrival.make("alone"))
    runner_of(core).shutdown()
    return deltas


def run_all(core: EngineCore, plan: list[tuple[int, Arrival]]) -> None:
    """Adds each arrival at its half-step and aborts those that leave; odd half-steps are between a step's launch and its update."""
    ends = {
        arrival_id: half_step + arrival.leaves_at for arrival_id, (half_step, arrival) in enumerate(plan) if arrival.leaves_at is not None
    }

    def interrupt(half_step: int) -> None:
        for number, (begin, arrival) in enumerate(plan):
            if begin == half_step:
                core.add(arrival.make(str(number), priority=arrival.priority, cache_salt=arrival.cache_salt))
            if ends.get(number) == half_step:
                core.abort(str(number))
        core.check_integrity()

    def launch(step: Step | None) -> tuple[Step, Batch, StepHandle] | None:
        if step is None:
            return None
        assert all(step.num_tokens[sequence] == sequence.num_uncomputed_tokens for sequence in step.drafts), "what is known comes first"
        assert sum(step.num_tokens.values()) + sum(map(len, step.drafts.values())) <= core.scheduler.max_num_batched_tokens
        assert len(core.scheduler.running) <= core.scheduler.max_num_seqs
        batch = core.build(step)
        return step, batch, core.runner.launch(batch)

    flight: tuple[Step, Batch, StepHandle] | None = None
    for half_step in range(0, 2000, 2):
        interrupt(half_step)
        flight = flight or launch(core.schedule())
        if flight is None:
            interrupt(half_step + 1)
            if half_step > 30:
                return
            continue
        step, batch, handle = flight
        flight = launch(core.schedule_ahead(step, batch))
        interrupt(half_step + 1)
        for request_id, deltas in core.update(step, batch, handle.collect()).items():
            plan[int(request_id)][1].deltas += deltas
            assert ends.get(int(request_id), half_step + 2) > half_step + 1, "an aborted request is heard of"
        core.check_integrity()
    raise AssertionError("it never ends")


@given(
    plan=st.lists(st.tuples(st.integers(0, 20), arrivals()), min_size=1, max_size=8),
    block_size=st.integers(1, 5),
    num_spare_blocks=st.integers(0, 4),
    max_num_seqs=st.integers(3, 6),
    max_num_batched_tokens=st.sampled_from([1, 4, 7, 16, 200]),
    enable_prefix_caching=st.booleans(),
    rows_for_weights=st.sampled_from([None, 20.0, 1000.0]),
    is_async=st.booleans(),
    windows=st.sampled_from([(None,), (None,), (None, 1), (None, 5, 5), (None, 12, 4)]),
    num_spare_slots=st.sampled_from([None, None, 0, 1, 5]),
)
@settings(max_examples=40)
def test_every_request_gets_the_answer_it_gets_alone(
    plan: list[tuple[int, Arrival]],
    block_size: int,
    num_spare_blocks: int,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    enable_prefix_caching: bool,
    rows_for_weights: float | None,
    is_async: bool,
    windows: tuple[int | None, ...],
    num_spare_slots: int | None,
) -> None:
    num_beam_blocks = -(-9 // block_size) + 1 if any(arrival.beam for _, arrival in plan) else 0
    core = make_core(
        letter_like_before,
        block_size=block_size,
        num_blocks=max_blocks_held(windows, MAX_MODEL_LEN, max(max_num_seqs, max_num_batched_tokens), block_size)
        + num_spare_blocks
        + (1 + len(windows)) * num_beam_blocks * len(windows),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=MAX_MODEL_LEN,
        enable_prefix_caching=enable_prefix_caching,
        rows_for_weights=rows_for_weights if num_spare_slots is None else None,
        is_async=is_async,
        windows=windows,
        num_slots=0 if num_spare_slots is None else max_num_seqs + num_spare_slots,
        grid=2 * block_size,
    )
    run_all(core, plan)
    runner_of(core).shutdown()
    assert core.scheduler.pool.num_free == core.scheduler.pool.num_blocks
    for _, arrival in plan:
        alone = said_alone(arrival)
        for index in range(arrival.params["n"]):
            ours, theirs = ([delta for delta in deltas if delta.index == index] for deltas in (arrival.deltas, alone))
            if arrival.leaves_at is not None and not (ours and ours[-1].finish_reason):
                assert tokens(ours, index) == tokens(theirs, index)[: len(tokens(ours, index))]
                continue
            assert tokens(ours, index) == tokens(theirs, index)
            assert [delta.finish_reason for delta in ours] == [None] * (len(ours) - 1) + [FinishReason.LENGTH]
            assert all((delta.prompt is not None) == (position == 0) for position, delta in enumerate(ours))
            assert ours[0].prompt is not None
            assert theirs[0].prompt is not None
            assert ours[0].prompt.logprobs == theirs[0].prompt.logprobs
            assert ours[0].prompt.num_cached_tokens < len(arrival.prompt)
