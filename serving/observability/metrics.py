"""Prometheus metrics: vLLM's core names under the prefix `penstock:`, in a registry of the server's own."""

import asyncio
import time
from collections import Counter as Counts
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import msgspec
from msgspec import Struct
from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from penstock.engine.constraints.compiler import GrammarStats
from penstock.engine.deltas import FinishReason, PromptInfo, SequenceDelta
from penstock.engine.errors import DeadlineExceeded
from penstock.engine.system.process import Histogram

if TYPE_CHECKING:
    from penstock.engine.adapters.registry import AdapterStats
    from penstock.engine.core import EngineStats
    from penstock.engine.kv_cache.blocks import CacheInfo
    from penstock.engine.kv_cache.persistence import PersistenceStats
    from penstock.engine.pooling.engine import PoolingStats
    from penstock.engine.sampling.params import SamplingParams
    from penstock.engine.transcription.engine import TranscriptionStats

PREFIX = "penstock:"
TIMEOUT = "timeout"  # what `stop_reason` says where the time limit of a request ended its answer
TOKEN_BUCKETS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 262144)
FAST_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 5)
SLOW_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
CHOICE_BUCKETS = (1, 2, 5, 10, 20)
PRESSURE_BUCKETS = (0.01, 0.1, 0.5, 1, 2, 5, 10, 20, 50, 100, 200)  # nats
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
OTHER = "other"  # the value of a label for whatever is not in a list of ours
MAX_REASONS = 64  # finish reasons that are kept of a request with many sequences


Stats = TypeVar("Stats")


class HistogramCollector(Collector):
    """A histogram with the label `model_name`. `observe` may be called for every token of a stream."""

    def __init__(self, name: str, help_text: str, bounds: tuple[float, ...], model_name: str) -> None:
        self._name, self._help, self._model_name = name, help_text, model_name
        self._histogram = Histogram(bounds)
        self.observe = self._histogram.observe

    def describe(self) -> list[Metric]:
        return [HistogramMetricFamily(self._name, self._help)]

    def collect(self) -> Iterator[Metric]:
        yield histogram_family(self._name, self._help, self._model_name, self._histogram)


def histogram_family(name: str, help_text: str, model_name: str, histogram: Histogram) -> HistogramMetricFamily:
    family = HistogramMetricFamily(name, help_text, labels=["model_name"])
    family.add_metric([model_name], cumulative(histogram), histogram.total)
    return family


def cumulative(histogram: Histogram) -> list[tuple[str, float]]:
    """Buckets as Prometheus has them: each holds what is in those before it."""
    return list(zip((*(str(float(bound)) for bound in histogram.bounds), "+Inf"), accumulate(histogram.counts), strict=True))


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
        return self._labelled(CounterMetricFamily(self.prefix + name, help_text, labels=["model_name", *labels]), values)

    def gauges(self, name: str, help_text: str, labels: Sequence[str], values: Iterable[tuple[tuple[str, ...], float]]) -> Metric:
        """As `counters`."""
        return self._labelled(GaugeMetricFamily(self.prefix + name, help_text, labels=["model_name", *labels]), values)

    def _labelled(
        self, family: CounterMetricFamily | GaugeMetricFamily, values: Iterable[tuple[tuple[str, ...], float]]
    ) -> CounterMetricFamily | GaugeMetricFamily:
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
            "Draft tokens by proposer: the one of --speculation, or a request's prediction.",
            ["proposer"],
            (((name,), counts.num_drafted) for name, counts in stats.drafts.items()),
        )
        yield self.counters(
            "spec_decode_num_accepted_tokens_per_pos_by_proposer",
            "Drafts whose tokens were accepted up to this position, from 0, by proposer.",
            ["proposer", "position"],
            (
                ((name, str(position)), count)
                for name, counts in stats.drafts.items()
                for position, count in enumerate(counts.accepted_by_place)
            ),
        )
        yield self.counter("num_preemptions", "Sequences preempted because the KV cache was full.", stats.num_preemptions)
        steps = "Tokens computed in a step, draft tokens included."
        yield histogram_family(self.prefix + "iteration_tokens_total", steps, self._model_name, stats.step_tokens)
        if stats.cache is not None:
            yield self._cache_config(stats.cache)
        if stats.adapters is not None:
            yield self._adapters(stats.adapters)
        if stats.persistence is not None:
            yield from self._persistence(stats.persistence)

    def _cache_config(self, cache: "CacheInfo") -> Metric:
        labels = {
            "block_size": str(cache.block_size),
            "num_gpu_blocks": str(cache.num_blocks),
            "cache_dtype": cache.dtype,
            "enable_prefix_caching": str(cache.has_prefix_caching),
        }
        help_text = "The KV cache: tokens per block, number of blocks on the device, and dtype; always 1."
        family = GaugeMetricFamily(self.prefix + "cache_config_info", help_text, labels=["model_name", *labels])
        family.add_metric([self._model_name, *labels.values()], 1)
        return family

    def _adapters(self, stats: "AdapterStats") -> Metric:
        help_text = "Adapters of running and of waiting requests, by name; the value is the time of the scrape."
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


class PoolingCollector(StatsCollector["PoolingStats"]):
    def collect(self) -> Iterator[Metric]:
        stats: PoolingStats = self._read()
        yield self.gauge("num_requests_running", "Inputs in the running batch.", stats.num_running)
        yield self.gauge("num_requests_waiting", "Inputs waiting to be computed.", stats.num_waiting)
        yield self.counter("prompt_tokens", "Prompt tokens processed.", stats.num_prompt_tokens)


class TranscriptionCollector(StatsCollector["TranscriptionStats"]):
    def collect(self) -> Iterator[Metric]:
        stats: TranscriptionStats = self._read()
        yield self.gauge("num_requests_running", "Windows of audio in the running batch.", stats.num_running)
        yield self.gauge("num_requests_waiting", "Recordings whose next window waits.", stats.num_waiting)
        yield self.counter("prompt_tokens", "Prompt tokens processed.", stats.num_prompt_tokens)
        yield self.counter("generation_tokens", "Tokens generated.", stats.num_generation_tokens)


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
            seconds.add_metric([self._model_name, backend], cumulative(times), times.total)
        yield seconds
        yield self.counter("cache_queries", "Constraints looked up in the cache.", stats.num_cache_queries)
        yield self.counter("cache_hits", "Constraints found in the cache, refused ones among them.", stats.num_cache_hits)
        yield self.gauge("cache_entries", "Compiled constraints in the cache.", stats.num_cache_entries)
        yield self.gauge("cache_bytes", "Memory of the compiled constraints in the cache.", stats.num_cache_bytes)
        yield self.gauge("num_compiling", "Constraints being compiled.", stats.num_running)
        yield self.gauge("num_waiting", "Constraints waiting to be compiled.", stats.num_waiting)


class HttpRequests(Collector):
    """HTTP requests by method, route and status. No label has text of a client's, so the number of series is bounded."""

    def __init__(self) -> None:
        self._counts: Counts[tuple[str, str, int]] = Counts()

    def count(self, method: str, route: str | None, status: int) -> None:
        """`route` is the template of the path, and None for a path without a route."""
        self._counts[method if method in METHODS else OTHER, route or OTHER, status] += 1

    def describe(self) -> list[Metric]:
        return [CounterMetricFamily(PREFIX + "http_requests", "")]

    def collect(self) -> Iterator[Metric]:
        labels = ["method", "route", "status"]
        family = CounterMetricFamily(PREFIX + "http_requests", "HTTP requests by method, route and status.", labels=labels)
        for (method, route, status), count in list(self._counts.items()):
            family.add_metric([method, route, str(status)], count)
        yield family


def num_tasks() -> int:
    """Tasks of the calling event loop; 0 outside of one."""
    try:
        return len(asyncio.all_tasks())
    except RuntimeError:
        return 0


class ServerMetrics:
    """A registry of this process's metrics; the metrics of an engine in another process are not in it."""

    def __init__(self, *collectors: Collector) -> None:
        self.registry = CollectorRegistry()
        for collector in collectors:
            self.registry.register(collector)


class RequestMetrics(ServerMetrics):
    """Metrics of requests to one model, of any kind, and of its engine."""

    def __init__(self, engine: Collector | None, model_name: str) -> None:
        super().__init__(*(() if engine is None else (engine,)))
        success = Counter(
            PREFIX + "request_success", "Finished sequences, by finish reason.", ["model_name", "finished_reason"], registry=self.registry
        )
        self._success = {reason.value: success.labels(model_name, reason.value) for reason in FinishReason}
        closed = Counter(
            PREFIX + "constraint_closed", "Answers that masks closed within their max_tokens.", ["model_name"], registry=self.registry
        )
        self.num_closed = closed.labels(model_name)
        self._model_name = model_name
        tasks = Gauge(PREFIX + "event_loop_tasks", "Tasks of the server's event loop.", ["model_name"], registry=self.registry)
        tasks.labels(model_name).set_function(num_tasks)
        self.e2e_latency = self._histogram("e2e_request_latency_seconds", "From a request's arrival to a sequence's end.", SLOW_BUCKETS)
        self.prompt_tokens = self._histogram("request_prompt_tokens", "Prompt tokens of a request.", TOKEN_BUCKETS)

    def count_finished(self, reason: str) -> None:
        self._success[reason].inc()

    def _histogram(self, name: str, help_text: str, bounds: tuple[float, ...]) -> HistogramCollector:
        collector = HistogramCollector(PREFIX + name, help_text, bounds, self._model_name)
        self.registry.register(collector)
        return collector


class Metrics(RequestMetrics):
    """Metrics of a model that generates. `begin()` returns the timer of one request."""

    def __init__(self, read_stats: "Callable[[], EngineStats] | None", model_name: str) -> None:
        super().__init__(None if read_stats is None else EngineCollector(read_stats, model_name), model_name)
        histogram = self._histogram
        self.time_to_first_token = histogram("time_to_first_token_seconds", "From a request's arrival to its first token.", SLOW_BUCKETS)
        self.inter_token_latency = histogram("inter_token_latency_seconds", "From one token to the next.", FAST_BUCKETS)
        self.time_per_output_token = histogram(
            "request_time_per_output_token_seconds", "Mean of a sequence's times from one token to the next.", FAST_BUCKETS
        )
        self.queue_time = histogram("request_queue_time_seconds", "Until a request was scheduled, or ended without a token.", SLOW_BUCKETS)
        self.prefill_time = histogram("request_prefill_time_seconds", "From a request's scheduling to its first token.", SLOW_BUCKETS)
        self.decode_time = histogram("request_decode_time_seconds", "From a sequence's first token to its last.", SLOW_BUCKETS)
        self.inference_time = histogram("request_inference_time_seconds", "Prefill and decode of a sequence.", SLOW_BUCKETS)
        self.generation_tokens = histogram("request_generation_tokens", "Tokens generated for a sequence.", TOKEN_BUCKETS)
        self.max_generation_tokens = histogram(
            "request_max_num_generation_tokens", "Tokens generated for a request's longest sequence.", TOKEN_BUCKETS
        )
        self.constraint_pressure = histogram(
            "constraint_pressure_nats", "Constraint pressure of an answer, where measured.", PRESSURE_BUCKETS
        )
        self.params_n = histogram("request_params_n", "Sequences requested (n).", CHOICE_BUCKETS)
        self.params_max_tokens = histogram("request_params_max_tokens", "Maximum number of tokens requested (max_tokens).", TOKEN_BUCKETS)

    def begin(self, arrived: float) -> "RequestTimer":
        """`arrived` is when the request came, by the monotonic clock."""
        return RequestTimer(self, arrived)


class RequestTimer:
    """One HTTP request's times and counts, from the engine's deltas that pass through `watch`.

    Times are in seconds. `time_to_first_token` is None before there was a token. `queue_seconds` and `prefill_seconds` are those of the
    first prompt. `finished` is when the last sequence ended, by the monotonic clock, and `finish_reasons` are those of the first sequences
    that ended. `model` is the name that the client asked for, once it is known to be served, and `params` are those of the last prompt.
    """

    __slots__ = (
        "_metrics",
        "_start",
        "finish_reasons",
        "finished",
        "model",
        "num_cached_tokens",
        "num_generation_tokens",
        "num_prompt_tokens",
        "params",
        "prefill_seconds",
        "queue_seconds",
        "time_to_first_token",
    )

    def __init__(self, metrics: Metrics, arrived: float) -> None:
        self._metrics = metrics
        self._start = arrived
        self.model: str | None = None
        self.params: SamplingParams | None = None
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.num_generation_tokens = 0
        self.queue_seconds: float | None = None
        self.prefill_seconds: float | None = None
        self.time_to_first_token: float | None = None
        self.finished: float | None = None
        self.finish_reasons: list[str] = []

    @property
    def summary(self) -> str:
        first = "-" if self.time_to_first_token is None else f"{self.time_to_first_token * 1000:.1f}ms"
        return f"first={first} prompt={self.num_prompt_tokens} output={self.num_generation_tokens}"

    @property
    def fields(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "prompt_tokens": self.num_prompt_tokens,
            "cached_tokens": self.num_cached_tokens,
            "output_tokens": self.num_generation_tokens,
            "queue_ms": milliseconds(self.queue_seconds),
            "prefill_ms": milliseconds(self.prefill_seconds),
            "first_token_ms": milliseconds(self.time_to_first_token),
            "finish_reasons": self.finish_reasons or None,
        }

    async def watch(self, stream: AsyncGenerator[SequenceDelta, None], params: "SamplingParams") -> AsyncGenerator[SequenceDelta, None]:
        """The same deltas, counted as they pass. Wrap each prompt's stream; closing the wrapper closes the stream.

        Where it is closed or cancelled before their ends, because the client has gone, sequences count as aborted.
        """
        self._observe_params(params)
        sequences: dict[int, _SequenceTimes] = {}
        has_prompt, began = False, time.monotonic()
        try:
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
        except (asyncio.CancelledError, GeneratorExit):
            self._observe_abort(params.n, sequences)
            raise
        finally:
            if sequences:  # else it was refused
                self._metrics.max_generation_tokens.observe(max(times.num_tokens for times in sequences.values()))
                if not has_prompt:
                    self._metrics.queue_time.observe(time.monotonic() - began)

    def _observe_params(self, params: "SamplingParams") -> None:
        self.params = params
        self._metrics.params_n.observe(params.n)
        if params.max_tokens is not None:
            self._metrics.params_max_tokens.observe(params.max_tokens)

    def _observe_prompt(self, prompt: PromptInfo) -> None:
        self.num_prompt_tokens += prompt.num_tokens
        self.num_cached_tokens += prompt.num_cached_tokens
        if self.queue_seconds is None:
            self.queue_seconds, self.prefill_seconds = prompt.queue_seconds, prompt.prefill_seconds
        self._metrics.prompt_tokens.observe(prompt.num_tokens)
        self._metrics.queue_time.observe(prompt.queue_seconds)
        self._metrics.prefill_time.observe(prompt.prefill_seconds)

    def _observe(self, delta: SequenceDelta, sequence: "_SequenceTimes") -> None:
        now = time.monotonic()
        if delta.token_ids:
            if self.time_to_first_token is None:
                self.time_to_first_token = now - self._start
                self._metrics.time_to_first_token.observe(self.time_to_first_token)
            if sequence.last_token is not None:
                self._metrics.inter_token_latency.observe((now - sequence.last_token) / len(delta.token_ids))
            else:
                sequence.first_token, sequence.num_first_tokens = now, len(delta.token_ids)
            sequence.last_token = now
            sequence.num_tokens += len(delta.token_ids)
            self.num_generation_tokens += len(delta.token_ids)
        for _, nats in delta.pressures:
            sequence.pressure = (sequence.pressure or 0.0) + nats
        if delta.finish_reason is not None:
            self._observe_end(delta.finish_reason, sequence, now)
            if delta.is_closed:
                self._metrics.num_closed.inc()
            if delta.finish_reason is FinishReason.TIMED_OUT:
                self._end_at_deadline(delta)

    def _observe_abort(self, n: int, sequences: "dict[int, _SequenceTimes]") -> None:
        """Ends those of the n sequences that have not ended, unless an error in one of them is why the others are no longer read."""
        if any(times.finish_reason is FinishReason.ERROR for times in sequences.values()):
            return
        now = time.monotonic()
        for index in range(n):
            times = sequences.setdefault(index, _SequenceTimes())
            if times.finish_reason is None:
                self._observe_end(FinishReason.ABORT, times, now)

    def _observe_end(self, reason: FinishReason, sequence: "_SequenceTimes", now: float) -> None:
        metrics = self._metrics
        self.finished, sequence.finish_reason = now, reason
        if len(self.finish_reasons) < MAX_REASONS:
            self.finish_reasons.append(reason.value)
        metrics.count_finished(reason.value)
        metrics.generation_tokens.observe(sequence.num_tokens)
        metrics.e2e_latency.observe(now - self._start)
        if sequence.pressure is not None:
            metrics.constraint_pressure.observe(sequence.pressure)
        if sequence.last_token is None:
            return
        decode_seconds = sequence.last_token - sequence.first_token
        metrics.decode_time.observe(decode_seconds)
        metrics.inference_time.observe(decode_seconds + (self.prefill_seconds or 0.0))
        if (num_later := sequence.num_tokens - sequence.num_first_tokens) > 0:
            metrics.time_per_output_token.observe(decode_seconds / num_later)

    def _end_at_deadline(self, delta: SequenceDelta) -> None:
        """Clients know no such finish reason: what there is of the answer ends as at its length. Raises `DeadlineExceeded` without any."""
        if self.time_to_first_token is None:
            raise DeadlineExceeded("the time limit of the request passed before its first token")
        delta.finish_reason, delta.stop_reason = FinishReason.LENGTH, TIMEOUT


def milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 1)


@dataclass(slots=True)
class _SequenceTimes:
    first_token: float = 0.0
    num_first_tokens: int = 0
    last_token: float | None = None
    num_tokens: int = 0
    pressure: float | None = None  # of its constraint, where that is measured
    finish_reason: FinishReason | None = None


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


def report_of(collector: Collector, *, without: Collection[str] = ()) -> bytes:
    """The metrics of one process, to be merged with those of others; those of some types can be left out, such as gauges."""
    return _encode(
        [
            ReportedFamily(
                family.name,
                family.documentation,
                family.type,
                [ReportedSample(sample.name, sample.labels, sample.value) for sample in family.samples],
            )
            for family in collector.collect()
            if family.type not in without
        ]
    )


class ReportCollector(Collector):
    """The sums of several processes' reports: counters and histograms, which may be added up."""

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


def merged_registry(engine: Iterable[Collector], reports: Iterable[bytes]) -> CollectorRegistry:
    """The metrics of the engine and the reports of all servers."""
    registry = CollectorRegistry()
    for collector in (*engine, ReportCollector(reports)):
        registry.register(collector)
    return registry


class LoggedTimer(Protocol):
    """What a request took, for the access log and for traces: in a few words, and as fields of JSON, where None is left out.

    Also its tokens so far.
    """

    model: str | None
    num_prompt_tokens: int

    @property
    def num_generation_tokens(self) -> int: ...

    @property
    def summary(self) -> str: ...

    @property
    def fields(self) -> dict[str, Any]: ...
