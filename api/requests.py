"""What a handler reads of an HTTP request: the server's objects; its API key, what that allows and has used, and its time limit; the
request's timer; and its body, bounded and typed.
"""

import asyncio
import math
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, AbstractContextManager, aclosing, asynccontextmanager, contextmanager
from typing import TypeVar

from aiohttp import BodyPartReader, HttpVersion11, MultipartReader, hdrs, web
from aiohttp.http_exceptions import HttpProcessingError
from msgspec import Struct

from penstock.engine.deltas import SequenceDelta
from penstock.engine.errors import InvalidRequest, NoSuchModel
from penstock.serving.context import ModelContext, PoolingContext, ServerContext, SharedContext, SpeechContext
from penstock.serving.endpoints.bodies import (
    Caller,
    T,
    check_fields,
    converted,
    deadline_of,
    decoded,
    ignored_fields_header,
    until,
)
from penstock.serving.limits import BYTES_PER_TOKEN, ApiKey, KeyRing, Ledger, OpenRequest
from penstock.serving.observability.metrics import LoggedTimer, Metrics, RequestMetrics, RequestTimer, ServerMetrics
from penstock.serving.options import ServerOptions
from penstock.serving.requests import MAX_TIMEOUT, RequestFields

SHARED: web.AppKey[SharedContext] = web.AppKey("shared", SharedContext)

# That of the model. With several models, a handler sees the application of the one that is asked for: see api/models.py.
MODEL: web.AppKey[ModelContext] = web.AppKey("model", ModelContext)

# One of these three is the same. No route leads to handlers of the other kind, so that each takes its own context without asking.
CONTEXT: web.AppKey[ServerContext] = web.AppKey("context", ServerContext)

POOLING: web.AppKey[PoolingContext] = web.AppKey("pooling", PoolingContext)

SPEECH: web.AppKey[SpeechContext] = web.AppKey("speech", SpeechContext)

SERVER_METRICS: web.AppKey[ServerMetrics] = web.AppKey("server_metrics", ServerMetrics)

REQUEST_METRICS: web.AppKey[RequestMetrics] = web.AppKey("request_metrics", RequestMetrics)  # with one model, the same

METRICS: web.AppKey[Metrics] = web.AppKey("metrics", Metrics)  # the same again, where the model generates

# Keeps the model loaded while it is entered, for work that outlasts its request.
KEEP: web.AppKey[Callable[[], AbstractContextManager[None]]] = web.AppKey("keep")

BATCH_TIMERS: web.AppKey[Metrics] = web.AppKey("batch_timers", Metrics)  # not shown: the times of batches say nothing about the server

ARRIVED: web.RequestKey[float] = web.RequestKey("arrived", float)

TIMER: web.RequestKey[LoggedTimer] = web.RequestKey("timer", LoggedTimer)

CLIENT: web.RequestKey[str] = web.RequestKey("client", str)  # of a batch's request, which brings no key

PRIORITY: web.RequestKey[int] = web.RequestKey("priority", int)  # of a batch's request, whatever its body says

KEYS: web.AppKey[KeyRing] = web.AppKey("keys", KeyRing)
LEDGER: web.AppKey[Ledger] = web.AppKey("ledger", Ledger)
KEY: web.RequestKey[ApiKey] = web.RequestKey("key", ApiKey)
OPEN: web.RequestKey[OpenRequest] = web.RequestKey("open", OpenRequest)
DEADLINE: web.RequestKey[float] = web.RequestKey("deadline", float)
TIMEOUT_HEADER = "x-request-timeout"
RATE_LIMIT_HEADERS = ", ".join(f"x-ratelimit-{what}-{kind}" for kind in ("requests", "tokens") for what in ("limit", "remaining", "reset"))


def key_of(http: web.Request) -> ApiKey | None:
    """The key that a request came with. None where the server or the route asks for none, and before the middleware has checked it."""
    return http.get(KEY)


def key_name(http: web.Request) -> str | None:
    """What operators know its key by."""
    key = key_of(http)
    return None if key is None else key.name


def offered_key(headers: Mapping[str, str]) -> str | None:
    """The API key that a request brings: as a bearer token, or in the header of Anthropic's or Azure's clients. None without one."""
    scheme, _, token = headers.get(hdrs.AUTHORIZATION, "").partition(" ")
    if scheme.lower() == "bearer":
        return token.strip()
    return headers.get("x-api-key", headers.get("api-key"))


def priority_of(key: ApiKey | None) -> int:
    """What a request with this key has before its body is read."""
    return 0 if key is None or key.limits.priority is None else key.limits.priority


def admit(request: web.Request, context: ModelContext, timer: LoggedTimer | None, *, is_batch: bool = False) -> None:
    """Raises `EngineUnavailable`, `QueueFull` or `RateLimitExceeded`. A request of a batch is counted, and no limit refuses it."""
    key = key_of(request)
    context.engine.check_admission(priority_of(key))
    if key is not None:
        estimate = min((request.content_length or 0) // BYTES_PER_TOKEN, context.max_model_len)
        opened = request.app[LEDGER].of(key).open(estimate, is_limited=not is_batch)
        opened.timer = timer
        request[OPEN] = opened


def check_limits(request: web.Request) -> None:
    """As `admit` of the key alone, for what is to be known before it is called. Raises `RateLimitExceeded`."""
    key = key_of(request)
    if key is not None:
        request.app[LEDGER].of(key).check()


@contextmanager
def waiting_for_model(request: web.Request, *, is_batch: bool = False) -> Iterator[None]:
    """Counts the request as an open one of its key before it is admitted. Raises `RateLimitExceeded`, but for a request of a batch."""
    key = key_of(request)
    if key is None:
        yield
        return
    held = request.app[LEDGER].of(key).hold(is_limited=not is_batch)
    try:
        yield
    finally:
        held.close()


def release(request: web.Request) -> None:
    """The request has been answered."""
    opened = request.get(OPEN)
    if opened is not None:
        opened.close()


async def open_to_the_end(request: web.Request, deltas: AsyncGenerator[SequenceDelta, None]) -> AsyncGenerator[SequenceDelta, None]:
    """The same deltas, of a request that has been answered while its generation goes on: it stays open until that ends."""
    opened = request.pop(OPEN, None)
    try:
        async with aclosing(deltas):
            async for delta in deltas:
                yield delta
    finally:
        if opened is not None:
            opened.close()


def rate_limit_headers(request: web.Request) -> dict[str, str]:
    """What is left of the limits of the request's key, if there are any; also where one of them has refused it."""
    key = key_of(request)
    return {} if key is None else request.app[LEDGER].of(key).headers()


def token_cap(request: web.Request) -> int | None:
    """The most tokens that an answer may have."""
    key = key_of(request)
    return None if key is None else key.limits.max_tokens


def set_deadline(request: web.Request, arrived: float, seconds: float | None, options: ServerOptions) -> None:
    """From the body's `timeout`, or the header, as far as the operator allows. Raises `InvalidRequest` for a header that is no time."""
    asked = header_timeout(request) if seconds is None else seconds
    deadline = deadline_of(arrived, asked, options)
    if deadline is not None:
        request[DEADLINE] = deadline


def header_timeout(request: web.Request) -> float | None:
    text = request.headers.get(TIMEOUT_HEADER)
    if text is None:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= MAX_TIMEOUT:
        raise InvalidRequest(f"`{TIMEOUT_HEADER}` is a number of seconds, above 0 and up to {MAX_TIMEOUT}", TIMEOUT_HEADER)
    return seconds


def within_deadline(request: web.Request) -> AbstractAsyncContextManager[None]:
    """As `until`, of the request's deadline."""
    return until(request.get(DEADLINE))


def metrics_of(request: web.Request) -> Metrics:
    """Where a request that generates is counted."""
    return request.app[BATCH_TIMERS if CLIENT in request else METRICS]


def begin_timer(request: web.Request) -> RequestTimer:
    """The timer of this HTTP request: what it counts goes to `/metrics` and into the access log.

    A handler writes `begin_timer(request).watch(engine.generate(...), params)` in place of `engine.generate(...)`.
    """
    timer = metrics_of(request).begin(request[ARRIVED])
    request[TIMER] = timer
    return timer


def client_of(http: web.Request) -> str | None:
    """The client that work is counted for: the owner of the API key if the server requires keys, else the address."""
    return http.remote if key_of(http) is None else owner_of(http)


def caller_of(http: web.Request) -> Caller:
    """What the request's client, API key, time limit and id decide of its answer. Its body has been read."""
    return Caller(
        client=client_of(http),
        max_tokens=token_cap(http),
        deadline=http.get(DEADLINE),
        key_name=key_name(http),
        request_id=http[REQUEST_ID],
    )


def owner_of(http: web.Request) -> str:
    """The client that files, batches and stored responses belong to: the owner of the API key. Without keys they all belong to one."""
    if CLIENT in http:
        return http[CLIENT]
    key = key_of(http)
    return "" if key is None else key.owner


def read_query(request: web.Request, kind: type[T]) -> T:
    """The query of a URL by its fields. Raises `InvalidRequest`, for a field that is given twice as well."""
    for name in kind.__struct_fields__ if issubclass(kind, Struct) else ():
        if len(request.query.getall(name, ())) > 1:
            raise InvalidRequest(f"`{name}` is given more than once", name)
    return converted(dict(request.query), kind)


Fields = TypeVar("Fields", bound=RequestFields)

REQUEST_ID: web.RequestKey[str] = web.RequestKey("request_id", str)
BODY: web.RequestKey[bytes] = web.RequestKey("body", bytes)  # one that was received to choose the model by it
CONTENT_ENCODINGS = frozenset({"identity", "gzip", "deflate", "br", "zstd"})  # br and zstd where aiohttp has their libraries
MIN_BYTES_PER_SECOND = 16 * 1024
FILES_PATH = "/v1/files"
MULTIPART_OVERHEAD = 2**16  # bytes of an upload beside its file


async def read_body(request: web.Request, kind: type[T], *, allow_unknown_fields: bool = False) -> tuple[T, int, dict[str, str]]:
    """The decoded body, its size in bytes, which says where it is worked on, and the response headers that it calls for.

    A `request_id` in it becomes the request's unless the header gave it one. Where the path names a model, that one is asked for. Unknown
    fields are allowed where the operator says so, and where `allow_unknown_fields` for this endpoint.

    Raises `InvalidRequest` for whatever is wrong with it, and aiohttp's own 413 and 408 where it is too large or too slow.
    """
    context = request.app[SHARED]
    data = await receive(request)
    allow = allow_unknown_fields or context.options.allow_unknown_fields
    body, ignored = await decoded(context.workers, data, kind, allow_unknown_fields=allow)
    if isinstance(body, RequestFields):
        if body.request_id is not None and request.headers.get("x-request-id") != request[REQUEST_ID]:
            request[REQUEST_ID] = body.request_id
        body.model = request.match_info.get("deployment", body.model)
    if hasattr(body, "model"):
        check_model(request, body.model)
    return body, len(data), ignored_fields_header(ignored)


async def read_admitted_body(
    request: web.Request, kind: type[Fields], *, allow_unknown_fields: bool = False
) -> tuple[Fields, int, dict[str, str]]:
    """As `read_body`, for what the engine will be asked to do.

    Raises `QueueFull`, `RateLimitExceeded` or `EngineUnavailable` before anything is read.
    """
    context = request.app[SHARED]
    admit(request, request.app[MODEL], request.get(TIMER), is_batch=CLIENT in request)
    body, size, headers = await read_body(request, kind, allow_unknown_fields=allow_unknown_fields)
    check_fields(body, key_of(request), context.options)
    body.priority = request.get(PRIORITY, body.priority)
    set_deadline(request, request[ARRIVED], body.timeout, context.options)
    return body, size, headers


async def receive(request: web.Request) -> bytes:
    """The body as it was sent, inflated. Raises aiohttp's 415 for an encoding that is not known, 413 where the body is larger than it may
    be, and 408 where it arrives too slowly.

    The deadline is extended by what arrives, at a minimum rate. A total deadline that suits a large body on a slow link would be just as
    long for a client that sends a byte now and then.
    """
    if (encoding := request.headers.get(hdrs.CONTENT_ENCODING, "identity").lower()) not in CONTENT_ENCODINGS:
        known = ", ".join(sorted(CONTENT_ENCODINGS))
        raise web.HTTPUnsupportedMediaType(text=f"a body may be encoded as {known}, got {encoding[:100]!r}")
    received: bytes | None = request.pop(BODY, None)
    if received is not None:
        return received
    await send_continue(request)
    options = request.app[SHARED].options
    body = bytearray()
    try:
        async with asyncio.timeout(options.read_timeout or None) as deadline:
            async for chunk in request.content.iter_any():
                body += chunk
                if len(body) > options.max_body_size:
                    raise web.HTTPRequestEntityTooLarge(max_size=options.max_body_size, actual_size=len(body))
                extend(deadline, len(chunk))
    except TimeoutError:
        raise web.HTTPRequestTimeout from None
    return bytes(body)


def extend(deadline: asyncio.Timeout, num_bytes: int) -> None:
    """Gives a client that has sent so many bytes the time for them."""
    if (due := deadline.when()) is not None:
        deadline.reschedule(due + num_bytes / MIN_BYTES_PER_SECOND)


CHUNK = 2**18  # bytes of a file
MAX_PARTS = 16


@asynccontextmanager
async def receiving_form(request: web.Request) -> AsyncIterator[asyncio.Timeout]:
    """The deadline for a form that its client has to send in time. Raises `InvalidRequest` and aiohttp's 408."""
    if request.content_type != "multipart/form-data":
        raise InvalidRequest(f"a file is uploaded as multipart/form-data, not as {request.content_type}")
    await send_continue(request)
    try:
        async with asyncio.timeout(request.app[SHARED].options.read_timeout or None) as deadline:
            try:
                yield deadline
            except InvalidRequest:
                raise
            except (ValueError, AssertionError, RuntimeError, HttpProcessingError) as error:  # aiohttp's, for a form that is malformed
                raise InvalidRequest(f"the form cannot be read: {error}") from None
    except TimeoutError:
        raise web.HTTPRequestTimeout from None


class Form(ABC):
    """The parts of a form: one file, and fields of up to `max_field` bytes. Those whose names end with `[]` may be there several times."""

    def __init__(self, deadline: asyncio.Timeout, max_field: int = 1024) -> None:
        self.filename: str | None = None
        self.fields: dict[str, str] = {}
        self.lists: dict[str, list[str]] = {}
        self._deadline = deadline
        self._max_field = max_field

    @abstractmethod
    async def begin_file(self, filename: str) -> None: ...

    @abstractmethod
    async def write(self, data: bytes) -> None:
        """Raises aiohttp's 413 for a file that becomes too large."""

    async def read(self, parts: MultipartReader) -> None:
        """Raises `InvalidRequest`, what `write` raises, or whatever aiohttp raises for a malformed form."""
        num_parts = 0
        async for part in parts:
            num_parts += 1
            if num_parts > MAX_PARTS or not isinstance(part, BodyPartReader) or not part.name:
                raise InvalidRequest(f"the form may have {MAX_PARTS} fields with names, and no forms inside")
            name = printable(part.name)
            if name in self.fields or (name == "file" and self.filename is not None):
                raise InvalidRequest(f"`{name}` is there twice", name)
            if name == "file":
                self.filename = printable(part.filename or "upload")
                await self.begin_file(self.filename)
                while data := await part.read_chunk(CHUNK):
                    extend(self._deadline, len(data))
                    await self.write(data)
            elif name.endswith("[]"):
                self.lists.setdefault(name, []).append(await self._read_field(part, name))
            else:
                self.fields[name] = await self._read_field(part, name)
        self._deadline.reschedule(None)  # what follows is the server's time
        if self.filename is None:
            raise InvalidRequest("the form has no `file`", "file")

    async def _read_field(self, part: BodyPartReader, name: str) -> str:
        value = b""
        while data := await part.read_chunk(self._max_field):
            value += data
            if len(value) > self._max_field:
                raise InvalidRequest(f"`{name[:100]}` is longer than {self._max_field} bytes", name)
        return value.decode()


def printable(text: str) -> str:
    """A name in a form may be any bytes, which aiohttp gives as lone surrogates."""
    return text.encode(errors="replace").decode()


def is_upload(request: web.Request) -> bool:
    return request.path == FILES_PATH and request.method == hdrs.METH_POST


def body_limit(request: web.Request) -> int:
    """The most bytes that its body may have."""
    options = request.app[SHARED].options
    return options.max_file_size + MULTIPART_OVERHEAD if is_upload(request) else options.max_body_size


def too_large(request: web.Request) -> str:
    """The message for a body beyond its limit."""
    options = request.app[SHARED].options
    if is_upload(request):
        return f"the file is larger than {options.max_file_size} bytes (--max-file-size)"
    return f"the body is larger than {options.max_body_size} bytes (--max-body-size)"


async def send_continue(request: web.Request) -> None:
    """Tells a client that waits for it to send the body. By now its key is known to be right, and the body not to be too large."""
    expected = request.headers.get(hdrs.EXPECT)
    if expected is None or request.version < HttpVersion11:
        return
    if expected.lower() != "100-continue":
        raise web.HTTPExpectationFailed(text="the only expectation that can be met is 100-continue")
    await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    request.writer.output_size = 0  # the response itself has not begun


async def leave_expectation(request: web.Request) -> None:
    """What aiohttp would answer to an `Expect` before any middleware has run: `receive` does, when the body is wanted."""


def served_names(request: web.Request) -> list[str]:
    """The models that the request's API key may use, by all of their names."""
    key, names = key_of(request), request.app[SHARED].served_names
    return [name for name in names if key is None or key.allows_model(name)]


def check_model(request: web.Request, name: str | None) -> None:
    """Raises `NoSuchModel` where the request's API key may not use the model, which is the first one by default."""
    key = key_of(request)
    if key is None:
        return
    asked = name or request.app[MODEL].model_names[0]
    if not key.allows_model(asked):
        served = ", ".join(served_names(request)) or "none"
        raise NoSuchModel(f"The model `{asked}` does not exist, or this API key may not use it. It may use: {served}.", "model")


ANTHROPIC_ROUTE = "/v1/messages"
ANTHROPIC_HEADER = "anthropic-version"


def speaks_anthropic(request: web.Request) -> bool:
    """Whether the client expects answers of Anthropic's API: by the route, or by a header that its clients send with every request."""
    return is_anthropic(request.path, request.headers)


def is_anthropic(path: str, headers: Mapping[str, str]) -> bool:
    """As `speaks_anthropic`, of what there is no request for."""
    return path == ANTHROPIC_ROUTE or path.startswith(f"{ANTHROPIC_ROUTE}/") or ANTHROPIC_HEADER in headers
