"""Steps and requests that fail, and what goes on beside them."""

import asyncio
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from penstock.engine.batch import Batch
from penstock.engine.core import EngineCore
from penstock.engine.deltas import FinishReason, SequenceDelta
from penstock.engine.errors import ENGINE_FAILED, EngineUnavailable
from penstock.engine.loop import MAX_FAILED_STEPS, STEP_FAILED, Engine
from penstock.engine.runner import StepOutput
from penstock.engine.scheduling.scheduler import Scheduler
from penstock.engine.scheduling.step import Step
from tests.engine.running import collect, ends, run, running
from tests.engine.running import order_of_steps as order_of_steps
from tests.fakes import content, make_core, make_request, runner_of, saying, tokens
from tests.fakes import generate as generate_alone


@pytest.mark.parametrize("failure", [RuntimeError("out of memory"), StopIteration()])
def test_a_failed_step_ends_its_requests_and_the_engine_goes_on(failure: Exception) -> None:
    core = make_core()
    runner = runner_of(core)

    async def test() -> None:
        async with running(core) as engine:
            runner.failure = failure
            answers = await asyncio.gather(*(collect(engine, make_request(str(number), n=2)) for number in range(2)))
            for deltas in answers:
                assert ends(deltas) == [(0, FinishReason.ERROR), (1, FinishReason.ERROR)]
                assert {delta.error for delta in deltas} == {STEP_FAILED}
            runner.failure = None
            assert ends(await collect(engine, make_request(max_tokens=2))) == [(0, FinishReason.LENGTH)]

    run(test)


def test_what_was_said_before_a_step_failed_is_heard() -> None:
    core = make_core()
    runner = runner_of(core)

    async def test() -> None:
        async with running(core) as engine:
            stream = engine.generate(make_request(max_tokens=50))
            said = [await anext(stream)]
            runner.failure = RuntimeError("out of memory")
            said += [delta async for delta in stream]
            alone = tokens(generate_alone(make_core(), make_request(max_tokens=50)))
            assert tokens(said) == alone[: len(tokens(said))]
            assert ends(said) == [(0, FinishReason.ERROR)]

    run(test)


@pytest.mark.parametrize("place", ["build", "update"])
def test_a_defect_around_the_model_fails_the_step_as_well(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: EngineCore, *args: Any) -> Any:
        raise RuntimeError("a defect")

    core = make_core()

    async def test() -> None:
        async with running(core) as engine:
            with monkeypatch.context() as patch:
                patch.setattr(EngineCore, place, fail)
                assert ends(await collect(engine, make_request(n=2))) == [(0, FinishReason.ERROR), (1, FinishReason.ERROR)]
            assert ends(await collect(engine, make_request(max_tokens=2))) == [(0, FinishReason.LENGTH)]

    run(test)


def test_a_few_failed_steps_in_a_row_are_unhealthy_until_one_succeeds() -> None:
    core = make_core()
    runner = runner_of(core)

    async def test() -> None:
        async with running(core) as engine:
            runner.failure = RuntimeError("broken")
            for number in range(MAX_FAILED_STEPS):
                assert engine.is_healthy
                await collect(engine, make_request(str(number)))
            assert not engine.is_healthy
            runner.failure = None
            await collect(engine, make_request(max_tokens=1))
            assert engine.is_healthy

    run(test)


def test_a_defect_of_the_scheduler_leaves_no_client_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    core = make_core()

    async def test() -> None:
        engine = Engine(core)
        await engine.start()
        stream = engine.generate(make_request(n=2, max_tokens=100))
        said = [await anext(stream)]

        def fail(self: Scheduler, **options: Any) -> None:
            raise RuntimeError("a defect")

        monkeypatch.setattr(Scheduler, "schedule", fail)
        said += [delta async for delta in stream]
        assert ends(said) == [(0, FinishReason.ERROR), (1, FinishReason.ERROR)]
        assert said[-1].error == ENGINE_FAILED
        assert not engine.is_healthy
        await engine.failed()
        with pytest.raises(EngineUnavailable, match="has failed"):
            await collect(engine, make_request())
        await engine.stop(drain_seconds=60)

    run(test)


def test_an_engine_whose_gpu_is_lost_ends_its_requests_and_refuses_others() -> None:
    core = make_core()
    runner = runner_of(core)

    async def test() -> None:
        engine = Engine(core)
        await engine.start()
        runner.failure = torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
        said = await collect(engine, make_request(n=2))
        assert ends(said) == [(0, FinishReason.ERROR), (1, FinishReason.ERROR)]
        assert {delta.error for delta in said} == {ENGINE_FAILED}
        await engine.failed()
        assert not engine.is_healthy
        with pytest.raises(EngineUnavailable, match="has failed"):
            await collect(engine, make_request())
        await engine.stop()

    run(test)


@dataclass(slots=True)
class StepSizes:
    """An observer: the tokens of the steps that have been built and not computed yet."""

    sizes: deque[int] = field(default_factory=deque)

    def begin(self, step: Step) -> None:
        self.sizes.append(sum(step.num_tokens.values()))

    def end(self, step: Step, deltas: dict[str, list[SequenceDelta]]) -> None:
        pass


def serve_in(core: EngineCore, most_tokens: int) -> tuple[list[list[SequenceDelta]], list[int]]:
    """What eight clients hear where larger steps run out of memory, and the sizes of those that did."""
    runner, too_large = runner_of(core), []
    compute = runner.run
    observer = core.observer = StepSizes()

    def run_if_small(batch: Batch) -> StepOutput:
        if (num_tokens := observer.sizes.popleft()) > most_tokens:
            too_large.append(num_tokens)
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return compute(batch)

    runner.run = run_if_small  # type: ignore[method-assign]
    said: list[list[SequenceDelta]] = []

    async def test() -> None:
        async with running(core) as engine:
            requests = [make_request(str(number), "abc" * (number + 1), max_tokens=6, ignore_eos=True) for number in range(8)]
            said.extend(await asyncio.gather(*(collect(engine, request) for request in requests)))

    run(test)
    return said, too_large


@pytest.mark.parametrize("enable_prefix_caching", [False, True])
def test_a_step_out_of_memory_is_computed_again_in_smaller_ones(enable_prefix_caching: bool) -> None:
    expected, _ = serve_in(make_core(enable_prefix_caching=enable_prefix_caching), most_tokens=1000)
    core = make_core(enable_prefix_caching=enable_prefix_caching)
    said, too_large = serve_in(core, most_tokens=5)
    assert [tokens(deltas) for deltas in said] == [tokens(deltas) for deltas in expected]
    assert max(too_large) > 20
    assert core.scheduler.max_num_batched_tokens in (3, 4, 5)


def test_a_step_of_one_token_that_runs_out_of_memory_fails() -> None:
    said, _ = serve_in(make_core(), most_tokens=0)
    assert {deltas[-1].error for deltas in said} == {STEP_FAILED}


def test_steps_grow_again_where_memory_ran_out_long_ago(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.engine.scheduling.step.STEPS_UNTIL_LARGER", 2)
    core = make_core()
    usual = core.scheduler.max_num_batched_tokens
    serve_in(core, most_tokens=20)
    assert core.scheduler.max_num_batched_tokens == usual


def test_an_answer_that_cannot_be_begun_is_its_clients_alone() -> None:
    core = make_core(saying("hello"))

    def parser(turn: Any) -> Any:
        raise ValueError("no such turn")

    async def test() -> None:
        async with running(core) as engine:
            good = asyncio.create_task(collect(engine, make_request("good")))
            with pytest.raises(ValueError, match="no such turn"):
                await collect(engine, make_request("bad", parser=parser))
            assert content(await good) == "hello"
            assert engine.is_healthy

    run(test)


@pytest.mark.parametrize("n", [1, 3])
def test_a_sequence_that_ended_in_an_update_which_failed_still_gets_its_last_delta(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    update = EngineCore.update

    def fail_after(*arguments: Any) -> Any:
        update(*arguments)
        raise RuntimeError("half way")

    monkeypatch.setattr(EngineCore, "update", fail_after)

    async def test() -> None:
        async with running(make_core()) as engine:
            said = await collect(engine, make_request("one", n=n, temperature=1.0, max_tokens=1))
        assert [(delta.finish_reason, delta.error) for delta in said] == [(FinishReason.ERROR, STEP_FAILED)] * n

    run(test)
