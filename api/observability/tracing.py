"""Traces of HTTP requests: what of a request its span has."""

import asyncio
import logging
import time

from aiohttp import web

from penstock.api.bodies import ARRIVED, REQUEST_ID, TIMER
from penstock.api.limits.admission import key_of
from penstock.serving.observability.tracing import FinishedRequest, TraceIds, Tracer, make_tracer

log = logging.getLogger("penstock.api")

TRACER: web.AppKey[Tracer] = web.AppKey("tracer", Tracer)

# GenAI's names of what routes ask a model for; the conventions have none for the others.
OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/messages": "chat",
    "/v1/responses": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
    "/openai/deployments/{deployment}/chat/completions": "chat",
    "/openai/deployments/{deployment}/completions": "text_completion",
    "/openai/deployments/{deployment}/embeddings": "embeddings",
}


def serve_traces(app: web.Application, endpoint: str | None) -> None:
    """Exports traces from now on, where they are wanted. What is left is exported when the server ends."""
    tracer = make_tracer(endpoint)
    if tracer is None:
        return
    app[TRACER] = tracer

    async def close(app: web.Application) -> None:
        await asyncio.to_thread(app[TRACER].close)

    app.on_cleanup.append(close)


def trace_request(request: web.Request, response: web.StreamResponse | None, route: str | None, status: int) -> TraceIds | None:
    """Exports the trace of a request, where `serve_traces` has found that they are wanted. None where it cannot be made."""
    key = key_of(request)
    finished = FinishedRequest(
        method=request.method,
        route=route,
        status=status,
        request_id=request[REQUEST_ID],
        started=request[ARRIVED],
        ended=time.monotonic(),
        operation=None if route is None else OPERATIONS.get(route),
        is_streamed=response is not None and not isinstance(response, web.Response),
        key=None if key is None else key.name,
        timer=request.get(TIMER),
    )
    try:
        return request.app[TRACER].record(finished, request.headers)
    except Exception:  # of a library or of its plug-ins, which environment variables choose: the request has been answered
        log.exception("no trace was made of request %s", request[REQUEST_ID])
        return None
