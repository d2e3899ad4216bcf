"""The time of a compilation, without what it started once for all later ones."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar, Token
from types import TracebackType

_CLOCKS: ContextVar[tuple["CompileClock", ...]] = ContextVar("compile_clocks", default=())


def thread_seconds(native_id: int) -> float | None:
    """The CPU time of a thread of this process. None where it has ended, and where it is not known."""
    if sys.platform != "linux":
        return None
    try:
        # The id of the thread's own clock, as Linux makes it. `time.pthread_getcpuclockid` may crash where the thread has just ended.
        return time.clock_gettime(~native_id << 3 | 6)
    except OSError:
        return None


class CompileClock:
    """Runs from when it is made. While it is entered, what the same thread does under `uncounted` does not count.

    Any thread may read it.
    """

    def __init__(self) -> None:
        self._state: tuple[float, float | None] = (time.monotonic(), None)  # when it began, as if it had never stopped; when it stopped
        self._entered: Token[tuple[CompileClock, ...]] | None = None

    @property
    def seconds(self) -> float:
        began_at, stopped_at = self._state
        return (time.monotonic() if stopped_at is None else stopped_at) - began_at

    @property
    def is_stopped(self) -> bool:
        return self._state[1] is not None

    def stop(self) -> None:
        began_at, stopped_at = self._state
        assert stopped_at is None
        self._state = (began_at, time.monotonic())

    def go_on(self) -> None:
        began_at, stopped_at = self._state
        assert stopped_at is not None
        self._state = (began_at + time.monotonic() - stopped_at, None)

    def __enter__(self) -> "CompileClock":
        self._entered = _CLOCKS.set((*_CLOCKS.get(), self))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        assert self._entered is not None
        _CLOCKS.reset(self._entered)


@contextmanager
def uncounted() -> Iterator[None]:
    """Excludes one-time work, such as starting a process, from the clocks of this thread. Not to be nested."""
    clocks = _CLOCKS.get()
    for clock in clocks:
        clock.stop()
    try:
        yield
    finally:
        for clock in clocks:
            clock.go_on()
