"""The models of one server: loaded on first use, unloaded where another one needs their memory, and never while a request uses them.

Everything but loading itself is on one event loop: no locks. Counters of metrics go on where a model's last load left them.
"""

import asyncio
import logging
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from penstock.engine.errors import ConfigurationError, EngineUnavailable, ModelNotLoaded, NoSuchModel, QueueFull
from penstock.engine.pooling.files import ModelKind
from penstock.serving.context import ModelContext, ModelDescription, SharedContext
from penstock.serving.models.file import ModelSpec, gib
from penstock.serving.observability.exposition import metrics_text
from penstock.serving.observability.metrics import PREFIX, ReportCollector, RequestMetrics, ServerMetrics, merged_registry, report_of
from penstock.serving.responses.store import ResponseStore

log = logging.getLogger(__name__)

TURN_SECONDS = 5.0
PAUSE_SECONDS = 5.0
POLL_SECONDS = 0.25  # how often, while requests wait, the pool checks whether a turn has ended
OF_NOW = ("gauge", "info")  # types of metrics that say nothing of a model that is no longer loaded


class ModelState(StrEnum):
    """A load that fails leads from LOADING to FAILED, from where the next request tries again."""

    UNLOADED = "unloaded"
    LOADING = "loading"
    LOADED = "loaded"
    UNLOADING = "unloading"
    FAILED = "failed"


@dataclass(slots=True, eq=False)
class Resident:
    """A model that is loaded, with the memory that it takes. `closing` ends what was begun for it, the last first, when it is unloaded."""

    context: ModelContext
    num_bytes: int
    summary: str = ""
    closing: AsyncExitStack = field(default_factory=AsyncExitStack)
    closed: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(frozen=True, slots=True)
class Expectation:
    """What the files of a model say before it is loaded: the memory that it will take, and its kind."""

    num_bytes: int
    kind: ModelKind


class ModelLoader(Protocol):
    async def fetch(self, spec: ModelSpec) -> Expectation:
        """Downloads and converts the model where that is to be done. Raises `ConfigurationError`."""
        ...

    async def load(self, spec: ModelSpec) -> Resident:
        """A model whose engine runs. Raises `ConfigurationError` where it cannot be served."""
        ...

    async def unload(self, resident: Resident) -> None:
        """Closes it."""
        ...

    async def free(self) -> None:
        """Gives the memory of what has been unloaded back to the operating system. Nothing refers to it any more."""
        ...


@dataclass(slots=True, eq=False)
class PooledModel:
    """One model of the pool. `num_bytes` is what it took when it was last loaded, before that what is expected, once its files are there.

    `num_users` are the requests that use it; `waiting` are those that wait for it, with their times of arrival. An unload that was asked
    for `is_due` as soon as no request uses it.
    """

    spec: ModelSpec
    is_pinned: bool
    num_bytes: int = 0
    is_fetched: bool = False
    fetching: asyncio.Task[None] | None = None
    kind: ModelKind | None = None
    tasks: tuple[str, ...] = ()
    max_model_len: int | None = None
    state: ModelState = ModelState.UNLOADED
    resident: Resident | None = None
    num_users: int = 0
    waiting: dict[asyncio.Future[Resident], float] = field(default_factory=dict)
    last_used: float = 0.0
    loaded_at: float = 0.0
    failed_at: float = 0.0
    error: str | None = None
    is_due: bool = False
    num_loads: int = 0
    num_failures: int = 0
    num_unloads: int = 0
    load_seconds: float = 0.0

    @classmethod
    def of(cls, spec: ModelSpec) -> "PooledModel":
        tasks = () if spec.kind is None else (spec.kind,)
        return cls(spec, spec.pin, kind=spec.kind, tasks=tasks, max_model_len=spec.arguments.engine.max_model_len)

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def waiting_since(self) -> float:
        """When the first of the requests arrived that wait."""
        return min(self.waiting.values())

    @property
    def retry_after(self) -> int:
        """In whole seconds, after which refused requests may be retried: the duration of its last load."""
        return max(1, round(self.load_seconds))

    @property
    def must_leave(self) -> bool:
        """Whether it is loaded, and has to be unloaded whatever else happens: that was asked for, or its engine has failed."""
        return self.resident is not None and (self.is_due or not self.resident.context.engine.is_healthy)

    def lend(self) -> None:
        """To all requests that wait."""
        assert self.resident is not None
        for future in self.waiting:
            if not future.done():
                self.num_users += 1
                future.set_result(self.resident)
        self.waiting.clear()

    def refuse(self, kind: type[EngineUnavailable], message: str, retry_after: int = 1) -> None:
        """To all requests that wait, each with an error of its own: one that has been raised keeps the frames of its request."""
        for future in self.waiting:
            if not future.done():
                future.set_exception(kind(message, retry_after))
        self.waiting.clear()


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolLimits:
    """`num_bytes` bounds the memory of loaded models; a request waits for `wait_seconds` at most, as one of `max_waiting` for its model.

    A busy model is left to its own requests for `turn_seconds` while another one is waited for. After a load that failed, requests get
    its error at once for `pause_seconds`.
    """

    num_bytes: int
    wait_seconds: float
    max_waiting: int = 1024
    turn_seconds: float = TURN_SECONDS
    pause_seconds: float = PAUSE_SECONDS

    @property
    def retry_after(self) -> int:
        """After a load that failed, in whole seconds."""
        return max(1, round(self.pause_seconds))


@dataclass(frozen=True, slots=True)
class Plan:
    """What is next: `unload` before all else, then `load`. Further requests for the `held` models wait, so that these become idle."""

    unload: PooledModel | None = None
    load: PooledModel | None = None
    held: frozenset[PooledModel] = frozenset()


class ModelPool:
    """Lends models to requests; loads and unloads them for that, one after the other.

    A model that requests wait for is loaded as soon as there is memory for it, in place of idle ones if need be: the least recently used
    first, pinned ones never. Where busy ones are in its way for longer than their turn, their further requests wait.
    """

    def __init__(
        self, specs: Sequence[ModelSpec], loader: ModelLoader, limits: PoolLimits, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.limits = limits
        self._loader = loader
        self._clock = clock
        self._models = [PooledModel.of(spec) for spec in specs]
        self._by_name = {name: model for model in self for name in (*model.spec.model_names, *model.spec.adapter_names)}
        self._held: frozenset[PooledModel] = frozenset()
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._is_accepting = False

    def __iter__(self) -> Iterator[PooledModel]:
        """In the order of the file."""
        return iter(self._models)

    @property
    def names(self) -> tuple[str, ...]:
        """All that requests may give: the models', then the adapters'."""
        own = (name for model in self for name in model.spec.model_names)
        return (*own, *(name for model in self for name in model.spec.adapter_names))

    @property
    def num_bytes(self) -> int:
        """The memory of the models that are loaded, or being unloaded."""
        return sum(model.num_bytes for model in self if model.resident is not None or model.state is ModelState.UNLOADING)

    def find(self, name: str) -> PooledModel:
        """Raises `NoSuchModel`."""
        if name not in self._by_name:
            raise NoSuchModel(f"The model `{name}` does not exist. Served here: {', '.join(self.names)}.", "model")
        return self._by_name[name]

    # What requests do.

    def take(self, model: PooledModel) -> Resident | None:
        """Lends it where that can be done at once. To be followed by `release`."""
        if model.resident is None or model in self._held:
            return None
        model.num_users += 1
        return model.resident

    async def wait_for(self, model: PooledModel) -> Resident:
        """Lends it once it is loaded. To be followed by `release`.

        Raises `ModelNotLoaded` where it cannot be loaded, `EngineUnavailable` where that takes too long, and `QueueFull`.
        """
        self.check_admission()
        now = self._clock()
        if model.error is not None and now - model.failed_at < self.limits.pause_seconds:
            raise ModelNotLoaded(model.error, self.limits.retry_after)
        if len(model.waiting) >= self.limits.max_waiting:
            message = f"{len(model.waiting)} requests wait for the model `{model.name}` (--max-waiting-requests)"
            raise QueueFull(message, model.retry_after)
        lent: asyncio.Future[Resident] = asyncio.get_running_loop().create_future()
        model.waiting[lent] = now
        self._changed.set()
        try:
            async with asyncio.timeout(self.limits.wait_seconds or None):
                return await lent
        except BaseException as error:
            if lent.done() and not lent.cancelled() and lent.exception() is None:
                self.release(model)  # it was lent just when the wait ended
            if isinstance(error, TimeoutError):
                raise self._too_late(model) from None
            raise
        finally:
            model.waiting.pop(lent, None)

    @contextmanager
    def keep(self, model: PooledModel) -> Iterator[None]:
        """For work that goes on after the request that the model is lent to."""
        assert model.num_users, "it is lent to no request"
        model.num_users += 1
        try:
            yield
        finally:
            self.release(model)

    def release(self, model: PooledModel) -> None:
        model.num_users -= 1
        model.last_used = self._clock()
        if not model.num_users:
            self._changed.set()

    def _too_late(self, model: PooledModel) -> EngineUnavailable:
        why = "is still being loaded" if model.state is ModelState.LOADING else "waits for memory, which other models use"
        return EngineUnavailable(f"the model `{model.name}` {why}: try again later", model.retry_after)

    # What the operator does.

    async def load(self, model: PooledModel) -> None:
        """Raises as `wait_for`."""
        if self.take(model) is None:
            await self.wait_for(model)
        self.release(model)

    async def unload(self, model: PooledModel) -> None:
        """Returns once no request uses it, and its memory is free. The next request loads it again."""
        if model.resident is not None:
            closed, model.is_due = model.resident.closed, True  # a reference to the model would keep its memory
            self._changed.set()
            await closed.wait()

    def pin(self, model: PooledModel, *, is_pinned: bool = True) -> None:
        """From now on it is never unloaded for another one or for being idle, or is again. One that is not loaded stays so."""
        model.is_pinned = is_pinned
        self._changed.set()

    # The life of the pool, as that of an engine.

    @property
    def is_healthy(self) -> bool:
        return self._task is not None and not self._task.done()

    def check_admission(self, priority: int = 0) -> None:
        if not self._is_accepting:
            raise EngineUnavailable("the server is shutting down")

    async def start(self) -> None:
        """Loads the pinned models. Raises `ConfigurationError` where one cannot be loaded."""
        for model in self:
            if model.is_pinned:
                await self._fetch(model)
                if (self.num_bytes + model.num_bytes) > self.limits.num_bytes:
                    raise ConfigurationError(f"--models: the pinned models do not fit: {self._too_large(model)}")
                if model.error is None:
                    await self._load(model)
                if model.error is not None:
                    raise ConfigurationError(f"--models: {model.error}")
        self._is_accepting = True
        self._task = asyncio.create_task(self._run(), name="model pool")

    async def stop(self, drain_seconds: float = 0.0) -> None:
        """Requests that wait are refused; those in flight were ended before."""
        self._is_accepting = False
        tasks = [task for task in (self._task, *(model.fetching for model in self)) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for model in self:
            model.refuse(EngineUnavailable, "the server is shutting down")
            if model.resident is not None:
                await self._unload(model)

    async def failed(self) -> None:
        """Returns when the pool cannot load or unload any more: a model that fails is unloaded, and loaded again for its next request."""
        assert self._task is not None
        await asyncio.wait([self._task])

    # What is loaded and unloaded.

    async def _run(self) -> None:
        while True:
            self._changed.clear()
            for model in self:
                if model.waiting and not model.is_fetched and model.fetching is None:
                    model.fetching = asyncio.create_task(self._fetch(model))  # beside all else: it may be a download of minutes
            plan = self._plan()
            self._held = plan.held
            for model in self:
                if model.waiting and model.resident is not None and model not in self._held:
                    model.lend()
            if plan.unload is not None:
                await self._unload(plan.unload)
            elif plan.load is not None:
                await self._load(plan.load)
            else:
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._seconds_until_due()):
                        await self._changed.wait()

    def _plan(self) -> Plan:
        must_leave = frozenset(model for model in self if model.must_leave)
        leaving = next((model for model in (*must_leave, *self._expired(), *self._excess()) if not model.num_users), None)
        if leaving is not None:
            return Plan(leaving, held=must_leave | {leaving})
        waiting = (model for model in self if model.waiting and model.is_fetched and model.resident is None)
        wanted = sorted(waiting, key=lambda model: model.waiting_since)
        for model in wanted:
            if self._in_the_way(model, lambda other: True) is None:
                model.refuse(ModelNotLoaded, f"the model `{model.name}` does not fit: {self._too_large(model)}")
                continue
            idle = self._in_the_way(model, lambda other: not other.num_users)
            if idle is not None:
                return Plan(idle[0] if idle else None, model, must_leave.union(idle))
            overdue = self._in_the_way(model, lambda other, waiting=model: self._has_had_its_turn(other, waiting))  # type: ignore[misc]
            if overdue is not None:
                return Plan(held=must_leave.union(overdue))  # models that would fit in between wait as well: else this one might forever
        return Plan(held=must_leave)

    def _in_the_way(self, model: PooledModel, may_leave: Callable[[PooledModel], bool]) -> list[PooledModel] | None:
        """The loaded models to be unloaded for one that is not, the least recently used first; None where there is no room even so."""
        excess, leaving = self.num_bytes + model.num_bytes - self.limits.num_bytes, []
        for other in sorted(self, key=lambda other: other.last_used):
            if excess <= 0:
                break
            if other.resident is not None and not other.is_pinned and may_leave(other):
                leaving.append(other)
                excess -= other.num_bytes
        return leaving if excess <= 0 else None

    def _has_had_its_turn(self, busy: PooledModel, waiting: PooledModel) -> bool:
        return not busy.num_users or self._clock() - max(busy.loaded_at, waiting.waiting_since) >= self.limits.turn_seconds

    def _expired(self) -> Iterator[PooledModel]:
        """Models that have been idle for their `ttl`."""
        for model in self:
            due = self._due(model)
            if due is not None and due <= self._clock():
                yield model

    def _excess(self) -> list[PooledModel]:
        """Idle models beyond the memory, where one turned out to be larger than expected. The one used last is kept."""
        loaded = sorted((model for model in self if model.resident is not None), key=lambda model: model.last_used)
        excess = self.num_bytes - self.limits.num_bytes
        return [model for model in loaded[:-1] if not model.is_pinned and not model.num_users][:1] if excess > 0 else []

    def _due(self, model: PooledModel) -> float | None:
        """When it will have been idle for its `ttl`."""
        if model.resident is None or model.num_users or model.waiting or model.is_pinned or model.spec.ttl is None:
            return None
        return model.last_used + model.spec.ttl

    def _seconds_until_due(self) -> float | None:
        if any(model.waiting for model in self):
            return POLL_SECONDS
        dues = [due for model in self if (due := self._due(model)) is not None]
        return max(0.0, min(dues) - self._clock()) if dues else None

    async def _fetch(self, model: PooledModel) -> None:
        model.state, model.error = ModelState.LOADING, None
        try:
            expected = await self._loader.fetch(model.spec)
        except Exception as error:
            self._fail(model, error)
        else:
            model.state, model.is_fetched = ModelState.UNLOADED, True
            model.num_bytes = model.spec.num_bytes or expected.num_bytes
            model.kind, model.tasks = expected.kind, model.tasks or (expected.kind,)
        finally:
            model.fetching = None
            self._changed.set()

    async def _load(self, model: PooledModel) -> None:
        began_at = self._clock()
        model.state, model.error = ModelState.LOADING, None
        try:
            resident = await self._loader.load(model.spec)
        except Exception as error:
            self._fail(model, error)
            return
        now = self._clock()
        model.state, model.resident, model.num_bytes = ModelState.LOADED, resident, resident.num_bytes
        model.tasks, model.max_model_len = resident.context.tasks, resident.context.max_model_len
        model.loaded_at, model.last_used, model.load_seconds = now, now, now - began_at
        model.num_loads += 1
        log.info("the model %r is loaded, after %.1f s: %s", model.name, model.load_seconds, resident.summary)
        if self.num_bytes > self.limits.num_bytes:
            log.warning("the loaded models take more than they may: %s", self._too_large(model))
        model.lend()

    def _fail(self, model: PooledModel, error: Exception) -> None:
        is_ours = isinstance(error, ConfigurationError)
        log.error("the model %r cannot be loaded: %s", model.name, error, exc_info=None if is_ours else error)
        cause = without_directories(str(error)) if is_ours else "an internal error, which has been logged"
        model.state, model.failed_at = ModelState.FAILED, self._clock()
        model.error = f"the model `{model.name}` cannot be loaded: {cause}"
        model.num_failures += 1
        model.refuse(ModelNotLoaded, model.error, self.limits.retry_after)

    async def _unload(self, model: PooledModel) -> None:
        resident = model.resident
        assert resident is not None
        closed = resident.closed
        model.state, model.resident, model.is_due = ModelState.UNLOADING, None, False
        try:
            await self._loader.unload(resident)
            del resident
            await self._loader.free()
        except Exception:
            log.exception("the model %r was not unloaded as it should be", model.name)
        model.state = ModelState.UNLOADED
        model.num_unloads += 1
        closed.set()
        log.info("the model %r is unloaded", model.name)

    def _too_large(self, model: PooledModel) -> str:
        pinned = sum(other.num_bytes for other in self if other.is_pinned and other is not model)
        beside = f", {gib(pinned)} of which are for pinned models" if pinned else ""
        bound = gib(self.limits.num_bytes)
        return f"it takes about {gib(model.num_bytes)}, and all models together may take {bound}{beside} (--models-memory)"


def without_directories(text: str) -> str:
    """For clients: of paths their last part."""
    return re.sub(r"(?<![\w.:/])~?(?:/[^/\s:'\"]+)*/(?=[^/\s:'\"]+)", "", text)


@dataclass(slots=True, kw_only=True)
class ModelsContext(SharedContext):
    """The pool is the server's engine. `metrics` are those of loaded models, `past` what earlier loads of each have counted."""

    engine: ModelPool
    responses: ResponseStore
    metrics: dict[str, RequestMetrics] = field(default_factory=dict)
    past: dict[str, bytes] = field(default_factory=dict)

    @property
    def served_names(self) -> tuple[str, ...]:
        return self.engine.names

    @property
    def metrics_label(self) -> str:
        return ""

    def descriptions(self) -> list[ModelDescription]:
        return [
            ModelDescription(
                name=name,
                root=model.name,
                tasks=model.tasks,
                max_model_len=model.max_model_len,
                parent=model.name if name in model.spec.adapter_names else None,
                state=model.state,
            )
            for model in self.engine
            for name in (*model.spec.model_names, *model.spec.adapter_names)
        ]

    def begin_counting(self, name: str, metrics: RequestMetrics) -> None:
        """Shows the metrics of a model that has been loaded."""
        self.metrics[name] = metrics

    def end_counting(self, name: str) -> None:
        """Keeps the counters of a model that is about to be unloaded: the next load's are added to them."""
        metrics = self.metrics.pop(name)
        last = report_of(metrics.registry, without=OF_NOW)
        metrics.registry = CollectorRegistry()  # the last request of a connection keeps its metrics, and the old one has the engine
        self.past[name] = report_of(ReportCollector([last, *([self.past[name]] if name in self.past else [])]))

    async def metrics_text(self, metrics: ServerMetrics) -> bytes:
        registries = (metrics.registry, *(each.registry for each in self.metrics.values()))
        merged = merged_registry([], [*map(report_of, registries), *self.past.values()])
        return metrics_text(merged, self.options.metric_prefix)

    def close(self) -> None:
        self.responses.close()
        SharedContext.close(self)


class PoolCollector(Collector):
    """What is loaded. The labels are the names in the file: their number is bounded."""

    def __init__(self, pool: ModelPool) -> None:
        self._pool = pool

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        yield self._gauge("model_loaded", "Whether the model is loaded.", {m.name: m.state is ModelState.LOADED for m in self._pool})
        yield self._gauge("model_pinned", "Whether the model is pinned.", {m.name: m.is_pinned for m in self._pool})
        yield self._gauge("model_memory_bytes", "What the model takes, or took when it was last loaded.", self._numbers("num_bytes"))
        yield self._gauge("model_requests", "Requests that the model is kept for.", self._numbers("num_users"))
        yield self._gauge("model_requests_waiting", "Requests that wait for the model.", {m.name: len(m.waiting) for m in self._pool})
        yield self._gauge("model_load_seconds", "How long the last load of the model took.", self._numbers("load_seconds"))
        yield self._counter("model_loads", "Loads of the model that succeeded.", self._numbers("num_loads"))
        yield self._counter("model_load_failures", "Loads of the model that failed.", self._numbers("num_failures"))
        yield self._counter("model_unloads", "How often the model was unloaded.", self._numbers("num_unloads"))
        yield GaugeMetricFamily(PREFIX + "models_memory_bytes_max", "The bound of --models-memory.", self._pool.limits.num_bytes)

    def _numbers(self, attribute: str) -> dict[str, float]:
        return {model.name: getattr(model, attribute) for model in self._pool}

    def _gauge(self, name: str, help_text: str, values: dict[str, float]) -> Metric:
        family = GaugeMetricFamily(PREFIX + name, help_text, labels=["model_name"])
        for model_name, value in values.items():
            family.add_metric([model_name], float(value))
        return family

    def _counter(self, name: str, help_text: str, values: dict[str, float]) -> Metric:
        family = CounterMetricFamily(PREFIX + name, help_text, labels=["model_name"])
        for model_name, value in values.items():
            family.add_metric([model_name], float(value))
        return family
