import asyncio
import functools
import itertools
import sys
import threading
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.engine.batch import Batch
from penstock.engine.core import EngineCore
from penstock.engine.deltas import FinishReason, SequenceDelta
from penstock.engine.errors import ENGINE_FAILED, EngineUnavailable, InvalidRequest, QueueFull
from penstock.engine.kv_cache import block_pool
from penstock.engine.loop import MAX_FAILED_STEPS, STEP_FAILED, Engine
from penstock.engine.request import Request
from penstock.engine.runner import StepHandle, StepOutput
from penstock.engine.sampling.speculation import Speculation
from penstock.engine.scheduling.scheduler import Scheduler, Step
from tests.fakes import EOS, LETTERS, RowFunction, content, make_core, make_request, runner_of, saying, tokens
from tests.fakes import generate as generate_alone


@pytest.fixture(autouse=True, params=[False, True], ids=["in turn", "ahead"])
def order_of_steps(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of it holds as well where steps are scheduled while others are under way."""
    monkeypatch.setattr(sys.modules[__name__], "make_core", functools.partial(make_core, is_async=request.param))


@asynccontextmanager
async def running(core: EngineCore) -> AsyncGenerator[Engine, None]:
    """A started engine; at the end nothing may be held."""
    engine = Engine(core)
    await engine.start()
    try:
        yield engine
        await settled(core)
    finally:
        await engine.stop()
    engine.check_integrity()
    assert core.scheduler.pool.num_free == core.scheduler.pool.num_blocks


async def settled(core: EngineCore) -> None:
    """Waits until a step that began before has ended."""
    num_steps = core.stats().num_steps
    await until(lambda: not core.has_work or core.stats().num_steps >= num_steps + 2)


async def until(condition: Callable[[], bool]) -> None:
    """Lets the loop turn until something has come about; the limit of the whole test ends what never does."""
    for _ in itertools.count():
        if condition():
            return
        await asyncio.sleep(0)


async def collect(engine: Engine, request: Request) -> list[SequenceDelta]:
    return [delta async for delta in engine.generate(request)]


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def within_a_minute() -> None:
        async with asyncio.timeout(60):
            await test()

    asyncio.run(within_a_minute())


def ends(deltas: list[SequenceDelta]) -> list[tuple[int, FinishReason]]:
    return sorted((delta.index, delta.finish_reason) for delta in deltas if delta.finish_reason is not None)


def test_clients_at_once_get_what_each_gets_alone() -> None:
    core = make_core(num_blocks=20, max_model_len=60, max_num_seqs=5)

    def request(number: int) -> Request:
        return make_request(str(number), LETTERS[number : number + 5], n=1 + number % 2, max_tokens=3 + number)

    async def test() -> None:
        async with running(core) as engine:
            answers = await asyncio.gather(*(collect(engine, request(number)) for number in range(10)))
        for number, deltas in enumerate(answers):
            alone = generate_alone(make_core(), request(number))
            for index in range(1 + number % 2):
                assert tokens(deltas, index) == tokens(alone, index)
            assert ends(deltas) == ends(alone)

    run(test)


def test_a_step_is_launched_while_another_is_under_way_and_no_third_one() -> None:
    async def launched(is_async: bool) -> int:
        core = make_core(is_async=is_async)
        runner = runner_of(core)
        num_launched = 0
        launch = runner.launch

        def count(batch: Batch) -> StepHandle:
            nonlocal num_launched
            num_launched += 1
            return launch(batch)

        runner.launch = count  # type: ignore[method-assign]
        async with running(core) as engine:
            runner.gate = threading.Event()
            client = asyncio.create_task(collect(engine, make_request(max_tokens=6)))
            await until(lambda: num_launched > 0)
            for _ in range(9):
                await asyncio.sleep(0)
            held_up = num_launched
            runner.gate.set()
            assert ends(await client) == [(0, FinishReason.LENGTH)]
            assert num_launched == 6
        return held_up

    async def test() -> None:
        assert await launched(False) == 1
        assert await launched(True) == 2

    run(test)


def test_deltas_come_while_others_are_still_being_made() -> None:
    core = make_core()

    async def test() -> None:
        async with running(core) as engine:
            slow, quick = engine.generate(make_request("slow", max_tokens=100)), engine.generate(make_request("quick", max_tokens=3))
            await anext(slow)
            assert len([delta async for delta in quick]) == 3
            await anext(slow)
            assert engine.stats().num_running == 1
            await slow.aclose()

    run(test)


def test_closing_the_stream_frees_everything_at_once() -> None:
    core = make_core()

    async def test() -> None:
        async with running(core) as engine:
            stream = engine.generate(make_request(n=3, max_tokens=100))
            await anext(stream)
            assert engine.stats().kv_cache_usage > 0
            await stream.aclose()
            assert engine.stats().kv_cache_usage == 0
            assert engine.stats().num_running == 0
            engine.check_integrity()
            assert content(await collect(engine, make_request(max_tokens=2)))

    run(test)


def test_a_client_that_is_cancelled_is_aborted() -> None:
    core = make_core()
    runner = runner_of(core)

    async def test() -> None:
        async with running(core) as engine:
            runner.gate = threading.Event()
            client = asyncio.create_task(collect(engine, make_request("leaves", max_tokens=100)))
            stays = asyncio.create_task(collect(engine, make_request("stays", max_tokens=4)))
            await until(lambda: engine.stats().num_running > 0)
            client.cancel()
            with pytest.raises(asyncio.CancelledError):
                await client
            assert engine.stats().num_running == 1
            engine.check_integrity()
            runner.gate.set()
            assert len(await stays) == 4

    run(test)


def test_an_id_that_is_in_use_is_refused_even_while_its_last_deltas_wait_to_be_read() -> None:
    core = make_core()

    async def test() -> None:
        async with running(core) as engine:
            stream = engine.generate(make_request("same", max_tokens=5))
            await anext(stream)
            await until(lambda: not core.has_work)
            with pytest.raises(InvalidRequest, match="in use"):
                await collect(engine, make_request("same"))
            assert len([delta async for delta in stream]) == 4
            assert len(await collect(engine, make_request("same", max_tokens=5))) == 5

    run(test)


def test_what_is_refused_is_refused_before_the_first_delta() -> None:
    core = make_core(max_waiting=1)
    runner = runner_of(core)

    async def test() -> None:
        async with running(core) as engine:
            with pytest.raises(InvalidRequest):
                await collect(engine, make_request(prompt=""))
            runner.gate = threading.Event()
            clients = [asyncio.create_task(collect(engine, make_request("0", max_tokens=3)))]
            await until(lambda: engine.stats().num_running > 0)
            clients.append(asyncio.create_task(collect(engine, make_request("1", max_tokens=3))))
            await until(lambda: engine.stats().num_waiting > 0)
            with pytest.raises(QueueFull):
                await collect(engine, make_request("2", max_tokens=3))
            runner.gate.set()
            assert [len(deltas) for deltas in await asyncio.gather(*clients)] == [3, 3]

    run(test)


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
    monkeypatch.setattr("penstock.engine.core.STEPS_UNTIL_LARGER", 2)
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


def test_stopping_lets_what_runs_finish_in_time_and_takes_no_more() -> None:
    core = make_core()
    runner = runner_of(core)

    async def test() -> None:
        engine = Engine(core)
        await engine.start()
        runner.gate = threading.Event()
        client = asyncio.create_task(collect(engine, make_request("r", max_tokens=5)))
        await until(lambda: engine.stats().num_running > 0)
        stopping = asyncio.create_task(engine.stop(drain_seconds=60))
        await asyncio.sleep(0)
        assert not engine.is_accepting
        with pytest.raises(EngineUnavailable, match="shutting down"):
            await collect(engine, make_request("late"))
        runner.gate.set()
        assert ends(await client) == [(0, FinishReason.LENGTH)]
        await stopping
        assert not engine.is_healthy

    run(test)


def test_stopping_gives_one_last_delta_to_every_sequence_that_has_not_ended() -> None:
    core = make_core(max_num_seqs=4)
    numbers = itertools.count()

    def make_processor() -> RowFunction:
        number = next(numbers)

        def end_the_second(token_ids: list[int], logits: Tensor) -> Tensor:
            if number == 1 and len(token_ids) == 2:
                logits[EOS] = logits.max() + 1
            return logits

        return end_the_second

    forks = make_request("forks", n=3, max_tokens=150, logits_processors=[make_processor])
    runner = runner_of(core)

    async def test() -> None:
        engine = Engine(core)
        await engine.start()
        clients = [asyncio.create_task(collect(engine, other)) for other in (forks, make_request("waits", n=2))]
        await until(lambda: core.stats().num_steps >= 4)
        runner.gate = threading.Event()
        for _ in range(5):
            await asyncio.sleep(0)  # some deltas are read, some are not
        stopping = asyncio.create_task(engine.stop())
        answers = await asyncio.gather(*clients)
        runner.gate.set()
        await stopping
        engine.check_integrity()
        assert ends(answers[0]) == [(0, FinishReason.ABORT), (1, FinishReason.STOP), (2, FinishReason.ABORT)]
        assert ends(answers[1]) == [(0, FinishReason.ABORT), (1, FinishReason.ABORT)]
        assert core.scheduler.pool.num_free == core.scheduler.pool.num_blocks

    run(test)


def test_an_engine_can_be_stopped_twice_and_before_it_was_started() -> None:
    async def test() -> None:
        engine = Engine(make_core())
        await engine.stop()
        await engine.start()
        await engine.stop()
        await engine.stop(drain_seconds=1)

    run(test)


def test_an_engine_that_is_not_running_takes_nothing() -> None:
    async def test() -> None:
        engine = Engine(make_core())
        assert not engine.is_accepting
        assert not engine.is_healthy
        with pytest.raises(EngineUnavailable, match="not running"):
            await collect(engine, make_request())
        await engine.start()
        assert engine.is_accepting
        assert engine.is_healthy
        with pytest.raises(AssertionError, match="started before"):
            await engine.start()
        await engine.stop()
        with pytest.raises(EngineUnavailable, match="shutting down"):
            await collect(engine, make_request())

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


@pytest.mark.parametrize("num_tokens", [39, 40])
def test_only_a_long_prompt_is_hashed_by_another_thread(monkeypatch: pytest.MonkeyPatch, num_tokens: int) -> None:
    threads: list[int] = []
    chain_hashes = block_pool.chain_hashes

    def note(token_ids: list[int], block_size: int, known: list[bytes], *options: Any, **bounds: Any) -> None:
        num_known = len(known)
        chain_hashes(token_ids, block_size, known, *options, **bounds)
        threads.extend([threading.get_ident()] * (len(known) - num_known))

    for module in ("kv_cache.block_pool", "scheduling.scheduler"):
        monkeypatch.setattr(f"penstock.engine.{module}.chain_hashes", note)
    monkeypatch.setattr("penstock.engine.loop.LONG_PROMPT", 40)

    async def test() -> None:
        async with running(make_core(block_size=4)) as engine:
            await collect(engine, make_request(prompt=(LETTERS * 3)[:num_tokens], max_tokens=1))

    run(test)
    assert len(threads) == num_tokens // 4
    assert (threading.get_ident() in threads) == (num_tokens < 40)


def test_a_long_prompt_that_cannot_be_served_is_refused_before_it_is_hashed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.engine.loop.LONG_PROMPT", 40)

    async def test() -> None:
        async with running(make_core()) as engine:
            with pytest.raises(InvalidRequest, match="outside the vocabulary"):
                await collect(engine, make_request(prompt=[*LETTERS * 3, 2**80]))

    run(test)


@pytest.mark.parametrize("is_async", [False, True])
def test_steps_are_measured_where_drafts_are_weighed_against_scheduling_ahead(monkeypatch: pytest.MonkeyPatch, is_async: bool) -> None:
    measured: list[tuple[bool, bool]] = []

    def observe(self: Speculation, host_seconds: float, step_seconds: float, *, is_ahead: bool) -> None:
        measured.append((0 < host_seconds <= step_seconds, is_ahead))

    monkeypatch.setattr(Speculation, "observe", observe)

    async def test() -> None:
        async with running(make_core(rows_for_weights=8.0, is_async=is_async)) as engine:
            for _ in range(2):
                await collect(engine, make_request(max_tokens=6, ignore_eos=True))

    run(test)
    if not is_async:
        assert measured == []
    else:
        assert all(is_plausible for is_plausible, _ in measured)
        assert 6 <= len(measured) <= 2 * 6  # the first step of each request has none before it
        assert sum(is_ahead for _, is_ahead in measured) >= 6


def test_a_step_wakes_each_client_once(monkeypatch: pytest.MonkeyPatch) -> None:
    num_clients, num_tokens = 8, 50
    core = make_core(num_blocks=200, max_model_len=100, max_num_seqs=num_clients)
    num_calls = 0

    async def test() -> None:
        loop = asyncio.get_running_loop()
        call_soon = loop.call_soon

        def counted(*arguments: Any, **options: Any) -> asyncio.Handle:
            nonlocal num_calls
            num_calls += 1
            return call_soon(*arguments, **options)

        async with running(core) as engine:
            requests = [make_request(str(number), LETTERS[number : number + 5], max_tokens=num_tokens) for number in range(num_clients)]
            with monkeypatch.context() as counting:
                counting.setattr(loop, "call_soon", counted)
                answers = await asyncio.gather(*(collect(engine, request) for request in requests))
        assert all(len(tokens(deltas)) == num_tokens for deltas in answers)
        assert num_calls < 1.5 * num_clients * num_tokens

    run(test)


def test_a_client_that_comes_late_reads_all_that_has_been_said_in_order() -> None:
    core = make_core(num_blocks=200, max_model_len=100)

    async def test() -> None:
        async with running(core) as engine:
            stream = engine.generate(make_request(max_tokens=20))
            deltas = [await anext(stream)]
            await until(lambda: not core.has_work)
            deltas += [delta async for delta in stream]
        assert tokens(deltas) == tokens(generate_alone(make_core(), make_request(max_tokens=20)))

    run(test)
