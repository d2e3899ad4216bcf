"""Connections: how many may be open, how long a client may take to send a request, and the answer if it does not send HTTP."""

import asyncio
import errno
import logging
import math
import socket
import time
from collections.abc import Sequence
from typing import Any

from aiohttp import HttpVersion11, StreamReader, hdrs, web
from aiohttp.http import RawRequestMessage
from aiohttp.http_exceptions import BadHttpMethod, ContentEncodingError, HttpProcessingError, InvalidHeader, LineTooLong
from aiohttp.http_parser import HttpParser

from penstock.api.answers import json_response
from penstock.api.middleware import SERVER_NAME, access_log
from penstock.api.refusals import REFUSALS
from penstock.engine.system.process import connection_limit
from penstock.serving.endpoints.errors import error_body
from penstock.serving.options import ServerOptions

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
