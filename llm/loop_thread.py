"""An event loop in a thread of its own, for callers that are not asynchronous, or whose own loop must not be held up."""

import asyncio
import concurrent.futures
import threading
import weakref
from collections.abc import AsyncGenerator, Coroutine, Generator
from typing import Any, Generic, TypeVar

from penstock.engine.errors import EngineUnavailable

T = TypeVar("T")


class LoopThread:
    """Runs coroutines for synchronous callers, from any thread but its own.

    A thread that waits in a notebook's running loop is as good a caller as any: the two loops know nothing of each other. What is still
    running when it is closed, or at the latest when the interpreter ends, is cancelled.
    """

    def __init__(self, name: str = "penstock-loop") -> None:
        started: concurrent.futures.Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = concurrent.futures.Future()
        self._thread = threading.Thread(target=_serve, args=(started,), name=name, daemon=True)
        self._thread.start()
        self._loop, stop = started.result()
        self._lock = threading.Lock()  # what is scheduled is so before the loop is told to stop, or not at all
        self._close = weakref.finalize(self, _close, self._loop, stop, self._thread, self._lock)

    @property
    def is_closed(self) -> bool:
        return not self._close.alive

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> "concurrent.futures.Future[T]":
        """Begins to run it and returns at once. Cancelling the future cancels it. Raises `EngineUnavailable` once the loop is closed."""
        with self._lock:
            self._check_open(coroutine)
            return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Its result, or what it raised. An interrupted caller leaves nothing running."""
        assert threading.current_thread() is not self._thread, "the loop's own thread would wait for itself"
        call = _Call(coroutine)
        with self._lock:
            self._check_open(coroutine)
            self._loop.call_soon_threadsafe(call.begin)
        try:
            call.done.wait()
        except BaseException:
            with self._lock:
                if not self.is_closed:
                    self._loop.call_soon_threadsafe(call.cancel)
            call.done.wait()  # what it holds is given back by the time the caller goes on
            raise
        return call.result()

    def iterate(self, source: AsyncGenerator[T, None]) -> Generator[T, None, None]:
        """What the generator yields, one item at a time. Closing the iterator closes it."""
        try:
            while True:
                try:
                    yield self.run(_next(source))
                except StopAsyncIteration:
                    return
        finally:
            if not self.is_closed:
                self.run(source.aclose())

    def close(self) -> None:
        """Cancels what runs and waits for the thread. May be called twice."""
        self._close()

    def _check_open(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        if self.is_closed:
            coroutine.close()
            raise EngineUnavailable("the engine has been closed")


class _Call(Generic[T]):
    """One coroutine that a thread waits for. `done` is set however it ends, and also where it is cancelled before it began."""

    def __init__(self, coroutine: Coroutine[Any, Any, T]) -> None:
        self.done = threading.Event()
        self._coroutine = coroutine
        self._task: asyncio.Task[T] | None = None

    def begin(self) -> None:
        self._task = asyncio.create_task(self._coroutine)
        self._task.add_done_callback(lambda task: self.done.set())

    def cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def result(self) -> T:
        assert self._task is not None
        if self._task.cancelled():
            raise EngineUnavailable("the engine was closed while this ran")
        return self._task.result()


async def _next(source: AsyncGenerator[T, None]) -> T:
    return await anext(source)


def _serve(started: "concurrent.futures.Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]]") -> None:
    async def until_stopped() -> None:
        stop = asyncio.Event()
        started.set_result((asyncio.get_running_loop(), stop))
        await stop.wait()

    asyncio.run(until_stopped())


def _close(loop: asyncio.AbstractEventLoop, stop: asyncio.Event, thread: threading.Thread, lock: threading.Lock) -> None:
    with lock:
        loop.call_soon_threadsafe(stop.set)
    if threading.current_thread() is not thread:  # the garbage collector may run there
        thread.join()
