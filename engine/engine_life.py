"""The life of an engine on its event loop: begun once, drained, ended; and how it waits for its model's thread."""

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any

from penstock.engine.errors import EngineUnavailable

MAX_FAILED_STEPS = 3  # in a row; then it is not the requests that are at fault


class EngineLife:
    """Whether an engine takes what it is given. The engine sets `idle` when it has nothing to do, and counts its failures in a row."""

    def __init__(self) -> None:
        self.idle = asyncio.Event()
        self.num_failed_steps = 0
        self.is_accepting = False
        self._task: asyncio.Task[None] | None = None

    @property
    def has_begun(self) -> bool:
        return self._task is not None

    @property
    def is_healthy(self) -> bool:
        """False once several steps in a row have failed, or when the engine is not running."""
        return self._is_running and self.num_failed_steps < MAX_FAILED_STEPS

    @property
    def _is_running(self) -> bool:
        return self._task is not None and not self._task.done()

    def begin(self, run: Callable[[], Coroutine[Any, Any, None]], name: str) -> None:
        """An engine is started once: the thread that its model runs in ends with it."""
        assert self._task is None, "the engine was started before"
        self._task = asyncio.create_task(run(), name=name)
        self.is_accepting = True

    def check_accepting(self) -> None:
        """Raises `EngineUnavailable` before the start, after a failure and from the beginning of the shutdown."""
        if not self.is_accepting or not self._is_running:
            is_stopping = self.has_begun and not self.is_accepting
            raise EngineUnavailable("the server is shutting down" if is_stopping else "the engine is not running")

    async def drain(self, seconds: float, has_work: Callable[[], object]) -> bool:
        """Lets what is there be done for so long; whether all of it was, or is not to be waited for since the engine has failed."""
        try:
            async with asyncio.timeout(seconds):
                while has_work() and self._is_running:
                    self.idle.clear()
                    await self.idle.wait()
        except TimeoutError:
            return not has_work()  # the last of it may have gone in the same moment
        return True

    async def end(self) -> None:
        """Waits for the step under way."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)


async def done(future: Future[Any]) -> None:
    """Waits for a future and leaves its outcome to `result`: one of asyncio's own never ends where the model raises StopIteration."""
    loop = asyncio.get_running_loop()
    is_done = asyncio.Event()
    future.add_done_callback(lambda _: loop.call_soon_threadsafe(is_done.set))
    await is_done.wait()
