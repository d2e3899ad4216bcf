"""Deltas of one engine request, or of several side by side, as one asynchronous iterator."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace

from penstock.engine.errors import QueueFull
from penstock.engine.outputs import SequenceDelta

AT_ONCE = 32  # sequences; adding one takes up to 0.1 ms, in which no other stream goes on
MAX_OPEN = 256  # sequences: enough for any batch; all of a long list at once would overflow the engine's queue, or shut others out of it

OpenStream = Callable[[], AsyncGenerator[SequenceDelta, None]]


async def merge(streams: Sequence[OpenStream], n: int) -> AsyncGenerator[SequenceDelta, None]:
    """The deltas of several prompts as they come, their choices numbered through: prompt p's sequence s becomes choice p * n + s.

    At most `MAX_OPEN` sequences are open at a time, and fewer where the engine's queue is full: what has begun is not refused any more, and
    the next stream is opened when there is room. The first exception of any other ends all of them and is raised here. Closing this
    generator closes the streams.
    """
    places = _Places(max(1, MAX_OPEN // n))
    queue: asyncio.Queue[SequenceDelta | Exception | None] = asyncio.Queue()

    async def pump(position: int, open_stream: OpenStream) -> None:
        try:
            async for delta in places.read(open_stream):
                delta.index += position * n
                queue.put_nowait(delta)
        except Exception as error:  # raised again below, where the caller can see it
            queue.put_nowait(error)
        else:
            queue.put_nowait(None)

    tasks: list[asyncio.Task[None]] = []
    try:
        for position, open_stream in enumerate(streams):
            tasks.append(asyncio.create_task(pump(position, open_stream)))
            if len(tasks) % max(1, AT_ONCE // n) == 0:
                await asyncio.sleep(0)
        num_running = len(tasks)
        while num_running:
            item = await queue.get()
            if isinstance(item, SequenceDelta):
                yield item
            elif item is None:
                num_running -= 1
            else:
                raise item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _Places:
    """How many streams of one request may be open at a time, and which of them wait for room in the engine's queue."""

    def __init__(self, count: int) -> None:
        self._free = asyncio.Semaphore(count)
        self._num_accepted = 0
        self._refused: deque[asyncio.Event] = deque()

    async def read(self, open_stream: OpenStream) -> AsyncGenerator[SequenceDelta, None]:
        """The stream's deltas. Raises `QueueFull` where that is what the first stream of all is told; later ones are opened again."""
        async with self._free:
            while True:
                self._num_accepted += 1
                try:
                    async with aclosing(open_stream()) as stream:
                        async for delta in stream:
                            yield delta
                    break
                except QueueFull as error:  # raised at once, before any other stream is opened
                    self._num_accepted -= 1
                    if not self._num_accepted:
                        raise
                    await self._wait(error.retry_after)
            if self._refused:
                self._refused.popleft().set()

    async def _wait(self, seconds: float) -> None:
        """Until another stream ends, which makes room, or for so long: other requests make room as well."""
        has_ended = asyncio.Event()
        self._refused.append(has_ended)
        try:
            await asyncio.wait_for(has_ended.wait(), seconds)
        except TimeoutError:
            self._refused.remove(has_ended)


async def bundled(deltas: AsyncGenerator[SequenceDelta, None], interval: int) -> AsyncGenerator[SequenceDelta, None]:
    """The same with `interval` tokens or more in each delta, but for a sequence's first and last one, which come at once.

    Closing this generator closes `deltas`.
    """
    held: dict[int, SequenceDelta] = {}
    begun: set[int] = set()
    async with aclosing(deltas):
        async for delta in deltas:
            delta = delta if delta.index not in held else joined(held.pop(delta.index), delta)
            if delta.index in begun and delta.finish_reason is None and len(delta.token_ids) < interval:
                held[delta.index] = delta
                continue
            begun.add(delta.index)
            yield delta


def joined(first: SequenceDelta, second: SequenceDelta) -> SequenceDelta:
    """Two steps of a sequence as one, in which the text of both is there and only the later one may be the last."""
    return replace(
        second,
        token_ids=first.token_ids + second.token_ids,
        events=first.events + second.events,
        logprobs=first.logprobs + second.logprobs,
        prompt=first.prompt or second.prompt,
    )


class FirstDelta:
    """A stream whose first delta can be waited for, for a while, before anything is sent.

    An error in it is then still an HTTP status. `close` aborts the request wherever it stands.
    """

    def __init__(self, stream: AsyncGenerator[SequenceDelta, None]) -> None:
        self._stream = stream
        self._first = asyncio.ensure_future(anext(stream))

    async def wait(self, seconds: float | None) -> None:
        """Raises what the stream raised; returns quietly where its first delta is there, or did not come in time."""
        await asyncio.wait({self._first}, timeout=seconds)
        if self._first.done():
            self._first.result()

    async def deltas(self) -> AsyncIterator[SequenceDelta]:
        yield await self._first
        async for delta in self._stream:
            yield delta

    async def close(self) -> None:
        if not self._first.done():
            self._first.cancel()
        await asyncio.gather(self._first, return_exceptions=True)
        await self._stream.aclose()
