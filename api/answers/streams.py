"""Deltas of one engine request, or of several side by side, as one asynchronous iterator."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import replace

from penstock.engine.deltas import SequenceDelta

AT_ONCE = 32
MAX_OPEN = 256  # enough for any batch; all of a long list at once would overflow the engine's queue, or shut others out of it


async def merge(streams: Sequence[AsyncGenerator[SequenceDelta, None]], n: int) -> AsyncGenerator[SequenceDelta, None]:
    """The deltas of several prompts as they come, their choices numbered through: prompt p's sequence s becomes choice p * n + s.

    At most `MAX_OPEN` streams are open at a time. The first exception of any ends all of them and is raised here. Closing this generator
    closes the streams.
    """
    places = asyncio.Semaphore(MAX_OPEN)
    queue: asyncio.Queue[SequenceDelta | Exception | None] = asyncio.Queue()

    async def pump(position: int, stream: AsyncGenerator[SequenceDelta, None]) -> None:
        try:
            async with places, aclosing(stream):
                async for delta in stream:
                    delta.index += position * n
                    queue.put_nowait(delta)
        except Exception as error:  # raised again below, where the caller can see it
            queue.put_nowait(error)
        else:
            queue.put_nowait(None)

    tasks: list[asyncio.Task[None]] = []
    try:
        for position, stream in enumerate(streams):
            tasks.append(asyncio.create_task(pump(position, stream)))
            if len(tasks) % AT_ONCE == 0:
                await asyncio.sleep(0)  # adding a request takes a while: let other streams go on in between
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
