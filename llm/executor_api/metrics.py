"""What it took to serve one request. Names are those of TensorRT-LLM's `RequestPerfMetrics`."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TimingMetrics:
    """Moments in `time.monotonic()`. None is what has not happened."""

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class KvCacheMetrics:
    """Blocks of the KV cache that the sequence's tokens take up, and which of the prompt's were there already."""

    num_total_allocated_blocks: int
    num_new_allocated_blocks: int
    num_reused_blocks: int
    num_missed_blocks: int

    @property
    def kv_cache_hit_rate(self) -> float:
        """Share of the prompt's blocks that were reused."""
        num_looked_up = self.num_reused_blocks + self.num_missed_blocks
        return self.num_reused_blocks / num_looked_up if num_looked_up else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestPerfMetrics:
    """Of one sequence, up to the response that has them. `first_iter`, `iter` and `last_iter` number the engine's steps."""

    timing_metrics: TimingMetrics
    kv_cache_metrics: KvCacheMetrics
    first_iter: int | None = None
    iter: int | None = None
    last_iter: int | None = None
