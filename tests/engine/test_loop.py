"""The engine's loop: clients, streams, and how they end."""

import asyncio
import gc
import itertools
import threading
import time
from typing import Any

import pytest
from torch import Tensor

from penstock.engine.batch import Batch
from penstock.engine.deltas import FinishReason
from penstock.engine.errors import EngineUnavailable, InvalidRequest, QueueFull
from penstock.engine.kv_cache import blocks as kv_blocks
from penstock.engine.loop import Engine
from penstock.engine.request import Request
from penstock.engine.runner import StepHandle
from penstock.engine.scheduling.step import Speculation
from tests.engine.running import collect, ends, run, running, until
from tests.engine.running import order_of_steps as order_of_steps
from tests.fakes import EOS, LETTERS, RowFunction, content, make_core, make_request, runner_of, tokens
from tests.fakes import generate as generate_alone


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


def test_stopping_waits_for_threads_that_still_read_the_weights() -> None:
    core, may_end = make_core(), threading.Event()
    reader = threading.Thread(target=may_end.wait, args=(60,))
    core.runner.readers.append(reader)
    reader.start()

    async def test() -> None:
        engine = Engine(core)
        await engine.start()
        stopping = asyncio.create_task(engine.stop())
        await until(lambda: not engine.is_accepting)
        await asyncio.sleep(0.05)
        assert not stopping.done()
        may_end.set()
        await stopping
        assert not reader.is_alive()

    run(test)


def test_an_engine_can_be_stopped_twice_and_before_it_was_started() -> None:
    async def test() -> None:
        engine = Engine(make_core())
        await engine.stop()
        await engine.start()
        await engine.stop()
        await engine.stop(drain_seconds=1)

    run(test)


@pytest.mark.parametrize("is_stopped", [True, False])
def test_no_thread_is_in_native_code_when_an_engine_has_ended(is_stopped: bool) -> None:
    core, is_shut_down, at_work = make_core(), threading.Event(), threading.Event()
    runner = runner_of(core)
    shutdown = runner.shutdown

    def optimize() -> None:
        at_work.set()
        is_shut_down.wait(60)
        time.sleep(0.05)  # what it does last takes a moment
        at_work.clear()

    def shut_down() -> None:
        shutdown()
        is_shut_down.set()

    runner.optimize, runner.shutdown = optimize, shut_down  # type: ignore[method-assign]

    async def test() -> None:
        engine = Engine(core)
        await engine.start()
        await until(at_work.is_set)
        if is_stopped:
            await engine.stop()

    run(test)
    gc.collect()
    assert not at_work.is_set()


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


@pytest.mark.parametrize("num_tokens", [39, 40])
def test_only_a_long_prompt_is_hashed_by_another_thread(monkeypatch: pytest.MonkeyPatch, num_tokens: int) -> None:
    threads: list[int] = []
    chain_hashes = kv_blocks.chain_hashes

    def note(token_ids: list[int], block_size: int, known: list[bytes], *options: Any, **bounds: Any) -> None:
        num_known = len(known)
        chain_hashes(token_ids, block_size, known, *options, **bounds)
        threads.extend([threading.get_ident()] * (len(known) - num_known))

    for module in ("kv_cache.blocks", "sequence"):
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
