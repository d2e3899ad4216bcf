"""Worker threads for jobs that would block the event loop, with a queue for each size, so that short jobs never wait for long ones; and
bounds on what requests do at the same time.
"""

import asyncio
import enum
import functools
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import ParamSpec, TypeVar

from penstock.engine.errors import EngineUnavailable
from penstock.engine.system.process import HANDOVER, release_heap
from penstock.engine.system.sandbox import Cancellation

T = TypeVar("T")
Parameters = ParamSpec("Parameters")


class JobQueue(enum.Enum):
    """Jobs of one size. Each queue has its own threads, and refuses jobs beyond a bound on those that wait."""

    SHORT = "short"  # milliseconds: an ordinary conversation
    LONG = "long"  # up to seconds
    HUGE = "huge"  # tokenizing takes up to 300 bytes of memory for each character, so one at a time
    SANDBOXED = "sandboxed"  # seconds, in which the thread waits for a child process


NUM_THREADS = {JobQueue.SHORT: 2, JobQueue.LONG: 3, JobQueue.HUGE: 1, JobQueue.SANDBOXED: 2}
MAX_WAITING = {JobQueue.SHORT: 2048, JobQueue.LONG: 128, JobQueue.HUGE: 16, JobQueue.SANDBOXED: 16}
SMALL = 2**12  # what is smaller is done at once: a millisecond or two
LONG = 2**16
HUGE = 2**19


def queue_for(size: int) -> JobQueue | None:
    """The queue for work on `size` bytes, characters or numbers; None where the event loop can do it between two steps."""
    if size < SMALL:
        return None
    return JobQueue.SHORT if size < LONG else JobQueue.LONG if size < HUGE else JobQueue.HUGE


class Workers(Executor):
    """One `ThreadPoolExecutor` for each queue; as an `Executor` itself it is the queue of long jobs, without a bound."""

    def __init__(self, max_waiting: dict[JobQueue, int] | None = None) -> None:
        self._pools = {queue: ThreadPoolExecutor(number, f"penstock-{queue.value}") for queue, number in NUM_THREADS.items()}
        self._max_waiting = MAX_WAITING | (max_waiting or {})
        self._num_unfinished = dict.fromkeys(JobQueue, 0)
        self._lock = threading.Lock()

    async def run(self, queue: JobQueue | None, call: Callable[[], T]) -> T:
        """Calls it in one of the queue's threads, or here without one. Where the caller stops waiting, its jobs in sandboxes are killed.

        Raises `EngineUnavailable` where too many jobs wait in the queue already.
        """
        if queue is None:
            return call()
        if self._num_unfinished[queue] >= self._max_waiting[queue] + NUM_THREADS[queue]:
            raise EngineUnavailable("the server has too many long requests to prepare: try again later")
        with self._lock:
            self._num_unfinished[queue] += 1
        cancellation = Cancellation()
        future = self._pools[queue].submit(cancellation.run, functools.partial(_trimming, call) if queue is JobQueue.HUGE else call)
        future.add_done_callback(lambda _: self._finish(queue))  # not when the caller stops waiting: a thread cannot be stopped
        try:
            with HANDOVER:
                return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            cancellation.cancel()
            raise

    def submit(self, function: Callable[Parameters, T], /, *args: Parameters.args, **kwargs: Parameters.kwargs) -> Future[T]:
        return self._pools[JobQueue.LONG].submit(function, *args, **kwargs)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        for pool in self._pools.values():
            pool.shutdown(wait, cancel_futures=cancel_futures)

    def _finish(self, queue: JobQueue) -> None:
        with self._lock:
            self._num_unfinished[queue] -= 1


class Places:
    """A bound on the requests that do something at the same time, and on those that wait to do it."""

    def __init__(self, purpose: str, number: int, max_waiting: int) -> None:
        self._purpose = purpose
        self._free = asyncio.Semaphore(number)
        self._max_waiting = max_waiting
        self._num_waiting = 0

    @asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        """Waits for one, and holds it. Raises `EngineUnavailable` where too many wait already."""
        if self._free.locked() and self._num_waiting >= self._max_waiting:
            raise EngineUnavailable(f"too many requests wait to {self._purpose}: try again later")
        self._num_waiting += 1
        try:
            await self._free.acquire()
        finally:
            self._num_waiting -= 1
        try:
            yield
        finally:
            self._free.release()


def _trimming(call: Callable[[], T]) -> T:
    """The allocator would keep what a huge text has taken."""
    try:
        return call()
    finally:
        release_heap()
