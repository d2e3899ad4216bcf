"""The aiohttp application: its routes, its middleware, and the routes that say what is served and how the server is."""

from contextlib import nullcontext, suppress
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Middleware
from msgspec import Struct
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from penstock import __version__
from penstock.api.answers import (
    OUTBOX,
    GrammarCheck,
    GrammarCheckRequest,
    Outbox,
    check_grammar,
    create_chat_completion,
    create_completion,
    detokenize,
    json_response,
    tokenize,
)
from penstock.api.batches import BATCH_ROUTES, FILE_ROUTES, serve_batches
from penstock.api.connections import refuse_early
from penstock.api.messages import MESSAGE_ROUTES, SIGNER
from penstock.api.middleware import (
    GATE,
    HTTP_REQUESTS,
    Gate,
    allow_origins,
    check_hosts,
    identify_and_log,
    limit_body,
    refuse_while_stopping,
    require_api_key,
    require_json_across_sites,
    serve_traces,
    set_response_headers,
    translate_errors,
)
from penstock.api.models import ADAPTER_ROUTES, APPS, MODEL_ROUTES, Routes
from penstock.api.pages.openapi import DOCUMENT, Document, show_asset, show_document, show_page
from penstock.api.pages.playground import playground_routes
from penstock.api.requests import CONTEXT, KEEP, KEYS, LEDGER, METRICS, MODEL, POOLING, REQUEST_METRICS, SERVER_METRICS, SHARED, SPEECH
from penstock.api.responses.endpoint import BACKGROUND, RESPONSE_ROUTES, RESPONSES, cancel_all
from penstock.api.routes import ROUTES, Route, add_refusal, add_routes, add_unavailable, azure_path
from penstock.engine.errors import ModelAsleep, QueueFull
from penstock.serving.anthropic import ThinkingSigner
from penstock.serving.context import (
    GENERATES,
    TRANSCRIBES,
    PoolingContext,
    RemoteContext,
    ServerContext,
    SpeechContext,
    wrong_model,
    wrong_task,
)
from penstock.serving.endpoints.chat import ChatCompletion, ChatCompletionChunk
from penstock.serving.endpoints.completions import Completion
from penstock.serving.endpoints.errors import ErrorBody
from penstock.serving.endpoints.models import NO_AUDIO, NOT_SERVED, POOLING_PATHS, SPOKEN, Health
from penstock.serving.endpoints.tokenization import DetokenizeRequest, DetokenizeResponse, TokenizeRequest, TokenizeResponse
from penstock.serving.limits import KeyCollector, KeyRing, Ledger
from penstock.serving.models.pool import ModelsContext, PoolCollector
from penstock.serving.observability.metrics import HttpRequests, ServerMetrics
from penstock.serving.requests import ChatCompletionRequest, CompletionRequest
from penstock.serving.responses.store import ResponseStore

RETRY_LATER = {"Retry-After": "1"}


class Version(Struct):
    version: str


async def show_health(request: web.Request) -> web.Response:
    """Whether the server works: 200 while the engine can, also when the server is stopping and answers what it has begun; else 503."""
    if not request.app[SHARED].engine.is_healthy:
        return json_response(Health("unhealthy"), status=503, headers=RETRY_LATER)
    return json_response(Health("ok" if request.app[GATE].is_open else "draining"))


async def show_readiness(request: web.Request) -> web.Response:
    """Whether to send requests here: 503 while the engine cannot answer, or sleeps until it is woken, and from the shutdown's beginning."""
    if not request.app[GATE].is_open:
        return json_response(Health("draining"), status=503, headers=RETRY_LATER)
    if not request.app[SHARED].engine.is_healthy:
        return json_response(Health("unhealthy"), status=503, headers=RETRY_LATER)
    with suppress(QueueFull):  # it is ready, and has much to do
        try:
            request.app[SHARED].engine.check_admission()
        except ModelAsleep as error:
            return json_response(Health("asleep"), status=503, headers={"Retry-After": str(error.retry_after)})
    return json_response(Health("ready"))


async def show_version(request: web.Request) -> web.Response:
    """The version of Penstock."""
    return json_response(Version(__version__))


async def show_metrics(request: web.Request) -> web.Response:
    """Prometheus metrics, as text."""
    text = await request.app[SHARED].metrics_text(request.app[SERVER_METRICS])
    return web.Response(body=text, headers={"Content-Type": CONTENT_TYPE_LATEST})


# The last path is where Azure's clients look for it: the path names the model, and the body may name another.
GENERATION = (
    Route(
        "POST",
        "/v1/chat/completions",
        create_chat_completion,
        request=ChatCompletionRequest,
        response=ChatCompletion,
        events=ChatCompletionChunk,
        aliases=(azure_path("/v1/chat/completions"),),
        is_admitted=True,
    ),
    Route(
        "POST",
        "/v1/completions",
        create_completion,
        request=CompletionRequest,
        response=Completion,
        events=Completion,
        aliases=(azure_path("/v1/completions"),),
        is_admitted=True,
    ),
    Route("POST", "/v1/grammar/check", check_grammar, request=GrammarCheckRequest, response=GrammarCheck),
    *MESSAGE_ROUTES,
    *RESPONSE_ROUTES,
)
COMMON = (
    Route("GET", "/health", show_health, response=Health, errors=(ErrorBody, Health), aliases=("/ping",)),
    Route("POST", "/ping", show_health, response=Health, errors=(ErrorBody, Health)),
    Route("GET", "/ready", show_readiness, response=Health, errors=(ErrorBody, Health)),
    Route("GET", "/version", show_version, response=Version),
    Route("GET", "/metrics", show_metrics, media_type=CONTENT_TYPE_LATEST),
    *MODEL_ROUTES,
    Route("POST", "/tokenize", tokenize, request=TokenizeRequest, response=TokenizeResponse),
    Route("POST", "/detokenize", detokenize, request=DetokenizeRequest, response=DetokenizeResponse),
)
DOCS = (
    Route("GET", "/openapi.json", show_document, response=dict[str, Any]),
    Route("GET", "/docs", show_page, media_type="text/html"),
    Route("GET", "/docs/{file}", show_asset, media_type="*/*"),
)


def build_app(context: ServerContext | PoolingContext | SpeechContext | ModelsContext) -> web.Application:
    """The whole HTTP interface over one context. Routes for another kind of model say what this one is."""
    options, is_alone = context.options, not isinstance(context, RemoteContext)
    keys = KeyRing.of(options, counts=is_alone)
    middlewares: list[Middleware] = [identify_and_log, translate_errors]
    if options.allowed_hosts and "*" not in options.allowed_hosts:
        middlewares.append(check_hosts(options.allowed_hosts))
    if options.allowed_origins:
        middlewares.append(allow_origins(options.allowed_origins))  # before the key: browsers send none with a preflight
    if options.requires_key:
        middlewares.append(require_api_key(keys, options))
    middlewares += [require_json_across_sites, refuse_while_stopping, limit_body]
    app = web.Application(middlewares=middlewares, client_max_size=options.max_body_size)
    app[SHARED] = context
    app[KEYS], app[LEDGER] = keys, Ledger(keys)
    keys.on_change = app[LEDGER].update
    app[GATE] = Gate()
    app[OUTBOX] = Outbox()
    app[ROUTES] = []
    app.on_response_prepare.append(set_response_headers)
    match context:
        case ServerContext():
            serve_generation(app, context)
            add_routes(app, COMMON)
        case PoolingContext():
            serve_pooling(app, context)
            add_routes(app, COMMON)
        case SpeechContext():
            serve_speech(app, context)
            add_routes(app, COMMON)
        case ModelsContext():
            serve_several(app, context)
    app[HTTP_REQUESTS] = requests = HttpRequests()
    app[SERVER_METRICS].registry.register(requests)
    serve_traces(app, options.otlp_endpoint)
    if keys.is_required:
        app[SERVER_METRICS].registry.register(KeyCollector(lambda: app[LEDGER], context.metrics_label, is_alone=is_alone))
    if not isinstance(context, SpeechContext):
        add_refusal(app, "POST", SPOKEN, NO_AUDIO)
    for message, paths in NOT_SERVED.items():
        add_refusal(app, "POST", paths, message)
    if options.playground:
        add_routes(app, playground_routes())
    if options.files_dir is None:
        add_unavailable(app, (*FILE_ROUTES, *BATCH_ROUTES), "--files-dir")
    else:
        add_routes(app, (*FILE_ROUTES, *BATCH_ROUTES))
        serve_batches(app)
    if options.docs:
        routes: list[Route] = app[ROUTES]
        app[DOCUMENT] = Document(routes, options)
        add_routes(app, DOCS)
    refuse_early(app)
    return app


def serve_generation(app: web.Application, context: ServerContext) -> None:
    app[CONTEXT] = app[MODEL] = context
    app[METRICS] = app[REQUEST_METRICS] = app[SERVER_METRICS] = context.make_metrics()
    app[KEEP] = nullcontext
    keep_conversations(app, context.responses)
    add_routes(app, GENERATION)
    if context.options.adapter_dir is None:
        add_unavailable(app, ADAPTER_ROUTES, "--adapter-dir")
    else:
        add_routes(app, ADAPTER_ROUTES)
    others = [route.path for route in GENERATION if route.request is not None]
    add_refusal(app, "POST", (*POOLING_PATHS, azure_path("/v1/embeddings")), wrong_model(context.model_names[0], GENERATES, others))


def keep_conversations(app: web.Application, responses: ResponseStore) -> None:
    """What outlasts a request that generates: stored responses, those in the background, and the secret that signs reasoning."""
    app[RESPONSES] = responses
    app[SIGNER] = ThinkingSigner()
    app[BACKGROUND] = {}
    app.on_cleanup.append(cancel_all)


def serve_pooling(app: web.Application, context: PoolingContext) -> None:
    from penstock.api.pooling import POOLING_ROUTES  # imports torch, which servers of other models may do without

    app[POOLING] = app[MODEL] = context
    app[REQUEST_METRICS] = app[SERVER_METRICS] = context.make_metrics()
    add_routes(app, POOLING_ROUTES)
    for route in GENERATION:
        add_refusal(app, route.method, route.paths, wrong_task(context))


def serve_speech(app: web.Application, context: SpeechContext) -> None:
    from penstock.api.audio import AUDIO_ROUTES  # imports torch

    app[SPEECH] = app[MODEL] = context
    app[REQUEST_METRICS] = app[SERVER_METRICS] = context.make_metrics()
    add_routes(app, AUDIO_ROUTES)
    message = wrong_model(context.model_names[0], TRANSCRIBES, SPOKEN[: len(context.tasks)])
    for route in GENERATION:
        add_refusal(app, route.method, route.paths, message)
    add_refusal(app, "POST", (*POOLING_PATHS, azure_path("/v1/embeddings")), message)


def serve_several(app: web.Application, context: ModelsContext) -> None:
    from penstock.api.pooling import POOLING_ROUTES

    app[APPS] = {}
    app[SERVER_METRICS] = ServerMetrics(PoolCollector(context.engine))
    keep_conversations(app, context.responses)
    add_routes(app, Routes(GENERATION, POOLING_ROUTES, COMMON).all)
    add_unavailable(app, ADAPTER_ROUTES, "--adapter-dir")


def build_runner(app: web.Application, shutdown_seconds: float = 0) -> web.AppRunner:
    """A client that goes away cancels its handler, which is what aborts its generation.

    `shutdown_seconds` is what handlers get to end by themselves when the runner is cleaned up.
    """
    return web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=shutdown_seconds)
