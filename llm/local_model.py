"""A model in this process, and the engine that runs it: the server's own parts, assembled as for the server."""

import functools
import logging
import os
import time
from collections.abc import AsyncGenerator, Mapping
from pathlib import Path
from typing import Any

from penstock.api.context import PoolingContext, ServerContext
from penstock.api.metrics.metrics import Metrics, RequestMetrics
from penstock.api.metrics.pooling_metrics import PoolingCollector
from penstock.api.model_abilities import GENERATES, description, wrong_model
from penstock.assembly import Assembled, assemble
from penstock.engine.deltas import SequenceDelta
from penstock.engine.errors import ConfigurationError, EngineUnavailable, InvalidRequest
from penstock.engine.hooks import RegisteredLogitsProcessor
from penstock.engine.loading.model_store import model_name, resolve_model
from penstock.engine.request import Request
from penstock.llm.calls import GENERATION_CALLS, pooling_calls
from penstock.llm.engine_arguments import engine_arguments
from penstock.llm.sleep import Rest
from penstock.plugins.manager import Plugins

logger = logging.getLogger(__name__)


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
        self.plugins.register_logits_processors(_by_name(logits_processors), "logits_processors")
        self.name = (self.arguments.served_model_names or (model_name(self.arguments.engine.model),))[0]
        self._context: ServerContext | PoolingContext | None = None
        self._metrics: RequestMetrics | None = None
        self._rest: Rest | None = None
        self._is_closed = False

    @property
    def context(self) -> ServerContext | PoolingContext:
        """What the server's handlers would be given. Raises `EngineUnavailable` where there is none."""
        if self._context is None:
            raise EngineUnavailable(self._why_not_served())
        return self._context

    @property
    def generating(self) -> ServerContext:
        """The same of a model that generates. Raises `InvalidRequest`, which says what the model is, for one that does not."""
        context = self.context
        if isinstance(context, PoolingContext):
            model = context.engine.model
            raise InvalidRequest(wrong_model(self.name, description(model), pooling_calls(model)), "model")
        return context

    @property
    def pooling(self) -> PoolingContext:
        """The same of a model that turns text into numbers. Raises `InvalidRequest` for one that generates."""
        context = self.context
        if isinstance(context, ServerContext):
            raise InvalidRequest(wrong_model(self.name, GENERATES, GENERATION_CALLS), "model")
        return context

    @property
    def metrics(self) -> RequestMetrics:
        """What has been counted, as a server's are."""
        if self._metrics is None:
            raise EngineUnavailable(self._why_not_served())
        return self._metrics

    @property
    def rest(self) -> Rest:
        """What puts a model that generates to sleep."""
        context = self.generating
        assert self._rest is not None
        assert self._rest.context is context
        return self._rest

    @property
    def is_sleeping(self) -> bool:
        return self._rest is not None and self._rest.is_sleeping

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

    def load(self) -> None:
        """Fetches and loads the model, once. Raises `ConfigurationError` for whatever cannot be served as asked."""
        if self._is_closed or self._context is not None:
            raise EngineUnavailable(self._why_not_served() if self._is_closed else "the engine has been started already")
        assembled = assemble(self.arguments, self.plugins)
        if isinstance(assembled, Assembled):
            self._rest = Rest(assembled.context, assembled.core, self.directory, self.arguments.engine)
            self._metrics = _metrics(assembled.context, self.name)
        else:
            stats = assembled.context.engine.stats
            self._metrics = RequestMetrics(PoolingCollector(stats, self.name), self.name)
        self._context = assembled.context
        logger.info("%s: %s", self.name, assembled.summary)

    async def start(self) -> None:
        await self.context.engine.start()

    def generate(self, request: Request) -> AsyncGenerator[SequenceDelta, None]:
        """The engine's deltas, counted as they pass. Raises as `Engine.generate`."""
        assert isinstance(self.metrics, Metrics)
        return self.metrics.begin(time.monotonic()).watch(self.generating.engine.generate(request))

    async def reset_prefix_cache(self) -> None:
        """Forgets what earlier prompts left in the KV cache. Requests that run keep what they hold."""
        pool = self.rest.awake().scheduler.pool
        pool.unpublish(range(pool.num_blocks))

    async def close(self) -> None:
        """Ends what runs and gives everything back. May be called twice."""
        context, self._context, self._is_closed = self._context, None, True
        if context is not None:
            await context.engine.stop()
            context.close()
            self._rest = self._metrics = None

    def _why_not_served(self) -> str:
        return "the engine has been closed" if self._is_closed else "the engine has not been started"


def _by_name(given: Any) -> Mapping[str, RegisteredLogitsProcessor]:
    if not isinstance(given, Mapping | None):
        message = f"`logits_processors` must be a dict of processors by the names that requests choose them by, got {type(given).__name__}"
        raise ConfigurationError(message)
    return given or {}


def _metrics(context: ServerContext, name: str) -> Metrics:
    """They read whichever engine is there, and hold none: one that sleeps is to be forgotten."""
    return Metrics(lambda: context.engine.stats(), name)
