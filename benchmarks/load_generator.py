"""Sends requests at given moments over HTTP/1.1, on as little processor time as Python allows: the server may need the same cores.

One thread waits for all connections by epoll, without asyncio or a client's library. While requests are sent, what arrives is only written
down, with its time; heads are read as far as it takes to find the end of an answer. Requests are bytes that are ready.
"""

import gc
import re
import select
import socket
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from benchmarks.client import Recording
from benchmarks.target import TargetError

READ_BYTES = 2**18
RETRY_SECONDS = 0.1  # after connections have been refused
LAST_CHUNK = b"\r\n0\r\n\r\n"
END_OF_HEAD = b"\r\n\r\n"
CHUNK_SIZE = re.compile(rb"([0-9a-fA-F]+)[^\n]*\n")


@dataclass(slots=True)
class Attempt:
    """One request, with what came back as it was sent. Times are those of `time.perf_counter()`.

    `status` is None before the headers are there, and `ended` before the end. `failure` says why there will be no answer.
    """

    due: float
    pieces: list[tuple[float, bytes]] = field(default_factory=list)
    status: int | None = None
    headers: dict[str, str] = field(default_factory=dict)
    ended: float | None = None
    failure: str | None = None

    @property
    def retry_after(self) -> float | None:
        value = self.headers.get("retry-after", "")
        return float(value) if value.isdigit() else None

    @property
    def recording(self) -> Recording:
        """The body as far as it has come, without the chunks it was sent in."""
        pieces = self._body()
        is_chunked = self.headers.get("transfer-encoding", "").lower() == "chunked"
        return Recording(self.due, list(without_chunks(pieces)) if is_chunked else list(pieces))

    def _body(self) -> Iterator[tuple[float, bytes]]:
        head, is_head = b"", True
        for at, piece in self.pieces:
            if is_head:
                head += piece
                _, end, piece = head.partition(END_OF_HEAD)
                is_head = not end
            if not is_head and piece:
                yield at, piece


def without_chunks(pieces: Iterator[tuple[float, bytes]]) -> Iterator[tuple[float, bytes]]:
    """The data of a chunked body, each with the time at which its last byte came."""
    rest, num_left = b"", 0  # of a chunk, with the line break that ends it
    for at, piece in pieces:
        rest += piece
        data: list[bytes] = []
        while rest:
            if not num_left:
                size = CHUNK_SIZE.match(rest)
                if size is None:
                    break
                rest, num_left = rest[size.end() :], int(size[1], 16) + 2
            taken = rest[:num_left]
            data.append(taken[: max(0, num_left - 2)])
            rest, num_left = rest[len(taken) :], num_left - len(taken)
        if any(data):
            yield at, b"".join(data)


class Connection:
    """A connection that carries one request after another. `attempt` is the one that is being answered."""

    def __init__(self, address: tuple[str, int]) -> None:
        self.socket = socket.socket()
        self.socket.setblocking(False)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.connect_ex(address)  # how that ends shows in what is sent
        self.attempt: Attempt | None = None
        self.num_answered = 0
        self._unsent = b""
        self._request = b""
        self._tail = b""
        self._num_left: int | None = None  # bytes of the body, where its length is known

    def begin(self, attempt: Attempt, request: bytes) -> bool:
        """Sends a request; False where some of it has to wait until there is room for it, or until the connection is there."""
        self.attempt, self._request, self._unsent, self._tail, self._num_left = attempt, request, request, b"", None
        return self.send_rest()

    def send_rest(self) -> bool:
        with suppress(BlockingIOError):
            self._unsent = self._unsent[self.socket.send(self._unsent) :]
        return not self._unsent

    def receive(self, now: float) -> bool:
        """Reads what has come; True at the end of the answer. Raises `ConnectionError` where the server has closed the connection."""
        try:
            data = self.socket.recv(READ_BYTES)
        except BlockingIOError:
            return False
        attempt = self.attempt
        if attempt is None:
            raise ConnectionError("the connection was closed while it was idle")
        if not data:
            return self._is_over_at_close(attempt)
        attempt.pieces.append((now, data))
        if attempt.status is None:
            return self._read_head(attempt)
        if self._num_left is not None:
            self._num_left -= len(data)
            return self._num_left <= 0
        self._tail = (self._tail + data)[-len(LAST_CHUNK) :] if len(data) < len(LAST_CHUNK) else data[-len(LAST_CHUNK) :]
        return self._tail == LAST_CHUNK

    def _read_head(self, attempt: Attempt) -> bool:
        head, end, body = b"".join(piece for _, piece in attempt.pieces).partition(END_OF_HEAD)
        if not end:
            return False
        status_line, *lines = head.decode("latin-1").split("\r\n")
        attempt.headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
        attempt.status = int(status_line.split()[1])
        if (length := attempt.headers.get("content-length")) is not None:
            self._num_left = int(length) - len(body)
            return self._num_left <= 0
        self._tail = (b"\r\n" + body)[-len(LAST_CHUNK) :]
        return self._tail == LAST_CHUNK

    def _is_over_at_close(self, attempt: Attempt) -> bool:
        """A body without a length ends with the connection. Raises `ConnectionError` for any other."""
        is_chunked = attempt.headers.get("transfer-encoding", "").lower() == "chunked"
        if attempt.status is None or is_chunked or self._num_left is not None:
            raise ConnectionError("the server closed the connection before the end of the answer")
        return True

    @property
    def may_send_again(self) -> bool:
        """Whether the request has met a connection that the server was closing: clients' libraries send it again on another one."""
        return self.num_answered > 0 and self.attempt is not None and not self.attempt.pieces

    @property
    def is_kept(self) -> bool:
        """Whether the server keeps the connection after the answer that has just ended."""
        assert self.attempt is not None
        headers = self.attempt.headers
        is_framed = "content-length" in headers or "transfer-encoding" in headers
        return is_framed and headers.get("connection", "").lower() != "close"

    def end(self) -> tuple[Attempt, bytes]:
        """What it was at, and the request of it."""
        assert self.attempt is not None
        attempt, self.attempt = self.attempt, None
        return attempt, self._request


class LoadGenerator:
    """Sends requests to one server. `attempts` are all that have been sent, in the order in which they were due.

    Connections are used again, the one first that was used last. A request on a connection that breaks has failed, unless it was sent just
    when the server closed an idle connection; the others go on.
    """

    def __init__(self, url: str, headers: dict[str, str]) -> None:
        parts = urlsplit(url)
        if parts.scheme != "http" or parts.hostname is None:
            raise TargetError(f"only http:// can be driven, not {url}")
        self._address = (socket.gethostbyname(parts.hostname), parts.port or 80)
        lines = {"Host": parts.netloc, "Content-Type": "application/json", **headers}
        self._head = f"POST {parts.path} HTTP/1.1\r\n" + "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        self._epoll = select.epoll()
        self._connections: dict[int, Connection] = {}
        self._idle: list[Connection] = []
        self.attempts: list[Attempt] = []
        self.num_running = 0
        self.num_connections = 0

    def request(self, body: bytes) -> bytes:
        """The bytes of a request."""
        return f"{self._head}Content-Length: {len(body)}\r\n\r\n".encode() + body

    def arrive(self, requests: deque[tuple[float, bytes]], end: float) -> None:
        """Sends each request at its moment, whether others have been answered or not, until `end`. Those due later are left in there."""
        now = time.perf_counter()
        while now < end:
            while requests and requests[0][0] <= now:
                due, request = requests.popleft()
                self._send(Attempt(due), request)
            self._wait((min(end, requests[0][0]) if requests else end) - now)
            now = time.perf_counter()

    def keep_busy(self, requests: Iterator[bytes], concurrency: int, end: float) -> None:
        """Has so many requests under way at any time until `end`."""
        now = time.perf_counter()
        while now < end:
            for _ in range(concurrency - self.num_running):
                self._send(Attempt(now), next(requests))
            self._wait(min(end - now, RETRY_SECONDS))
            now = time.perf_counter()

    def close(self) -> None:
        """Leaves what is under way."""
        for connection in self._connections.values():
            connection.socket.close()
        self._connections.clear()
        self._epoll.close()

    def _send(self, attempt: Attempt, request: bytes) -> None:
        self.attempts.append(attempt)
        self.num_running += 1
        self._send_on(self._idle.pop() if self._idle else self._connect(), attempt, request)

    def _connect(self) -> Connection:
        connection = Connection(self._address)
        self._connections[connection.socket.fileno()] = connection
        self._epoll.register(connection.socket, select.EPOLLIN)
        self.num_connections += 1
        return connection

    def _send_on(self, connection: Connection, attempt: Attempt, request: bytes) -> None:
        try:
            if not connection.begin(attempt, request):
                self._epoll.modify(connection.socket, select.EPOLLIN | select.EPOLLOUT)
        except OSError as error:
            self._lose(connection, error)

    def _wait(self, seconds: float) -> None:
        """For what comes next, not longer than this."""
        events = self._epoll.poll(max(0.0, seconds))
        now = time.perf_counter()
        for descriptor, event in events:
            connection = self._connections[descriptor]
            try:
                if event & select.EPOLLOUT and connection.send_rest():
                    self._epoll.modify(connection.socket, select.EPOLLIN)
                if event & ~select.EPOLLOUT and connection.receive(now):
                    self._end(connection, now)
            except OSError as error:
                self._lose(connection, error)

    def _end(self, connection: Connection, now: float) -> None:
        is_kept = connection.is_kept
        attempt, _ = connection.end()
        attempt.ended = now
        self.num_running -= 1
        connection.num_answered += 1
        if is_kept:
            self._idle.append(connection)
        else:
            self._forget(connection)

    def _lose(self, connection: Connection, error: OSError) -> None:
        may_send_again = connection.may_send_again
        self._forget(connection)
        if connection.attempt is None:
            self._idle.remove(connection)
            return
        attempt, request = connection.end()
        if may_send_again:
            self._send_on(self._connect(), attempt, request)
        else:
            self.num_running -= 1
            attempt.failure = str(error) or type(error).__name__

    def _forget(self, connection: Connection) -> None:
        del self._connections[connection.socket.fileno()]
        connection.socket.close()  # which removes it from those that are waited for


@contextmanager
def collector_off() -> Iterator[None]:
    """Python's garbage collector would look at all that has arrived, again and again."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
