"""The order in which constraints are compiled: clients take turns, and slow compilations make room for others."""

import asyncio
import os
import sys
import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from penstock.engine.errors import EngineUnavailable, GenerationFailed, QueueFull
from penstock.engine.system.process import HANDOVER, CompileClock, thread_seconds

MAX_PENDING = 512
MAX_PENDING_OF_CLIENT = 256  # behind a proxy, all users are one client
NUM_QUICK = 1
MAX_RUNNING = 4
MAX_RUNNING_OF_CLIENT = 2  # what runs side by side takes the interpreter's lock from the model in turn: 10 ms a step for each
SLOW_SECONDS = 0.1
NICENESS = 5
SLOW_NICENESS = 10  # not the lowest: it may hold the interpreter's lock when it is set aside for others
STACK_BYTES = 2**26  # engines recurse into what they compile; only what is used of it takes memory


@dataclass(slots=True, eq=False)
class Job:
    """A function to run in a thread. `done` resolves to its result; it `is_slow` once it has run for too long.

    `clock` also counts the time for which it waits.
    """

    work: Callable[[], Any]
    client: str | None
    done: asyncio.Future[Any]
    thread: threading.Thread | None = None
    is_slow: bool = False
    clock: CompileClock = field(default_factory=CompileClock)

    @property
    def is_started(self) -> bool:
        return self.thread is not None

    @property
    def cpu_seconds(self) -> float | None:
        """CPU time that its thread has used, None if unknown."""
        native_id = None if self.thread is None else self.thread.native_id
        return None if native_id is None else thread_seconds(native_id)


class GrammarQueue:
    """Runs work in few threads of low priority: a step of the model needs every core there is, and goes first.

    Clients take turns, one job each. One that runs for longer than `SLOW_SECONDS` falls to a lower one and makes room for the next
    beside it, until `MAX_RUNNING` run, or `MAX_RUNNING_OF_CLIENT` of one client: so the quick ones do not wait behind it. A thread
    cannot be stopped, so the work itself has to be bounded. Each job has a thread of its own, since a priority once lowered cannot be
    raised again. While any runs, the switch interval of the GIL is shorter for the whole process.
    """

    def __init__(self) -> None:
        self._waiting: OrderedDict[str | None, deque[Job]] = OrderedDict()
        self._num_of_client: dict[str | None, int] = {}
        self._running: set[Job] = set()

    def submit(self, work: Callable[[], Any], client: str | None) -> Job:
        """Raises `QueueFull` where too many jobs, or too many of this client's, are waiting or running."""
        if self._num_of_client.get(client, 0) >= MAX_PENDING_OF_CLIENT:
            raise QueueFull("too many constraints of this client are being compiled")
        if sum(self._num_of_client.values()) >= MAX_PENDING:
            raise QueueFull("too many constraints are being compiled")
        job = Job(work, client, asyncio.get_running_loop().create_future())
        self._num_of_client[client] = self._num_of_client.get(client, 0) + 1
        self._waiting.setdefault(client, deque()).append(job)
        self._start_next()
        return job

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return sum(map(len, self._waiting.values()))

    def cancel(self, job: Job) -> bool:
        """Removes a job that has not been started; False if it has been, or if the queue is closed."""
        if job.is_started or job.done.done():
            return False
        self._waiting[job.client].remove(job)
        self._leave(job)
        job.done.cancel()
        return True

    def _start_next(self) -> None:
        while len(self._running) < MAX_RUNNING and sum(not job.is_slow for job in self._running) < NUM_QUICK:
            running = Counter(job.client for job in self._running)
            free = [client for client in self._waiting if running[client] < MAX_RUNNING_OF_CLIENT]
            if not free:
                return
            client = free[0]
            jobs = self._waiting.pop(client)
            job = jobs.popleft()
            if jobs:
                self._waiting[client] = jobs  # at the end: the other clients' turn comes first
            self._start(job)

    def _start(self, job: Job) -> None:
        loop = asyncio.get_running_loop()
        slow_timer = loop.call_later(SLOW_SECONDS, self._step_aside, job)
        job.thread = threading.Thread(target=self._run, args=(job, slow_timer, loop), name="penstock-grammar", daemon=True)
        self._running.add(job)
        previous = threading.stack_size(STACK_BYTES)
        job.thread.start()
        threading.stack_size(previous)

    def _run(self, job: Job, slow_timer: asyncio.TimerHandle, loop: asyncio.AbstractEventLoop) -> None:
        """In the job's thread."""
        result: Any = None
        failure: Exception | None = None
        try:
            _lower_priority(threading.get_native_id(), NICENESS)
            with HANDOVER, job.clock:
                result = _contained(job.work)
        except Exception as error:  # raised again where the job is waited for
            failure = error
        with suppress(RuntimeError):  # the loop may be closed by now, and then nothing waits
            loop.call_soon_threadsafe(self._finish, job, slow_timer, result, failure)

    def _step_aside(self, job: Job) -> None:
        job.is_slow = True
        assert job.thread is not None
        if job.thread.native_id is not None:
            with suppress(ProcessLookupError):  # it has just ended
                _lower_priority(job.thread.native_id, SLOW_NICENESS)
        self._start_next()

    def _finish(self, job: Job, slow_timer: asyncio.TimerHandle, result: Any, failure: Exception | None) -> None:
        slow_timer.cancel()
        self._running.discard(job)
        self._leave(job)
        if not job.done.cancelled():
            if failure is None:
                job.done.set_result(result)
            else:
                job.done.set_exception(failure)
        self._start_next()

    def _leave(self, job: Job) -> None:
        self._num_of_client[job.client] -= 1
        if not self._num_of_client[job.client]:
            del self._num_of_client[job.client]
        if not self._waiting.get(job.client, True):
            del self._waiting[job.client]

    def check_integrity(self) -> None:
        """Asserts that nothing is left waiting or running. For tests, between requests."""
        assert not self._waiting
        assert not self._running
        assert not self._num_of_client

    def close(self) -> None:
        """Fails the jobs that have not been started, without waiting for those that run."""
        waiting = [job for jobs in self._waiting.values() for job in jobs]
        self._waiting.clear()
        for job in waiting:
            job.done.set_exception(EngineUnavailable("the server is shutting down"))
            self._leave(job)


def _lower_priority(thread_id: int, niceness: int) -> None:
    if sys.platform == "linux":  # elsewhere a priority is a whole process's
        os.setpriority(os.PRIO_PROCESS, thread_id, max(niceness, os.getpriority(os.PRIO_PROCESS, thread_id)))


def _contained(work: Callable[[], Any]) -> Any:
    # A panic in a Rust library is a `BaseException`, which the handlers that end a request do not catch.
    try:
        return work()
    except BaseException as error:
        if isinstance(error, Exception):
            raise
        raise GenerationFailed(f"a grammar backend broke down: {type(error).__name__}") from error
