"""An engine that runs on an event loop, and its clients."""

import asyncio
import functools
import itertools
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from penstock.engine.core import DeltasByRequest, EngineCore
from penstock.engine.deltas import FinishReason, SequenceDelta
from penstock.engine.loop import Engine
from penstock.engine.request import Request
from penstock.engine.scheduling.step import Step
from penstock.engine.sequence import Sequence
from tests.fakes import make_core


@pytest.fixture(autouse=True, params=[False, True], ids=["in turn", "ahead"])
def order_of_steps(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Has the tests of a module run with steps in turn, and with each scheduled while the one before it is in flight."""
    monkeypatch.setattr(request.module, "make_core", functools.partial(make_core, is_async=request.param))


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


class InFlight:
    """An observer of steps: the most that were in flight at once, none of which may have a sequence of another."""

    def __init__(self) -> None:
        self.steps: list[set[Sequence]] = []
        self.most = 0

    def begin(self, step: Step) -> None:
        own = set(step.num_tokens)
        assert not any(own & other for other in self.steps)
        self.steps.append(own)
        self.most = max(self.most, len(self.steps))

    def end(self, step: Step, deltas: DeltasByRequest) -> None:
        self.steps.pop(0)
