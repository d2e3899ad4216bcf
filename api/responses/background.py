"""Responses in the background: generated without a client that waits, and followed or cancelled by any that asks for them."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial

import msgspec
from aiohttp import web

from penstock.api.answering import EventStream
from penstock.api.bodies import CONTEXT, SHARED
from penstock.api.middleware import GATE
from penstock.api.responses.events import Response
from penstock.api.responses.fold import ResponseFold
from penstock.engine.deltas import SequenceDelta
from penstock.serving.responses.store import StoredResponse
from penstock.serving.workers import queue_for

END = b"\n\n"  # of each event


@dataclass(frozen=True, slots=True)
class Record:
    """What is stored of a response beside itself."""

    owner: str
    previous: str | None
    input: bytes

    def of(self, response: Response, events: bytes = b"") -> StoredResponse:
        return StoredResponse(response.id, self.owner, response.status, self.previous, msgspec.json.encode(response), self.input, events)


class BackgroundResponse:
    """A response that is being generated, with all events of its stream so far, whose places are their numbers."""

    def __init__(self, record: Record, fold: ResponseFold) -> None:
        self.fold = fold
        self._record = record
        self._events: list[bytes] = []
        self._has_news = asyncio.Event()
        self._has_ended = False
        self._task: asyncio.Task[None] | None = None

    @property
    def id(self) -> str:
        return self.fold.response.id

    @property
    def owner(self) -> str:
        return self._record.owner

    @property
    def stored(self) -> StoredResponse:
        return self._record.of(self.fold.response, b"".join(self._events) if self._has_ended else b"")

    def start(self, app: web.Application, first: "asyncio.Future[SequenceDelta]", deltas: AsyncGenerator[SequenceDelta, None]) -> None:
        """Goes on with what `deltas` has been asked for, its `first` one."""
        self._publish(self.fold.queued())
        self._task = asyncio.create_task(self._run(app, first, deltas))

    async def follow(self, start: int) -> AsyncIterator[bytes]:
        """The events from number `start` on, as they come."""
        while True:
            news = self._has_news
            if start < len(self._events):
                yield b"".join(self._events[start:])
                start = len(self._events)
            elif self._has_ended:
                return
            else:
                await news.wait()

    async def cancel(self) -> None:
        """Returns when it has ended, and is stored."""
        assert self._task is not None
        await asyncio.sleep(0)  # a task that is cancelled before it begins would never store anything
        if not self._has_ended:
            self._task.cancel()
        await asyncio.wait({self._task})

    async def _run(self, app: web.Application, first: "asyncio.Future[SequenceDelta]", deltas: AsyncGenerator[SequenceDelta, None]) -> None:
        with app[GATE].enter():  # a server that is stopping waits for it
            try:
                await self._generate(app, first, deltas)
            except asyncio.CancelledError:
                self._publish(self.fold.cancel())
            except Exception as error:
                self._publish(self.fold.failure(error))
            self._has_ended = True
            await app[CONTEXT].responses.put(self.stored)
            self._publish(b"")
            del app[BACKGROUND][self.id]

    async def _generate(
        self, app: web.Application, first: "asyncio.Future[SequenceDelta]", deltas: AsyncGenerator[SequenceDelta, None]
    ) -> None:
        workers, fold = app[SHARED].workers, self.fold

        async def publish(delta: SequenceDelta) -> None:
            self._publish(await workers.run(queue_for(fold.num_logprobs(delta)), partial(fold.events, delta)))

        async with aclosing(deltas):
            delta = await first
            self._publish(fold.begin())
            await publish(delta)
            async for delta in deltas:
                await publish(delta)
        self._publish(fold.closing())

    def _publish(self, data: bytes) -> None:
        self._events += split_events(data)
        news, self._has_news = self._has_news, asyncio.Event()
        news.set()


BACKGROUND: web.AppKey[dict[str, BackgroundResponse]] = web.AppKey("background", dict)


async def run_in_background(app: web.Application, response: BackgroundResponse, deltas: AsyncGenerator[SequenceDelta, None]) -> None:
    """Returns once it can be asked for. Raises what the engine refuses the request with."""
    first = asyncio.ensure_future(anext(deltas))
    try:
        await asyncio.sleep(0)  # the engine has the request in its queue then, or has refused it
        if first.done():
            first.result()
    except BaseException:
        first.cancel()
        raise
    response.start(app, first, deltas)
    app[BACKGROUND][response.id] = response
    await app[CONTEXT].responses.put(response.stored)


async def cancel_all(app: web.Application) -> None:
    """At shutdown, of what has not ended in time."""
    for response in list(app[BACKGROUND].values()):
        await response.cancel()


def split_events(data: bytes) -> list[bytes]:
    return [event + END for event in data.split(END) if event]


async def send_events(http: web.Request, events: AsyncIterator[bytes], headers: dict[str, str] | None = None) -> web.StreamResponse:
    """A stream of events that are made elsewhere."""
    options = http.app[SHARED].options
    stream = EventStream(
        http, keep_alive_seconds=options.keep_alive_interval, headers=headers or {}, write_timeout_seconds=options.write_timeout
    )
    async with stream:
        async for data in events:
            await stream.send(data)
    return stream.response
