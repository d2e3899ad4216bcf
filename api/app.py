"""The aiohttp application: which path is whose, and what surrounds every handler."""

from aiohttp import web
from aiohttp.typedefs import Middleware

from penstock.api.chat import create_chat_completion
from penstock.api.completions import create_completion
from penstock.api.context import CONTEXT, SHARED, ServerContext
from penstock.api.grammar_metrics import GrammarCollector
from penstock.api.health import show_health, show_version
from penstock.api.metrics import METRICS, Metrics, show_metrics
from penstock.api.middleware import (
    GATE,
    Gate,
    allow_origins,
    identify_and_log,
    limit_body,
    refuse_while_stopping,
    require_api_key,
    set_response_headers,
    translate_errors,
)
from penstock.api.models import list_models, show_model
from penstock.api.tokenization import detokenize, tokenize


def build_app(context: ServerContext) -> web.Application:
    """The whole HTTP interface over one context."""
    options = context.options
    middlewares: list[Middleware] = [identify_and_log, translate_errors]
    if options.cors_origins:
        middlewares.append(allow_origins(options.cors_origins))  # before the key: browsers send none with a preflight
    if options.api_keys:
        middlewares.append(require_api_key(options.api_keys))
    middlewares += [refuse_while_stopping, limit_body]
    app = web.Application(middlewares=middlewares, client_max_size=options.max_body_bytes)
    app[SHARED] = app[CONTEXT] = context
    app[GATE] = Gate()
    app[METRICS] = Metrics(context.engine.stats, context.model_names[0])
    app[METRICS].registry.register(GrammarCollector(context.compile_grammar.stats, context.model_names[0]))
    app.on_response_prepare.append(set_response_headers)
    app.on_cleanup.append(stop_checking)
    app.add_routes(
        [
            web.get("/health", show_health),
            web.get("/ping", show_health),
            web.post("/ping", show_health),
            web.get("/version", show_version),
            web.get("/metrics", show_metrics),
            web.get("/v1/models", list_models),
            web.get("/v1/models/{name:.+}", show_model),
            web.post("/v1/chat/completions", create_chat_completion),
            web.post("/v1/completions", create_completion),
            web.post("/tokenize", tokenize),
            web.post("/detokenize", detokenize),
        ]
    )
    return app


async def stop_checking(app: web.Application) -> None:
    await app[CONTEXT].conformance.close()


def build_runner(app: web.Application, shutdown_seconds: float = 0) -> web.AppRunner:
    """A client that goes away cancels its handler, which is what aborts its generation.

    `shutdown_seconds` is what handlers get to end by themselves when the runner is cleaned up.
    """
    return web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=shutdown_seconds)
