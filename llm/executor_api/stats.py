"""What an executor counts, step by step. Names are those of TensorRT-LLM's statistics; times are in milliseconds."""

import json
import re
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from typing import Any


class JsonStats:
    """Statistics that can be written as JSON."""

    __slots__ = ()

    def to_json_str(self) -> str:
        """An object with the original's names: `iter_latency_ms` is `iterLatencyMS`, and a stage is its name."""
        return json.dumps(_plain(self))


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        return {_camel_case(field.name): _plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value.name if isinstance(value, Enum) else value


def _camel_case(name: str) -> str:
    joined = re.sub(r"_([a-z])", lambda found: found[1].upper(), name)
    return f"{joined[:-2]}MS" if name.endswith("_ms") else joined


@dataclass(frozen=True, slots=True, kw_only=True)
class KvCacheStats:
    """Blocks of the KV cache, each of `tokens_per_block` tokens. Those kept for what may come again count as free.

    `cache_hit_rate` is the share of all prompt tokens so far that were found in the cache.
    """

    max_num_blocks: int
    free_num_blocks: int
    used_num_blocks: int
    tokens_per_block: int
    cache_hit_rate: float


@dataclass(frozen=True, slots=True, kw_only=True)
class InflightBatchingStats:
    """Sequences in one step: those whose prompt is computed, those that generate, and those that were pushed out to come again later."""

    num_scheduled_requests: int
    num_context_requests: int
    num_gen_requests: int
    num_paused_requests: int
    num_ctx_tokens: int
    avg_num_decoded_tokens_per_iter: float


@dataclass(frozen=True, slots=True, kw_only=True)
class IterationStats(JsonStats):
    """One step. `timestamp` is when it ended, in local time; requests are queued until their first token is computed."""

    timestamp: str
    iter: int
    iter_latency_ms: float
    new_active_requests_queue_latency_ms: float
    num_new_active_requests: int
    num_active_requests: int
    num_queued_requests: int
    num_completed_requests: int
    max_num_active_requests: int
    kv_cache_stats: KvCacheStats
    inflight_batching_stats: InflightBatchingStats


class RequestStage(Enum):
    QUEUED = 0
    CONTEXT_IN_PROGRESS = 2
    GENERATION_IN_PROGRESS = 3
    GENERATION_COMPLETE = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestStats(JsonStats):
    """One request at the end of a step. With several sequences it is as far as the first of them, and its generated tokens are theirs."""

    id: int
    stage: RequestStage
    context_prefill_position: int
    num_generated_tokens: int
    scheduled: bool
    paused: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestStatsPerIteration(JsonStats):
    """Requests that run, were paused or ended in this step, and of those that are queued the ones that may come next."""

    iter: int
    request_stats: list[RequestStats]
