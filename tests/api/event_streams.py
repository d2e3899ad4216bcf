"""A stream of events to a connection that is not there."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from unittest.mock import Mock

from aiohttp import HttpVersion11, web
from aiohttp.base_protocol import BaseProtocol
from aiohttp.http_writer import StreamWriter
from aiohttp.test_utils import make_mocked_request

from penstock.api.answers import OUTBOX, EventStream, Outbox
from penstock.serving.endpoints.answers import StreamFormat


class Connection(BaseProtocol):
    """A client's connection that keeps each write."""

    peername = sockname = ssl_context = None  # a request looks for them

    def __init__(self, outbox: Outbox, version: Any) -> None:
        super().__init__(asyncio.get_running_loop())
        self.writes: list[bytes] = []
        transport = Mock(asyncio.Transport)
        transport.is_closing.return_value = False
        transport.write.side_effect = self.writes.append
        app = web.Application()
        app[OUTBOX] = outbox
        writer = StreamWriter(self, asyncio.get_running_loop())
        self.request = make_mocked_request("POST", "/", app=app, protocol=self, transport=transport, writer=writer, version=version)


@asynccontextmanager
async def open_stream(
    outbox: Outbox | None = None,
    version: Any = HttpVersion11,
    write_timeout_seconds: float = 0.0,
    keep_alive_seconds: float = 0.0,
    stream_format: StreamFormat | None = None,
) -> AsyncIterator[tuple[EventStream, Connection]]:
    connection = Connection(outbox or Outbox(), version)
    stream = EventStream(
        connection.request,
        keep_alive_seconds=keep_alive_seconds,
        headers={},
        write_timeout_seconds=write_timeout_seconds,
        stream_format=stream_format,
    )
    async with stream:
        assert len(connection.writes) == 1, "the headers"
        connection.writes.clear()
        yield stream, connection
