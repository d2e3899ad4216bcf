"""A model inside another program, by the flags of `penstock serve`, and a whole server in it: the application behind a call of Python in
place of a socket.

In place of HTTP, actors send each other a request as it came, and how its answer begins. Processes that only pass calls on do without
aiohttp, which is imported where a server starts.
"""

import asyncio
from collections.abc import AsyncGenerator, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from penstock.cli.flags import parse_arguments
from penstock.engine.errors import ConfigurationError
from penstock.engine.system.process import raise_descriptor_limit
from penstock.plugins.manager import Plugins
from penstock.server import load_model
from penstock.serving.options import Arguments

if TYPE_CHECKING:
    from aiohttp import web
    from aiohttp.web_protocol import RequestHandler

    from penstock.assembly import AnyAssembled

# What one of several servers would have for itself alone, or listen to by itself.
REFUSED = {
    "admin": "it listens to no socket of its own",
    "api_servers": "it is one process, and there may be several of it",
    "distributed_address": "ranks meet where they have been placed",
    "files_dir": "files and batches would be those of one replica: run a server of their own",
    "response_store": "stored responses would be those of one replica",
}


def read_flags(flags: Sequence[str]) -> Arguments:
    """Those of `penstock serve`. Raises `ConfigurationError`, also for flags that only a server with a socket of its own can have."""
    arguments = parse_arguments(list(flags))
    for option, value in arguments.values():
        if option.name in REFUSED and value != option.default:
            raise ConfigurationError(f"{option.shown(value)}: {REFUSED[option.name]}")
    # Clients come through another server, which decides where it listens. --allowed-hosts still says by what names they may come.
    return replace(arguments, host="0.0.0.0")


def load(arguments: Arguments) -> "AnyAssembled":
    """Takes seconds. The engine is to be started, in the event loop that it is to run in. Raises `ConfigurationError`."""
    raise_descriptor_limit()
    plugins = Plugins.asked_for(arguments)
    return load_model(arguments, plugins)


HOP_BY_HOP = frozenset({"connection", "keep-alive", "transfer-encoding", "upgrade"})
REWRITTEN = HOP_BY_HOP | {"content-length", "expect", "te", "trailer"}  # of the request: what the new connection says itself
END_OF_HEAD = b"\r\n\r\n"
REPLICA_HEADER = "x-replica"  # which one has answered, by Serve's name for it

Headers = list[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Call:
    """A request as it came over HTTP. `target` has the path and the query."""

    method: str
    target: str
    headers: Headers
    body: bytes = b""

    def encode(self) -> bytes:
        """HTTP/1.0, so that the answer ends with the connection and no chunk has a length of its own."""
        lines = [f"{self.method} {self.target} HTTP/1.0", f"Content-Length: {len(self.body)}"]
        lines += [f"{name}: {value}" for name, value in self.headers if name.lower() not in REWRITTEN]
        assert not any("\r" in line or "\n" in line for line in lines), "whatever has read the request refuses them"
        return "\r\n".join(lines).encode("latin-1") + END_OF_HEAD + self.body


@dataclass(frozen=True, slots=True)
class Head:
    """How an answer begins."""

    status: int
    headers: Headers

    @classmethod
    def decode(cls, content: bytes) -> "Head":
        first, *lines = content.decode("latin-1").split("\r\n")
        pairs = (line.partition(":") for line in lines)
        return cls(int(first.split(" ", 2)[1]), [(name, value.strip()) for name, _, value in pairs if name.lower() not in HOP_BY_HOP])


HIGH_WATER = 2**16  # bytes that are unread; the handler waits from there on


class Connection(asyncio.Transport):
    """One connection to the application, in memory. What the application writes is kept until it is read."""

    def __init__(self, protocol: "RequestHandler", client: str | None) -> None:
        super().__init__({"peername": None if client is None else (client, 0)})
        self._protocol = protocol
        self._unread = bytearray()
        self._has_news = asyncio.Event()
        self._is_closing = False
        self._is_paused = False
        protocol.connection_made(self)

    def send(self, content: bytes) -> None:
        """From the client to the application."""
        self._protocol.data_received(content)

    async def read(self) -> bytes:
        """All that the application has written since the last time, at least one byte; nothing once it has closed the connection."""
        while not self._unread and not self._is_closing:
            self._has_news.clear()
            await self._has_news.wait()
        content = bytes(self._unread)
        self._unread.clear()
        if self._is_paused:
            self._is_paused = False
            self._protocol.resume_writing()
        return content

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self._is_closing:
            return
        self._unread += data
        self._has_news.set()
        if len(self._unread) > HIGH_WATER and not self._is_paused:
            self._is_paused = True
            self._protocol.pause_writing()

    def writelines(self, list_of_data: Iterable[bytes | bytearray | memoryview]) -> None:
        for data in list_of_data:
            self.write(data)

    def is_closing(self) -> bool:
        return self._is_closing

    def close(self) -> None:
        self._end(None)

    def abort(self) -> None:
        self._unread.clear()
        self._end(ConnectionResetError("the client is gone"))

    def _end(self, error: Exception | None) -> None:
        if self._is_closing:
            return
        self._is_closing = True
        self._has_news.set()
        asyncio.get_running_loop().call_soon(self._protocol.connection_lost, error)

    def pause_reading(self) -> None:
        """The request is here as a whole: there is nothing to be held back."""

    def resume_reading(self) -> None:
        """As `pause_reading`."""

    def get_write_buffer_size(self) -> int:
        return len(self._unread)

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """The limit is `HIGH_WATER`."""


async def answer(server: "web.Server", call: Call, client: str | None = None) -> AsyncGenerator[Head | bytes, None]:
    """The head of the application's answer, then its body in pieces as they come. Closing this generator aborts the request."""
    connection = Connection(server(), client)
    try:
        connection.send(call.encode())
        content = b""
        while END_OF_HEAD not in content:
            piece = await connection.read()
            if not piece:
                raise ConnectionResetError("the application has closed the connection without an answer")
            content += piece
        head, _, body = content.partition(END_OF_HEAD)
        yield Head.decode(head)
        while body or (body := await connection.read()):
            yield body
            body = b""
    finally:
        connection.abort()


class EmbeddedServer:
    """Loads the model when it is made, which takes seconds. The engine starts with the first call, in that call's event loop."""

    def __init__(self, arguments: Arguments) -> None:
        self.assembled = load(arguments)
        self._starting = asyncio.Lock()
        self._runner: web.AppRunner | None = None

    async def start(self) -> "web.Server":
        """Does nothing where it has started already."""
        async with self._starting:
            if self._runner is None:
                from penstock.api.app import build_app, build_runner

                await self.assembled.context.engine.start()
                runner = build_runner(build_app(self.assembled.context))
                await runner.setup()
                self._runner = runner
        assert self._runner.server is not None
        return self._runner.server

    async def answer(self, call: Call, client: str | None = None) -> AsyncGenerator[Head | bytes, None]:
        """As the function `answer`."""
        return answer(await self.start(), call, client)

    @property
    def is_healthy(self) -> bool:
        return self.assembled.context.engine.is_healthy

    async def stop(self) -> None:
        """Ends what still runs. The requests have ended by now, or are to be aborted."""
        runner, self._runner = self._runner, None
        if runner is None:
            return
        from penstock.api.middleware import GATE

        runner.app[GATE].is_open = False
        await self.assembled.context.engine.stop(0)
        await runner.cleanup()
        self.assembled.context.close()
