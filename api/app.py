"""The aiohttp application: its routes, its middleware, and the routes that say what is served and how the server is."""

import time

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware
from msgspec import Struct
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from penstock import __version__
from penstock.api.answering import OUTBOX, Outbox
from penstock.api.bodies import CONTEXT, METRICS, POOLING, REQUEST_METRICS, SHARED, leave_expectation
from penstock.api.chat import create_chat_completion
from penstock.api.completions import create_completion
from penstock.api.errors import json_response
from penstock.api.grammar import check_grammar
from penstock.api.middleware import (
    GATE,
    Gate,
    allow_origins,
    check_hosts,
    identify_and_log,
    limit_body,
    open_paths,
    refuse_while_stopping,
    require_api_key,
    require_json_across_sites,
    set_response_headers,
    translate_errors,
)
from penstock.api.playground import playground_routes
from penstock.api.tokenization import detokenize, tokenize
from penstock.engine.errors import InvalidRequest, NoSuchModel
from penstock.serving.context import GENERATES, PoolingContext, ServerContext, SharedContext, what_it_is, wrong_model
from penstock.serving.metrics import RequestMetrics

_STARTED = int(time.time())


class ModelCard(Struct):
    id: str
    root: str
    max_model_len: int
    tasks: list[str]
    created: int = _STARTED
    object: str = "model"
    owned_by: str = "penstock"


class ModelList(Struct):
    data: list[ModelCard]
    object: str = "list"


def model_card(context: SharedContext, name: str) -> ModelCard:
    tasks: list[str] = [*sorted(context.engine.model.tasks)] if isinstance(context, PoolingContext) else ["generate"]
    return ModelCard(id=name, root=context.model_names[0], max_model_len=context.max_model_len, tasks=tasks)


async def list_models(request: web.Request) -> web.Response:
    """GET /v1/models."""
    context = request.app[SHARED]
    return json_response(ModelList([model_card(context, name) for name in context.model_names]))


async def show_model(request: web.Request) -> web.Response:
    """GET /v1/models/{name}. Names may hold slashes."""
    context = request.app[SHARED]
    name = request.match_info["name"]
    if name not in context.model_names:
        raise NoSuchModel(f"the model {name!r} is not served here; these are: {', '.join(context.model_names)}", "model")
    return json_response(model_card(context, name))


RETRY_LATER = {"Retry-After": "1"}


class Health(Struct):
    status: str


class Version(Struct):
    version: str


async def show_health(request: web.Request) -> web.Response:
    """200 while the engine can serve; 503 when it cannot, or when the server is stopping and traffic should go elsewhere."""
    if not request.app[GATE].is_open:
        return json_response(Health("stopping"), status=503, headers=RETRY_LATER)
    if not request.app[SHARED].engine.is_healthy:
        return json_response(Health("unhealthy"), status=503, headers=RETRY_LATER)
    return json_response(Health("ok"))


async def show_version(request: web.Request) -> web.Response:
    return json_response(Version(__version__))


async def show_metrics(request: web.Request) -> web.Response:
    """GET /metrics."""
    text = await request.app[SHARED].metrics_text(request.app[REQUEST_METRICS])
    return web.Response(body=text, headers={"Content-Type": CONTENT_TYPE_LATEST})


GENERATION: dict[str, Handler] = {
    "/v1/chat/completions": create_chat_completion,
    "/v1/completions": create_completion,
    "/v1/grammar/check": check_grammar,
}
POOLED = ("/v1/embeddings", "/v1/score", "/score", "/v1/rerank", "/rerank", "/v2/rerank", "/pooling", "/classify")
# Where Azure's clients look for them. The path names the model, and the body may name another.
AZURE_ROUTES = {
    f"/v1/{endpoint}": f"/openai/deployments/{{deployment:.+}}/{endpoint}" for endpoint in ("chat/completions", "completions", "embeddings")
}


def build_app(context: ServerContext | PoolingContext) -> web.Application:
    """The whole HTTP interface over one context. Routes for another kind of model say what this one is."""
    options = context.options
    middlewares: list[Middleware] = [identify_and_log, translate_errors]
    if options.allowed_hosts and "*" not in options.allowed_hosts:
        middlewares.append(check_hosts(options.allowed_hosts))
    if options.allowed_origins:
        middlewares.append(allow_origins(options.allowed_origins))  # before the key: browsers send none with a preflight
    if options.api_keys:
        middlewares.append(require_api_key(options.api_keys, open_paths(options)))
    middlewares += [require_json_across_sites, refuse_while_stopping, limit_body]
    app = web.Application(middlewares=middlewares, client_max_size=options.max_body_size)
    app[SHARED] = context
    app[GATE] = Gate()
    app[OUTBOX] = Outbox()
    app.on_response_prepare.append(set_response_headers)
    app.add_routes(
        [
            web.get("/health", show_health),
            web.get("/ping", show_health),
            post("/ping", show_health),
            web.get("/version", show_version),
            web.get("/metrics", show_metrics),
            web.get("/v1/models", list_models),
            web.get("/v1/models/{name:.+}", show_model),
            web.get("/openai/models", list_models),
            web.get("/openai/models/{name:.+}", show_model),
            post("/tokenize", tokenize),
            post("/detokenize", detokenize),
        ]
    )
    if options.playground:
        app.add_routes(playground_routes())
    if isinstance(context, ServerContext):
        serve_generation(app, context)
    else:
        serve_pooling(app, context)
    return app


def serve_generation(app: web.Application, context: ServerContext) -> None:
    model_name = context.model_names[0]
    app[CONTEXT] = context
    app[METRICS] = app[REQUEST_METRICS] = context.make_metrics()
    add_routes(app, GENERATION, dict.fromkeys(POOLED, refuse(wrong_model(model_name, GENERATES, GENERATION))))


def serve_pooling(app: web.Application, context: PoolingContext) -> None:
    from penstock.api.pooling import HANDLERS  # imports torch, which servers of other models may do without
    from penstock.serving.pooling import PoolingCollector

    app[POOLING] = context
    app[REQUEST_METRICS] = RequestMetrics(PoolingCollector(context.engine.stats, context.model_names[0]), context.model_names[0])
    add_routes(app, HANDLERS, dict.fromkeys(GENERATION, refuse(what_it_is(context))))


def add_routes(app: web.Application, *tables: dict[str, Handler]) -> None:
    handlers = {path: handler for table in tables for path, handler in table.items()}
    app.add_routes([post(path, handler) for path, handler in handlers.items()])
    app.add_routes([post(alias, handlers[path]) for path, alias in AZURE_ROUTES.items()])


def post(path: str, handler: Handler) -> web.RouteDef:
    return web.post(path, handler, expect_handler=leave_expectation)


def refuse(message: str) -> Handler:
    """A handler for what the model that is served cannot do."""

    async def refuse_request(request: web.Request) -> web.StreamResponse:
        raise InvalidRequest(message, "model")

    return refuse_request


def build_runner(app: web.Application, shutdown_seconds: float = 0) -> web.AppRunner:
    """A client that goes away cancels its handler, which is what aborts its generation.

    `shutdown_seconds` is what handlers get to end by themselves when the runner is cleaned up.
    """
    return web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=shutdown_seconds)
