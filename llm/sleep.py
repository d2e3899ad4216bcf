"""Gives a model's memory back for a while, and builds its engine again over what was kept."""

import asyncio
import functools
import gc
import math
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import TypeVar, cast

import torch

from penstock.api.context import ServerContext
from penstock.engine.build import build_core, load, release
from penstock.engine.config import EngineConfig
from penstock.engine.core import EngineCore, EngineStats
from penstock.engine.deltas import SequenceDelta
from penstock.engine.errors import EngineUnavailable, InvalidRequest
from penstock.engine.heap import release_heap
from penstock.engine.loading.model_loader import LoadedModel
from penstock.engine.loop import Engine
from penstock.engine.request import Request

T = TypeVar("T")

SLEEPING = "the model is asleep: call wake_up() first"


class SleepingEngine:
    """Stands where the engine was, with what it had `counted`."""

    is_healthy = True
    is_accepting = False

    def __init__(self, counted: EngineStats) -> None:
        self.counted = counted

    async def start(self) -> None:
        """There is nothing to run."""

    async def stop(self, drain_seconds: float = 0.0) -> None:
        """There is nothing to end."""

    def stats(self) -> EngineStats:
        return self.counted

    async def generate(self, request: Request) -> AsyncGenerator[SequenceDelta, None]:
        raise EngineUnavailable(SLEEPING)
        yield  # which makes it a generator, as the engine's is


class Rest:
    """Whether a model runs, sleeps with its weights in memory (level 1), or without them (level 2). Belongs to the engine's loop.

    `core` is what the engine in `context` runs, None while the model sleeps.
    """

    def __init__(self, context: ServerContext, core: EngineCore, directory: Path, config: EngineConfig) -> None:
        self.core: EngineCore | None = core
        self.context = context
        self._directory = directory
        self._config = config
        self._loaded: LoadedModel | None = None  # while it sleeps
        self._change = asyncio.Lock()

    @property
    def is_sleeping(self) -> bool:
        return self.core is None

    def awake(self) -> EngineCore:
        """Raises `EngineUnavailable` while it sleeps."""
        if self.core is None:
            raise EngineUnavailable(SLEEPING)
        return self.core

    async def sleep(self, level: int) -> None:
        """Takes no more requests, waits for those that run, and frees the KV cache; at level 2 the weights too."""
        if level not in (1, 2):
            raise InvalidRequest(f"`level` must be 1 (frees the KV cache) or 2 (frees the weights too), got {level!r}", "level")
        async with self._change:
            if self.core is not None:
                self._loaded = await self._stop(self.core)
            if level == 2:
                self._loaded = None
            await self._in_worker(_release_memory)

    async def wake_up(self) -> None:
        """Serves again; what the engine had counted begins anew. Raises `ConfigurationError` where there is no room any more."""
        async with self._change:
            if self.core is None:
                self.core = await self._in_worker(functools.partial(self._rebuild, self._loaded))
                self._loaded = None
                self.context.engine = Engine(self.core)
                await self.context.engine.start()

    async def _stop(self, core: EngineCore) -> LoadedModel:
        engine, resting = self.context.engine, SleepingEngine(core.stats())
        self.context.engine, self.core = cast(Engine, resting), None
        await engine.stop(drain_seconds=math.inf)
        resting.counted = core.stats()
        release(core)
        return core.runner.loaded

    def _rebuild(self, loaded: LoadedModel | None) -> EngineCore:
        return build_core(loaded or load(self._directory, self._config), self.context.tokenizer, self._config)

    async def _in_worker(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self.context.workers, work)


def _release_memory() -> None:
    gc.collect()
    release_heap()
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()
