"""What is recorded of every HTTP request once it is over: a count, a trace where they are exported, and a line of the access log."""

import asyncio
import logging
import time
from dataclasses import dataclass, field
from typing import Any

import msgspec
from aiohttp import web

from penstock.api.bodies import ARRIVED, CLIENT, REQUEST_ID, TIMER
from penstock.api.limits.admission import key_of
from penstock.serving.endpoints.errors import ErrorBody
from penstock.serving.metrics import HttpRequests, LoggedTimer, milliseconds
from penstock.serving.observability.log_formats import LogMessage
from penstock.serving.observability.tracing import FinishedRequest, TraceIds, Tracer, make_tracer

HTTP_REQUESTS: web.AppKey[HttpRequests] = web.AppKey("http_requests", HttpRequests)

log = logging.getLogger("penstock.api")
access_log = logging.getLogger("penstock.access")

MAX_LOGGED = 300  # characters of a refusal
MAX_PATH = 1000  # characters
CLIENT_CLOSED_REQUEST = 499  # nginx's code for a client that did not wait for its answer


def record_request(request: web.Request, response: web.StreamResponse | None, *, is_poll: bool) -> None:
    """To be called once per request, when its answer is out. `response` is None where the client has not waited for it.

    Polls have no traces, and those that find all well are logged for debugging only: they would fill the log.
    """
    status = CLIENT_CLOSED_REQUEST if response is None else response.status
    seconds = time.monotonic() - request[ARRIVED]
    route = route_of(request)
    trace: TraceIds | None = None
    if CLIENT not in request:  # the requests of batches come over no connection
        request.app[HTTP_REQUESTS].count(request.method, route, status)
        trace = None if is_poll or TRACER not in request.app else trace_request(request, response, route, status)
    level = logging.DEBUG if is_poll and status < 400 else logging.INFO
    if access_log.isEnabledFor(level):
        refusal = refusal_in(response) if isinstance(response, web.Response) and status >= 400 else {}
        access_log.log(level, AccessEntry.of(request, route, status, seconds, refusal, trace))


def route_of(request: web.Request) -> str | None:
    """The template of its path; None where there is nothing at the path, or not for this method."""
    resource = request.match_info.route.resource
    return None if resource is None else resource.canonical


def refusal_in(response: web.Response) -> dict[str, str]:
    """The field and the message of an error's body. Its words may be a client's: they are to be quoted, and cut."""
    try:
        error = msgspec.json.decode(response.body if isinstance(response.body, bytes) else b"", type=ErrorBody).error
    except msgspec.MsgspecError:
        return {}
    named = {"field": error.param, "error": error.message}
    return {name: value[:MAX_LOGGED] for name, value in named.items() if value}


@dataclass(slots=True)
class AccessEntry(LogMessage):
    """One line: address, what was asked, status, id, in milliseconds how long it took and until the first token, and why it was refused.

    Nothing of a prompt or an answer is in it, nor a query, which may hold a key.
    """

    client: str | None
    method: str
    path: str
    route: str | None
    status: int
    request_id: str
    seconds: float
    key: str | None
    timer: LoggedTimer | None
    refusal: dict[str, str] = field(default_factory=dict)
    trace: TraceIds | None = None

    @classmethod
    def of(
        cls, request: web.Request, route: str | None, status: int, seconds: float, refusal: dict[str, str], trace: TraceIds | None
    ) -> "AccessEntry":
        path = request.rel_url.raw_path[:MAX_PATH]
        api_key, timer = key_of(request), request.get(TIMER)
        key = None if api_key is None else api_key.name
        return cls(request.remote, request.method, path, route, status, request[REQUEST_ID], seconds, key, timer, refusal, trace)

    def __str__(self) -> str:
        parts = [f"{self.client} {self.method} {self.path} {self.status} id={self.request_id} total={self.seconds * 1000:.1f}ms"]
        if self.key is not None:
            parts.append(f"key={self.key}")
        if self.timer is not None:
            parts.append(self.timer.summary)
        parts += [f"{name}={value!r}" for name, value in self.refusal.items()]
        return " ".join(parts)

    @property
    def title(self) -> str:
        return f"{self.method} {self.path} {self.status}"

    @property
    def fields(self) -> dict[str, Any]:
        return {
            "request_id": self.request_id,
            "client": self.client,
            "key": self.key,
            "method": self.method,
            "path": self.path,
            "route": self.route,
            "status": self.status,
            "duration_ms": milliseconds(self.seconds),
            **({} if self.timer is None else self.timer.fields),
            **self.refusal,
            **({} if self.trace is None else {"trace_id": self.trace.trace_id, "span_id": self.trace.span_id}),
        }


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
