"""What `/metrics` would show, as objects."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from penstock.llm import outputs as metric_values
from penstock.llm.outputs import metric_values as values


def test_counters_gauges_and_histograms_keep_their_numbers_and_labels() -> None:
    registry = CollectorRegistry()
    Counter("made", "", ["kind"], registry=registry).labels("a").inc(3)
    Gauge("now", "", registry=registry).set(1.5)
    times = Histogram("seconds", "", ["kind"], registry=registry, buckets=(1, 2))
    for seconds in (0.5, 1.5, 9):
        times.labels("b").observe(seconds)
    assert values(registry) == [
        metric_values.Counter("made", {"kind": "a"}, 3),
        metric_values.Gauge("now", {}, 1.5),
        metric_values.Histogram("seconds", {"kind": "b"}, 3, 11.0, {"1.0": 1, "2.0": 2, "+Inf": 3}),
    ]
