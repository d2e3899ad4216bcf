"""Sleep: an engine that computes nothing returns the memory of its KV cache, and of its weights, to the system until it is woken.

    AWAKE → FALLING_ASLEEP → ASLEEP → WAKING → AWAKE
            FALLING_ASLEEP → AWAKE     its requests did not end in time, it was woken, or the weights could not be written

At level 1 the KV cache is freed; at level 2 the weights are too. They are written to a file without a name first, from which waking reads
them. Nothing is moved: every tensor stays at its address, without memory behind it, so that nothing that refers to one has to know.
"""

import asyncio
import enum
import logging
import time
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar, get_args

from torch import Tensor, nn

from penstock.engine.core import EngineCore
from penstock.engine.errors import ENGINE_FAILED, Conflict, EngineUnavailable, InvalidRequest, ModelAsleep
from penstock.engine.runner import ModelRunner
from penstock.engine.scheduling.scheduler import Scheduler
from penstock.engine.scheduling.step import Step
from penstock.engine.system import memory
from penstock.engine.system.cache import cache_directory, make_private
from penstock.engine.system.memory import Region, SpilledRegions, regions_of
from penstock.engine.system.process import release_heap
from penstock.engine.weights.linear import PackedLinear, packed_weight

logger = logging.getLogger(__name__)

T = TypeVar("T")
SleepMode = Literal["wait", "abort", "keep"]
LEVELS = (1, 2)
WAIT_SECONDS = 60.0  # for running requests to end, unless the operator says
MIN_IDLE_SECONDS = 0.1  # between two looks at how long the engine has been idle
RETRY_AFTER = 10  # seconds, for clients that are refused
ASLEEP = "the model is asleep: an operator has to wake it"
PUT_TO_SLEEP = "the request was aborted: the model has been put to sleep"


class SleepState(enum.StrEnum):
    AWAKE = "awake"
    FALLING_ASLEEP = "falling_asleep"
    ASLEEP = "asleep"
    WAKING = "waking"


TRANSITIONS = {
    SleepState.AWAKE: {SleepState.FALLING_ASLEEP},
    SleepState.FALLING_ASLEEP: {SleepState.ASLEEP, SleepState.AWAKE},
    SleepState.ASLEEP: {SleepState.WAKING},
    SleepState.WAKING: {SleepState.AWAKE},
}


@dataclass(frozen=True, slots=True)
class SleepStatus:
    """`seconds` is how long the state has lasted. Bytes are those that the last change to sleep has freed, by the kernel's count."""

    state: SleepState
    level: int
    seconds: float
    wakes_on_request: bool
    freed_kv_cache_bytes: int
    freed_weight_bytes: int


class PausableEngine(Protocol):
    """The part of `Engine` that sleeping needs."""

    @property
    def num_requests(self) -> int: ...

    @property
    def idle_seconds(self) -> float:
        """How long it has had no request; 0 while it has one."""
        ...

    def check_accepting(self) -> None: ...

    def abort_all(self, reason: str) -> None: ...

    async def drain(self, seconds: float) -> bool: ...

    async def optimized(self) -> None:
        """Returns when nothing but steps reads the weights any more."""
        ...

    async def pause(self) -> None:
        """Returns when no step is in flight; none is launched until `resume`. Raises `EngineUnavailable` where none would be anyway."""
        ...

    def resume(self) -> None: ...

    def fail(self, error: Exception) -> None:
        """The model cannot compute any more."""
        ...


class Sleeper:
    """Puts an engine to sleep and wakes it. Belongs to the engine's loop; `on_change` is called there with each change of the state.

    Changes follow one another: one that is asked for during another waits for it, and does nothing where the state is as wanted then.
    """

    def __init__(self, core: EngineCore, engine: PausableEngine) -> None:
        self.state = SleepState.AWAKE
        self.is_awake = True  # as `state` says: what each request looks at
        self.level = 0
        self.wakes_on_request = False
        self.on_change: Callable[[], None] = lambda: None
        self._core = core
        self._engine = engine
        self._change = asyncio.Lock()
        self._wake_wanted = asyncio.Event()
        self._since = time.monotonic()
        self._memory = ReleasedMemory(core.runner)

    def status(self) -> SleepStatus:
        return SleepStatus(
            self.state,
            self.level,
            time.monotonic() - self._since,
            self.wakes_on_request,
            self._memory.num_cache_bytes,
            self._memory.num_weight_bytes,
        )

    def check_can_sleep(self) -> None:
        """Raises `InvalidRequest` where memory cannot be freed and filled again in place."""
        runner = self._core.runner
        device = runner.loaded.device.type
        if runner.group.size > 1:
            raise InvalidRequest(f"a model over {runner.group.size} ranks cannot sleep", "level")
        if device != "cpu" or not memory.can_release():
            raise InvalidRequest(f"only a model on the CPU, on Linux, can sleep, and this one is on {device}", "level")

    def check_admission(self) -> None:
        """Raises `ModelAsleep` where a request would not wake the model."""
        if not self.is_awake and not self.wakes_on_request:
            raise ModelAsleep(ASLEEP, RETRY_AFTER)

    async def admit(self) -> None:
        """Wakes the model for a request, where it has to. Raises as `check_admission`."""
        while not self.is_awake:
            self.check_admission()
            await self.wake()

    async def sleep(
        self, level: int = 1, mode: SleepMode = "wait", seconds: float = WAIT_SECONDS, *, wakes_on_request: bool = False
    ) -> SleepStatus:
        """Frees the KV cache, at level 2 the weights too. A model that sleeps is put to sleep more deeply, never less.

        Running requests end first, within so many seconds (`wait`), are aborted (`abort`), or go on once the model is awake (`keep`).
        Raises `InvalidRequest` for a level, mode or device that is not served, and `Conflict` where the model stays awake.
        """
        if level not in LEVELS:
            raise InvalidRequest(f"`level` must be 1 (frees the KV cache) or 2 (frees the weights too), got {level!r}", "level")
        if mode not in get_args(SleepMode):
            raise InvalidRequest(f"`mode` must be one of {', '.join(get_args(SleepMode))}, got {mode!r}", "mode")
        self.check_can_sleep()
        return await completed(self._sleep(level, mode, seconds, wakes_on_request))

    async def wake(self) -> SleepStatus:
        """Reads the weights again, where they have been freed; the KV cache is empty. Does nothing while the model is awake.

        Raises `EngineUnavailable` where they cannot be read: the engine has failed then.
        """
        self._wake_wanted.set()
        return await completed(self._wake())

    def close(self) -> None:
        """The engine has stopped: what the weights have been written to is not needed any more."""
        self._memory.close()

    async def sleep_when_idle(self, seconds: float, level: int) -> None:
        """Puts the model to sleep whenever it has had no request for so long; the next request wakes it. Never returns."""
        while True:
            await asyncio.sleep(max(MIN_IDLE_SECONDS, seconds - self._engine.idle_seconds))
            if not self.is_awake or self._engine.idle_seconds < seconds:
                continue
            try:
                await self.sleep(level, "wait", 0, wakes_on_request=True)
            except Conflict as reason:  # a request came in the same moment, or the disk is full
                logger.info("the model stays awake: %s", reason)
                await asyncio.sleep(seconds)

    async def _sleep(self, level: int, mode: SleepMode, seconds: float, wakes_on_request: bool) -> SleepStatus:
        async with self._change:
            self._engine.check_accepting()
            if self.state is SleepState.ASLEEP:
                if level > self.level:
                    await self._free_weights()
                    self.level = level
                self.wakes_on_request = wakes_on_request
                self.on_change()
                return self.status()
            self._wake_wanted.clear()
            self.wakes_on_request = wakes_on_request
            self._become(SleepState.FALLING_ASLEEP)
            try:
                await self._end_requests(mode, seconds)
                await self._engine.optimized()
                await self._engine.pause()
                self._engine.check_accepting()
                if level == 2:
                    await self._free_weights()
                await self._free_cache()
            except BaseException:
                await self._restore()
                self._engine.resume()
                self._become(SleepState.AWAKE)
                raise
            self.level = level
            self._become(SleepState.ASLEEP)
            return self.status()

    async def _wake(self) -> SleepStatus:
        async with self._change:
            if self.state is SleepState.ASLEEP:
                self._become(SleepState.WAKING)
                await self._restore()
                self.level = 0
                self._become(SleepState.AWAKE)
                self._engine.resume()
            return self.status()

    async def _restore(self) -> None:
        """Raises `EngineUnavailable` where the weights cannot be read: the engine has failed then."""
        try:
            await asyncio.to_thread(self._memory.restore)
        except OSError as error:
            self._engine.fail(error)
            raise EngineUnavailable(ENGINE_FAILED) from error

    async def _end_requests(self, mode: SleepMode, seconds: float) -> None:
        """Raises `Conflict` where some are left."""
        if mode == "keep":
            return
        if mode == "abort":
            self._engine.abort_all(PUT_TO_SLEEP)
        ends = asyncio.create_task(self._engine.drain(seconds))
        woken = asyncio.create_task(self._wake_wanted.wait())
        await asyncio.wait([ends, woken], return_when=asyncio.FIRST_COMPLETED)
        for task in (ends, woken):
            task.cancel()
        if self._wake_wanted.is_set():
            raise Conflict("the model was woken before it slept")
        if not ends.result():
            number = self._engine.num_requests
            raise Conflict(f"{number} requests have not ended after {seconds:g} s: abort them, or use mode `abort` or `keep`")

    async def _free_weights(self) -> None:
        try:
            await self._in_model_thread(self._memory.free_weights)
        except OSError as error:
            raise Conflict(f"the weights cannot be written: {error.strerror or error}; level 1 writes nothing") from error

    async def _free_cache(self) -> None:
        # From here on no block may be written, and no cached block found.
        scheduler = self._core.scheduler
        preempt_all(scheduler)
        # Blocks that are being loaded from --kv-cache-dir are written in the model's thread: those are over when this is.
        await self._in_model_thread(lambda: None)
        if scheduler.persistence is not None:
            scheduler.persistence.loader.update(0)
        forget_prefixes(scheduler)
        assert scheduler.pool.num_free == scheduler.pool.num_blocks, "a block is held without a sequence"
        await self._in_model_thread(self._memory.free_cache)

    async def _in_model_thread(self, work: Callable[[], None]) -> None:
        await asyncio.wrap_future(self._core.runner.thread.submit(work))

    def _become(self, state: SleepState) -> None:
        assert state in TRANSITIONS[self.state]
        self.state, self._since = state, time.monotonic()
        self.is_awake = state is SleepState.AWAKE
        self.on_change()


async def completed(work: Coroutine[Any, Any, T]) -> T:
    """Its result. A client that disconnects meanwhile does not stop it half-way."""
    return await asyncio.shield(asyncio.create_task(work))


def preempt_all(scheduler: Scheduler) -> None:
    """Has every sequence wait, without any blocks and not for the disk. No step may be in flight."""
    scheduler.cancel_step(Step(num_tokens=dict.fromkeys(scheduler.running, 0)))
    cancel_loads(scheduler)
    if scheduler.persistence is not None and scheduler.persistence.transfer is not None:
        scheduler.persistence.transfer.held.clear()


def cancel_loads(scheduler: Scheduler) -> None:
    """Has no sequence wait for the disk: it computes its prompt."""
    if scheduler.persistence is not None:
        for sequence in scheduler.waiting:
            if sequence.load is not None:
                scheduler.persistence.loader.cancel(sequence.load)


def forget_prefixes(scheduler: Scheduler) -> int:
    """Makes all cached blocks and snapshots of states unfindable; sequences keep what they hold. Returns how many blocks there were."""
    pools = [scheduler.pool] if scheduler.states is None else [scheduler.pool, scheduler.states.pool]
    num_cached = scheduler.pool.num_cached
    for pool in pools:
        pool.clear()
    return num_cached


class ReleasedMemory:
    """The memory of an engine's KV cache and weights. Belongs to the thread of the model, while no step is in flight.

    The file of the weights is written once: they never change.
    """

    def __init__(self, runner: ModelRunner) -> None:
        self.num_cache_bytes = 0
        self.num_weight_bytes = 0
        self._runner = runner
        self._weights: list[Tensor] = []  # held while they have no memory: no other memory may get their addresses
        self._spilled: SpilledRegions | None = None

    def free_cache(self) -> None:
        self.num_cache_bytes = _release(regions_of(cache_of(self._runner)))

    def free_weights(self) -> None:
        """Raises `OSError` where they cannot be written; they are still there then."""
        weights = list(weights_of(self._runner))
        regions = regions_of(weights)
        if self._spilled is None or self._spilled.regions != regions:
            if self._spilled is not None:
                self._spilled.close()
            self._spilled = SpilledRegions(regions, spill_directory())
        self._weights = weights
        self.num_weight_bytes = _release(regions)

    def restore(self) -> None:
        """Raises `OSError` where the weights cannot be read."""
        if self._weights:
            assert self._spilled is not None
            self._spilled.restore()
        self._weights = []

    def close(self) -> None:
        if self._spilled is not None:
            self._spilled.close()


def _release(regions: list[Region]) -> int:
    num_bytes = memory.resident_bytes(regions)
    memory.release(regions)
    release_heap()
    return num_bytes


def spill_directory() -> Path:
    """Where weights are written. Raises `OSError` or `ConfigurationError` where there is no such place."""
    directory = cache_directory() / "asleep"
    make_private(directory)
    return directory


def cache_of(runner: ModelRunner) -> list[Tensor]:
    """What is empty after sleep: keys and values, those of a drafter, and recurrent states."""
    caches = [runner.cache] if runner.drafter is None else [runner.cache, runner.drafter.cache]
    states = [] if runner.states is None else runner.states.memory
    return [*(tensor for cache in caches for tensor in cache.tensors), *states]


def weights_of(runner: ModelRunner) -> Iterable[Tensor]:
    """The tensors of the model and what runs beside it, but for those of its caches."""
    caches = {tensor.untyped_storage().data_ptr() for tensor in cache_of(runner)}
    loaded, drafter, head = runner.loaded, runner.drafter, runner.greedy_head
    modules: list[nn.Module] = [loaded.model]
    modules += [] if loaded.vision is None else [loaded.vision.model]
    modules += [] if drafter is None else [drafter.module]
    modules += [] if head is None else head.weights
    for tensor in (tensor for module in modules for tensor in _tensors_of(module)):
        if tensor.is_mkldnn or tensor.untyped_storage().data_ptr() not in caches:
            yield tensor


def _tensors_of(module: nn.Module) -> Iterable[Tensor]:
    yield from module.parameters()
    yield from module.buffers()
    yield from (packed_weight(linear) for linear in module.modules() if isinstance(linear, PackedLinear))
