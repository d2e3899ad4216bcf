"""Connections: how many may be open, how long a client may take to send a request, and answers that no handler gives.

An overloaded server refuses many more requests than it answers, and on a machine whose cores compute the model each refusal delays a step.
What a handler would refuse whatever is in the body is therefore refused as soon as its headers have been parsed, with the same answer and
before aiohttp makes an object of the request. Clients that send something other than HTTP get an answer as well.
"""

import asyncio
import errno
import logging
import math
import socket
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import msgspec
from aiohttp import HttpVersion11, StreamReader, hdrs, web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.helpers import rfc822_formatted_time
from aiohttp.http import RawRequestMessage
from aiohttp.http_exceptions import BadHttpMethod, ContentEncodingError, HttpProcessingError, InvalidHeader, LineTooLong
from aiohttp.http_parser import HttpParser

from penstock.api.answers import json_response
from penstock.api.errors import anthropic_body_of, body_of, status_of
from penstock.api.middleware import (
    GATE,
    HTTP_REQUESTS,
    MAX_LOGGED,
    SERVER_NAME,
    TRACER,
    AccessEntry,
    access_log,
    is_allowed_host,
    request_id_of,
)
from penstock.api.requests import KEYS, LEDGER, SHARED, is_anthropic, offered_key, priority_of
from penstock.api.routes import ROUTES
from penstock.engine.errors import EngineUnavailable, PenstockError, QueueFull
from penstock.engine.system.process import connection_limit
from penstock.serving.endpoints.errors import error_body
from penstock.serving.limits import ApiKey
from penstock.serving.options import ServerOptions

ServerHandler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]

LOG_SECONDS = 0.2  # that a line of the access log waits for others: each time they are written, a thread has to be woken

# Of requests that the middleware may answer differently: from web pages, or before the body is sent.
LEFT_TO_MIDDLEWARE = (hdrs.ORIGIN, "Sec-Fetch-Site", hdrs.EXPECT)
log = logging.getLogger("penstock.api")

BACKLOG = 1024  # connections that the kernel completes and keeps until they are accepted
BATCH = 128  # accepted in one turn of the loop
RETRY_SECONDS = 1.0  # after the system has refused a connection
QUIET_SECONDS = 60.0  # between two warnings, however often the limit is met
OUT_OF_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)
# What is wrong with a request that aiohttp cannot read. Its own messages quote what was sent, which may be a key or a prompt.
MISTAKES: dict[type[BaseException], str] = {
    LineTooLong: "the request line or a header is too long",
    InvalidHeader: "a header is not valid",
    ContentEncodingError: "the body's Content-Encoding is not supported",
    BadHttpMethod: "the method is not valid, or this is HTTPS",
}


@dataclass(frozen=True, slots=True)
class Answer:
    """What the answers to requests that are refused for the same reason have in common. Most of the headers are before the body."""

    refusal: tuple[type[PenstockError], str, int] | None
    head: str
    body: bytes

    def is_of(self, error: QueueFull | EngineUnavailable) -> bool:
        return self.refusal == (type(error), str(error), error.retry_after)


NO_ANSWER = Answer(None, "", b"")


def answer_of(error: QueueFull | EngineUnavailable, status: int, body: msgspec.Struct) -> Answer:
    data = msgspec.json.encode(body)
    head = (
        f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\nRetry-After: {error.retry_after}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(data)}\r\nServer: {SERVER_NAME}\r\n"
    )
    return Answer((type(error), str(error), error.retry_after), head, data)


class Refusals:
    """Answers the requests that the engine takes no more of. Handlers get all others, and check once more.

    What the middleware would answer instead, such as a wrong API key, is left to it. So is everything where traces are exported, as these
    are made of aiohttp's requests.
    """

    def __init__(self, app: web.Application) -> None:
        self._context = app[SHARED]
        self._keys, self._ledger, self._gate, self._requests = app[KEYS], app[LEDGER], app[GATE], app[HTTP_REQUESTS]
        paths = (path for route in app[ROUTES] if route.is_admitted for path in route.paths)
        self._paths = frozenset() if TRACER in app else frozenset(path for path in paths if "{" not in path)
        self._last = NO_ANSWER
        self._lines: list[tuple[float, AccessEntry]] = []

    def answer(self, method: str, path: str, headers: Mapping[str, str], client: str | None) -> bytes | None:
        """The whole response to a request of HTTP/1.1 whose connection stays open; None where it is not refused, or not here.

        `path` is as it was sent, with its query. A request that is refused has been counted and logged.
        """
        if path not in self._paths or method != hdrs.METH_POST or not self._gate.is_open:
            return None
        arrived, options, key = time.monotonic(), self._context.options, None
        if options.requires_key:
            offered = offered_key(headers)
            key = None if offered is None else self._keys.find(offered)
            if key is None:
                return None
        try:
            self._context.engine.check_admission(priority_of(key))
            return None
        except (QueueFull, EngineUnavailable) as error:
            refusal = error
        if int(headers.get(hdrs.CONTENT_LENGTH, 0)) > options.max_body_size or any(name in headers for name in LEFT_TO_MIDDLEWARE):
            return None
        if not self._is_host(headers.get(hdrs.HOST), options.allowed_hosts):
            return None
        return self._refuse(refusal, path, headers, key, client, arrived)

    def _is_host(self, host: str | None, allowed: tuple[str, ...]) -> bool:
        return not allowed or host is None or "*" in allowed or is_allowed_host(host, allowed)

    def _refuse(
        self,
        error: QueueFull | EngineUnavailable,
        path: str,
        headers: Mapping[str, str],
        key: ApiKey | None,
        client: str | None,
        arrived: float,
    ) -> bytes:
        status, request_id = status_of(error), request_id_of(headers)
        self._requests.count(hdrs.METH_POST, path, status)
        id_headers = f"x-request-id: {request_id}\r\n"
        if is_anthropic(path, headers):
            answer = answer_of(error, status, anthropic_body_of(error, request_id))
            id_headers += f"request-id: {request_id}\r\n"
        elif self._last.is_of(error):
            answer = self._last
        else:
            answer = self._last = answer_of(error, status, body_of(error))
        if key is not None:
            id_headers += "".join(f"{name}: {value}\r\n" for name, value in self._ledger.of(key).headers().items())
        if access_log.isEnabledFor(logging.INFO):
            name, refusal = None if key is None else key.name, {"error": str(error)[:MAX_LOGGED]}
            seconds = time.monotonic() - arrived
            self._log(AccessEntry(client, hdrs.METH_POST, path, path, status, request_id, seconds, name, None, refusal))
        return f"{answer.head}Date: {rfc822_formatted_time()}\r\n{id_headers}\r\n".encode() + answer.body

    def _log(self, entry: AccessEntry) -> None:
        if not self._lines:
            asyncio.get_running_loop().call_later(LOG_SECONDS, self.write_lines)
        self._lines.append((time.time(), entry))

    def write_lines(self) -> None:
        """Writes the lines of the access log that wait."""
        lines, self._lines = self._lines, []
        for at, entry in lines:
            record = access_log.makeRecord(access_log.name, logging.INFO, __file__, 0, entry, (), None)
            record.created, record.msecs = at, at % 1 * 1000
            access_log.handle(record)

    def before(self, handler: ServerHandler) -> ServerHandler:
        """The handler of a server, which sees what is not refused here."""

        async def handle(request: web.BaseRequest) -> web.StreamResponse:
            data = None
            if request.keep_alive and request.version == HttpVersion11:
                data = self.answer(request.method, request.raw_path, request.headers, request.remote)
            return await handler(request) if data is None else _Refusal(data)

        return handle


class _Refusal(web.StreamResponse):
    """A response whose bytes are ready. The connection stays open."""

    _keep_alive = True

    def __init__(self, data: bytes) -> None:
        super().__init__()
        self._data = data

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter:
        await request.writer.write(self._data)
        return request.writer

    async def write_eof(self, data: bytes = b"") -> None:
        """There is no more."""


REFUSALS: web.AppKey[Refusals] = web.AppKey("refusals", Refusals)


def refuse_early(app: web.Application) -> None:
    """To be called when the application has its routes."""
    app[REFUSALS] = refusals = Refusals(app)

    async def write_lines(app: web.Application) -> None:
        refusals.write_lines()

    app.on_cleanup.append(write_lines)


class Listener:
    """Accepts connections from a socket that listens, up to the limit. Further ones stay in the kernel's queue until some have closed.

    asyncio's own server has no limit, and logs a traceback for each attempt to accept where descriptors run out.
    """

    def __init__(self, runner: web.AppRunner, listener: socket.socket, options: ServerOptions) -> None:
        assert runner.server is not None, "the runner has not been set up"
        self.server = runner.server
        self.refusals = runner.app[REFUSALS]
        self.server.request_handler = self.refusals.before(self.server.request_handler)
        self.options = options
        self._limit = connection_limit(options.max_connections)
        self._listener = listener
        self._listener.setblocking(False)
        self._loop = asyncio.get_running_loop()
        self._open: set[socket.socket] = set()
        self._opening: set[asyncio.Task[None]] = set()
        self._is_accepting = False
        self._is_closed = False
        self._next_warning = 0.0

    @property
    def address(self) -> tuple[str, int]:
        host, port = self._listener.getsockname()[:2]
        return host, port

    @property
    def num_open(self) -> int:
        return len(self._open)

    def start(self) -> None:
        """Accepts from now on, or again."""
        if not self._is_accepting and not self._is_closed:
            self._is_accepting = True
            self._loop.add_reader(self._listener, self._accept_waiting)

    def close(self) -> None:
        """New clients are refused from now on. Connections that are open stay open."""
        self._pause()
        self._is_closed = True
        self._listener.close()

    def forget(self, connection: socket.socket) -> None:
        """Called when a connection closes: makes room for another one."""
        self._open.discard(connection)
        self.start()

    def _pause(self) -> None:
        if self._is_accepting:
            self._is_accepting = False
            self._loop.remove_reader(self._listener)

    def _accept_waiting(self) -> None:
        for _ in range(BATCH):
            if len(self._open) >= self._limit:
                self._warn("%d connections are open (--max-connections): new ones wait until some close", len(self._open))
                self._pause()
                return
            try:
                connection, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                self._warn("cannot accept connections: %s%s", error.strerror, self._advice(error))
                self._pause()
                self._loop.call_later(RETRY_SECONDS, self.start)
                return
            self._prepare(connection)
            self._open.add(connection)
            opening = self._loop.create_task(self._open_connection(connection))
            self._opening.add(opening)
            opening.add_done_callback(self._opening.discard)

    def _prepare(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        timeout = self.options.write_timeout
        if timeout and hasattr(socket, "TCP_USER_TIMEOUT"):
            # For whole answers: the kernel gives up a client that does not read. Streams notice by themselves, as they keep what is unread.
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, math.ceil(timeout * 1000))

    async def _open_connection(self, connection: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(lambda: Connection(self, connection), connection)
        except OSError:  # gone already
            connection.close()
            self.forget(connection)

    def _advice(self, error: OSError) -> str:
        return "; raise `ulimit -n` or lower --max-connections" if error.errno in OUT_OF_DESCRIPTORS else ""

    def _warn(self, message: str, *arguments: object) -> None:
        now = time.monotonic()
        if now >= self._next_warning:
            self._next_warning = now + QUIET_SECONDS
            log.warning(message, *arguments)


class _RefusingParser:
    """aiohttp's parser, without the requests that its connection has refused."""

    __slots__ = ("_connection", "_parser")

    def __init__(self, parser: "HttpParser[Any]", connection: "Connection") -> None:
        self._parser = parser
        self._connection = connection

    def feed_data(self, data: bytes) -> tuple[Sequence[tuple[RawRequestMessage, StreamReader]], bool, bytes]:
        messages, upgraded, rest = self._parser.feed_data(data)
        if len(messages) == 1 and self._connection.refuse(*messages[0]):
            self._parser.message_consumed()
            return (), upgraded, rest
        return messages, upgraded, rest

    def __getattr__(self, name: str) -> Any:
        return getattr(self._parser, name)


class Connection(web.RequestHandler):
    """aiohttp's protocol, with a deadline for headers. What it refuses by itself has OpenAI's error body and one line in the access log.

    A request that is being answered has no deadline here, nor does one whose body arrives: `bodies.receive` has that. One that has arrived
    as a whole and is refused by its headers never gets to aiohttp's handler: under overload there are hundreds of them a second.
    """

    __slots__ = ("_header_deadline", "_listener", "_read_timeout", "_socket")

    def __init__(self, listener: Listener, connection: socket.socket) -> None:
        options = listener.options
        idle = options.keep_alive_timeout or math.inf
        super().__init__(listener.server, loop=asyncio.get_running_loop(), keepalive_timeout=idle, access_log=None)  # type: ignore[arg-type]
        self._listener = listener
        self._socket = connection
        self._read_timeout = options.read_timeout
        self._header_deadline: asyncio.TimerHandle | None = None
        assert self._parser is not None
        self._parser = _RefusingParser(self._parser, self)  # type: ignore[assignment]

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._expect_headers()

    def connection_lost(self, exc: BaseException | None) -> None:
        self._headers_arrived()
        super().connection_lost(exc)
        self._listener.forget(self._socket)

    def data_received(self, data: bytes) -> None:
        num_requests = self._request_count
        super().data_received(data)
        if self._request_count > num_requests:
            self._headers_arrived()
        elif self._header_deadline is None and self._is_idle:
            self._expect_headers()  # of another request on the same connection, of which this is a part

    def refuse(self, message: RawRequestMessage, body: StreamReader) -> bool:
        """Answers a request that has just been parsed, where it is refused and nothing else is to be answered before it."""
        if self.transport is None or not self._is_idle or self._messages or not body.is_eof():
            return False
        if message.should_close or message.upgrade or message.version != HttpVersion11 or self.transport.get_write_buffer_size():
            return False
        client = self.peername[0] if isinstance(self.peername, tuple) else self.peername
        data = self._listener.refusals.answer(message.method, message.path, message.headers, client)
        if data is None:
            return False
        self.transport.write(data)
        self._request_count += 1
        self._next_keepalive_close_time = self._loop.time() + self._keepalive_timeout
        return True

    @property
    def _is_idle(self) -> bool:
        return self._waiter is not None and not self._waiter.done()

    def _expect_headers(self) -> None:
        if self._read_timeout:
            self._header_deadline = self._loop.call_later(self._read_timeout, self._headers_are_late)

    def _headers_arrived(self) -> None:
        if self._header_deadline is not None:
            self._header_deadline.cancel()
            self._header_deadline = None

    def _headers_are_late(self) -> None:
        self._header_deadline = None
        self.force_close()

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        """For what no handler of ours sees. The answer is the last one on its connection."""
        if isinstance(exc, HttpProcessingError):
            message = next((text for kind, text in MISTAKES.items() if isinstance(exc, kind)), "this is not valid HTTP")
            access_log.info("%s %d error=%r", request.remote, status, message)
        else:
            log.error("a request failed outside of its handler", exc_info=exc)
            message = "internal server error"
        if request.writer.output_size > 0:
            raise ConnectionError("the response has started: it is too late for an error")
        response = json_response(error_body(status, message), status=status, headers={hdrs.SERVER: SERVER_NAME})
        response.force_close()
        return response

    def log_exception(self, *args: object, **kw: object) -> None:
        """Says nothing of bodies that are malformed behind an answer that did not need them: the message would quote them."""
        if not isinstance(kw.get("exc_info"), HttpProcessingError | web.RequestPayloadError):
            super().log_exception(*args, **kw)
