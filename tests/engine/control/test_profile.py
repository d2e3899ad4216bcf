"""A profile of some steps: the engine's spans, and torch's operations within them."""

import asyncio
import itertools
import json
import threading
from contextlib import nullcontext
from typing import Any

import pytest

from penstock.engine.control.profile import OperationProfile
from penstock.engine.core import EngineCore
from penstock.engine.errors import Conflict
from penstock.engine.loop import Engine
from penstock.engine.runner import ModelRunner
from tests.engine.running import collect, run, running, until
from tests.engines import core_over, loaded_model
from tests.fakes import LETTERS, generate, make_core, make_request, tokens
from tests.tiny_models import tiny_model


async def profiled(core: EngineCore, num_steps: int) -> dict[str, Any]:
    async with running(core) as engine:
        taking = asyncio.create_task(engine.profiler.profile(num_steps, 60))
        await until(lambda: is_recording(engine))
        await collect(engine, make_request("a", LETTERS, max_tokens=num_steps + 8, ignore_eos=True))
        trace: dict[str, Any] = json.loads(await taking)
        assert not is_recording(engine)
        return trace


def is_recording(engine: Engine) -> bool:
    return engine.profiler.recording is not None


def test_a_trace_has_the_steps_and_what_torch_computes_in_them() -> None:
    async def test() -> None:
        trace = await profiled(core_over(loaded_model(tiny_model("gpt2"))), 4)
        assert trace["penstock"] == {"steps": 4}
        events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
        assert all({"name", "ts", "dur", "pid", "tid"} <= event.keys() for event in events)
        steps = [event for event in events if event["name"] == "model step"]
        operations = [event for event in events if event.get("cat") == "cpu_op"]
        assert len(steps) >= 4
        within = [each for each in operations if any(step["ts"] <= each["ts"] <= step["ts"] + step["dur"] for step in steps)]
        assert len(within) > len(operations) / 2 > 10
        assert {each["tid"] for each in within} == {step["tid"] for step in steps}
        assert {event["tid"] for event in events if event["name"] == "schedule"}.isdisjoint({step["tid"] for step in steps})

    run(test)


def test_spans_end_with_the_last_step_that_was_asked_for() -> None:
    async def test() -> None:
        trace = await profiled(make_core(), 3)
        names = [event["name"] for event in trace["traceEvents"] if event.get("cat") == "penstock"]
        assert {name: names.count(name) for name in set(names)} == {"schedule": 3, "build": 3, "update": 3}

    run(test)


def test_one_profile_is_taken_at_a_time_and_a_failed_one_leaves_room_for_the_next() -> None:
    async def test() -> None:
        async with running(make_core()) as engine:
            taking = asyncio.create_task(engine.profiler.profile(3, 60))
            await until(lambda: is_recording(engine))
            with pytest.raises(Conflict, match="already"):
                await engine.profiler.profile(1, 1)
            taking.cancel()
            await asyncio.gather(taking, return_exceptions=True)
            assert json.loads(await engine.profiler.profile(1, 0))["penstock"] == {"steps": 0}

    run(test)


def test_a_client_that_disconnects_before_a_profile_begins_leaves_room_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    began, may_begin = threading.Event(), threading.Event()
    start = OperationProfile.start

    def start_late(self: OperationProfile) -> None:
        began.set()
        may_begin.wait(60)
        start(self)

    async def test() -> None:
        async with running(make_core()) as engine:
            monkeypatch.setattr(OperationProfile, "start", start_late)
            taking = asyncio.create_task(engine.profiler.profile(3, 60))
            await until(began.is_set)
            taking.cancel()
            await until(lambda: taking.cancelling() > 0)
            may_begin.set()
            await asyncio.gather(taking, return_exceptions=True)
            monkeypatch.setattr(OperationProfile, "start", start)
            assert json.loads(await engine.profiler.profile(1, 0))["penstock"] == {"steps": 0}

    run(test)


def test_engines_of_one_process_are_profiled_one_after_the_other() -> None:
    async def test() -> None:
        async with running(make_core()) as one, running(make_core()) as other:
            taking = asyncio.create_task(one.profiler.profile(3, 60))
            await until(lambda: is_recording(one))
            with pytest.raises(Conflict, match="already"):
                await other.profiler.profile(1, 0)
            taking.cancel()
            await asyncio.gather(taking, return_exceptions=True)

    run(test)


def test_a_profile_may_end_just_when_a_step_begins() -> None:
    """The loop's thread ends it, and the model's begins the step."""
    core = core_over(loaded_model(tiny_model("gpt2")))
    whole = tokens(generate(core, make_request("a")))
    looks = itertools.chain([lambda batch: nullcontext()], itertools.repeat(None))

    class Ending(ModelRunner):
        around_step = property(lambda self: next(looks))

    del core.runner.around_step
    core.runner.__class__ = Ending
    assert tokens(generate(core, make_request("b"))) == whole
