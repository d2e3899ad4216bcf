"""Sends an answer: as one body, or as a stream. Whatever happens on the way, the engine's request is closed."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Protocol

import msgspec
from aiohttp import web

from penstock.api.answers.sse import EventStream
from penstock.api.answers.streams import FirstDelta, bundled
from penstock.api.context import SHARED
from penstock.api.errors import json_response
from penstock.api.workers import run
from penstock.engine.deltas import SequenceDelta


class AnswerFold(Protocol):
    """One request's deltas as an endpoint writes them.

    Streaming: `opening`, then `chunks` of each delta, then `closing`. Otherwise: `add` each delta, then `body`, in a worker where that
    `is_long` to write.
    """

    @property
    def is_long(self) -> bool: ...

    def opening(self) -> Sequence[msgspec.Struct]: ...

    def chunks(self, delta: SequenceDelta) -> Sequence[msgspec.Struct]: ...

    def closing(self) -> Sequence[msgspec.Struct]: ...

    def add(self, delta: SequenceDelta) -> None: ...

    def body(self) -> msgspec.Struct: ...


async def answer(
    http: web.Request,
    deltas: AsyncGenerator[SequenceDelta, None],
    fold: AnswerFold,
    *,
    stream: bool,
    headers: dict[str, str],
    interval: int | None = None,
) -> web.StreamResponse:
    """Streams a chunk for every `interval` tokens. Raises what the engine raises, as long as nothing has been sent."""
    if stream:
        return await _stream(http, deltas if interval is None or interval == 1 else bundled(deltas, interval), fold, headers)
    async with aclosing(deltas):
        async for delta in deltas:
            fold.add(delta)
    return await run(http.app[SHARED], lambda: json_response(fold.body(), headers=headers), is_long=fold.is_long)


async def _stream(
    http: web.Request, deltas: AsyncGenerator[SequenceDelta, None], fold: AnswerFold, headers: dict[str, str]
) -> web.StreamResponse:
    keep_alive_seconds = http.app[SHARED].options.keep_alive_seconds
    source = FirstDelta(deltas)
    try:
        # An error before the first token keeps its status, unless the client has to wait so long that it needs a sign of life.
        await source.wait(keep_alive_seconds or None)
        write_timeout_seconds = http.app[SHARED].options.write_timeout_seconds
        events = EventStream(http, keep_alive_seconds=keep_alive_seconds, headers=headers, write_timeout_seconds=write_timeout_seconds)
        async with events:
            await events.send(fold.opening())
            async for delta in source.deltas():
                await events.send(fold.chunks(delta))
            await events.send(fold.closing())
        return events.response
    finally:
        await source.close()
