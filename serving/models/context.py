"""What handlers need of a server with several models, and its metrics."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from penstock.serving.context import ModelDescription, SharedContext
from penstock.serving.metrics import PREFIX, ReportCollector, RequestMetrics, ServerMetrics, merged_registry, report_of
from penstock.serving.models.pool import ModelPool, ModelState
from penstock.serving.observability.exposition import metrics_text
from penstock.serving.responses.store import ResponseStore

OF_NOW = ("gauge", "info")  # types of metrics that say nothing of a model that is no longer loaded


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
