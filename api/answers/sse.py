"""Server-sent events: chunks, keep-alive comments while nothing comes, errors in mid-stream, and the end."""

import asyncio
from collections.abc import Iterable
from types import TracebackType
from typing import Self

import msgspec
from aiohttp import web

from penstock.api.errors import body_of

HEADERS = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"

_encode = msgspec.json.Encoder().encode


def encode_event(chunk: msgspec.Struct) -> bytes:
    return b"data: %b\n\n" % _encode(chunk)


class EventStream:
    """One streamed response. Entering it sends the headers; leaving it sends what ends the stream.

    An exception inside becomes an error event and `[DONE]`: the status is long sent. Cancellation, and a client that is gone, pass through.
    One that has not read for `write_timeout_seconds` is taken for gone, and its connection is cut: what is unread would pile up here.
    """

    def __init__(
        self, request: web.Request, *, keep_alive_seconds: float, headers: dict[str, str], write_timeout_seconds: float = 0.0
    ) -> None:
        self.response = web.StreamResponse(headers={**HEADERS, **headers})
        self._request = request
        self._keep_alive_seconds = keep_alive_seconds
        self._write_timeout = write_timeout_seconds or None
        self._last_write = 0.0
        self._keep_alive: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        await self.response.prepare(self._request)
        self._last_write = asyncio.get_running_loop().time()
        if self._keep_alive_seconds > 0:
            self._keep_alive = asyncio.create_task(self._comment_when_idle())
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> bool:
        if self._keep_alive is not None:
            self._keep_alive.cancel()
            await asyncio.gather(self._keep_alive, return_exceptions=True)
        if error is not None and not isinstance(error, Exception):
            return False
        try:
            if isinstance(error, ConnectionResetError):
                return True  # the client is gone: there is nobody to tell
            if error is not None:
                await self._write(encode_event(body_of(error)))
            await self._write(DONE)
            await self.response.write_eof()
        except ConnectionResetError:
            return True
        return True

    async def send(self, chunks: Iterable[msgspec.Struct]) -> None:
        """One write for all that one step brought."""
        data = b"".join(map(encode_event, chunks))
        if data:
            self._last_write = asyncio.get_running_loop().time()
            await self._write(data)

    async def _write(self, data: bytes) -> None:
        """Raises `ConnectionResetError` where the client is gone, or has not read for too long."""
        try:
            async with asyncio.timeout(self._write_timeout):
                await self.response.write(data)
        except TimeoutError:
            if self._request.transport is not None:
                self._request.transport.abort()
            raise ConnectionResetError("the client does not read its stream") from None

    async def _comment_when_idle(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due = self._last_write + self._keep_alive_seconds
            if loop.time() < due:
                await asyncio.sleep(due - loop.time())
                continue
            self._last_write = loop.time()
            try:
                await self.response.write(KEEP_ALIVE)
            except ConnectionResetError:
                return  # the next write of an event finds out
