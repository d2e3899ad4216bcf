"""The middleware: request id, errors as bodies, hosts, CORS, API key, and no new work while stopping; and what is recorded of every request
once it is over: a count, a trace where they are exported, and a line of the access log.
"""

import asyncio
import ipaddress
import logging
import random
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
from aiohttp import hdrs, web
from aiohttp.typedefs import Handler, Middleware

from penstock.api.errors import error_response, refusal_response
from penstock.api.pages.playground import page_files
from penstock.api.requests import (
    ARRIVED,
    CLIENT,
    KEY,
    RATE_LIMIT_HEADERS,
    REQUEST_ID,
    SHARED,
    TIMER,
    body_limit,
    key_of,
    offered_key,
    rate_limit_headers,
    release,
    speaks_anthropic,
    too_large,
)
from penstock.engine.errors import EngineUnavailable, PenstockError
from penstock.serving.endpoints.bodies import IGNORED_HEADER, IGNORED_TOOLS_HEADER, TRUNCATED_HEADER
from penstock.serving.endpoints.errors import ErrorBody, shortened
from penstock.serving.limits import KeyRing
from penstock.serving.messages import WARNING_HEADER
from penstock.serving.observability.logs import LogMessage
from penstock.serving.observability.metrics import HttpRequests, LoggedTimer, milliseconds
from penstock.serving.observability.tracing import FinishedRequest, TraceIds, Tracer, make_tracer
from penstock.serving.options import ServerOptions

log = logging.getLogger("penstock.api")
access_log = logging.getLogger("penstock.access")

STARTED: web.RequestKey[web.StreamResponse] = web.RequestKey("started", web.StreamResponse)
OPEN_PATHS = frozenset({"/health", "/ping", "/ready"})
METRICS_PATH = "/metrics"
POLLED_PATHS = OPEN_PATHS | {METRICS_PATH}
SERVER_NAME = "penstock"  # without a version, which would tell an attacker more than an operator
EXPOSED_HEADERS = ", ".join(
    (
        "x-request-id, request-id, retry-after",
        WARNING_HEADER,
        IGNORED_HEADER,
        IGNORED_TOOLS_HEADER,
        TRUNCATED_HEADER,
        RATE_LIMIT_HEADERS,
    )
)
VALID_REQUEST_ID = re.compile(r"[!-~]{1,128}")


class Gate:
    """Whether the server takes new requests, and how many it is answering."""

    def __init__(self) -> None:
        self.is_open = True
        self.num_inside = 0
        self._is_empty = asyncio.Event()
        self._is_empty.set()

    @contextmanager
    def enter(self) -> Iterator[None]:
        self.num_inside += 1
        self._is_empty.clear()
        try:
            yield
        finally:
            self.num_inside -= 1
            if not self.num_inside:
                self._is_empty.set()

    async def drain(self, seconds: float) -> bool:
        """Closes the gate and waits for the requests inside; False where some are left after `seconds`."""
        self.is_open = False
        try:
            await asyncio.wait_for(self._is_empty.wait(), seconds)
        except TimeoutError:
            return False
        return True


GATE: web.AppKey[Gate] = web.AppKey("gate", Gate)


def request_id_of(headers: Mapping[str, str]) -> str:
    """The client's own, where it sent one that can be used."""
    offered = headers.get("x-request-id", "")
    return (
        offered if VALID_REQUEST_ID.fullmatch(offered) else f"{random.getrandbits(128):032x}"
    )  # which takes a tenth of the time of a UUID


@web.middleware
async def identify_and_log(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Outermost: gives the request its id, and records it when the answer is out."""
    request[REQUEST_ID] = request_id_of(request.headers)
    request[ARRIVED] = time.monotonic()
    response: web.StreamResponse | None = None
    try:
        response = await handler(request)
        return response
    finally:
        release(request)
        record_request(request, response, is_poll=request.path in POLLED_PATHS)


@web.middleware
async def translate_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every exception becomes an error body; an unexpected one is logged with the request's id and not described.

    Where the response has started it is too late for that: the connection is cut, so that no client takes half an answer for a whole one.
    """
    try:
        return await handler(request)
    except Exception as error:
        if (started := request.get(STARTED)) is not None:
            return cut_off(request, started, error)
        if isinstance(error, web.HTTPException):
            return refusal(request, error)
        if isinstance(error, web.RequestPayloadError):
            return last_response(request, 400, "the body is not encoded as its headers say")
        if not isinstance(error, PenstockError):
            log.exception("request %s failed", request[REQUEST_ID])
            return refusal_response(request, 500, f"internal server error; the log has more under {request[REQUEST_ID]}")
        return error_response(request, error)


def refusal(request: web.Request, error: web.HTTPException) -> web.Response:
    """aiohttp's own refusals, in the same shape as ours."""
    headers: dict[str, str] = {}
    message = error.text or error.reason
    if isinstance(error, web.HTTPMethodNotAllowed):
        headers[hdrs.ALLOW] = ", ".join(sorted(error.allowed_methods))
        message = f"{request.path} takes {headers[hdrs.ALLOW]}, not {request.method}"
    elif isinstance(error, web.HTTPNotFound):
        message = f"there is nothing at {request.path}"
    elif isinstance(error, web.HTTPRequestEntityTooLarge):
        message = too_large(request)
    elif isinstance(error, web.HTTPRequestTimeout):
        return last_response(request, error.status, "the body did not arrive in time (--read-timeout)")
    return refusal_response(request, error.status, message, headers=headers)


def last_response(request: web.Request, status: int, message: str) -> web.Response:
    """For a body whose end is unknown, or is not waited for: the connection ends with the answer."""
    request.content.feed_eof()  # else aiohttp goes on reading
    response = refusal_response(request, status, message)
    response.force_close()
    return response


def cut_off(request: web.Request, started: web.StreamResponse, error: Exception) -> web.StreamResponse:
    if not isinstance(error, ConnectionError):
        log.error("request %s failed after its response had started", request[REQUEST_ID], exc_info=error)
    if request.transport is not None:
        request.transport.abort()
    return started


@web.middleware
async def refuse_while_stopping(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Probes and scrapes go on during the drain: its last minutes are those that an operator wants to see."""
    gate = request.app[GATE]
    if not gate.is_open and request.path not in POLLED_PATHS:
        raise EngineUnavailable("the server is shutting down")
    with gate.enter():
        return await handler(request)


@web.middleware
async def limit_body(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Refuses by the announced length, before anything is read; what is not announced is counted by aiohttp while it reads."""
    limit = body_limit(request)
    if request.content_length is not None and request.content_length > limit:
        raise web.HTTPRequestEntityTooLarge(max_size=limit, actual_size=request.content_length)
    return await handler(request)


def check_hosts(allowed: tuple[str, ...]) -> Middleware:
    """Refuses a `Host` that is not the server's, against DNS rebinding: a page is loaded, then its name resolves to this machine's address,
    and the browser lets it read the answers as those of its own site. That cannot be done with IP addresses or with localhost.
    """

    @web.middleware
    async def check_host(request: web.Request, handler: Handler) -> web.StreamResponse:
        host = request.headers.get(hdrs.HOST)
        if host is None or is_allowed_host(host, allowed):
            return await handler(request)
        message = f"{shortened(host)!r} is not a host of this server; --allowed-hosts adds hosts"
        return refusal_response(request, 403, message, code="host_not_allowed")

    return check_host


def is_allowed_host(host: str, allowed: tuple[str, ...]) -> bool:
    """`host` is that of a header, with or without a port. `*.example.com` matches every name below it, `*` all."""
    name = re.sub(r":\d*$", "", host).strip("[]").rstrip(".").lower()
    if name == "localhost" or name.endswith(".localhost") or _is_address(name):
        return True
    return any(pattern in ("*", name) or (pattern.startswith("*.") and name.endswith(pattern[1:])) for pattern in allowed)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


@web.middleware
async def require_json_across_sites(request: web.Request, handler: Handler) -> web.StreamResponse:
    """A page may send forms and plain text anywhere, and only JSON makes its browser ask beforehand, which is what CORS relies on."""
    is_foreign = hdrs.ORIGIN in request.headers or request.headers.get("Sec-Fetch-Site") == "cross-site"
    if request.method != hdrs.METH_POST or not is_foreign or request.content_type == "application/json":
        return await handler(request)
    if _is_allowed(request, request.app[SHARED].options.allowed_origins):
        return await handler(request)
    message = "a request from a web page takes `Content-Type: application/json`, or an origin that --allowed-origins names"
    return refusal_response(request, 415, message)


def needs_key(path: str, options: ServerOptions) -> bool:
    """Whether a route asks for an API key, if there is one. Browsers send none for a page, and there are no secrets in ours."""
    if path in OPEN_PATHS or path in ("/openapi.json", "/docs") or path.startswith("/docs/"):
        return False
    if path == METRICS_PATH:
        return not options.metrics_without_key
    return not (options.playground and path in page_files())


def require_api_key(keys: KeyRing, options: ServerOptions) -> Middleware:
    """Asks for a key on the routes that need it; `key_of` has it from then on."""

    @web.middleware
    async def check_api_key(request: web.Request, handler: Handler) -> web.StreamResponse:
        offered = offered_key(request.headers)
        key = None if offered is None else keys.find(offered)
        if key is not None:
            request[KEY] = key
        if key is not None or not needs_key(request.path, options):
            return await handler(request)
        message = "the API key is wrong"
        if offered is None:
            message = "this server asks for an API key: send `Authorization: Bearer KEY` or `x-api-key: KEY`"
        headers: dict[str, str] = {hdrs.WWW_AUTHENTICATE: "Bearer"}
        return refusal_response(request, 401, message, code="invalid_api_key", headers=headers)

    return check_api_key


def allow_origins(origins: tuple[str, ...]) -> Middleware:
    """Answers preflight requests; the headers on all other responses are set by `set_response_headers`."""

    @web.middleware
    async def answer_preflight(request: web.Request, handler: Handler) -> web.StreamResponse:
        is_preflight = request.method == hdrs.METH_OPTIONS and hdrs.ACCESS_CONTROL_REQUEST_METHOD in request.headers
        if not is_preflight or not _is_allowed(request, origins):
            return await handler(request)
        return web.Response(
            status=204,
            headers={
                hdrs.ACCESS_CONTROL_ALLOW_METHODS: "GET, POST, DELETE, OPTIONS",
                hdrs.ACCESS_CONTROL_ALLOW_HEADERS: request.headers.get(hdrs.ACCESS_CONTROL_REQUEST_HEADERS, "*"),
                hdrs.ACCESS_CONTROL_MAX_AGE: "600",
            },
        )

    return answer_preflight


async def set_response_headers(request: web.Request, response: web.StreamResponse) -> None:
    """Runs when a response is about to start, so that streams get these headers like all others."""
    request[STARTED] = response
    response.headers[hdrs.SERVER] = SERVER_NAME
    if not request.app[GATE].is_open:
        # Clients that keep connections open are to look for another server with their next request.
        response.force_close()
        response.headers[hdrs.CONNECTION] = "close"
    if REQUEST_ID in request:  # not where aiohttp refuses before any middleware runs, as it does for an `Expect` that it does not know
        response.headers["x-request-id"] = request[REQUEST_ID]
        if speaks_anthropic(request):
            response.headers["request-id"] = request[REQUEST_ID]
    response.headers.update(rate_limit_headers(request))
    origins = request.app[SHARED].options.allowed_origins
    if origins and _is_allowed(request, origins):
        response.headers[hdrs.ACCESS_CONTROL_ALLOW_ORIGIN] = "*" if "*" in origins else request.headers[hdrs.ORIGIN]
        response.headers[hdrs.ACCESS_CONTROL_EXPOSE_HEADERS] = EXPOSED_HEADERS
        response.headers.add(hdrs.VARY, hdrs.ORIGIN)


def _is_allowed(request: web.Request, origins: tuple[str, ...]) -> bool:
    return hdrs.ORIGIN in request.headers and ("*" in origins or request.headers[hdrs.ORIGIN] in origins)


HTTP_REQUESTS: web.AppKey[HttpRequests] = web.AppKey("http_requests", HttpRequests)

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
