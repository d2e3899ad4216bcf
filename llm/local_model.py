"""A model in this process, and the engine that runs it: the server's own parts, assembled as for the server."""

import asyncio
import functools
import gc
import logging
import math
import os
import time
from collections.abc import AsyncGenerator, Mapping
from pathlib import Path
from typing import Any, cast

import torch

from penstock.api.context import PoolingContext, ServerContext, SharedContext
from penstock.api.metrics import Metrics, RequestMetrics
from penstock.api.model_abilities import GENERATES, description, wrong_model
from penstock.api.pooling_metrics import PoolingCollector
from penstock.assembly import Assembled, AssembledPooling, assemble
from penstock.engine.build import build_core, load, release
from penstock.engine.engine import Engine
from penstock.engine.engine_core import EngineCore
from penstock.engine.errors import EngineUnavailable, InvalidRequest
from penstock.engine.hooks import RegisteredLogitsProcessor
from penstock.engine.memory import release_heap
from penstock.engine.model_loader import LoadedModel
from penstock.engine.model_store import model_name, resolve_model
from penstock.engine.outputs import SequenceDelta
from penstock.engine.request import Request
from penstock.engine.stats import EngineStats
from penstock.engine.tokenizer import Tokenizer
from penstock.llm.calls import GENERATION_CALLS, pooling_calls
from penstock.llm.engine_arguments import engine_arguments
from penstock.plugins.manager import Plugins

logger = logging.getLogger(__name__)

SLEEPING = "the model is asleep: call wake_up() first"


class SleepingEngine:
    """Stands where the engine was, with what it had counted."""

    is_healthy = True
    is_accepting = False

    def __init__(self, stats: EngineStats) -> None:
        self.counted = stats

    async def start(self) -> None:
        """There is nothing to run."""

    async def stop(self, drain_seconds: float = 0.0) -> None:
        """There is nothing to end."""

    def stats(self) -> EngineStats:
        return self.counted

    async def generate(self, request: Request) -> AsyncGenerator[SequenceDelta, None]:
        raise EngineUnavailable(SLEEPING)
        yield  # which makes it a generator, as the engine's is


class LocalModel:
    """Loads a model by the arguments of the command line, as keywords.

    Making one checks the arguments; `load` blocks for seconds; `start` and everything after it belongs to one event loop. `metrics` counts
    as the server's do.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | None,
        given: Mapping[str, Any],
        logits_processors: Mapping[str, RegisteredLogitsProcessor] | None = None,
    ) -> None:
        self.arguments = engine_arguments(model, given)
        self.plugins = Plugins.start(
            self.arguments.plugins,
            self.arguments.without,
            reasoning_parser=self.arguments.reasoning_parser,
            tool_parser=self.arguments.tool_parser,
        )
        self.plugins.register_logits_processors(logits_processors or {}, "logits_processors")
        self.name = (self.arguments.served_model_names or (model_name(self.arguments.engine.model),))[0]
        self._context: SharedContext | None = None
        self._core: EngineCore | None = None
        self._loaded: LoadedModel | None = None  # while it sleeps
        self._is_closed = False
        self._metrics = Metrics(lambda: self.generating.engine.stats(), self.name)
        self._pooling_metrics: RequestMetrics | None = None

    @property
    def context(self) -> SharedContext:
        """What the server's handlers would be given. Raises `EngineUnavailable` where there is none."""
        if self._is_closed or self._context is None:
            raise EngineUnavailable("the engine has been closed" if self._is_closed else "the engine has not been started")
        return self._context

    @property
    def generating(self) -> ServerContext:
        """The same of a model that generates. Raises `InvalidRequest` for one that does not."""
        context = self.context
        if not isinstance(context, ServerContext):
            raise InvalidRequest(wrong_model(self.name, description(self.pooling.engine.model), pooling_calls(self.pooling.engine.model)))
        return context

    @property
    def pooling(self) -> PoolingContext:
        """The same of a model that turns text into numbers. Raises `InvalidRequest` for one that does not."""
        context = self.context
        if not isinstance(context, PoolingContext):
            raise InvalidRequest(wrong_model(self.name, GENERATES, GENERATION_CALLS))
        return context

    @property
    def metrics(self) -> RequestMetrics:
        return self._pooling_metrics or self._metrics

    @property
    def directory(self) -> Path:
        """Where the model's files are."""
        config = self.arguments.engine
        return resolve_model(config.model, config.trust_remote_code)

    @functools.cached_property
    def hf_tokenizer(self) -> Any:
        """transformers' own. Takes a second the first time."""
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self.directory, trust_remote_code=self.arguments.engine.trust_remote_code)

    @property
    def is_sleeping(self) -> bool:
        return self._core is None and isinstance(self.context, ServerContext)

    def load(self) -> None:
        """Fetches and loads the model. Raises `ConfigurationError` for whatever cannot be served as asked."""
        assembled = assemble(self.arguments, self.plugins)
        self._core = assembled.core if isinstance(assembled, Assembled) else None
        self._context = assembled.context
        if isinstance(assembled, AssembledPooling):
            self._pooling_metrics = RequestMetrics(PoolingCollector(assembled.context.engine.stats, self.name), self.name)
        logger.info("%s: %s", self.name, assembled.summary)

    async def start(self) -> None:
        await self.context.engine.start()

    def generate(self, request: Request) -> AsyncGenerator[SequenceDelta, None]:
        """The engine's deltas, counted as they pass. Raises as `Engine.generate`."""
        return self._metrics.begin(time.monotonic()).watch(self.generating.engine.generate(request))

    async def close(self) -> None:
        """Ends what runs and gives everything back. May be called twice."""
        if self._is_closed or self._context is None:
            return
        context, self._is_closed = self._context, True
        await context.engine.stop()
        context.close()
        self._core = self._context = None

    async def reset_prefix_cache(self) -> None:
        """Forgets what earlier prompts left in the KV cache. Requests that run keep what they hold."""
        self.generating.engine  # noqa: B018 - says what the model is
        if self._core is None:
            raise EngineUnavailable(SLEEPING)
        pool = self._core.scheduler.pool
        pool.forget(range(pool.num_blocks))

    async def sleep(self, level: int) -> None:
        """Frees the KV cache, at level 2 the weights too, once the requests that run have ended; new ones are refused until `wake_up`."""
        if level not in (1, 2):
            raise InvalidRequest(f"`level` must be 1 (frees the KV cache) or 2 (frees the weights too), got {level!r}", "level")
        context = self.generating
        if self._core is not None:
            engine, core, self._core = context.engine, self._core, None
            resting = SleepingEngine(engine.stats())
            context.engine = cast("Engine", resting)
            await engine.stop(drain_seconds=math.inf)
            resting.counted = engine.stats()
            self._loaded = core.runner.loaded
            release(core)
            del engine, core
        if level == 2:
            self._loaded = None
        await asyncio.get_running_loop().run_in_executor(context.workers, _release_memory)

    async def wake_up(self) -> None:
        """Serves again; what the engine had counted begins anew. Raises `ConfigurationError` where there is no room any more."""
        context = self.generating
        if self._core is not None:
            return
        loop = asyncio.get_running_loop()
        self._core, self._loaded = await loop.run_in_executor(context.workers, self._rebuild, context.tokenizer), None
        context.engine = Engine(self._core)
        await context.engine.start()

    def _rebuild(self, tokenizer: Tokenizer) -> EngineCore:
        config = self.arguments.engine
        return build_core(self._loaded or load(self.directory, config), tokenizer, config)


def _release_memory() -> None:
    gc.collect()
    release_heap()
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()
