"""The threads for work that would hold up the event loop, in lanes, so that short jobs never wait for long ones."""

import asyncio
import enum
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import ParamSpec, Protocol, TypeVar

from penstock.engine.errors import EngineUnavailable
from penstock.engine.threads import HANDOVER

T = TypeVar("T")
Parameters = ParamSpec("Parameters")

MANY = 500  # messages and tools, or prompts: fewer take less than a few milliseconds


class Lane(enum.Enum):
    """Jobs of one size. Each lane has its own threads, and refuses jobs beyond a bound on those that wait."""

    SHORT = "short"  # milliseconds: the template of an ordinary conversation
    LONG = "long"  # up to seconds: what a large body asks for
    HUGE = "huge"  # tokenizing more than `HUGE_TEXT` characters: takes 250 bytes of memory for each, so one at a time


NUM_THREADS = {Lane.SHORT: 2, Lane.LONG: 3, Lane.HUGE: 1}
MAX_WAITING = {Lane.SHORT: 2048, Lane.LONG: 128, Lane.HUGE: 16}


class Workers(Executor):
    """One `ThreadPoolExecutor` for each lane; as an `Executor` itself it is the lane of long jobs, without a bound."""

    def __init__(self, max_waiting: dict[Lane, int] | None = None) -> None:
        self._pools = {lane: ThreadPoolExecutor(number, f"penstock-{lane.value}") for lane, number in NUM_THREADS.items()}
        self._max_waiting = MAX_WAITING | (max_waiting or {})
        self._num_unfinished = dict.fromkeys(Lane, 0)
        self._lock = threading.Lock()

    async def run(self, lane: Lane, call: Callable[[], T]) -> T:
        """Calls it in one of the lane's threads. Raises `EngineUnavailable` where too many jobs wait in the lane already."""
        if self._num_unfinished[lane] >= self._max_waiting[lane] + NUM_THREADS[lane]:
            raise EngineUnavailable("the server has too many long requests to prepare: try again later")
        with self._lock:
            self._num_unfinished[lane] += 1
        future = self._pools[lane].submit(call)
        future.add_done_callback(lambda _: self._finish(lane))  # not when the caller stops waiting: a thread cannot be stopped
        with HANDOVER:
            return await asyncio.wrap_future(future)

    def submit(self, function: Callable[Parameters, T], /, *args: Parameters.args, **kwargs: Parameters.kwargs) -> Future[T]:
        return self._pools[Lane.LONG].submit(function, *args, **kwargs)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        for pool in self._pools.values():
            pool.shutdown(wait, cancel_futures=cancel_futures)

    def _finish(self, lane: Lane) -> None:
        with self._lock:
            self._num_unfinished[lane] -= 1


class HasWorkers(Protocol):
    @property
    def workers(self) -> Workers: ...


async def run(context: HasWorkers, call: Callable[[], T], *, is_long: bool) -> T:
    """Calls it here where that is quick, in the lane of long jobs where it would hold up every stream."""
    return await context.workers.run(Lane.LONG, call) if is_long else call()
