"""Sleep: what is freed, what goes on afterwards, and every change of the state that may meet another one."""

import asyncio
import functools
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.engine.control import sleep
from penstock.engine.control.sleep import SleepState, cache_of, weights_of
from penstock.engine.core import EngineCore
from penstock.engine.deltas import FinishReason, SequenceDelta
from penstock.engine.errors import ENGINE_FAILED, Conflict, EngineUnavailable, InvalidRequest
from penstock.engine.loop import Engine
from penstock.engine.native.runtime import native_library
from penstock.engine.parallel.group import Group
from penstock.engine.sampling.params import BeamSearchParams
from penstock.engine.system.memory import regions_of, resident_bytes
from tests.engine.running import collect, ends, run, running, until
from tests.engine.running import order_of_steps as order_of_steps
from tests.engines import core_over, loaded_model
from tests.fakes import LETTERS, beam_request, make_core, make_request, runner_of, tokens
from tests.fakes import generate as generate_alone
from tests.tiny_models import tiny_model

PROMPT = LETTERS * 3  # twelve full blocks
LONG: dict[str, Any] = {"max_tokens": 60, "ignore_eos": True}


@pytest.fixture(autouse=True)
def spill_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sleep, "spill_directory", lambda: tmp_path)
    return tmp_path


def large_core(**settings: Any) -> EngineCore:
    """Its cache has pages of its own."""
    return make_core(num_blocks=2048, **settings)


@functools.cache
def alone() -> list[int]:
    return tokens(generate_alone(large_core(), make_request(prompt=PROMPT, **LONG)))


@pytest.mark.parametrize("level", [1, 2])
def test_a_model_that_has_slept_says_the_same(level: int) -> None:
    core = large_core()

    async def test() -> None:
        async with running(core) as engine:
            before = tokens(await collect(engine, make_request("a", PROMPT, **LONG)))
            status = await engine.sleeper.sleep(level)
            assert (status.state, status.level) == (SleepState.ASLEEP, level)
            assert status.freed_kv_cache_bytes > 0
            assert resident_bytes(regions_of(cache_of(core.runner))) == 0
            weights = regions_of(weights_of(core.runner))
            assert (resident_bytes(weights) == 0) == (level == 2)
            assert core.scheduler.pool.num_cached == 0
            assert (await engine.sleeper.wake()).state is SleepState.AWAKE
            deltas = await collect(engine, make_request("b", PROMPT, **LONG))
            assert tokens(deltas) == before == alone()
            assert deltas[0].prompt is not None
            assert deltas[0].prompt.num_cached_tokens == 0

    run(test)


def test_kept_streams_pause_and_go_on_with_the_same_tokens() -> None:
    core = large_core(max_num_seqs=4)
    requests = [make_request(str(number), LETTERS[number:], n=1 + number % 2, **LONG) for number in range(6)]

    async def test() -> None:
        async with running(core) as engine:
            streams = [asyncio.create_task(collect(engine, request)) for request in requests]
            for level in (1, 2):
                num_tokens = core.stats().num_generation_tokens
                await until(lambda: core.stats().num_generation_tokens > num_tokens + 20)  # noqa: B023
                await engine.sleeper.sleep(level, "keep")
                num_steps = core.stats().num_steps
                for _ in range(20):
                    await asyncio.sleep(0)
                assert core.stats().num_steps == num_steps
                assert core.scheduler.pool.num_free == core.scheduler.pool.num_blocks
                assert engine.num_requests == len(requests)
                core.check_integrity()
                await engine.sleeper.wake()
            for request, deltas in zip(requests, await asyncio.gather(*streams), strict=True):
                expected = generate_alone(large_core(), request)
                for index in range(request.params.n):
                    assert tokens(deltas, index) == tokens(expected, index)

    run(test)


def last_tokens(deltas: list[SequenceDelta]) -> list[list[int]]:
    return [delta.token_ids for delta in deltas if delta.finish_reason is not None]


def test_a_beam_search_is_kept() -> None:
    core = large_core()
    request = beam_request("beams", PROMPT, BeamSearchParams(beam_width=3, max_tokens=40))

    async def test() -> None:
        async with running(core) as engine:
            stream = asyncio.create_task(collect(engine, request))
            await until(lambda: core.stats().num_steps > 5)
            await engine.sleeper.sleep(2, "keep")
            await engine.sleeper.wake()
            deltas = await stream
        expected = generate_alone(large_core(), request)
        assert last_tokens(deltas) == last_tokens(expected)

    run(test)


def test_sleep_waits_for_running_requests_and_admits_none_meanwhile() -> None:
    core = large_core()

    async def test() -> None:
        async with running(core) as engine:
            stream = asyncio.create_task(collect(engine, make_request("a", **LONG)))
            await until(lambda: core.stats().num_steps > 2)
            asleep = asyncio.create_task(engine.sleeper.sleep(1))
            await until(lambda: engine.sleeper.state is SleepState.FALLING_ASLEEP)
            with pytest.raises(EngineUnavailable, match="asleep") as refusal:
                engine.check_admission()
            assert refusal.value.retry_after == sleep.RETRY_AFTER
            with pytest.raises(EngineUnavailable, match="asleep"):
                await collect(engine, make_request("b"))
            await asleep
            assert ends(await stream) == [(0, FinishReason.LENGTH)]

    run(test)


def test_a_model_whose_requests_do_not_end_in_time_stays_awake() -> None:
    core = large_core()

    async def test() -> None:
        async with running(core) as engine:
            runner_of(core).gate = gate = threading.Event()
            stream = asyncio.create_task(collect(engine, make_request("a", **LONG)))
            await until(lambda: core.has_work)
            with pytest.raises(Conflict, match="1 requests have not ended"):
                await engine.sleeper.sleep(1, "wait", 0.01)
            assert engine.sleeper.is_awake
            gate.set()
            assert ends(await stream) == [(0, FinishReason.LENGTH)]

    run(test)


def test_a_model_that_is_woken_before_it_sleeps_stays_awake() -> None:
    core = large_core()

    async def test() -> None:
        async with running(core) as engine:
            runner_of(core).gate = gate = threading.Event()
            stream = asyncio.create_task(collect(engine, make_request("a", **LONG)))
            await until(lambda: core.has_work)
            asleep = asyncio.create_task(engine.sleeper.sleep(2))
            await until(lambda: engine.sleeper.state is SleepState.FALLING_ASLEEP)
            assert (await engine.sleeper.wake()).state is SleepState.AWAKE
            with pytest.raises(Conflict, match="woken"):
                await asleep
            gate.set()
            assert ends(await stream) == [(0, FinishReason.LENGTH)]

    run(test)


def test_requests_are_aborted_where_that_is_asked_for() -> None:
    core = large_core()

    async def test() -> None:
        async with running(core) as engine:
            streams = [asyncio.create_task(collect(engine, make_request(str(number), **LONG))) for number in range(3)]
            await until(lambda: core.stats().num_steps > 2)
            await engine.sleeper.sleep(2, "abort")
            for deltas in await asyncio.gather(*streams):
                assert (deltas[-1].finish_reason, deltas[-1].error) == (FinishReason.ABORT, sleep.PUT_TO_SLEEP)
            await engine.sleeper.wake()
            assert tokens(await collect(engine, make_request("b", PROMPT, **LONG))) == alone()

    run(test)


def test_changes_follow_one_another_and_asking_twice_changes_nothing() -> None:
    core = large_core()

    async def test() -> None:
        async with running(core) as engine:
            sleeper, changes = engine.sleeper, []
            sleeper.on_change = lambda: changes.append(sleeper.state)
            levels = [status.level for status in await asyncio.gather(sleeper.sleep(1), sleeper.sleep(2), sleeper.sleep(1))]
            assert levels == [1, 2, 2]
            assert resident_bytes(regions_of(weights_of(core.runner))) == 0
            await asyncio.gather(*(sleeper.wake() for _ in range(5)), sleeper.wake())
            assert list(dict.fromkeys(changes)) == [SleepState.FALLING_ASLEEP, SleepState.ASLEEP, SleepState.WAKING, SleepState.AWAKE]
            assert changes.count(SleepState.AWAKE) == changes.count(SleepState.WAKING) == 1
            asleep = asyncio.create_task(sleeper.sleep(2))
            await until(lambda: not sleeper.is_awake)
            await asyncio.gather(asleep, sleeper.wake(), return_exceptions=True)
            assert sleeper.is_awake

    run(test)


def test_requests_wake_a_model_that_may_be_woken_by_them() -> None:
    core = large_core()

    async def test() -> None:
        async with running(core) as engine:
            await engine.sleeper.sleep(2, wakes_on_request=True)
            engine.check_admission()
            answers = await asyncio.gather(*(collect(engine, make_request(str(number), PROMPT, **LONG)) for number in range(20)))
            assert all(tokens(deltas) == alone() for deltas in answers)

    run(test)


def test_an_idle_model_sleeps_until_the_next_request() -> None:
    core = large_core()

    async def test() -> None:
        async with running(core) as engine:
            sleeping = asyncio.create_task(engine.sleeper.sleep_when_idle(0.05, 2))
            for number in range(2):
                while engine.sleeper.state is not SleepState.ASLEEP:  # noqa: ASYNC110 - it sleeps by the clock
                    await asyncio.sleep(0.01)
                assert tokens(await collect(engine, make_request(str(number), PROMPT, **LONG))) == alone()
            sleeping.cancel()
            await asyncio.gather(sleeping, return_exceptions=True)
            await engine.sleeper.wake()

    run(test)


def test_a_client_that_disconnects_stops_no_change_half_way() -> None:
    core = large_core()

    async def test() -> None:
        async with running(core) as engine:
            for change in (engine.sleeper.sleep(2), engine.sleeper.wake()):
                asking = asyncio.create_task(change)
                await asyncio.sleep(0)
                await asyncio.sleep(0)
                asking.cancel()
                await asyncio.gather(asking, return_exceptions=True)
                await until(lambda: engine.sleeper.state in (SleepState.ASLEEP, SleepState.AWAKE))
            await engine.sleeper.wake()
            assert tokens(await collect(engine, make_request("a", PROMPT, **LONG))) == alone()

    run(test)


def test_deadlines_hold_while_the_model_sleeps() -> None:
    core = large_core()

    async def test() -> None:
        async with running(core) as engine:
            request = make_request("a", **LONG)
            request.deadline = time.monotonic() + 0.2
            stream = asyncio.create_task(collect(engine, request))
            await until(lambda: core.has_work or stream.done())  # which it is where the machine has had no time for it
            await engine.sleeper.sleep(1, "keep")
            assert ends(await stream) in ([(0, FinishReason.TIMED_OUT)], [(0, FinishReason.LENGTH)])
            await engine.sleeper.wake()

    run(test)


def test_kept_requests_may_be_aborted_while_the_model_sleeps() -> None:
    core = large_core()

    async def test() -> None:
        async with running(core) as engine:
            stream = asyncio.create_task(collect(engine, make_request("a", **LONG)))
            await until(lambda: core.has_work)
            await engine.sleeper.sleep(2, "keep")
            assert engine.abort("a")
            assert (await stream)[-1].finish_reason is FinishReason.ABORT
            assert not engine.abort("a")
            await engine.sleeper.wake()

    run(test)


def test_a_full_disk_leaves_the_model_awake(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> Path:
        raise OSError(28, "No space left on device")

    core = large_core()

    async def test() -> None:
        async with running(core) as engine:
            monkeypatch.setattr(sleep, "spill_directory", fail)
            stream = asyncio.create_task(collect(engine, make_request("a", PROMPT, **LONG)))
            await until(lambda: core.has_work)
            with pytest.raises(Conflict, match="No space left on device"):
                await engine.sleeper.sleep(2, "keep")
            assert engine.sleeper.is_awake
            assert tokens(await stream) == alone()
            assert (await engine.sleeper.sleep(1)).level == 1
            with pytest.raises(Conflict, match="No space left"):
                await engine.sleeper.sleep(2)
            assert engine.sleeper.level == 1
            await engine.sleeper.wake()

    run(test)


def test_weights_are_not_freed_while_a_thread_still_reads_them() -> None:
    core, may_end = large_core(), threading.Event()
    reader = threading.Thread(target=may_end.wait, args=(60,))
    core.runner.readers.append(reader)
    reader.start()

    async def test() -> None:
        async with running(core) as engine:
            asleep = asyncio.create_task(engine.sleeper.sleep(2))
            await until(lambda: engine.sleeper.state is SleepState.FALLING_ASLEEP)
            await asyncio.sleep(0.05)
            assert not asleep.done()
            may_end.set()
            assert (await asleep).level == 2
            await engine.sleeper.wake()

    run(test)


@pytest.mark.parametrize("level", [1, 2])
def test_an_engine_is_stopped_while_its_model_sleeps(level: int) -> None:
    core = large_core()

    async def test() -> None:
        engine = Engine(core)
        await engine.start()
        stream = asyncio.create_task(collect(engine, make_request("a", **LONG)))
        await until(lambda: core.has_work)
        await engine.sleeper.sleep(level, "keep")
        await engine.stop(0.01)
        assert (await stream)[-1].finish_reason is FinishReason.ABORT
        with pytest.raises(EngineUnavailable, match="shutting down"):
            await engine.sleeper.sleep(2)

    run(test)


def test_an_engine_whose_weights_cannot_be_read_has_failed() -> None:
    core = large_core()

    async def test() -> None:
        engine = Engine(core)
        await engine.start()
        stream = asyncio.create_task(collect(engine, make_request("a", **LONG)))
        await until(lambda: core.has_work)
        await engine.sleeper.sleep(2, "keep")
        spilled = engine.sleeper._memory._spilled
        assert spilled is not None
        spilled._file.truncate(0)
        with pytest.raises(EngineUnavailable, match="failed"):
            await engine.sleeper.wake()
        assert (await stream)[-1].error == ENGINE_FAILED
        await engine.failed()
        with pytest.raises(EngineUnavailable):
            engine.check_admission()
        await engine.stop()

    run(test)


def test_an_engine_is_stopped_while_its_model_falls_asleep() -> None:
    core, may_end = large_core(), asyncio.Event()

    async def test() -> None:
        engine = Engine(core)
        await engine.start()
        engine.optimized = may_end.wait  # type: ignore[assignment]
        asleep = asyncio.create_task(engine.sleeper.sleep(2))
        await until(lambda: engine.sleeper.state is SleepState.FALLING_ASLEEP)
        await engine.stop()
        may_end.set()
        with pytest.raises(EngineUnavailable, match="shutting down"):
            await asleep

    run(test)


def test_an_engine_that_loses_its_weights_while_it_falls_asleep_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    core = large_core()

    async def test() -> None:
        engine = Engine(core)
        await engine.start()
        stream = asyncio.create_task(collect(engine, make_request("a", **LONG)))
        await until(lambda: core.has_work)

        def fail() -> None:
            spilled = engine.sleeper._memory._spilled
            assert spilled is not None
            spilled._file.truncate(0)
            raise MemoryError

        monkeypatch.setattr(engine.sleeper._memory, "free_cache", fail)
        with pytest.raises(EngineUnavailable, match="failed"):
            await engine.sleeper.sleep(2, "keep")
        assert (await stream)[-1].error == ENGINE_FAILED
        await engine.failed()
        await engine.stop()

    run(test)


@pytest.mark.parametrize(("level", "mode", "match"), [(0, "wait", "level"), (3, "wait", "level"), (1, "soon", "mode")])
def test_levels_and_modes_are_checked(level: int, mode: str, match: str) -> None:
    async def test() -> None:
        async with running(large_core()) as engine:
            with pytest.raises(InvalidRequest, match=match):
                await engine.sleeper.sleep(level, mode)  # type: ignore[arg-type]
            assert engine.sleeper.is_awake

    run(test)


def test_a_model_on_a_gpu_is_refused() -> None:
    core = large_core()
    core.runner.loaded.device = torch.device("cuda", 0)  # type: ignore[misc]

    async def test() -> None:
        async with running(core) as engine:
            with pytest.raises(InvalidRequest, match="only a model on the CPU"):
                await engine.sleeper.sleep(1)

    run(test)


def test_a_model_over_several_ranks_is_refused() -> None:
    core, group = large_core(), Group()
    group.size, runner_of(core).group = 2, group

    async def test() -> None:
        async with running(core) as engine:
            with pytest.raises(InvalidRequest, match="a model over 2 ranks"):
                await engine.sleeper.sleep(1)

    run(test)


def test_blocks_that_were_being_loaded_from_disk_are_not_found_afterwards(tmp_path: Path) -> None:
    """The blocks of the prompt are on disk, and are being loaded when the model falls asleep."""
    first = large_core(kv_cache_dir=tmp_path / "kv")
    expected = tokens(generate_alone(first, make_request("a", PROMPT, **LONG)))
    first.close()
    first.runner.shutdown()
    core = large_core(kv_cache_dir=tmp_path / "kv")

    async def test() -> None:
        async with running(core) as engine:
            for number in range(0, 10, 3):
                stream = asyncio.create_task(collect(engine, make_request(str(number), PROMPT, **LONG)))
                for _ in range(number):
                    await asyncio.sleep(0)
                await engine.sleeper.sleep(1, "keep")
                core.check_integrity()
                await engine.sleeper.wake()
                assert tokens(await stream) == expected

    run(test)


def test_states_of_recurrent_layers_are_forgotten() -> None:
    core = large_core(num_slots=24)
    expected = alone()

    async def test() -> None:
        async with running(core) as engine:
            assert tokens(await collect(engine, make_request("a", PROMPT, **LONG))) == expected
            stream = asyncio.create_task(collect(engine, make_request("b", PROMPT, **LONG)))
            await until(lambda: core.has_work)
            await engine.sleeper.sleep(1, "keep")
            assert core.scheduler.states is not None
            assert core.scheduler.states.pool.num_cached == 0
            runner_of(core).state_slots[:] = [[-1]] * 24
            await engine.sleeper.wake()
            assert tokens(await stream) == expected

    run(test)


async def said(engine: Engine, request_id: str) -> list[SequenceDelta]:
    return await collect(engine, make_request(request_id, LETTERS, max_tokens=16, ignore_eos=True))


Scenario = Callable[[Engine, EngineCore], Awaitable[None]]


def with_model(name: str, scenario: Scenario, *, dtype: torch.dtype = torch.float32) -> None:
    """Of an engine over a small model, with weights that have pages of their own."""
    model = tiny_model(name, vocab_size=320, hidden_size=256, intermediate_size=512)
    core = core_over(loaded_model(torch.nn.Module.to(model, dtype)))

    async def test() -> None:
        async with running(core) as engine:
            await scenario(engine, core)

    run(test)


@pytest.mark.parametrize("name", ["llama", pytest.param("lfm2", marks=pytest.mark.thorough)])
def test_a_real_model_computes_the_same_after_its_weights_have_been_freed(name: str) -> None:
    async def scenario(engine: Engine, core: EngineCore) -> None:
        before = tokens(await said(engine, "a"))
        status = await engine.sleeper.sleep(2)
        assert status.freed_weight_bytes > 2**18
        assert resident_bytes(regions_of([*weights_of(core.runner), *cache_of(core.runner)])) == 0
        await engine.sleeper.wake()
        assert tokens(await said(engine, "b")) == before

    with_model(name, scenario)


@pytest.mark.skipif(native_library() is None, reason="there is no C++ compiler here")
def test_native_code_finds_the_weights_where_they_were() -> None:
    async def scenario(engine: Engine, core: EngineCore) -> None:
        before = tokens(await said(engine, "a"))
        num_bytes = sum(parameter.nbytes for parameter in core.runner.loaded.model.parameters())
        status = await engine.sleeper.sleep(2)
        assert status.freed_weight_bytes > num_bytes
        await engine.sleeper.wake()
        assert tokens(await said(engine, "b")) == before

    with_model("llama", scenario, dtype=torch.bfloat16)
