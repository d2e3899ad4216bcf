"""Worker threads for jobs that would block the event loop, in lanes, so that short jobs never wait for long ones."""

import asyncio
import enum
import functools
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from penstock.engine.errors import EngineUnavailable
from penstock.engine.system.process import HANDOVER, release_heap
from penstock.engine.system.sandbox import Cancellation

T = TypeVar("T")
Parameters = ParamSpec("Parameters")


class Lane(enum.Enum):
    """Jobs of one size. Each lane has its own threads, and refuses jobs beyond a bound on those that wait."""

    SHORT = "short"  # milliseconds: an ordinary conversation
    LONG = "long"  # up to seconds
    HUGE = "huge"  # tokenizing takes up to 300 bytes of memory for each character, so one at a time
    SANDBOXED = "sandboxed"  # seconds, in which the thread waits for a child process


NUM_THREADS = {Lane.SHORT: 2, Lane.LONG: 3, Lane.HUGE: 1, Lane.SANDBOXED: 2}
MAX_WAITING = {Lane.SHORT: 2048, Lane.LONG: 128, Lane.HUGE: 16, Lane.SANDBOXED: 16}
SMALL = 2**12  # what is smaller is done at once: a millisecond or two
LONG = 2**16
HUGE = 2**19


def lane_of(size: int) -> Lane | None:
    """The lane for work on `size` bytes, characters or numbers; None where the event loop can do it between two steps."""
    if size < SMALL:
        return None
    return Lane.SHORT if size < LONG else Lane.LONG if size < HUGE else Lane.HUGE


class Workers(Executor):
    """One `ThreadPoolExecutor` for each lane; as an `Executor` itself it is the lane of long jobs, without a bound."""

    def __init__(self, max_waiting: dict[Lane, int] | None = None) -> None:
        self._pools = {lane: ThreadPoolExecutor(number, f"penstock-{lane.value}") for lane, number in NUM_THREADS.items()}
        self._max_waiting = MAX_WAITING | (max_waiting or {})
        self._num_unfinished = dict.fromkeys(Lane, 0)
        self._lock = threading.Lock()

    async def run(self, lane: Lane | None, call: Callable[[], T]) -> T:
        """Calls it in one of the lane's threads, or here without a lane. Where the caller stops waiting, its jobs in sandboxes are killed.

        Raises `EngineUnavailable` where too many jobs wait in the lane already.
        """
        if lane is None:
            return call()
        if self._num_unfinished[lane] >= self._max_waiting[lane] + NUM_THREADS[lane]:
            raise EngineUnavailable("the server has too many long requests to prepare: try again later")
        with self._lock:
            self._num_unfinished[lane] += 1
        cancellation = Cancellation()
        future = self._pools[lane].submit(cancellation.run, functools.partial(_trimming, call) if lane is Lane.HUGE else call)
        future.add_done_callback(lambda _: self._finish(lane))  # not when the caller stops waiting: a thread cannot be stopped
        try:
            with HANDOVER:
                return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            cancellation.cancel()
            raise

    def submit(self, function: Callable[Parameters, T], /, *args: Parameters.args, **kwargs: Parameters.kwargs) -> Future[T]:
        return self._pools[Lane.LONG].submit(function, *args, **kwargs)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        for pool in self._pools.values():
            pool.shutdown(wait, cancel_futures=cancel_futures)

    def _finish(self, lane: Lane) -> None:
        with self._lock:
            self._num_unfinished[lane] -= 1


def _trimming(call: Callable[[], T]) -> T:
    """The allocator would keep what a huge text has taken."""
    try:
        return call()
    finally:
        release_heap()
