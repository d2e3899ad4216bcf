"""The engine as the server sees it: an asyncio task that turns requests into streams of deltas."""

import asyncio
import functools
import logging
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncGenerator, Callable, Collection, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from penstock.engine.batch import Batch
from penstock.engine.constraints.masks import PATIENCE
from penstock.engine.control.profile import NOTHING, StepProfiler
from penstock.engine.control.requests import RequestInfo, requests_of
from penstock.engine.control.sleep import Sleeper
from penstock.engine.core import DeltasByRequest, EngineCore, EngineStats
from penstock.engine.deltas import ClientFault, FinishReason, SequenceDelta
from penstock.engine.errors import ENGINE_FAILED, EngineUnavailable, InvalidRequest
from penstock.engine.multimodal.vision import ImageFailed
from penstock.engine.parallel.group import RankFailed
from penstock.engine.request import Request
from penstock.engine.runner import ModelRunner, StepHandle
from penstock.engine.scheduling.step import Step
from penstock.engine.system.memory import is_device_lost, is_out_of_memory

logger = logging.getLogger(__name__)

MAX_FAILED_STEPS = 3  # in a row; then it is not the requests that are at fault
LONG_PROMPT = 8192  # tokens; from here on a prompt is hashed by a thread, so that streams go on meanwhile
OPTIMIZATION_SECONDS = 10  # that stopping waits for its thread, which ends soon once the runner is shut down
ABORTED = ClientFault("the request was aborted by an operator")
STEP_FAILED = "the model failed while it computed this request; the error has been logged"


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
            if self.has_begun and self.is_accepting:
                raise EngineUnavailable(ENGINE_FAILED)
            raise EngineUnavailable("the server is shutting down" if self.has_begun else "the engine is not running")

    async def failed(self) -> None:
        """Returns when the engine, which was started, has failed for good."""
        assert self._task is not None
        await asyncio.wait([self._task])

    def fail(self) -> None:
        """The engine, which was started, ends: nothing can be computed any more."""
        assert self._task is not None
        self._task.cancel()

    async def drain(self, seconds: float, has_work: Callable[[], object]) -> bool:
        """Waits so long for the work that is left; False where some of it is left then, unless the engine has failed."""
        try:
            async with asyncio.timeout(seconds):
                while has_work() and self._is_running:
                    self.idle.clear()
                    await self.idle.wait()
        except TimeoutError:
            return not has_work()  # the last of it may have gone in the same moment
        return True

    async def end(self) -> None:
        """Waits for the step in flight."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)


class LivingEngine:
    """What all engines say of their lives."""

    def __init__(self) -> None:
        self._life = EngineLife()

    @property
    def is_accepting(self) -> bool:
        """False before the start and from the beginning of the shutdown."""
        return self._life.is_accepting

    @property
    def is_healthy(self) -> bool:
        """False once several steps in a row have failed, or when the engine is not running."""
        return self._life.is_healthy

    async def failed(self) -> None:
        """Returns when the engine, which was started, has failed for good: no request can be served by this process any more."""
        await self._life.failed()


async def done(future: Future[Any]) -> None:
    """Waits for a future and leaves its outcome to `result`: one of asyncio's own never ends where the model raises StopIteration."""
    loop = asyncio.get_running_loop()
    is_done = asyncio.Event()
    future.add_done_callback(lambda _: loop.call_soon_threadsafe(is_done.set))
    await is_done.wait()


class DeltaStream(ABC):
    """Deltas on their way to one client. `unfinished` are the sequences whose last one has not been put in yet."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.opened_at = time.monotonic()
        self.unfinished = set(range(request.params.n))

    def put(self, deltas: list[SequenceDelta]) -> None:
        for delta in deltas:
            if delta.finish_reason is not None:
                self.unfinished.discard(delta.index)
        self.send(deltas)

    @abstractmethod
    def send(self, deltas: list[SequenceDelta]) -> None:
        """Called on the engine's loop once per step: must be quick and not raise."""


class _QueuedStream(DeltaStream):
    """The deltas of a client in this process."""

    def __init__(self, request: Request) -> None:
        super().__init__(request)
        self._unread: list[SequenceDelta] = []
        self._reader: asyncio.Future[None] | None = None

    def send(self, deltas: list[SequenceDelta]) -> None:
        """Wakes the reader."""
        self._unread += deltas
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def take(self) -> list[SequenceDelta]:
        """All that has been put in since the last time."""
        taken, self._unread = self._unread, []
        return taken

    def changed(self) -> "asyncio.Future[None]":
        """Is done when more has been put in."""
        self._reader = asyncio.get_running_loop().create_future()
        return self._reader


@dataclass(frozen=True, slots=True)
class _InFlight:
    """A step in flight; it has no batch where that could not be built."""

    step: Step
    batch: Batch | None
    handle: StepHandle


class _StepClock:
    """How long the loop works for each step, and how long the step takes, for the choice between drafts and scheduling ahead."""

    def __init__(self, core: EngineCore) -> None:
        self._speculation = core.scheduler.speculation if core.is_async else None
        self._host_seconds = 0.0
        self._resumed = 0.0
        self._ended: float | None = None  # the step before
        self._is_ahead = False

    def resume(self) -> None:
        """The loop goes on with the step."""
        self._resumed = time.perf_counter()

    def pause(self) -> None:
        """Other tasks run, until the step's results are there."""
        self._host_seconds += time.perf_counter() - self._resumed

    def end_step(self, *, has_follower: bool) -> None:
        """The step's results have been processed. With `has_follower`, the next one is under way."""
        self.pause()
        now = time.perf_counter()
        if self._speculation is not None and self._ended is not None:
            self._speculation.observe(self._host_seconds, now - self._ended, is_ahead=self._is_ahead)
        self._ended, self._host_seconds, self._is_ahead = now, 0.0, has_follower

    def reset(self) -> None:
        """Nothing is to be computed: the time until the next step counts for none."""
        self._ended, self._host_seconds, self._is_ahead = None, 0.0, False


class Engine(LivingEngine):
    """Runs an `EngineCore` for as many clients as there are. Everything but the model's own thread is on one event loop: no locks."""

    def __init__(self, core: EngineCore) -> None:
        super().__init__()
        self._core = core
        self._streams: dict[str, DeltaStream] = {}
        self._wake = asyncio.Event()
        self._paused: asyncio.Event | None = None  # while steps are paused: set once none is in flight
        self._fault: Exception | None = None  # why the model cannot compute any more
        self._unpublished: DeltasByRequest = {}  # of the step before
        self._idle_since = time.monotonic()
        self._optimization = threading.Thread(target=core.runner.optimize, name="optimize", daemon=True)
        self._end_runner: Callable[[], object] = core.runner.shutdown
        self.profiler = StepProfiler(core.runner)
        self.sleeper = Sleeper(core, self)

    async def start(self) -> None:
        """Begins to serve. An engine is started once: the thread that its model runs in ends with it."""
        loop = asyncio.get_running_loop()
        self._core.masks.wake = functools.partial(_set_from_elsewhere, loop, self._wake)
        self._life.begin(self._run, "engine")
        self._optimization.start()
        fail = weakref.WeakMethod(self._fail)
        self._core.runner.group.when_failed(lambda: call_from_elsewhere(loop, fail))
        self._end_runner = weakref.finalize(self, _end_runner, self._core.runner, self._optimization)

    async def stop(self, drain_seconds: float = 0.0) -> None:
        """Takes no more requests, lets those that run finish for `drain_seconds`, ends the others and waits for the step in flight."""
        self._life.is_accepting = False
        if not self._life.has_begun:
            return
        if not await self._life.drain(drain_seconds, lambda: self._streams):
            logger.warning("requests cut off by the shutdown: %d", len(self._streams))
        self._end_all(FinishReason.ABORT)
        await self._life.end()
        # A thread that ends here: one of asyncio's would hold the engine's memory for a moment longer than the caller expects.
        with ThreadPoolExecutor(1, "penstock-stop") as executor:
            await asyncio.get_running_loop().run_in_executor(executor, self._close)

    def _fail(self) -> None:
        """A rank has ended, while a step was in flight or not."""
        self._end_all(FinishReason.ERROR, ENGINE_FAILED)
        self._life.fail()

    def _close(self) -> None:
        self._core.close()
        self._end_runner()
        self.sleeper.close()
        for thread in self._core.runner.readers:  # which hold the memory that the next of several models may be waiting for
            thread.join()

    @property
    def core(self) -> EngineCore:
        """What it runs, to be looked at and observed on its own loop."""
        return self._core

    def stats(self) -> EngineStats:
        return self._core.stats()

    def check_integrity(self) -> None:
        self._core.check_integrity()

    def check_admission(self, priority: int = 0) -> None:
        """Raises `EngineUnavailable` or `QueueFull` where a request would be refused anyway: to be called before preparing one."""
        self._life.check_accepting()
        if not self.sleeper.is_awake:
            self.sleeper.check_admission()
        self._core.scheduler.waiting.check_admission(priority)

    def check_accepting(self) -> None:
        """Raises `EngineUnavailable` where it takes no requests, now or ever again."""
        self._life.check_accepting()

    async def generate(self, request: Request) -> AsyncGenerator[SequenceDelta, None]:
        """The deltas of the request's n sequences as they come; each one's last has a `finish_reason`. Closing the iterator aborts.

        Raises `EngineUnavailable`, `QueueFull` or `InvalidRequest` before the first delta.
        """
        stream = _QueuedStream(request)
        await self.open(stream)
        num_unfinished = request.params.n
        try:
            while num_unfinished:
                deltas = stream.take()
                if not deltas:
                    await stream.changed()
                    continue
                for delta in deltas:
                    num_unfinished -= delta.finish_reason is not None
                    if request.is_exported and not num_unfinished and delta.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
                        delta.transfer_state = await self._export(request.request_id)
                    yield delta
        finally:
            self.close(request.request_id)

    async def open(self, stream: DeltaStream) -> None:
        """Adds the stream's request, whose deltas are put into it until `close`. Raises as `generate`."""
        request = stream.request.expanded()
        if len(request.prompt_token_ids) >= LONG_PROMPT:
            self.check_admission(request.priority)
            await asyncio.to_thread(self._core.hash_prompt, request)
        if request.ends_within:
            await asyncio.to_thread(self._core.find_end, request)
        if not self.sleeper.is_awake:
            await self.sleeper.admit()
        self._life.check_accepting()
        if request.request_id in self._streams:
            raise InvalidRequest(f"request id {request.request_id!r} is in use", "request_id")
        try:
            self._core.add(request)
        except Exception as error:
            if is_device_lost(error):  # found out before any step: without one, none would ever end the engine
                self.fail(error)
                raise EngineUnavailable(ENGINE_FAILED) from error
            raise
        self._streams[request.request_id] = stream
        self._wake.set()

    def close(self, request_id: str) -> None:
        """Aborts what is left of a request that has been opened, and puts nothing more into its stream."""
        del self._streams[request_id]
        self._core.abort(request_id)
        self._wake.set()
        if not self._streams:
            self._idle_since = time.monotonic()
            self._life.idle.set()

    def requests(self, model_name: str = "") -> list[RequestInfo]:
        """Those that are open, the oldest first."""
        opened = ((stream.request, stream.opened_at) for stream in self._streams.values())
        return requests_of(self._core.scheduler, opened, model_name)

    async def _export(self, request_id: str) -> bytes:
        """Writes the full blocks of a prompt whose sequences have ended where other processes receive them. Raises as `export`."""
        runner, transfer = self._core.runner, self._core.transfer
        assert transfer is not None, "`add` refuses the request"

        async def read(group: int, blocks: list[int]) -> Tensor:
            return await asyncio.wrap_future(runner.thread.submit(lambda: runner.cache.read_blocks(group, blocks).cpu()))

        return await transfer.export(request_id, read)

    @property
    def num_requests(self) -> int:
        return len(self._streams)

    @property
    def idle_seconds(self) -> float:
        """How long no request has been open; 0 while one is."""
        return 0.0 if self._streams else time.monotonic() - self._idle_since

    def abort(self, request_id: str) -> bool:
        """Ends a request for an operator, with an error that clients do not retry after; False where none of this id is open."""
        if (stream := self._streams.get(request_id)) is None:
            return False
        self._end(stream, FinishReason.ABORT, ABORTED)
        return True

    def abort_all(self, reason: str) -> None:
        """Ends all requests, for a reason that their clients can do nothing about."""
        self._end_all(FinishReason.ABORT, reason)

    async def drain(self, seconds: float) -> bool:
        """Waits so long for the requests that are open; False where some are left then."""
        return await self._life.drain(seconds, lambda: self._streams)

    async def optimized(self) -> None:
        """Returns when the threads have ended that prepare, beside the first steps, what makes later ones or the next start faster."""
        for thread in (self._optimization, *self._core.runner.readers):
            await asyncio.to_thread(thread.join)

    async def pause(self) -> None:
        """Returns when no step is in flight; none is launched until `resume`. Requests are added, aborted and expire all the same.

        Raises `EngineUnavailable` where no step is launched any more.
        """
        self._life.check_accepting()
        assert self._paused is None
        self._paused = asyncio.Event()
        self._wake.set()
        await self._paused.wait()

    def resume(self) -> None:
        """Steps are launched again."""
        self._paused = None
        self._idle_since = time.monotonic()
        self._wake.set()

    def fail(self, error: Exception) -> None:
        """Ends the engine before its next step: the model cannot compute any more."""
        self._fault = error
        self._wake.set()

    def end_sequence(self, request_id: str, index: int, num_tokens: int) -> None:
        """Ends a sequence of an open request after its first `num_tokens`: its text, which another process reads, ends there."""
        self._streams[request_id].unfinished.discard(index)
        self._core.end_sequence(request_id, index, num_tokens)
        self._wake.set()

    async def _run(self) -> None:
        try:
            await (self._run_stages() if self._core.max_in_flight > 1 else self._run_steps())
        except Exception:  # a defect of the scheduler, or the device is lost: the engine ends, and no client may be left waiting
            logger.exception("The engine has failed")
            self._publish(self._unpublished)
            self._end_all(FinishReason.ERROR, ENGINE_FAILED)
        finally:
            if self._paused is not None:
                self._paused.set()

    async def _run_steps(self) -> None:
        flight: _InFlight | None = None
        clock = _StepClock(self._core)
        while True:
            clock.resume()
            self._expire()
            flight = flight or self._launch(self._schedule())
            follower = None
            if flight is not None and flight.batch is not None and self._paused is None:
                follower = self._launch(self._core.schedule_ahead(flight.step, flight.batch))
            self._publish(self._unpublished)  # of the previous step, while the next one is computed
            clock.pause()
            if flight is None:
                clock.reset()
                self._wake.clear()
                await self._awake()
                continue
            await done(flight.handle.awaited())
            clock.resume()
            if not self._collect(flight) and follower is not None:
                self._core.cancel_step(follower.step)
                follower = None
            flight = follower
            clock.end_step(has_follower=flight is not None)

    async def _run_stages(self) -> None:
        """The same with as many steps in flight as the model has stages, each of other sequences."""
        flights: deque[_InFlight] = deque()
        try:
            while True:
                self._expire()
                while len(flights) < self._core.max_in_flight and (flight := self._launch(self._schedule_beside(flights))) is not None:
                    flights.append(flight)
                self._publish(self._unpublished)
                if not flights:
                    self._wake.clear()
                    await self._awake()
                    continue
                await done(flights[0].handle.awaited())
                if not self._collect(flights.popleft()):
                    for other in flights:  # they may read what the failed step was to write
                        await done(other.handle.awaited())
                        self._core.cancel_step(other.step)
                    flights.clear()
        finally:
            for flight in flights:  # the other ranks send what they have computed
                flight.handle.awaited()

    def _expire(self) -> None:
        for request_id, last in self._core.expire().items():
            self._unpublished.setdefault(request_id, []).extend(last)

    def _schedule_beside(self, flights: Collection[_InFlight]) -> Step | None:
        if not flights:
            return self._schedule()
        return None if self._paused is not None else self._core.schedule_beside([flight.step for flight in flights])

    def _schedule(self) -> Step | None:
        """The next step, where none is in flight. Raises `_fault`."""
        if self._fault is not None:
            raise self._fault
        if self._paused is not None:
            self._paused.set()
            return None
        with self._span("schedule"):
            return self._core.schedule()

    def _span(self, name: str, step: Step | None = None) -> AbstractContextManager[None]:
        """A part of a step, for the profile that is taken, if one is."""
        return NOTHING if self.profiler.recording is None else self.profiler.span(self.profiler.recording, name, step)

    async def _awake(self) -> None:
        """Waits until a request is added or aborted or, where a mask is late, until that is there or may be over its time limit."""
        if not self._core.has_work:
            await self._wake.wait()
            return
        with suppress(TimeoutError):  # not by `wait_for`, which may swallow the cancellation that ends the engine
            async with asyncio.timeout(self._core.deadlines.seconds_left(PATIENCE)):
                await self._wake.wait()

    def _launch(self, step: Step | None) -> _InFlight | None:
        if step is None:
            return None
        try:
            with self._span("build", step):
                batch = self._core.build(step)
            return _InFlight(step, batch, self._core.runner.launch(batch))
        except Exception as error:  # collected like a failure of the model
            return _InFlight(step, None, StepHandle.failed(error))

    def _collect(self, flight: _InFlight) -> bool:
        """Processes the results of a step; False where it has failed, and those in flight behind it are to be cancelled."""
        step = flight.step
        try:
            output = flight.handle.collect()
            assert flight.batch is not None
            with self._span("update", step):
                self._unpublished = self._core.update(step, flight.batch, output)
            self._life.num_failed_steps = 0
            return True
        except Exception as error:  # whatever the model raised: it ends the requests of this step and nothing else
            if is_device_lost(error) or isinstance(error, RankFailed):
                raise
            if isinstance(error, ImageFailed) and flight.batch is not None:
                logger.exception("An image cannot be encoded")
                self._unpublished = self._core.fail_image(step, flight.batch, error)
                return False
            if is_out_of_memory(error) and flight.batch is not None and self._core.retry_smaller(step, flight.batch):
                return False
            logger.exception("A step over %d sequences failed", len(step.num_tokens))
            self._life.num_failed_steps += 1
            self._unpublished = self._core.fail(step, STEP_FAILED)
            self._end_unreported(step, self._unpublished)
            return False

    def _end_unreported(self, step: Step, fresh: DeltasByRequest) -> None:
        """Adds a last delta for sequences that ended in an update which then failed, and so lost theirs."""
        for request in {sequence.request.request_id: sequence.request for sequence in step.num_tokens}.values():
            stream = self._streams.get(request.request_id)
            if stream is None or stream.request is not request:  # aborted meanwhile; the id may belong to another request
                continue
            self._core.abort(request.request_id)
            deltas = fresh.setdefault(request.request_id, [])
            lost = stream.unfinished - {delta.index for delta in deltas}
            deltas += [SequenceDelta(index, finish_reason=FinishReason.ERROR, error=STEP_FAILED) for index in sorted(lost)]

    def _publish(self, deltas_by_request: DeltasByRequest) -> None:
        """Puts the deltas into their requests' streams."""
        for request_id, deltas in deltas_by_request.items():
            stream = self._streams.get(request_id)
            if stream is not None:
                stream.put(deltas)
        deltas_by_request.clear()

    def _end_all(self, reason: FinishReason, error: str | None = None) -> None:
        """A last delta for every sequence that has had none."""
        for stream in self._streams.values():
            self._end(stream, reason, error)

    def _end(self, stream: DeltaStream, reason: FinishReason, error: str | None) -> None:
        stream.put([SequenceDelta(index, finish_reason=reason, error=error) for index in sorted(stream.unfinished)])
        self._core.abort(stream.request.request_id)
        self._wake.set()


def _end_runner(runner: ModelRunner, optimization: threading.Thread) -> None:
    # When an engine is stopped, and at exit for those that are not: an interpreter that ends while a thread is in native code aborts.
    with runner.group.last_step():
        runner.shutdown()
    optimization.join(OPTIMIZATION_SECONDS)
    runner.group.close()


def call_from_elsewhere(loop: asyncio.AbstractEventLoop, method: "weakref.WeakMethod[Callable[[], None]]") -> None:
    def call() -> None:
        own = method()
        if own is not None:
            own()

    with suppress(RuntimeError):  # the loop is closed
        loop.call_soon_threadsafe(call)


def _set_from_elsewhere(loop: asyncio.AbstractEventLoop, event: asyncio.Event) -> None:
    with suppress(RuntimeError):  # the loop is closed: no task waits any more
        loop.call_soon_threadsafe(event.set)
