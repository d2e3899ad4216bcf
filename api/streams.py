"""Deltas of one engine request, or of several side by side, as one asynchronous iterator."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing

from penstock.engine.outputs import SequenceDelta


async def merge(streams: Sequence[AsyncGenerator[SequenceDelta, None]], n: int) -> AsyncGenerator[SequenceDelta, None]:
    """The deltas of several prompts as they come, their choices numbered through: prompt p's sequence s becomes choice p * n + s.

    The first exception of any stream ends all of them and is raised here. Closing this generator closes the streams.
    """
    queue: asyncio.Queue[SequenceDelta | None] = asyncio.Queue()

    async def pump(position: int, stream: AsyncGenerator[SequenceDelta, None]) -> None:
        try:
            async with aclosing(stream):
                async for delta in stream:
                    delta.index += position * n
                    queue.put_nowait(delta)
        finally:
            queue.put_nowait(None)

    tasks = [asyncio.create_task(pump(position, stream)) for position, stream in enumerate(streams)]
    try:
        num_running = len(tasks)
        while num_running:
            delta = await queue.get()
            if delta is not None:
                yield delta
                continue
            num_running -= 1
            for task in tasks:
                if task.done() and not task.cancelled() and (error := task.exception()):
                    raise error
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


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
