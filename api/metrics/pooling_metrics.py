"""What `/metrics` shows of a pooling model: the same names as of one that generates, as far as they mean something."""

import time
from collections.abc import Callable, Iterator, Sequence

from aiohttp import web
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from penstock.api.metrics.metric_families import MetricFamilies
from penstock.api.metrics.metrics import ARRIVED, PREFIX, REQUEST_METRICS, TIMER, RequestMetrics
from penstock.engine.pooling.engine import EncodedText, PoolingEngine, PoolingOutput, PoolingStats, pool_all
from penstock.engine.pooling.params import PoolingParams


class PoolingCollector(Collector):
    """Reads the engine's counters when they are asked for."""

    def __init__(self, read: Callable[[], PoolingStats], model_name: str) -> None:
        self._read = read
        self._model_name = model_name

    def collect(self) -> Iterator[Metric]:
        stats = self._read()
        families = MetricFamilies(PREFIX, self._model_name)
        yield families.gauge("num_requests_running", "Inputs in the running batch.", stats.num_running)
        yield families.gauge("num_requests_waiting", "Inputs waiting to be computed.", stats.num_waiting)
        yield families.counter("prompt_tokens", "Prompt tokens processed.", stats.num_prompt_tokens)

    def describe(self) -> list[Metric]:
        return []  # the registry must not ask the engine before it runs


class PoolingTimer:
    """One request's counts, from what it has pooled. `on_output` is told of each output as it comes."""

    __slots__ = ("_metrics", "_on_output", "_start", "num_prompt_tokens")

    def __init__(self, metrics: RequestMetrics, arrived: float, on_output: Callable[[PoolingOutput], None] | None = None) -> None:
        self._metrics = metrics
        self._start = arrived
        self._on_output = on_output
        self.num_prompt_tokens = 0

    @property
    def summary(self) -> str:
        return f"prompt={self.num_prompt_tokens}"

    async def pool(
        self,
        engine: PoolingEngine,
        inputs: Sequence[EncodedText],
        params: PoolingParams | Sequence[PoolingParams],
        *,
        priority: int | Sequence[int] | None,
    ) -> list[PoolingOutput]:
        """As `pool_all`; each output is counted as it comes."""
        return await pool_all(engine, inputs, params, priority=priority or 0, on_output=self._observe)

    def _observe(self, output: PoolingOutput) -> None:
        num_tokens = len(output.prompt_token_ids)
        self.num_prompt_tokens += num_tokens
        self._metrics.prompt_tokens.observe(num_tokens)
        self._metrics.e2e_latency.observe(time.monotonic() - self._start)
        self._metrics.count_finished("stop")
        if self._on_output is not None:
            self._on_output(output)


def begin_pooling_timer(request: web.Request) -> PoolingTimer:
    """The timer of this HTTP request: what it counts goes to `/metrics` and into the access log."""
    timer = PoolingTimer(request.app[REQUEST_METRICS], request[ARRIVED])
    request[TIMER] = timer
    return timer
