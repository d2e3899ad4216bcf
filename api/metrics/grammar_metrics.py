"""What `/metrics` shows of constraints: what compiling them took, and what the cache spares."""

from collections.abc import Callable, Iterator
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from penstock.api.metrics.metric_families import MetricFamilies
from penstock.engine.grammars.grammar_stats import BOUNDS, CompileSeconds, GrammarStats

PREFIX = "penstock:grammar_"


class GrammarCollector(Collector):
    """Reads the counters when they are asked for."""

    def __init__(self, read: Callable[[], GrammarStats], model_name: str) -> None:
        self._read = read
        self._model_name = model_name

    def collect(self) -> Iterator[Metric]:
        stats = self._read()
        families = MetricFamilies(PREFIX, self._model_name)
        attempts = CounterMetricFamily(
            PREFIX + "compilations",
            "Constraints that a backend was asked to compile, by how that ended.",
            labels=["model_name", "backend", "outcome"],
        )
        for (backend, outcome), number in stats.num_attempts.items():
            attempts.add_metric([self._model_name, backend, outcome], number)
        yield attempts
        seconds = HistogramMetricFamily(
            PREFIX + "compile_seconds", "How long a backend took over a constraint.", labels=["model_name", "backend"]
        )
        for backend, times in stats.seconds.items():
            seconds.add_metric([self._model_name, backend], _buckets(times), times.total)
        yield seconds
        yield families.counter("cache_queries", "Constraints looked up in the cache.", stats.num_cache_queries)
        yield families.counter("cache_hits", "Constraints found in the cache, refused ones among them.", stats.num_cache_hits)
        yield families.gauge("cache_entries", "Compiled constraints in the cache.", stats.num_cache_entries)
        yield families.gauge("cache_bytes", "Memory that they take.", stats.num_cache_bytes)
        yield families.gauge("num_compiling", "Constraints being compiled.", stats.num_running)
        yield families.gauge("num_waiting", "Constraints waiting to be compiled.", stats.num_waiting)

    def describe(self) -> list[Metric]:
        return []  # as the engine's


def _buckets(times: CompileSeconds) -> list[tuple[str, float]]:
    """As Prometheus has them: each holds what is in those before it."""
    return list(zip((*map(str, BOUNDS), "+Inf"), accumulate(times.counts), strict=True))
