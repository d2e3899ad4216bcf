"""The served models: GET /v1/models, in OpenAI's and Anthropic's formats, adapters loaded and unloaded while the server runs, and
several models in one server: a request is passed to the model that its body, or its path, names, once that is loaded.

The handlers are the same as in a server with one model. Each model has an application of its own, which has its context, its metrics
and its parsers, in addition to everything that the server has once.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from functools import partial, wraps
from pathlib import Path
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler
from msgspec import Struct

from penstock.api.answers import BEGUN, json_response
from penstock.api.errors import anthropic_body_of, body_of
from penstock.api.messages import ModelQuery, model_info, model_page
from penstock.api.requests import (
    ARRIVED,
    BODY,
    CLIENT,
    CONTEXT,
    KEEP,
    METRICS,
    MODEL,
    POOLING,
    REQUEST_ID,
    REQUEST_METRICS,
    SHARED,
    check_limits,
    check_model,
    read_body,
    receive,
    served_names,
    set_deadline,
    speaks_anthropic,
    waiting_for_model,
    within_deadline,
)
from penstock.api.responses.events import ErrorDetails, ErrorEvent
from penstock.api.routes import Route
from penstock.engine.errors import InvalidRequest, NoSuchModel
from penstock.engine.pooling.files import ModelKind
from penstock.serving.context import GENERATES, PoolingContext, ServerContext, wrong_model, wrong_task
from penstock.serving.endpoints.answers import HEADERS, StreamFormat, encode_event
from penstock.serving.endpoints.bodies import decoded
from penstock.serving.endpoints.models import ModelCard, ModelList, model_card
from penstock.serving.models.pool import ModelsContext, PooledModel, Resident
from penstock.serving.observability.metrics import Metrics


async def list_models(request: web.Request) -> web.Response:
    """The models that are served, by all of their names; with the header `anthropic-version`, in pages as Anthropic's API has them."""
    page, names = model_page(request), served_names(request)
    if speaks_anthropic(request):
        return json_response(page)
    return json_response(ModelList([model_card(model) for model in request.app[SHARED].descriptions() if model.name in names]))


async def show_model(request: web.Request) -> web.Response:
    """One model that is served. Its name may hold slashes."""
    context, name = request.app[SHARED], request.match_info["name"]
    check_model(request, name)
    found = next((model for model in context.descriptions() if model.name == name), None)
    if found is None:
        served = f"The model `{name}` does not exist. Served here: {', '.join(served_names(request))}."
        raise NoSuchModel(f"model: {name}" if speaks_anthropic(request) else served, "model")
    return json_response(model_info(found) if speaks_anthropic(request) else model_card(found))


MODEL_ROUTES = (
    Route("GET", "/v1/models", list_models, response=ModelList, query=ModelQuery, aliases=("/openai/models",)),
    Route("GET", "/v1/models/{name:.+}", show_model, response=ModelCard, aliases=("/openai/models/{name:.+}",)),
)


RESPONSES_PATH = "/v1/responses"
APPS: web.AppKey[dict[Resident, web.Application]] = web.AppKey("apps", dict)
TURNS_TEXT_INTO_NUMBERS = "a model that turns text into numbers"


class Asked(Struct):
    """What of a body says how it is to be answered."""

    model: str | None = None
    stream: Any = None
    timeout: Any = None

    @property
    def seconds(self) -> float | None:
        """The time limit, where it is a number: the handler refuses what is none."""
        return self.timeout if isinstance(self.timeout, int | float) and self.timeout > 0 else None


class Routes:
    """The routes of a server with several models, by the kind of the model that answers them."""

    def __init__(self, generation: Iterable[Route], pooling: Iterable[Route], common: Iterable[Route]) -> None:
        self._paths: dict[ModelKind, list[str]] = {"generate": paths_of(generation), "pooling": paths_of(pooling)}
        routes: tuple[tuple[Iterable[Route], ModelKind | None], ...] = ((generation, "generate"), (pooling, "pooling"), (common, None))
        self.all = [self._by_model(route, kind) for group, kind in routes for route in group]

    def _by_model(self, route: Route, kind: ModelKind | None) -> Route:
        """The same route with a handler that chooses the model, where the body names one."""
        if route.request is None:
            return route

        @wraps(route.handler)
        async def answer(request: web.Request) -> web.StreamResponse:
            context = models_context(request)
            context.engine.check_admission()
            if CLIENT not in request:  # requests of batches are not refused
                check_limits(request)  # a key beyond its limits has no model loaded in the place of another's
            asked = await read_asked(request)
            model = model_asked_for(request, request.match_info.get("deployment", asked.model))

            async def handle(request: web.Request) -> web.StreamResponse:
                self._check_kind(model, kind)  # once more: by now it is known
                return await route.handler(request)

            self._check_kind(model, kind)
            set_deadline(request, request[ARRIVED], asked.seconds, context.options)
            return await answer_with(request, context, model, handle, is_streamed=bool(asked.stream))

        return replace(route, handler=answer)

    def _check_kind(self, model: PooledModel, kind: ModelKind | None) -> None:
        """Raises `InvalidRequest` where the model is of another kind. Before its first load that may be unknown."""
        if kind is None or model.kind in (None, kind):
            return
        if model.kind == "generate":
            raise InvalidRequest(wrong_model(model.name, GENERATES, self._paths["generate"]), "model")
        loaded = None if model.resident is None else model.resident.context
        message = wrong_model(model.name, TURNS_TEXT_INTO_NUMBERS, self._paths["pooling"])
        raise InvalidRequest(wrong_task(loaded) if isinstance(loaded, PoolingContext) else message, "model")


def paths_of(routes: Iterable[Route]) -> list[str]:
    return [route.path for route in routes if route.request is not None]


def models_context(request: web.Request) -> ModelsContext:
    context = request.app[SHARED]
    assert isinstance(context, ModelsContext)
    return context


async def read_asked(request: web.Request) -> Asked:
    """Reads the body, which the handler is to decode again as its own type. Raises `InvalidRequest`."""
    data = request[BODY] = await receive(request)
    asked, _ = await decoded(request.app[SHARED].workers, data, Asked)
    return asked


def model_asked_for(request: web.Request, name: str | None) -> PooledModel:
    """Raises `NoSuchModel`, and `InvalidRequest` where none is named: with several there is no model that could be meant."""
    if not name:
        served = ", ".join(served_names(request))
        raise InvalidRequest(f"Object missing required field `model`. Served here: {served}.", "model")
    check_model(request, name)  # which the handler does as well, when the model has been loaded
    return models_context(request).engine.find(name)


async def answer_with(
    request: web.Request, context: ModelsContext, model: PooledModel, handler: Handler, *, is_streamed: bool
) -> web.StreamResponse:
    """Has the handler answer in the model's application. While the model is waited for, a stream gets comments."""
    pool = context.engine
    resident = pool.take(model)
    try:
        if resident is None:
            interval = context.options.keep_alive_interval if is_streamed else 0
            with waiting_for_model(request, is_batch=CLIENT in request):  # outermost: until the handler admits it, which waits for nothing
                async with keeping_alive(request, interval), within_deadline(request):
                    resident = await pool.wait_for(model)
        app = request.app[APPS].get(resident) or model_app(request.app, context, model, resident)
        with application(request, app):
            return await handler(request)
    except Exception as error:
        begun = request.get(BEGUN)
        if begun is None:
            raise
        return await end_stream(request, begun, error)
    finally:
        if resident is not None:  # also where the client goes away just when it is lent
            pool.release(model)


def model_app(server: web.Application, context: ModelsContext, model: PooledModel, resident: Resident) -> web.Application:
    """What handlers see of the server with this model: all that the server has, and what is the model's own."""
    app, own = web.Application(), resident.context
    app.update(server)
    app[SHARED], app[MODEL] = own, own
    keep: Callable[[], AbstractContextManager[None]] = partial(context.engine.keep, model)
    app[KEEP] = keep
    metrics = app[REQUEST_METRICS] = own.make_metrics()
    if isinstance(own, ServerContext):
        app[CONTEXT] = own
        assert isinstance(metrics, Metrics)
        app[METRICS] = metrics
    elif isinstance(own, PoolingContext):
        app[POOLING] = own
    context.begin_counting(model.name, metrics)
    server[APPS][resident] = app
    resident.closing.callback(server[APPS].pop, resident)
    resident.closing.callback(context.end_counting, model.name)
    return app


@contextmanager
def application(request: web.Request, app: web.Application) -> Iterator[None]:
    """Lets the handler find `app` as the request's, as if it was mounted in the server's."""
    outer = request.match_info
    inner = web.UrlMappingMatchInfo(dict(outer), outer.route)
    inner.add_app(app)
    inner.add_app(request.app)
    request._match_info = inner
    try:
        yield
    finally:
        request._match_info = outer


@asynccontextmanager
async def keeping_alive(request: web.Request, interval: float) -> AsyncIterator[None]:
    """Begins the stream of the answer where it takes longer than `interval`, and sends a comment after each. An interval of 0 never ends.

    What the handler finds wrong with the request has no status of its own then: it is an event.
    """

    async def write_comments() -> None:
        response = web.StreamResponse(headers=HEADERS)
        while True:
            await asyncio.sleep(interval)
            if BEGUN not in request:
                await response.prepare(request)
                request[BEGUN] = response
            await response.write(StreamFormat.keep_alive)

    comments = asyncio.create_task(write_comments()) if interval else None
    try:
        yield
    finally:
        if comments is not None:
            comments.cancel()
            await asyncio.gather(comments, return_exceptions=True)


async def end_stream(request: web.Request, response: web.StreamResponse, error: Exception) -> web.StreamResponse:
    """The error as the last event of a stream in which no other has been sent."""
    ending = b"" if speaks_anthropic(request) or request.path == RESPONSES_PATH else StreamFormat.ending
    with suppress(ConnectionError):
        await response.write_eof(error_event(request, error) + ending)
    return response


def error_event(request: web.Request, error: Exception) -> bytes:
    if speaks_anthropic(request):
        return encode_event(anthropic_body_of(error, request[REQUEST_ID]))
    body = body_of(error)
    if request.path != RESPONSES_PATH:
        return encode_event(body)
    code = body.error.code or "server_error"
    details = ErrorDetails(code, code, body.error.message, body.error.param)
    return encode_event(ErrorEvent(sequence_number=0, error=details, code=code, message=details.message, param=details.param))


log = logging.getLogger(__name__)


class LoadAdapterRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """`lora_path` is a directory below --adapter-dir. With `load_inplace`, it replaces an adapter of this name."""

    lora_name: str
    lora_path: str
    load_inplace: bool = False


class UnloadAdapterRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """`lora_int_id` has no meaning here: adapters are known by their names."""

    lora_name: str
    lora_int_id: int | None = None


async def load_adapter(http: web.Request) -> web.Response:
    """Reads an adapter and serves it as a model of its name. Nothing of one that does not fit the model is served."""
    context = http.app[CONTEXT]
    body, _, _ = await read_body(http, LoadAdapterRequest)
    check_model(http, body.lora_name)
    root = context.options.adapter_dir
    assert root is not None
    adapter = await context.adapters.load(body.lora_name, Path(body.lora_path), Path(root), replaces=body.load_inplace)
    log.info("adapter %r is loaded from %s", adapter.name, adapter.path)
    return web.Response(text=f"Success: LoRA adapter '{adapter.name}' added successfully.")


async def unload_adapter(http: web.Request) -> web.Response:
    """Serves an adapter no longer. Requests that run with it end with it."""
    context = http.app[CONTEXT]
    body, _, _ = await read_body(http, UnloadAdapterRequest)
    check_model(http, body.lora_name)
    context.adapters.remove(body.lora_name)
    log.info("adapter %r is unloaded", body.lora_name)
    return web.Response(text=f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


ADAPTER_ROUTES = (
    Route("POST", "/v1/load_lora_adapter", load_adapter, request=LoadAdapterRequest, media_type="text/plain"),
    Route("POST", "/v1/unload_lora_adapter", unload_adapter, request=UnloadAdapterRequest, media_type="text/plain"),
)
