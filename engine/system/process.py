"""This process: its heap and file descriptors, its threads' time and turns at the interpreter's lock, imports it can do without, and the
histograms of what it measures.
"""

import contextlib
import ctypes
import gc
import logging
import os
import resource
import signal
import socket
import sys
import threading
import time
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar, Token
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, TypeVar

import msgspec

from penstock.engine.errors import ConfigurationError

Kind = TypeVar("Kind")

# As torch, the loader of libraries, Python and the operating system report it, in exceptions of many types.
OUT_OF_MEMORY = ("can't allocate memory", "cannot allocate memory", "out of memory", "failed to map segment", "can't start new thread")


class _Mallinfo2(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
    ]


logger = logging.getLogger(__name__)


@contextlib.contextmanager
def startup_phase(name: str) -> Iterator[None]:
    """Logs what a part of the start took: by the clock, and of all processors. Phases may be nested."""
    began_at, processor_began_at = time.monotonic(), time.process_time()
    yield
    seconds, processor_seconds = time.monotonic() - began_at, time.process_time() - processor_began_at
    logger.debug("startup: %s: %.3f s, %.3f s of processor time", name, seconds, processor_seconds)


# Held while transformers makes a model: it changes torch's default dtype, which all threads share, and two of them at once would give
# the modules of one model the dtype of the other, and leave the process with either.
making_model = threading.Lock()

_examining = threading.Lock()
_examined: set[Any] = set()


def examined(kind: Kind) -> Kind:
    """The type, which from then on any thread may decode or convert to: msgspec 0.22 crashes where two threads are the first to do so."""
    if kind not in _examined:
        with _examining:
            msgspec.json.Decoder(kind)
            _examined.add(kind)
    return kind


def heap_bytes() -> int:
    """What all threads of the process have allocated of the C heap and not freed; 0 where the C library does not say."""
    mallinfo = getattr(ctypes.CDLL(None), "mallinfo2", None) if sys.platform == "linux" else None
    if mallinfo is None:
        return 0
    mallinfo.restype = _Mallinfo2
    info = mallinfo()
    return int(info.uordblks + info.hblkhd)


def release_heap() -> None:
    """Gives memory back to the operating system that was freed and kept for later."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's own
        if trim is not None:
            trim(0)


PR_SET_PDEATHSIG = 1  # of `prctl`


def end_after_parent(parent: int, seconds: float) -> None:
    """Has this process killed, whatever it does, if it is still there so long after the end of its parent. Only Linux can."""
    if sys.platform != "linux":
        return

    def on_end(*_: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, seconds)  # SIGALRM ends a process that does not handle it

    signal.signal(signal.SIGUSR1, on_end)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGUSR1)
    if os.getppid() != parent:  # it ended before the kernel was asked
        on_end()


def notify_supervisor(state: str) -> None:
    """Sends systemd a state such as `READY=1`, by sd_notify's protocol, where it has started the process and waits for that."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notifier:
            notifier.connect(f"\0{address[1:]}" if address.startswith("@") else address)
            notifier.sendall(state.encode())
    except OSError as error:
        logging.getLogger(__name__).warning("systemd cannot be notified of %s at %s: %s", state, address, error)


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """For imports and tables: nearly all of their objects stay, and looking for the others takes a sixth of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


YOUNG_OBJECTS = 20_000  # until the collector looks for garbage among them; by default 700, fewer than a step of 256 streams makes


def collect_garbage() -> None:
    """Gives the memory of objects that refer to each other, and of nothing else, back to the operating system."""
    gc.collect()
    release_heap()


@contextlib.contextmanager
def settled_heap() -> Iterator[None]:
    """For the time in which the process serves: existing objects live as long as the process, and cycles of new objects are rare.

    A collection that traversed all loaded objects would delay every stream by 0.2 s.
    """
    thresholds = gc.get_threshold()
    collect_garbage()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, *thresholds[1:])
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()  # else extensions such as triton's report what was never collected as leaked, in forty lines


@contextlib.contextmanager
def memory_shortage_refused() -> Iterator[None]:
    """Raises `ConfigurationError` where a model's loading runs out of memory."""
    try:
        yield
    except Exception as error:
        if not isinstance(error, MemoryError) and not any(words in str(error).lower() for words in OUT_OF_MEMORY):
            raise
        detail = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigurationError(
            "there is not enough memory to load the model: raise the process's limit (ulimit -v, or the container's), choose a smaller "
            f"model or --quantization int4, or lower --max-model-len or --kv-cache-memory ({detail})"
        ) from error


# A step of the model gives the lock up in each of its hundreds of kernels, and asks again: 200 of them, 3 ms alone, took 940 ms beside
# Python code at the usual 5 ms, 120 at 0.5 ms and 7 at this.
SWITCH_SECONDS = 50e-6


class LockHandover:
    """While it is entered, by however many at a time, all threads of the process hand the lock on sooner."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_entered = 0
        self._usual_seconds = SWITCH_SECONDS

    def __enter__(self) -> None:
        with self._lock:
            if not self._num_entered:
                self._usual_seconds = sys.getswitchinterval()
                sys.setswitchinterval(min(SWITCH_SECONDS, self._usual_seconds))
            self._num_entered += 1

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        with self._lock:
            self._num_entered -= 1
            if not self._num_entered:
                sys.setswitchinterval(self._usual_seconds)


HANDOVER = LockHandover()  # the one of the process, as the interval is


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


@contextlib.contextmanager
def triton_left_out(device: str) -> Iterator[None]:
    """Lets torch and transformers be imported as if triton, of no use to a model on the CPU, were not installed: 70 MB of memory.

    `device` is the operator's choice. Nothing happens where the model goes to a GPU, or triton is imported already.
    """
    import torch

    if device.startswith("cuda") or (device == "auto" and torch.cuda.is_available()):
        yield
    else:
        with left_out("triton"):
            yield


@contextlib.contextmanager
def left_out(name: str) -> Iterator[None]:
    """Lets others be imported as if this module, which they can do without, were not installed; as it is where it is imported already."""
    if name in sys.modules:
        yield
        return
    sys.modules[name] = None  # type: ignore[assignment]  # Python's own way to say that a module cannot be imported
    try:
        yield
    finally:
        del sys.modules[name]


@contextmanager
def progress_for_terminals() -> Iterator[None]:
    """No progress bars in logs: transformers and the Hub's client draw them wherever standard error goes."""
    from transformers.utils import logging as transformers_logging

    if sys.stderr.isatty() or not transformers_logging.is_progress_bar_enabled():
        yield
        return
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        transformers_logging.enable_progress_bar()  # type: ignore[no-untyped-call]


MAX_CONNECTIONS = 16_384  # the most by default: each takes some 20 KB
OTHER_DESCRIPTORS = 64  # for files, pipes of helper processes, and what libraries open
MAX_DESCRIPTORS = 65_536  # not more than that are asked for, though the hard limit may be a billion


def raise_descriptor_limit() -> None:
    """Makes as many file descriptors available as the system allows. The soft limit is often 1,024, for programs that use `select`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def connection_limit(asked: int | None) -> int:
    """How many connections may be open: as many as were asked for, else as many as the descriptors allow. Raises `ConfigurationError`."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return asked or MAX_CONNECTIONS
    available = soft - min(OTHER_DESCRIPTORS, soft // 2)
    if asked is not None and asked > available:
        raise ConfigurationError(f"--max-connections {asked}: `ulimit -n` is {soft}, which leaves {available} for connections")
    return asked or min(available, MAX_CONNECTIONS)


@dataclass(slots=True)
class Histogram:
    """`counts[i]` are the values above `bounds[i - 1]`, up to `bounds[i]`; the last, those above all bounds. `total` is their sum.

    May be added to for every token: prometheus_client's own takes a lock and looks through the buckets one by one. Belongs to one thread;
    others may read it, and see a value in `counts` before it is in `total`.
    """

    bounds: tuple[float, ...]
    counts: list[int] = field(default_factory=list)
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = self.counts or [0] * (len(self.bounds) + 1)

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def copy(self) -> "Histogram":
        return Histogram(self.bounds, [*self.counts], self.total)

    @property
    def num_values(self) -> int:
        return sum(self.counts)
