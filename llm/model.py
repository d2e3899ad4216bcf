"""A model in this process: loaded as for the server, run by an event loop in a thread of its own, put to sleep and woken."""

import asyncio
import concurrent.futures
import difflib
import functools
import gc
import json
import logging
import math
import os
import threading
import time
import weakref
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

import torch

from penstock.assembly import Assembled, AssembledSpeech, assemble
from penstock.engine.build import build_core, load, load_draft, release
from penstock.engine.config import EngineConfig
from penstock.engine.contracts.hooks import RegisteredLogitsProcessor
from penstock.engine.control.sleep import forget_prefixes
from penstock.engine.core import EngineCore, EngineStats
from penstock.engine.deltas import SequenceDelta
from penstock.engine.errors import ConfigurationError, EngineUnavailable, InvalidRequest
from penstock.engine.loop import Engine
from penstock.engine.model.loader import LoadedModel
from penstock.engine.model.store import model_name, resolve_model
from penstock.engine.options import Option, flattened
from penstock.engine.pooling.model import PoolingModel, PoolingTask
from penstock.engine.request import Request
from penstock.engine.system.process import memory_shortage_refused, release_heap
from penstock.llm.adapters import AdapterLoader
from penstock.plugins.manager import Plugins
from penstock.serving.context import GENERATES, LocalContext, PoolingContext, description, wrong_model
from penstock.serving.observability.metrics import Metrics, PoolingCollector, RequestMetrics
from penstock.serving.options import OPTIONS_BY_ANY_NAME, Arguments
from penstock.serving.vllm_arguments import ENGINE, LIKENESS, SERVER, find, keyword_shown, to_our_keywords

# A batch is submitted as a whole: all of it may wait, and its priorities do not change with time.
DEFAULTS = {"max_waiting_requests": 2**31, "max_waiting_tokens": 2**31, "priority_aging": 0}


def engine_arguments(model: str | os.PathLike[str] | None, given: Mapping[str, Any]) -> Arguments:
    """The options that keyword arguments set, as the command line would. None means the default.

    Sizes may be given in bytes or as the command line takes them, lists where a flag is repeatable, and torch's own types for `dtype`.
    Raises `TypeError` for an unknown argument, with the nearest name, and `ConfigurationError` for one that is refused or for an invalid
    value.
    """
    if not isinstance(model, str | os.PathLike | None):
        raise TypeError(f"`model` must be a path or a name, got {model!r:.100}")
    values: dict[str, Any] = {"model": None if model is None else os.fspath(model), "trust_request_chat_template": True}
    for name, value in {**DEFAULTS, **given}.items():
        for option, setting in _settings(name, value):
            if setting is not None:
                values[option.name] = converted(option, name, setting)
    return Arguments.of(values)


def known_arguments() -> list[str]:
    """Every name that may be given, without vLLM's that stand for others."""
    return sorted(name for name, option in OPTIONS_BY_ANY_NAME.items() if not option.is_server_only)


def _settings(name: str, value: Any) -> list[tuple[Option, Any]]:
    """The options that an argument sets."""
    option = OPTIONS_BY_ANY_NAME.get(name)
    if option is not None and not option.is_server_only:
        return [(option, value)]
    if option is not None or find(name, SERVER) is not None:
        raise ConfigurationError(f"`{name}` is an option of the server, which is not running here")
    if find(name, ENGINE) is not None:
        return [(OPTIONS_BY_ANY_NAME[ours], setting) for ours, setting in to_our_keywords(name, value, ENGINE, keyword_shown)]
    nearest = difflib.get_close_matches(name, [*known_arguments(), *ENGINE], n=1, cutoff=LIKENESS)
    raise TypeError(f"there is no argument `{name}`" + (f": did you mean `{nearest[0]}`?" if nearest else ""))


def converted(option: Option, name: str, value: Any) -> Any:
    """A value as the command line would have read it. Raises `ConfigurationError`."""
    if option.is_switch:
        if not isinstance(value, bool):
            raise ConfigurationError(f"`{name}`: expected True or False, got {value!r}")
        return value
    is_list = isinstance(value, list | tuple)
    if is_list and not option.is_repeatable:
        raise ConfigurationError(f"`{name}`: expected one value, got {value!r}")
    try:
        if option.is_repeatable:
            return flattened([option.value_of(str(item)) for item in (value if is_list else [value])])
        return option.value_of(_spelled(value))
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"`{name}`: {error}") from error


def _spelled(value: Any) -> str:
    if isinstance(value, dict):
        return json.dumps(value)
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else str(value)


T = TypeVar("T")

SLEEPING = "the model is asleep: call wake_up() first"


class SleepingEngine:
    """Replaces the engine while the model sleeps, with what it had `counted`."""

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

    def __init__(self, context: LocalContext, core: EngineCore, directory: Path, config: EngineConfig) -> None:
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
            if self.core is not None and self.core.runner.group.size > 1:
                raise InvalidRequest("a model of several ranks does not sleep: its other processes end with its engine")
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
        loaded, context = loaded or load(self._directory, self._config), self.context
        draft = load_draft(self._config, context.tokenizer, loaded)
        return build_core(loaded, context.tokenizer, self._config, context.plugins.proposers, draft)

    async def _in_worker(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self.context.workers, work)


def _release_memory() -> None:
    gc.collect()
    release_heap()
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()


GENERATION_CALLS = ("generate", "chat", "beam_search")
CALLS: dict[PoolingTask, tuple[str, ...]] = {
    "embed": ("embed", "score", "encode"),
    "token_embed": ("encode",),
    "score": ("score", "encode"),
    "classify": ("classify", "encode"),
    "token_classify": ("encode",),
}


def pooling_calls(model: PoolingModel) -> list[str]:
    """Those for this model, each once."""
    return list(dict.fromkeys(call for task, calls in CALLS.items() if task in model.tasks for call in calls))


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
        self.plugins = Plugins.asked_for(self.arguments)
        self.plugins.register_logits_processors(_by_name(logits_processors), "logits_processors")
        self.name = (self.arguments.served_model_names or (model_name(self.arguments.engine.model),))[0]
        self._context: LocalContext | PoolingContext | None = None
        self._metrics: RequestMetrics | None = None
        self._rest: Rest | None = None
        self._adapters: AdapterLoader | None = None
        self._is_closed = False

    @property
    def context(self) -> LocalContext | PoolingContext:
        """What the server's handlers would be given. Raises `EngineUnavailable` without an engine."""
        if self._context is None:
            raise EngineUnavailable(self._why_not_served())
        return self._context

    @property
    def generating(self) -> LocalContext:
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
        if isinstance(context, LocalContext):
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
    def adapters(self) -> AdapterLoader:
        """What loads the adapters of calls to a model that generates."""
        assert self._adapters is not None
        return self._adapters

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
        with memory_shortage_refused():
            assembled = assemble(self.arguments, self.plugins, takes_audio=False)
        assert not isinstance(assembled, AssembledSpeech)
        if isinstance(assembled, Assembled):
            self._rest = Rest(assembled.context, assembled.core, self.directory, self.arguments.engine)
            self._metrics = _metrics(assembled.context, self.name)
            self._adapters = AdapterLoader(assembled.context)
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
        return self.metrics.begin(time.monotonic()).watch(self.generating.engine.generate(request), request.params)

    async def reset_prefix_cache(self) -> None:
        """Forgets what earlier prompts left in the KV cache. Requests that run keep what they hold."""
        forget_prefixes(self.rest.awake().scheduler)

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


def _metrics(context: LocalContext, name: str) -> Metrics:
    # They read the current engine and keep no reference: a sleeping engine must be freed.
    return Metrics(lambda: context.engine.stats(), name)


Result = TypeVar("Result")


class LoopThread:
    """Runs coroutines for synchronous callers, from any thread but its own.

    A thread that waits in a notebook's running loop may call it too: the two loops are independent. Coroutines still
    running when it is closed, or at the latest when the interpreter ends, are cancelled.
    """

    def __init__(self, name: str = "penstock-loop") -> None:
        started: concurrent.futures.Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = concurrent.futures.Future()
        self._thread = threading.Thread(target=_serve, args=(started,), name=name, daemon=True)
        self._thread.start()
        self._loop, stop = started.result()
        self._lock = threading.Lock()  # what is scheduled is so before the loop is asked to stop, or not at all
        self._close = weakref.finalize(self, _close, self._loop, stop, self._thread, self._lock)

    @property
    def is_closed(self) -> bool:
        return not self._close.alive

    def submit(self, coroutine: Coroutine[Any, Any, Result]) -> "concurrent.futures.Future[Result]":
        """Begins to run it and returns at once. Cancelling the future cancels it. Raises `EngineUnavailable` once the loop is closed."""
        with self._lock:
            self._check_open(coroutine)
            return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def run(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        """Its result, or what it raised. An interrupted caller leaves nothing running."""
        assert threading.current_thread() is not self._thread, "the loop's own thread would wait for itself"
        call = _Call(coroutine)
        with self._lock:
            self._check_open(coroutine)
            self._loop.call_soon_threadsafe(call.begin)
        try:
            call.done.wait()
        except BaseException:
            with self._lock:
                if not self.is_closed:
                    self._loop.call_soon_threadsafe(call.cancel)
            call.done.wait()  # what it holds is given back by the time the caller goes on
            raise
        return call.result()

    def iterate(self, source: AsyncGenerator[Result, None]) -> Generator[Result, None, None]:
        """What the generator yields, one item at a time. Closing the iterator closes it."""
        try:
            while True:
                try:
                    yield self.run(_next(source))
                except StopAsyncIteration:
                    return
        finally:
            if not self.is_closed:
                self.run(source.aclose())

    def close(self) -> None:
        """Cancels what runs and waits for the thread. May be called twice."""
        self._close()

    def _check_open(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        if self.is_closed:
            coroutine.close()
            raise EngineUnavailable("the engine has been closed")


class _Call(Generic[Result]):
    """One coroutine that a thread waits for. `done` is set however it ends, and also where it is cancelled before it began."""

    def __init__(self, coroutine: Coroutine[Any, Any, Result]) -> None:
        self.done = threading.Event()
        self._coroutine = coroutine
        self._task: asyncio.Task[Result] | None = None

    def begin(self) -> None:
        self._task = asyncio.create_task(self._coroutine)
        self._task.add_done_callback(lambda task: self.done.set())

    def cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def result(self) -> Result:
        assert self._task is not None
        if self._task.cancelled():
            raise EngineUnavailable("the engine was closed while this ran")
        return self._task.result()


async def _next(source: AsyncGenerator[Result, None]) -> Result:
    return await anext(source)


def _serve(started: "concurrent.futures.Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]]") -> None:
    async def until_stopped() -> None:
        stop = asyncio.Event()
        started.set_result((asyncio.get_running_loop(), stop))
        await stop.wait()

    asyncio.run(until_stopped())


def _close(loop: asyncio.AbstractEventLoop, stop: asyncio.Event, thread: threading.Thread, lock: threading.Lock) -> None:
    with lock:
        loop.call_soon_threadsafe(stop.set)
    if threading.current_thread() is not thread:  # the garbage collector may run there
        thread.join()


@contextmanager
def threads_as_they_were() -> Iterator[None]:
    """Loading leaves torch one thread in whichever thread it is done: a server's has nothing else to compute, a caller's may have."""
    num_threads = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)
