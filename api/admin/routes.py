"""What an operator asks of a running server: its requests, its prefix cache, sleep, adapters, the level of the log, and profiles.

Each route has one handler, and the options of each are one struct. Those of sleep may also be in the URL's query, as vLLM has them.
"""

import asyncio
import logging
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
from aiohttp import web
from msgspec import Meta, Struct

from penstock import __version__
from penstock.api.requests import read_query
from penstock.api.routes import Route
from penstock.engine.control.profile import MAX_STEPS
from penstock.engine.control.requests import RequestInfo
from penstock.engine.control.sleep import WAIT_SECONDS, SleepMode, SleepStatus, cancel_loads, forget_prefixes
from penstock.engine.core import EngineStats
from penstock.engine.errors import Conflict, InvalidRequest
from penstock.engine.loop import Engine
from penstock.engine.remote.server import EngineServer
from penstock.engine.system.memory import resident_set_size
from penstock.serving.context import LocalContext, ModelContext, PoolingContext, SpeechContext
from penstock.serving.endpoints.bodies import converted, decode
from penstock.serving.models.pool import ModelPool, ModelsContext, PooledModel
from penstock.serving.options import LogLevel

log = logging.getLogger("penstock.admin")

T = TypeVar("T", bound=Struct)
PACKAGE_LOG = "penstock"
Seconds = Annotated[float, Meta(ge=0, le=86400)]


@dataclass(frozen=True, slots=True)
class Administration:
    """What there is to administer; with `--api-servers`, `api_servers` are the connections of those."""

    context: ModelContext | ModelsContext
    api_servers: EngineServer | None = None

    @property
    def pool(self) -> ModelPool:
        """Raises `InvalidRequest` where the server has one model."""
        if not isinstance(self.context, ModelsContext):
            raise InvalidRequest("this is for servers of several models (--models)", "model")
        return self.context.engine

    @property
    def engines(self) -> dict[str, Engine]:
        """Those that are running, of models that generate text, by the names of these."""
        loaded: Iterable[tuple[str, ModelContext]]
        if isinstance(self.context, ModelsContext):
            loaded = ((model.name, model.resident.context) for model in self.context.engine if model.resident is not None)
        else:
            loaded = [(self.context.model_names[0], self.context)]
        return {name: context.engine for name, context in loaded if isinstance(context, LocalContext)}

    def check_generates(self) -> None:
        """Raises `InvalidRequest` where the one model of the server does not."""
        if isinstance(self.context, PoolingContext | SpeechContext):
            raise InvalidRequest("this is for models that generate text", "model")

    @contextmanager
    def lent(self, name: str | None) -> Iterator[LocalContext]:
        """The model of this name, which is not unloaded meanwhile; of one model, the name need not be given.

        Raises `InvalidRequest`, and `Conflict` where it is not loaded.
        """
        with ExitStack() as on_exit:
            context: ModelContext
            if isinstance(self.context, ModelsContext):
                context = on_exit.enter_context(self._taken(self.pool, name))
            else:
                self.context.adapter_of(name)  # raises for an unknown one
                context = self.context
            if not isinstance(context, LocalContext):
                raise InvalidRequest("this is for models that generate text", "model")
            yield context

    @contextmanager
    def _taken(self, pool: ModelPool, name: str | None) -> Iterator[ModelContext]:
        if name is None:
            raise InvalidRequest(f"say which `model`: this server has {', '.join(model.name for model in pool)}", "model")
        model = pool.find(name)
        resident = pool.take(model)
        if resident is None:
            raise Conflict(f"the model `{model.name}` is {model.state}", "model")
        try:
            yield resident.context
        finally:
            pool.release(model)


ADMINISTRATION: web.AppKey[Administration] = web.AppKey("administration", Administration)


class Options(Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of a request; a missing body is an empty object. `model` is the name of one of several models."""

    model: str | None = None


async def read_options(request: web.Request, kind: type[T]) -> T:
    """Raises `InvalidRequest`, and aiohttp's 413 for a body that is too large."""
    if request.content_length is not None and request.content_length > request.client_max_size:
        raise web.HTTPRequestEntityTooLarge(max_size=request.client_max_size, actual_size=request.content_length)
    options, _ = decode(await request.read() or b"{}", kind)
    return options


def answer(value: Any) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")


class RequestList(Struct):
    requests: list[RequestInfo]


async def list_requests(request: web.Request) -> web.Response:
    """The open requests, of each model the oldest first, without their text."""
    administration = request.app[ADMINISTRATION]
    administration.check_generates()
    return answer(RequestList([info for name, engine in administration.engines.items() for info in engine.requests(name)]))


class AbortOptions(Struct, kw_only=True, forbid_unknown_fields=True):
    """Either the `ids` of some requests, as the list has them in `id` or in `http_id`, or `all`."""

    ids: list[str] = []
    all: bool = False


class Aborted(Struct):
    """The engine's ids of requests that have been ended. `unknown` are given ids of none that is open: it has ended, or never was."""

    aborted: list[str]
    unknown: list[str]


async def abort_requests(request: web.Request) -> web.Response:
    """Ends requests at once; their clients get an error, which they do not take for one to try again after."""
    administration, options = request.app[ADMINISTRATION], await read_options(request, AbortOptions)
    administration.check_generates()
    if options.all == bool(options.ids):
        raise InvalidRequest("give either `ids` or `all: true`", "ids")
    opened = [(engine, info) for engine in administration.engines.values() for info in engine.requests()]
    ids = set(options.ids)
    aborted = [info.id for engine, info in opened if (options.all or ids & {info.id, info.http_id}) and engine.abort(info.id)]
    known = {name for _, info in opened for name in (info.id, info.http_id)}
    log.info("aborted by an operator: %d requests", len(aborted))
    return answer(Aborted(aborted, [given for given in dict.fromkeys(options.ids) if given not in known]))


class ResetOptions(Options):
    """`disk` deletes the blocks of this model in --kv-cache-dir as well."""

    disk: bool = False


class Reset(Struct):
    """How many blocks were forgotten in memory, and how many were deleted from the disk."""

    blocks: int
    files: int


async def reset_prefix_cache(request: web.Request) -> web.Response:
    """Forgets what earlier prompts have left in the KV cache; running requests keep the blocks that they hold."""
    options = await read_options(request, ResetOptions)
    with request.app[ADMINISTRATION].lent(options.model) as context:
        scheduler = context.engine.core.scheduler
        files = None if scheduler.persistence is None else scheduler.persistence.files
        if options.disk and files is None:
            raise InvalidRequest("this server was started without --kv-cache-dir", "disk")
        num_blocks, num_files = forget_prefixes(scheduler), 0
        if options.disk and files is not None:
            cancel_loads(scheduler)
            num_files = await asyncio.to_thread(files.clear)
    return answer(Reset(num_blocks, num_files))


class SleepOptions(Options):
    """`level` 1 frees the KV cache, 2 the weights too. With `mode` wait, running requests end first, in at most `timeout` seconds."""

    level: int = 1
    mode: SleepMode = "wait"
    timeout: Seconds = WAIT_SECONDS
    wake_on_request: bool = False


async def sleep(request: web.Request) -> web.Response:
    """Puts the model to sleep, and answers when it sleeps."""
    options = converted(dict(request.query), SleepOptions) if request.query else await read_options(request, SleepOptions)
    with request.app[ADMINISTRATION].lent(options.model) as context:
        sleeper = context.engine.sleeper
        return answer(await sleeper.sleep(options.level, options.mode, options.timeout, wakes_on_request=options.wake_on_request))


async def wake_up(request: web.Request) -> web.Response:
    """Wakes the model, and answers when it is awake."""
    options = await read_options(request, Options)
    with request.app[ADMINISTRATION].lent(options.model) as context:
        return answer(await context.engine.sleeper.wake())


async def show_sleep(request: web.Request) -> web.Response:
    """Whether the model sleeps, how deeply, and what that has freed."""
    with request.app[ADMINISTRATION].lent(read_query(request, Options).model) as context:
        return answer(context.engine.sleeper.status())


class IsSleeping(Struct):
    is_sleeping: bool


async def show_is_sleeping(request: web.Request) -> web.Response:
    """As vLLM has it."""
    with request.app[ADMINISTRATION].lent(read_query(request, Options).model) as context:
        return answer(IsSleeping(not context.engine.sleeper.is_awake))


class ModelInfo(Struct):
    """`state` is that of its sleep, or of one of several models that of its loading. `adapters` are by name, with their directories.

    The others are None where the server has one model: the bytes that it takes or, before its first load, is expected to take, how often it
    was loaded, and how many requests use it and wait for it.
    """

    id: str
    names: list[str]
    max_model_len: int | None
    state: str
    adapters: dict[str, str]
    is_pinned: bool | None = None
    num_bytes: int | None = None
    num_loads: int | None = None
    num_users: int | None = None
    num_waiting: int | None = None


class Models(Struct):
    models: list[ModelInfo]


async def list_models(request: web.Request) -> web.Response:
    """The models that are served, with their adapters."""
    context = request.app[ADMINISTRATION].context
    if isinstance(context, ModelsContext):
        return answer(Models([describe(model) for model in context.engine]))
    return answer(Models([ModelInfo(context.model_names[0], list(context.model_names), context.max_model_len, *state_of(context))]))


def state_of(context: ModelContext) -> tuple[str, dict[str, str]]:
    """That of its sleep, and its adapters."""
    state = context.engine.sleeper.state if isinstance(context, LocalContext) else "awake"
    return state, {adapter.name: adapter.path for adapter in context.adapters}


def describe(model: PooledModel) -> ModelInfo:
    state, adapters = (model.state, dict[str, str]()) if model.resident is None else state_of(model.resident.context)
    return ModelInfo(
        id=model.name,
        names=list(model.spec.model_names),
        max_model_len=model.max_model_len,
        state=model.state if state == "awake" else state,
        adapters=adapters,
        is_pinned=model.is_pinned,
        num_bytes=model.num_bytes,
        num_loads=model.num_loads,
        num_users=model.num_users,
        num_waiting=len(model.waiting),
    )


class ModelOptions(Struct, kw_only=True, forbid_unknown_fields=True):
    model: str


async def load_model(request: web.Request) -> web.Response:
    """Loads one of several models, in place of idle ones if need be, and answers once it is loaded."""
    options, pool = await read_options(request, ModelOptions), request.app[ADMINISTRATION].pool
    await pool.load(pool.find(options.model))
    return await list_models(request)


async def unload_model(request: web.Request) -> web.Response:
    """Unloads one of several models once no request uses it. The next request loads it again."""
    options, pool = await read_options(request, ModelOptions), request.app[ADMINISTRATION].pool
    await pool.unload(pool.find(options.model))
    return await list_models(request)


class PinOptions(ModelOptions):
    pinned: bool = True


async def pin_model(request: web.Request) -> web.Response:
    """Has a model never be unloaded for another one, or for being idle, from now on or no longer."""
    options, pool = await read_options(request, PinOptions), request.app[ADMINISTRATION].pool
    pool.pin(pool.find(options.model), is_pinned=options.pinned)
    return await list_models(request)


class LoadAdapterOptions(Struct, kw_only=True, forbid_unknown_fields=True):
    """`path` is a directory of the server's machine. With `replace`, the adapter takes the place of one of its name."""

    name: str
    path: str
    replace: bool = False


class UnloadAdapterOptions(Struct, kw_only=True, forbid_unknown_fields=True):
    name: str


def adapted(administration: Administration) -> LocalContext:
    """Raises `InvalidRequest` where adapters do not come and go: with API servers or several models, their names are those of the start."""
    if administration.api_servers is not None:
        raise InvalidRequest("adapters are loaded in one process: start the server without --api-servers, or with --adapter", "name")
    if isinstance(administration.context, ModelsContext):
        raise InvalidRequest("the adapters of several models are those of the file of --models", "name")
    with administration.lent(None) as context:
        return context


async def load_adapter(request: web.Request) -> web.Response:
    """Reads an adapter and serves it as a model of its name; the model may be asleep. The server needs --enable-lora."""
    options, context = await read_options(request, LoadAdapterOptions), adapted(request.app[ADMINISTRATION])
    adapter = await context.adapters.load(options.name, Path(options.path), replaces=options.replace)
    log.info("adapter %r is loaded from %r", adapter.name, adapter.path)
    return await list_models(request)


async def unload_adapter(request: web.Request) -> web.Response:
    """Serves an adapter no longer. Requests that run with it end with it."""
    options, context = await read_options(request, UnloadAdapterOptions), adapted(request.app[ADMINISTRATION])
    context.adapters.remove(options.name)
    log.info("adapter %r is unloaded", options.name)
    return await list_models(request)


class LogLevelOptions(Struct, kw_only=True, forbid_unknown_fields=True):
    level: LogLevel


class LogLevelInfo(Struct):
    level: str


async def show_log_level(request: web.Request) -> web.Response:
    """The lowest level that is logged."""
    level = logging.getLogger(PACKAGE_LOG).getEffectiveLevel()
    return answer(LogLevelInfo(logging.getLevelName(level).lower()))


async def set_log_level(request: web.Request) -> web.Response:
    """Sets the lowest level that is logged, in all processes of the server."""
    options, api_servers = await read_options(request, LogLevelOptions), request.app[ADMINISTRATION].api_servers
    logging.getLogger(PACKAGE_LOG).setLevel(options.level.upper())
    if api_servers is not None:
        api_servers.set_log_level(options.level)
    return await show_log_level(request)


class ProfileOptions(Options):
    """How many steps, and how long to wait for them."""

    steps: Annotated[int, Meta(ge=1, le=MAX_STEPS)] = 20
    timeout: Seconds = 60.0


async def take_profile(request: web.Request) -> web.Response:
    """Records the next steps; answers with a Chrome trace, which Perfetto and chrome://tracing open."""
    options = await read_options(request, ProfileOptions)
    with request.app[ADMINISTRATION].lent(options.model) as context:
        if not context.engine.sleeper.is_awake:
            raise Conflict("the model is asleep: it computes no steps")
        trace = await context.engine.profiler.profile(options.steps, options.timeout)
    return web.Response(body=trace, content_type="application/json")


class ProcessInfo(Struct):
    """Of the engine's process. `tasks` are those of its event loop, `rss_bytes` what it has in memory."""

    version: str
    uptime_seconds: float
    rss_bytes: int
    threads: int
    tasks: int


class EngineInfo(Struct):
    """`counters` are those that /metrics shows, in one object."""

    num_open_requests: int
    sleep: SleepStatus
    counters: EngineStats


class Stats(Struct):
    """`engines` are those of models that generate text, by the names of these."""

    process: ProcessInfo
    engines: dict[str, EngineInfo]


_STARTED = time.monotonic()


async def show_stats(request: web.Request) -> web.Response:
    """Counters and sizes, for a look at a server that behaves oddly."""
    uptime = time.monotonic() - _STARTED
    process = ProcessInfo(__version__, uptime, resident_set_size(), threading.active_count(), len(asyncio.all_tasks()))
    engines = request.app[ADMINISTRATION].engines
    infos = {name: EngineInfo(engine.num_requests, engine.sleeper.status(), engine.stats()) for name, engine in engines.items()}
    return answer(Stats(process, infos))


class StackInfo(Struct):
    """The innermost call last; of files and lines only, never with values."""

    name: str
    stack: list[str]


class Stacks(Struct):
    threads: list[StackInfo]
    tasks: list[StackInfo]


async def show_threads(request: web.Request) -> web.Response:
    """What every thread and every task of the event loop is doing right now."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = sys._current_frames()
    threads = [StackInfo(names.get(ident, str(ident)), _lines(traceback.extract_stack(frame))) for ident, frame in frames.items()]
    tasks = [
        StackInfo(task.get_name(), _lines(traceback.StackSummary.extract((frame, frame.f_lineno) for frame in task.get_stack())))
        for task in asyncio.all_tasks()
    ]
    return answer(Stacks(threads, tasks))


def _lines(frames: traceback.StackSummary) -> list[str]:
    return [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in frames]


# With the paths of vLLM's development mode, so far as they mean the same.
ADMIN_ROUTES = (
    Route("GET", "/requests", list_requests, response=RequestList),
    Route("POST", "/requests/abort", abort_requests, request=AbortOptions, response=Aborted),
    Route("POST", "/prefix-cache/reset", reset_prefix_cache, request=ResetOptions, response=Reset, aliases=("/reset_prefix_cache",)),
    Route("GET", "/sleep", show_sleep, response=SleepStatus),
    Route("GET", "/is_sleeping", show_is_sleeping, response=IsSleeping),
    Route("POST", "/sleep", sleep, request=SleepOptions, response=SleepStatus),
    Route("POST", "/wake", wake_up, request=Options, response=SleepStatus, aliases=("/wake_up",)),
    Route("GET", "/models", list_models, response=Models),
    Route("POST", "/models/load", load_model, request=ModelOptions, response=Models),
    Route("POST", "/models/unload", unload_model, request=ModelOptions, response=Models),
    Route("POST", "/models/pin", pin_model, request=PinOptions, response=Models),
    Route("POST", "/adapters/load", load_adapter, request=LoadAdapterOptions, response=Models),
    Route("POST", "/adapters/unload", unload_adapter, request=UnloadAdapterOptions, response=Models),
    Route("GET", "/log-level", show_log_level, response=LogLevelInfo),
    Route("POST", "/log-level", set_log_level, request=LogLevelOptions, response=LogLevelInfo),
    Route("POST", "/profile", take_profile, request=ProfileOptions, response=dict[str, Any]),
    Route("GET", "/stats", show_stats, response=Stats),
    Route("GET", "/threads", show_threads, response=Stacks),
)
