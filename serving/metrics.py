"""Prometheus metrics: vLLM's core names under the prefix `penstock:`, in a registry of the server's own."""

import time
from bisect import bisect_left
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

import msgspec
from msgspec import Struct
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from penstock.engine.constraints.compiler import BOUNDS, GrammarStats
from penstock.engine.deltas import PromptInfo, SequenceDelta

if TYPE_CHECKING:
    from penstock.engine.adapters.registry import AdapterStats
    from penstock.engine.core import EngineStats
    from penstock.engine.kv_cache.persistence import PersistenceStats

PREFIX = "penstock:"
TOKEN_BUCKETS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 262144)
FAST_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 5)
SLOW_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


Stats = TypeVar("Stats")


class TokenHistogram(Collector):
    """A histogram that is added to for every token of a stream. prometheus_client's own takes a lock and looks through the buckets."""

    def __init__(self, name: str, help_text: str, bounds: Sequence[float], model_name: str) -> None:
        self._name, self._help, self._model_name = name, help_text, model_name
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def describe(self) -> list[Metric]:
        return [HistogramMetricFamily(self._name, self._help)]

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(self._name, self._help, labels=["model_name"])
        family.add_metric([self._model_name], _cumulative(map(float, self._bounds), self._counts), self._sum)
        yield family


class StatsCollector(Collector, Generic[Stats]):
    """Counters that are read when metrics are scraped, so that the token loop pays nothing. Names begin with `prefix`."""

    prefix = PREFIX

    def __init__(self, read: Callable[[], Stats], model_name: str) -> None:
        self._read = read
        self._model_name = model_name

    def describe(self) -> list[Metric]:
        return []  # the registry must not ask the engine before it runs

    def gauge(self, name: str, help_text: str, value: float) -> Metric:
        family = GaugeMetricFamily(self.prefix + name, help_text, labels=["model_name"])
        family.add_metric([self._model_name], value)
        return family

    def counter(self, name: str, help_text: str, value: float) -> Metric:
        return self.counters(name, help_text, (), [((), value)])

    def counters(self, name: str, help_text: str, labels: Sequence[str], values: Iterable[tuple[tuple[str, ...], float]]) -> Metric:
        """One counter for each combination of the labels' values."""
        family = CounterMetricFamily(self.prefix + name, help_text, labels=["model_name", *labels])
        for key, value in values:
            family.add_metric([self._model_name, *key], value)
        return family


class EngineCollector(StatsCollector["EngineStats"]):
    def collect(self) -> Iterator[Metric]:
        stats = self._read()
        yield self.gauge("num_requests_running", "Sequences in the running batch.", stats.num_running)
        yield self.gauge("num_requests_waiting", "Sequences waiting to be scheduled.", stats.num_waiting)
        yield self.gauge("kv_cache_usage_perc", "Share of the KV cache's blocks in use; 1 is all of them.", stats.kv_cache_usage)
        yield self.counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", stats.num_prefix_cache_queries)
        yield self.counter("prefix_cache_hits", "Prompt tokens found in the prefix cache.", stats.num_prefix_cache_hits)
        yield self.counter("prompt_tokens", "Prompt tokens processed.", stats.num_prompt_tokens)
        yield self.counter("generation_tokens", "Tokens generated.", stats.num_generation_tokens)
        yield self.counter("forced_tokens", "Tokens that were not sampled: a grammar allowed no other.", stats.num_forced_tokens)
        yield self.counter("spec_decode_num_drafts", "Drafts of speculative decoding.", stats.num_drafts)
        yield self.counter("spec_decode_num_draft_tokens", "Draft tokens of speculative decoding.", stats.num_draft_tokens)
        yield self.counter("spec_decode_num_accepted_tokens", "Draft tokens that were accepted.", stats.num_accepted_tokens)
        yield self.counters(
            "spec_decode_num_accepted_tokens_per_pos",
            "Drafts whose tokens were accepted up to this position, from 0.",
            ["position"],
            (((str(position),), count) for position, count in enumerate(stats.accepted_by_place)),
        )
        yield self.counters(
            "spec_decode_num_draft_tokens_by_proposer",
            "Draft tokens by what proposed them: the proposer of --speculation, or a request's prediction.",
            ["proposer"],
            (((name,), counts.num_drafted) for name, counts in stats.drafts.items()),
        )
        yield self.counters(
            "spec_decode_num_accepted_tokens_per_pos_by_proposer",
            "Drafts whose tokens were accepted up to this position, from 0, by what proposed them.",
            ["proposer", "position"],
            (
                ((name, str(position)), count)
                for name, counts in stats.drafts.items()
                for position, count in enumerate(counts.accepted_by_place)
            ),
        )
        yield self.counter("num_preemptions", "Sequences preempted because the KV cache was full.", stats.num_preemptions)
        if stats.adapters is not None:
            yield self._adapters(stats.adapters)
        if stats.persistence is not None:
            yield from self._persistence(stats.persistence)

    def _adapters(self, stats: "AdapterStats") -> Metric:
        help_text = "Adapters of running and of waiting requests, by name; the value is the time of this reading."
        labels = ["model_name", "running_lora_adapters", "waiting_lora_adapters", "max_lora"]
        family = GaugeMetricFamily(self.prefix + "lora_requests_info", help_text, labels=labels)
        family.add_metric([self._model_name, ",".join(stats.running), ",".join(stats.waiting), str(stats.num_slots)], time.time())
        return family

    def _persistence(self, stats: "PersistenceStats") -> Iterator[Metric]:
        """Of --kv-cache-dir."""
        files = stats.files
        yield self.counter("kv_cache_dir_hits", "Blocks loaded from the directory into the KV cache.", stats.num_hits)
        yield self.counter("kv_cache_dir_blocks_written", "Blocks written to the directory.", files.num_written)
        yield self.counter("kv_cache_dir_bytes_written", "Bytes written to the directory.", files.num_bytes_written)
        yield self.counter("kv_cache_dir_blocks_read", "Blocks read from the directory and verified.", files.num_read)
        yield self.counter("kv_cache_dir_bytes_read", "Bytes of these blocks.", files.num_bytes_read)
        yield self.counter("kv_cache_dir_blocks_rejected", "Files that were damaged, and deleted.", files.num_rejected)
        yield self.counter(
            "kv_cache_dir_blocks_dropped", "Blocks evicted, or refused by the disk, before they were written.", stats.num_dropped
        )
        yield self.counter("kv_cache_dir_blocks_evicted", "Files deleted to keep the directory to its size.", files.num_evicted)
        yield self.counters(
            "kv_cache_dir_errors",
            "Errors of the disk.",
            ["operation"],
            [(("read",), files.num_read_errors), (("write",), files.num_write_errors)],
        )


class GrammarCollector(StatsCollector[GrammarStats]):
    prefix = PREFIX + "grammar_"

    def collect(self) -> Iterator[Metric]:
        stats = self._read()
        attempts = "Compilations of constraints, by backend and outcome."
        yield self.counters("compilations", attempts, ["backend", "outcome"], stats.num_attempts.items())
        seconds = HistogramMetricFamily(
            self.prefix + "compile_seconds", "Time to compile a constraint, by backend.", labels=["model_name", "backend"]
        )
        for backend, times in stats.seconds.items():
            seconds.add_metric([self._model_name, backend], _cumulative(BOUNDS, times.counts), times.total)
        yield seconds
        yield self.counter("cache_queries", "Constraints looked up in the cache.", stats.num_cache_queries)
        yield self.counter("cache_hits", "Constraints found in the cache, refused ones among them.", stats.num_cache_hits)
        yield self.gauge("cache_entries", "Compiled constraints in the cache.", stats.num_cache_entries)
        yield self.gauge("cache_bytes", "Memory of the compiled constraints in the cache.", stats.num_cache_bytes)
        yield self.gauge("num_compiling", "Constraints being compiled.", stats.num_running)
        yield self.gauge("num_waiting", "Constraints waiting to be compiled.", stats.num_waiting)


def _cumulative(bounds: Iterable[float], counts: Iterable[int]) -> list[tuple[str, float]]:
    """Buckets as Prometheus has them: each holds what is in those before it."""
    return list(zip((*map(str, bounds), "+Inf"), accumulate(counts), strict=True))


class RequestMetrics:
    """A server's registry, with the metrics of requests to any kind of model; those of an engine in another process are not in it."""

    def __init__(self, engine: Collector | None, model_name: str) -> None:
        self.registry = CollectorRegistry()
        if engine is not None:
            self.registry.register(engine)
        self._success = Counter(
            PREFIX + "request_success", "Finished sequences, by finish reason.", ["model_name", "finished_reason"], registry=self.registry
        )
        self._model_name = model_name
        self.e2e_latency = self._histogram("e2e_request_latency_seconds", "From a request's arrival to a sequence's end.", SLOW_BUCKETS)
        self.prompt_tokens = self._histogram("request_prompt_tokens", "Prompt tokens of a request.", TOKEN_BUCKETS)

    def count_finished(self, reason: str) -> None:
        self._success.labels(self._model_name, reason).inc()

    def expose(self) -> bytes:
        """The registry in Prometheus's text format."""
        return generate_latest(self.registry)

    def _histogram(self, name: str, help_text: str, buckets: tuple[float, ...]) -> Histogram:
        family = Histogram(PREFIX + name, help_text, ["model_name"], registry=self.registry, buckets=buckets)
        return family.labels(self._model_name)


class Metrics(RequestMetrics):
    """Those of a model that generates. `begin()` gives the timer of one request."""

    def __init__(self, read_stats: "Callable[[], EngineStats] | None", model_name: str) -> None:
        super().__init__(None if read_stats is None else EngineCollector(read_stats, model_name), model_name)
        self.time_to_first_token = self._histogram("time_to_first_token_seconds", "Until a request's first token.", SLOW_BUCKETS)
        self.inter_token_latency = TokenHistogram(
            PREFIX + "inter_token_latency_seconds", "From one token to the next.", FAST_BUCKETS, model_name
        )
        self.registry.register(self.inter_token_latency)
        self.queue_time = self._histogram("request_queue_time_seconds", "Until a request was first scheduled.", SLOW_BUCKETS)
        self.generation_tokens = self._histogram("request_generation_tokens", "Tokens generated for a sequence.", TOKEN_BUCKETS)

    def begin(self, arrived: float) -> "RequestTimer":
        """`arrived` is when the request came, by the monotonic clock."""
        return RequestTimer(self, arrived)


class RequestTimer:
    """One HTTP request's times and counts, from the engine's deltas that pass through `watch`.

    `time_to_first_token` is in seconds, None before there was one.
    """

    __slots__ = ("_metrics", "_start", "num_generation_tokens", "num_prompt_tokens", "time_to_first_token")

    def __init__(self, metrics: Metrics, arrived: float) -> None:
        self._metrics = metrics
        self._start = arrived
        self.num_prompt_tokens = 0
        self.num_generation_tokens = 0
        self.time_to_first_token: float | None = None

    @property
    def summary(self) -> str:
        first = "-" if self.time_to_first_token is None else f"{self.time_to_first_token * 1000:.1f}ms"
        return f"first={first} prompt={self.num_prompt_tokens} output={self.num_generation_tokens}"

    async def watch(self, stream: AsyncGenerator[SequenceDelta, None]) -> AsyncGenerator[SequenceDelta, None]:
        """The same deltas, counted as they pass. Wrap each prompt's stream; closing the wrapper closes the stream."""
        sequences: dict[int, _SequenceTimes] = {}
        has_prompt = False
        async with aclosing(stream):
            async for delta in stream:
                if delta.prompt is not None and not has_prompt:
                    has_prompt = True
                    self._observe_prompt(delta.prompt)
                times = sequences.get(delta.index)
                if times is None:
                    times = sequences[delta.index] = _SequenceTimes()
                self._observe(delta, times)
                yield delta

    def _observe_prompt(self, prompt: PromptInfo) -> None:
        self.num_prompt_tokens += prompt.num_tokens
        self._metrics.prompt_tokens.observe(prompt.num_tokens)
        self._metrics.queue_time.observe(prompt.queue_seconds)

    def _observe(self, delta: SequenceDelta, sequence: "_SequenceTimes") -> None:
        now = time.monotonic()
        if delta.token_ids:
            if self.time_to_first_token is None:
                self.time_to_first_token = now - self._start
                self._metrics.time_to_first_token.observe(self.time_to_first_token)
            if sequence.last_token is not None:
                self._metrics.inter_token_latency.observe((now - sequence.last_token) / len(delta.token_ids))
            sequence.last_token = now
            sequence.num_tokens += len(delta.token_ids)
            self.num_generation_tokens += len(delta.token_ids)
        if delta.finish_reason is not None:
            self._metrics.count_finished(delta.finish_reason.value)
            self._metrics.generation_tokens.observe(sequence.num_tokens)
            self._metrics.e2e_latency.observe(now - self._start)


@dataclass(slots=True)
class _SequenceTimes:
    last_token: float | None = None
    num_tokens: int = 0


class ReportedSample(Struct, array_like=True):
    """One number, by the name and the labels that it has in Prometheus's text format."""

    name: str
    labels: dict[str, str]
    value: float


class ReportedFamily(Struct, array_like=True):
    """A metric of one process."""

    name: str
    documentation: str
    kind: str
    samples: list[ReportedSample]


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[ReportedFamily]).decode


def report_of(registry: CollectorRegistry) -> bytes:
    """The metrics of one process, to be merged with those of others."""
    return _encode(
        [
            ReportedFamily(
                family.name,
                family.documentation,
                family.type,
                [ReportedSample(sample.name, sample.labels, sample.value) for sample in family.samples],
            )
            for family in registry.collect()
        ]
    )


class ReportCollector(Collector):
    """The sums over several processes of what they have reported: counters and histograms, which may be added up."""

    def __init__(self, reports: Iterable[bytes]) -> None:
        self._reports = reports

    def collect(self) -> Iterator[Metric]:
        families: dict[str, ReportedFamily] = {}
        samples: dict[str, dict[tuple[str, tuple[tuple[str, str], ...]], float]] = {}
        for family in (family for report in self._reports for family in _decode(report)):
            families.setdefault(family.name, family)
            sums = samples.setdefault(family.name, {})
            for sample in family.samples:
                key = (sample.name, tuple(sample.labels.items()))
                if sample.name.endswith("_created"):  # a time: since when it has been counted
                    sums[key] = min(sums.get(key, sample.value), sample.value)
                else:
                    sums[key] = sums.get(key, 0.0) + sample.value
        for name, family in families.items():
            metric = Metric(name, family.documentation, family.kind)
            for (sample_name, labels), value in samples[name].items():
                metric.add_sample(sample_name, dict(labels), value)
            yield metric


def merged_text(engine: Iterable[Collector], reports: Iterable[bytes]) -> bytes:
    """The metrics of the engine and the reports of all servers in Prometheus's text format."""
    registry = CollectorRegistry()
    for collector in (*engine, ReportCollector(reports)):
        registry.register(collector)
    return generate_latest(registry)


class LoggedTimer(Protocol):
    """What a request took, for the access log."""

    @property
    def summary(self) -> str: ...
