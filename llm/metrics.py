"""The numbers of `/metrics` as Python objects. Names and shapes are vLLM's."""

from collections.abc import Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric as Family


@dataclass(frozen=True, slots=True)
class Metric:
    """`labels` tell apart what is counted under one name."""

    name: str
    labels: dict[str, str]


@dataclass(frozen=True, slots=True)
class Counter(Metric):
    """Only grows."""

    value: float


@dataclass(frozen=True, slots=True)
class Gauge(Metric):
    """Of this moment."""

    value: float


@dataclass(frozen=True, slots=True)
class Histogram(Metric):
    """`buckets` count what was at most so much, by its number as text; `+Inf` is all."""

    count: int
    sum: float
    buckets: dict[str, int]


def metric_values(registry: CollectorRegistry) -> list[Metric]:
    """All there are, in the registry's order."""
    return [metric for family in registry.collect() for metric in _of_family(family)]


def _of_family(family: Family) -> Iterator[Metric]:
    if family.type == "histogram":
        yield from _histograms(family)
        return
    kind = Counter if family.type == "counter" else Gauge
    for sample in family.samples:
        if not sample.name.endswith("_created"):
            yield kind(family.name, dict(sample.labels), sample.value)


def _histograms(family: Family) -> Iterator[Histogram]:
    found: dict[tuple[tuple[str, str], ...], Histogram] = {}
    for sample in family.samples:
        labels = {name: value for name, value in sample.labels.items() if name != "le"}
        key = tuple(sorted(labels.items()))
        before = found.get(key, Histogram(family.name, labels, 0, 0.0, {}))
        match sample.name.removeprefix(family.name):
            case "_bucket":
                buckets = before.buckets | {sample.labels["le"]: int(sample.value)}
                found[key] = Histogram(family.name, labels, before.count, before.sum, buckets)
            case "_count":
                found[key] = Histogram(family.name, labels, int(sample.value), before.sum, before.buckets)
            case "_sum":
                found[key] = Histogram(family.name, labels, before.count, sample.value, before.buckets)
    yield from found.values()
