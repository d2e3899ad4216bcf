"""The engine as the server sees it: an asyncio task that turns requests into streams of deltas."""

import asyncio
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from penstock.engine.engine_core import DeltasByRequest, EngineCore
from penstock.engine.errors import EngineUnavailable
from penstock.engine.outputs import FinishReason, SequenceDelta
from penstock.engine.request import Request
from penstock.engine.stats import EngineStats

logger = logging.getLogger(__name__)

MAX_FAILED_STEPS = 3  # in a row; then it is not the requests that are at fault
STEP_FAILED = "the model failed while it computed this request; the error has been logged"


@dataclass(slots=True)
class _Stream:
    """Deltas on their way to one client."""

    num_unfinished: int
    queue: "asyncio.Queue[list[SequenceDelta]]" = field(default_factory=asyncio.Queue)


class Engine:
    """Runs an `EngineCore` for as many clients as there are. Everything but the model's own thread is on one event loop: no locks."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._streams: dict[str, _Stream] = {}
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._is_accepting = False
        self._num_failed_steps = 0

    async def start(self) -> None:
        """Begins to serve."""
        self._task = asyncio.create_task(self._run(), name="engine")
        self._is_accepting = True

    async def stop(self, drain_seconds: float = 0.0) -> None:
        """Takes no more requests, lets those that run finish for `drain_seconds`, ends the others and waits for the step under way."""
        self._is_accepting = False
        if self._task is None:
            return
        try:
            async with asyncio.timeout(drain_seconds):
                while self._streams and not self._task.done():
                    self._idle.clear()
                    await self._idle.wait()
        except TimeoutError:
            logger.warning("%d requests were cut off by the shutdown", len(self._streams))
        for request_id, stream in list(self._streams.items()):
            self._core.abort(request_id)
            stream.queue.put_nowait([SequenceDelta(index, finish_reason=FinishReason.ABORT) for index in range(stream.num_unfinished)])
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._core.runner.shutdown()

    @property
    def is_accepting(self) -> bool:
        """False before the start and from the beginning of the shutdown."""
        return self._is_accepting

    @property
    def is_healthy(self) -> bool:
        """False once several steps in a row have failed, or when the engine is not running."""
        return self._task is not None and not self._task.done() and self._num_failed_steps < MAX_FAILED_STEPS

    def stats(self) -> EngineStats:
        return self._core.stats()

    def check_integrity(self) -> None:
        self._core.check_integrity()

    async def generate(self, request: Request) -> AsyncIterator[SequenceDelta]:
        """The deltas of the request's n sequences as they come; each one's last has a `finish_reason`. Closing the iterator aborts.

        Raises `EngineUnavailable`, `QueueFull` or `InvalidRequest` before the first delta.
        """
        if not self._is_accepting or self._task is None or self._task.done():
            raise EngineUnavailable("the engine is not running" if self._is_accepting else "the server is shutting down")
        self._core.add(request)
        stream = self._streams[request.request_id] = _Stream(request.params.n)
        self._wake.set()
        try:
            while stream.num_unfinished:
                for delta in await stream.queue.get():
                    stream.num_unfinished -= delta.finish_reason is not None
                    yield delta
        finally:
            del self._streams[request.request_id]
            self._core.abort(request.request_id)
            if not self._streams:
                self._idle.set()

    async def _run(self) -> None:
        news: DeltasByRequest = {}
        while True:
            scheduled = self._core.schedule()
            if scheduled is None:
                self._deliver(news)
                news = {}
                self._wake.clear()
                await self._wake.wait()
                continue
            step, batch = scheduled
            handle = self._core.runner.launch(batch)
            # Clients are told of the last step while this one runs.
            self._deliver(news)
            try:
                output = await asyncio.wrap_future(handle.future)
                news = self._core.update(step, batch, output)
                self._num_failed_steps = 0
            except Exception:  # whatever the model or a plug-in raised: it ends the requests of this step and nothing else
                logger.exception("A step over %d sequences failed", len(step.num_tokens))
                self._num_failed_steps += 1
                news = self._core.fail(step, STEP_FAILED)

    def _deliver(self, news: DeltasByRequest) -> None:
        for request_id, deltas in news.items():
            stream = self._streams.get(request_id)
            if stream is not None:
                stream.queue.put_nowait(deltas)
