"""Runs functions in child processes that can be killed: for work whose time or memory only the operating system can bound.

    sandbox = Sandbox("looking for primes", Limits(cpu_seconds=2))
    prime = await sandbox.run(largest_prime_below, 10**6)

The function is found by its name, so it belongs at the top level of a module that can be imported. Its arguments are pickled; its result
comes back as MessagePack and is checked against the annotated return type. Nothing that comes out of a sandbox is ever unpickled.
"""

import asyncio
import fcntl
import functools
import os
import pickle
import resource
import select
import signal
import struct
import subprocess
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, BinaryIO, ParamSpec, TypeVar, get_type_hints

import msgspec

from penstock.engine.errors import EngineUnavailable, InvalidRequest, JobLimitExceeded, QueueFull
from penstock.engine.system.process import examined, uncounted

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

START_CPU_SECONDS = 120  # far more than any start takes: one that uses them up is broken
NUM_ATTEMPTS = 2  # of a job whose process was ended from outside
ENDED_FROM_OUTSIDE = (0, -signal.SIGKILL, -signal.SIGTERM, -signal.SIGHUP, -signal.SIGINT, -signal.SIGQUIT)  # 0: it had retired

_HEADER = struct.Struct("<cQ")
_REQUEST = b"q"
_READY = b"s"
_RESULT = b"r"
_INVALID = b"i"  # the job raised `InvalidRequest`
_OUT_OF_MEMORY = b"m"
_FAILED = b"f"  # the job raised anything else


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of one job. A job's time is measured in CPU time, since a busy machine lengthens wall-clock time.

    `memory_bytes` of address space are in addition to the process's own after its start. `wall_seconds` is for a job that gets no CPU
    time, and `result_bytes` bounds the result. `niceness` is added once the process is up.
    """

    cpu_seconds: float = 5.0
    memory_bytes: int = 2**28
    wall_seconds: float = 60.0
    result_bytes: int = 2**26
    niceness: int = 0


class Sandbox:
    """Up to `num_processes` child processes, each with one job at a time, started on first use or by `prestart`.

    `purpose` describes the job, for messages. A process that exceeds a limit is killed and replaced by the next job. If a process was
    killed from outside, such as by the system when memory runs out, its job is run once more, in a new process. A job waits
    at most `max_wait` seconds for a process, not counting the time to start one. `initializer(*initargs)` is called in each
    process before its limits are set, and belongs to the start. All processes end with this object, with `close`, and with the server,
    however that ends.
    """

    def __init__(
        self,
        purpose: str,
        limits: Limits = Limits(),
        *,
        num_processes: int = 1,
        max_wait: float = 10.0,
        initializer: Callable[..., None] | None = None,
        initargs: tuple[Any, ...] = (),
    ) -> None:
        self.purpose = purpose
        self.limits = limits
        self._max_wait = max_wait
        self._initialize = (initializer, initargs)
        self._children = [_Child() for _ in range(num_processes)]
        self._idle = list(self._children)
        self._changed = threading.Condition()  # guards `_idle`, `_started_at`, `_is_closed` and each child's `is_starting`
        self._started_at = 0.0  # when a process last was
        self._is_closed = False
        self._threads = ThreadPoolExecutor(num_processes, "penstock-sandbox")
        weakref.finalize(self, _kill_all, self._children, self._idle)

    @property
    def pids(self) -> list[int]:
        """Of the processes that are there."""
        return [child.process.pid for child in self._children if child.process is not None]

    def prestart(self) -> None:
        """Starts the processes in the background, so that the first job does not wait for it. Returns at once."""
        for _ in self._children:
            threading.Thread(target=self._prestart, name="penstock-sandbox-start", daemon=True).start()

    async def run(self, function: Callable[Parameters, Result], *args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        """Calls the function in a process. Cancelling kills that process where the job has begun.

        Raises `InvalidRequest` where the function does, `JobLimitExceeded` for a limit, `QueueFull` where no process becomes free,
        `EngineUnavailable` where none starts or lives, and `RuntimeError` for any other exception of the function's.
        """
        self._check_open()
        job = _Job(time.monotonic() + self._max_wait)
        call = functools.partial(function, *args, **kwargs)
        try:
            result: Result = await asyncio.wrap_future(self._threads.submit(self._run, job, call))
        except asyncio.CancelledError:
            job.cancel()
            raise
        return result

    def run_blocking(self, function: Callable[Parameters, Result], *args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        """`run` for a thread that may wait. A `Cancellation` around the call kills the process as well."""
        job = _Job(time.monotonic() + self._max_wait)
        cancellation = _CANCELLATION.get()
        if cancellation is not None:
            cancellation.add(job)
        result: Result = self._run(job, functools.partial(function, *args, **kwargs))
        return result

    def close(self) -> None:
        """Kills the processes, and fails the jobs in them and all later ones with `EngineUnavailable`."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
            _kill_all(self._children, self._idle)
        self._threads.shutdown(wait=False)

    def _run(self, job: "_Job", call: "functools.partial[Any]") -> Any:
        request = pickle.dumps(call)
        for _ in range(NUM_ATTEMPTS):
            child = self._acquire(job)
            try:
                self._start(child)
                kind, payload = self._exchange(job, child, request)
            except EOFError:
                self._check_end(child, job)
                job.deadline = time.monotonic() + self._max_wait
            else:
                return self._result(call.func, kind, payload)
            finally:
                self._release(child)
        raise EngineUnavailable(f"the process for {self.purpose} was ended from outside")

    def _acquire(self, job: "_Job") -> "_Child":
        with self._changed:
            while not self._idle and not self._is_closed:
                if any(child.is_starting for child in self._children):
                    with uncounted():
                        self._changed.wait()
                elif not self._changed.wait(self._seconds_left(job)):
                    break
            self._check_open()
            if not self._idle or self._seconds_left(job) < 0:
                raise QueueFull(f"too many requests wait for {self.purpose}")
            return self._idle.pop()

    def _seconds_left(self, job: "_Job") -> float:
        return max(job.deadline, self._started_at + self._max_wait) - time.monotonic()

    def _check_open(self) -> None:
        if self._is_closed:
            raise EngineUnavailable("the server is shutting down")

    def _release(self, child: "_Child") -> None:
        with self._changed:
            self._idle.append(child)
            self._changed.notify_all()
            is_closed = self._is_closed
        if is_closed:
            child.kill()

    def _prestart(self) -> None:
        with suppress(EngineUnavailable, QueueFull):  # the first job starts it again, and its client gets the error
            child = self._acquire(_Job(time.monotonic() + self._max_wait))
            try:
                self._start(child)
            finally:
                self._release(child)

    def _start(self, child: "_Child") -> None:
        if child.is_alive:
            return
        with self._changed:
            child.is_starting = True
        try:
            with uncounted():  # importing a library takes seconds, and many of them where the model has all cores
                child.start(self.limits, self._initialize)
        except (EOFError, OSError):
            child.kill()
            raise EngineUnavailable(f"the process for {self.purpose} does not start") from None
        finally:
            with self._changed:
                child.is_starting = False
                self._started_at = time.monotonic()
                self._changed.notify_all()
        self._check_open()  # `close` kills only what has started

    def _exchange(self, job: "_Job", child: "_Child", request: bytes) -> tuple[bytes, bytes]:
        job.begin(child)
        try:
            return child.exchange(request, time.monotonic() + self.limits.wall_seconds, self.limits.result_bytes)
        except OverflowError:
            child.kill()
            raise JobLimitExceeded(f"{self.purpose} gave more than {self.limits.result_bytes / 2**20:.0f} MiB") from None
        except TimeoutError:
            child.kill()
            raise EngineUnavailable(f"the machine is too busy for {self.purpose}") from None
        finally:
            job.end()

    def _check_end(self, child: "_Child", job: "_Job") -> None:
        """Raises unless the process was ended from outside."""
        returncode = child.reap()
        if job.is_cancelled or self._is_closed:
            raise EngineUnavailable("the request was cancelled, or the server is shutting down")
        if returncode == -signal.SIGPROF:
            raise JobLimitExceeded(f"{self.purpose} took more than {self.limits.cpu_seconds:g} s of CPU time")
        if returncode not in ENDED_FROM_OUTSIDE:
            raise JobLimitExceeded(f"{self.purpose} took more than {self._memory}, or ended its process")

    def _result(self, function: Callable[..., Any], kind: bytes, payload: bytes) -> Any:
        if kind == _RESULT:
            return msgspec.msgpack.decode(payload, type=examined(_return_type(function)))
        if kind == _INVALID:
            raise InvalidRequest(*msgspec.msgpack.decode(payload, type=tuple[str, str | None]))
        if kind == _OUT_OF_MEMORY:
            raise JobLimitExceeded(f"{self.purpose} took more than {self._memory}")
        raise RuntimeError(f"{function.__qualname__} failed in its sandbox: {payload.decode()}")

    @property
    def _memory(self) -> str:
        return f"{self.limits.memory_bytes / 2**20:.0f} MiB of memory"


class _Job:
    """One call: until when it may wait, and the process that runs it, which only then may be killed for its sake."""

    def __init__(self, deadline: float) -> None:
        self.deadline = deadline
        self.is_cancelled = False
        self._child: _Child | None = None
        self._lock = threading.Lock()

    def begin(self, child: "_Child") -> None:
        with self._lock:
            if self.is_cancelled:
                raise EngineUnavailable("the request was cancelled")
            self._child = child

    def end(self) -> None:
        with self._lock:
            self._child = None

    def cancel(self) -> None:
        with self._lock:
            self.is_cancelled = True
            if self._child is not None:
                self._child.send_kill()


class Cancellation:
    """Cancels a call in another thread, as far as it waits for sandboxes: their processes are killed."""

    def __init__(self) -> None:
        self._jobs: list[_Job] = []
        self._is_cancelled = False
        self._lock = threading.Lock()

    def run(self, call: Callable[[], Result]) -> Result:
        """Calls it in this thread; `run_blocking` within raises `EngineUnavailable` once it is cancelled."""
        token = _CANCELLATION.set(self)
        try:
            return call()
        finally:
            _CANCELLATION.reset(token)

    def add(self, job: _Job) -> None:
        with self._lock:
            self._jobs.append(job)
            if self._is_cancelled:
                job.cancel()

    def cancel(self) -> None:
        with self._lock:
            self._is_cancelled = True
            for job in self._jobs:
                job.cancel()


_CANCELLATION: ContextVar[Cancellation | None] = ContextVar("cancellation", default=None)


class _Child:
    """One process, seen from the server, or none. Used by one thread at a time."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self.is_starting = False

    @property
    def is_alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def start(self, limits: Limits, initialize: tuple[Callable[..., None] | None, tuple[Any, ...]]) -> None:
        """Raises `EOFError` or `OSError`. The process bounds its own start, by CPU time."""
        self.kill()
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-c", "from penstock.engine.system.sandbox import serve; serve()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # what libraries write there may quote what clients sent
            process_group=0,  # Ctrl-C in a terminal is for the server to handle
        )
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            os.set_blocking(pipe.fileno(), False)
        self._write(pickle.dumps(sys.path), None)  # on its own: what follows is unpickled by way of these
        self.exchange(pickle.dumps((limits, initialize)), None, 0)

    def exchange(self, payload: bytes, deadline: float | None, max_bytes: int) -> tuple[bytes, bytes]:
        """Raises `EOFError` where the process ends, `TimeoutError`, and `OverflowError` for an answer of more than `max_bytes`."""
        self._write(payload, deadline)
        kind, num_bytes = _HEADER.unpack(self._read(_HEADER.size, deadline))
        if num_bytes > max_bytes:
            raise OverflowError
        return kind, self._read(num_bytes, deadline)

    def send_kill(self) -> None:
        """Kills the process for the thread that uses it. Any thread may call this."""
        process = self.process
        if process is not None:
            process.kill()

    def kill(self) -> None:
        process, self.process = self.process, None
        if process is not None:
            process.kill()
            process.wait()
            _close_pipes(process)

    def reap(self) -> int:
        """The exit status of a process that has ended."""
        assert self.process is not None
        process, self.process = self.process, None
        returncode = process.wait()
        _close_pipes(process)
        return returncode

    def _write(self, payload: bytes, deadline: float | None) -> None:
        assert self.process is not None
        assert self.process.stdin is not None
        left = memoryview(_frame(_REQUEST, payload))
        try:
            while left:
                _wait(self.process.stdin.fileno(), select.POLLOUT, deadline)
                left = left[os.write(self.process.stdin.fileno(), left) :]
        except BrokenPipeError:
            raise EOFError from None

    def _read(self, num_bytes: int, deadline: float | None) -> bytes:
        assert self.process is not None
        assert self.process.stdout is not None
        parts = []
        while num_bytes:
            _wait(self.process.stdout.fileno(), select.POLLIN, deadline)
            part = os.read(self.process.stdout.fileno(), min(num_bytes, 2**20))
            if not part:
                raise EOFError
            parts.append(part)
            num_bytes -= len(part)
        return b"".join(parts)


def _wait(descriptor: int, event: int, deadline: float | None) -> None:
    """Until it can be read or written. Raises `TimeoutError`. Not by `select`, which takes no descriptors beyond 1023."""
    poll = select.poll()
    poll.register(descriptor, event)
    if not poll.poll(None if deadline is None else max(deadline - time.monotonic(), 0) * 1000):
        raise TimeoutError


def _kill_all(children: list[_Child], idle: list[_Child]) -> None:
    for child in children:
        if child in idle:
            child.kill()
        else:
            child.send_kill()  # the thread that uses it takes care of the rest


def _close_pipes(process: "subprocess.Popen[bytes]") -> None:
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        pipe.close()


def _frame(kind: bytes, payload: bytes) -> bytes:
    return _HEADER.pack(kind, len(payload)) + payload


@functools.lru_cache
def _return_type(function: Callable[..., Any]) -> Any:
    return get_type_hints(function)["return"]


# From here on: the child.


def serve() -> None:
    """Answers each request from standard input on standard output, until the former ends."""
    for number in (signal.SIGPROF, signal.SIGIO, signal.SIGXCPU):
        signal.signal(number, signal.SIG_DFL)  # each ends the process wherever it is: a handler in Python would wait for the next bytecode
    _set_limit(resource.RLIMIT_CORE, 0)
    most_cpu_seconds = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (_at_most(START_CPU_SECONDS, most_cpu_seconds[1]), most_cpu_seconds[1]))
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints does not get among the answers
    sys.path[:] = pickle.loads(_read_frame(requests))
    limits, (initializer, initargs) = pickle.loads(_read_frame(requests))
    _end_with_parent(is_on=True)
    if initializer is not None:
        initializer(*initargs)
    _end_with_parent(is_on=False)
    resource.setrlimit(resource.RLIMIT_CPU, most_cpu_seconds)
    os.nice(limits.niceness)
    num_bytes_at_start = _address_space()
    _set_limit(resource.RLIMIT_AS, num_bytes_at_start + limits.memory_bytes)
    _write_frame(answers, _READY, b"")
    with suppress(EOFError):
        # A process that has kept much of what a job took is of no more use: the next job would find the memory taken.
        while _serve_one(requests, answers, limits) and _address_space() < num_bytes_at_start + limits.memory_bytes / 2:
            continue


def _serve_one(requests: BinaryIO, answers: BinaryIO, limits: Limits) -> bool:
    request = _read_frame(requests)
    signal.setitimer(signal.ITIMER_PROF, limits.cpu_seconds)
    _end_with_parent(is_on=True)
    kind, payload = _outcome(request)
    _end_with_parent(is_on=False)
    signal.setitimer(signal.ITIMER_PROF, 0)
    _write_frame(answers, kind, payload)
    return kind != _OUT_OF_MEMORY


def _outcome(request: bytes) -> tuple[bytes, bytes]:
    try:
        return _RESULT, _encoded(pickle.loads(request)())
    except InvalidRequest as error:
        message = error.message.encode(errors="backslashreplace").decode()
        return _INVALID, msgspec.msgpack.encode((message, error.param))
    except MemoryError:
        return _OUT_OF_MEMORY, b""
    except Exception as error:  # our own bug, so the log is to say where; not the message, which may quote what a client sent
        frame = traceback.extract_tb(error.__traceback__)[-1]
        return _FAILED, f"{type(error).__name__} in {frame.name}, {frame.filename}:{frame.lineno}".encode()


def _encoded(result: Any) -> bytes:
    try:
        return msgspec.msgpack.encode(result)
    except UnicodeEncodeError:
        raise InvalidRequest("the text holds a lone surrogate and cannot be encoded as UTF-8") from None


def _end_with_parent(*, is_on: bool) -> None:
    # While a job runs, the only input is the end of the pipe, after the server has died: the process then ends at once.
    flags = fcntl.fcntl(0, fcntl.F_GETFL)
    fcntl.fcntl(0, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(0, fcntl.F_SETFL, flags | os.O_ASYNC if is_on else flags & ~os.O_ASYNC)


def _read_frame(source: BinaryIO) -> bytes:
    header = source.read(_HEADER.size)
    if len(header) < _HEADER.size:
        raise EOFError
    _, num_bytes = _HEADER.unpack(header)
    return source.read(num_bytes)


def _write_frame(target: BinaryIO, kind: bytes, payload: bytes) -> None:
    target.write(_frame(kind, payload))
    target.flush()


def _set_limit(kind: int, value: int) -> None:
    limit = _at_most(value, resource.getrlimit(kind)[1])
    resource.setrlimit(kind, (limit, limit))


def _at_most(value: int, most: int) -> int:
    return value if most == resource.RLIM_INFINITY else min(value, most)


def _address_space() -> int:
    """What is mapped already, in bytes; where the system does not say, more than that."""
    try:
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[0]) * resource.getpagesize()
    except FileNotFoundError:
        return 8 * 2**30
