"""An executor's statistics: what each step did, as TensorRT-LLM's iteration statistics say it."""

import json
import re
import threading
import time
from collections import deque
from dataclasses import dataclass, fields, is_dataclass
from datetime import datetime
from enum import Enum
from typing import Any, NamedTuple

from penstock.engine.deltas import SequenceDelta
from penstock.engine.scheduling.scheduler import Scheduler
from penstock.engine.scheduling.step import Step
from penstock.engine.sequence import Sequence, Status


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
    """Blocks of the KV cache, each of `tokens_per_block` tokens. Cached blocks that no sequence uses count as free.

    `cache_hit_rate` is the share of all prompt tokens so far that were found in the cache.
    """

    max_num_blocks: int
    free_num_blocks: int
    used_num_blocks: int
    tokens_per_block: int
    cache_hit_rate: float


@dataclass(frozen=True, slots=True, kw_only=True)
class InflightBatchingStats:
    """Sequences in one step: those whose prompt is computed, those that generate, and those that were preempted."""

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


MAX_UNDER_WAY = 4  # steps: cancelled ones never end


@dataclass(frozen=True, slots=True)
class _Begun:
    """What is known of a step only before it is computed."""

    at: float
    contexts: dict[Sequence, int]
    num_preemptions: int


class Glance(NamedTuple):
    """One sequence at the end of a step. Statistics are made of it once they are asked for."""

    request_id: str
    num_prompt_tokens: int
    num_computed_tokens: int
    num_output_tokens: int
    status: Status
    has_run: bool
    is_scheduled: bool


class StepRecorder:
    """Keeps what happened in the last steps, up to a bound; each is given out once. A bound of 0 keeps none.

    `StepObserver` on the engine's loop; what it has kept may be taken in any thread.
    """

    def __init__(self, scheduler: Scheduler, *, max_iterations: int, max_request_iterations: int) -> None:
        self._scheduler = scheduler
        self._lock = threading.Lock()
        self._iterations: deque[IterationStats] = deque(maxlen=max_iterations)
        self._glances_of: deque[tuple[int, list[Glance]]] = deque(maxlen=max_request_iterations)
        self._begun: dict[int, _Begun] = {}
        self._last_begin = time.monotonic()
        self._num_preemptions = 0
        self.num_iterations = 0

    def take_iterations(self) -> list[IterationStats]:
        with self._lock:
            taken = list(self._iterations)
            self._iterations.clear()
            return taken

    def take_requests(self) -> list[RequestStatsPerIteration]:
        with self._lock:
            taken = list(self._glances_of)
            self._glances_of.clear()
        return [_request_stats(number, glances) for number, glances in taken]

    def begin(self, step: Step) -> None:
        contexts = {
            sequence: num_tokens
            for sequence, num_tokens in step.num_tokens.items()
            if sequence.num_computed_tokens < sequence.num_prompt_tokens
        }
        num_preemptions = self._scheduler.num_preemptions - self._num_preemptions
        self._num_preemptions = self._scheduler.num_preemptions
        self._begun[id(step)] = _Begun(time.monotonic(), contexts, num_preemptions)
        if len(self._begun) > MAX_UNDER_WAY:
            del self._begun[next(iter(self._begun))]

    def end(self, step: Step, deltas: dict[str, list[SequenceDelta]]) -> None:
        begun = self._begun.pop(id(step), None)
        if begun is None:
            return
        self.num_iterations += 1
        iteration = self._iteration(step, begun, deltas)
        glances = self._glances(step) if self._glances_of.maxlen else []
        self._last_begin = begun.at
        with self._lock:
            self._iterations.append(iteration)
            self._glances_of.append((iteration.iter, glances))

    def _iteration(self, step: Step, begun: _Begun, deltas: dict[str, list[SequenceDelta]]) -> IterationStats:
        scheduler, now = self._scheduler, time.monotonic()
        new = [sequence for sequence in begun.contexts if self._is_new(sequence)]
        return IterationStats(
            timestamp=datetime.now().isoformat(" "),
            iter=self.num_iterations,
            iter_latency_ms=(now - begun.at) * 1000,
            new_active_requests_queue_latency_ms=sum(sequence.queue_seconds or 0.0 for sequence in new) * 1000,
            num_new_active_requests=len(new),
            num_active_requests=len({sequence.request.request_id for sequence in scheduler.running}),
            num_queued_requests=len(scheduler.waiting),
            num_completed_requests=self._num_completed(deltas),
            max_num_active_requests=scheduler.max_num_seqs,
            kv_cache_stats=self._kv_cache(),
            inflight_batching_stats=_batch(step, begun, deltas),
        )

    def _is_new(self, sequence: Sequence) -> bool:
        return sequence.queue_seconds is not None and sequence.queued_at + sequence.queue_seconds >= self._last_begin

    def _num_completed(self, deltas: dict[str, list[SequenceDelta]]) -> int:
        ended = {request_id for request_id, news in deltas.items() if any(delta.finish_reason is not None for delta in news)}
        if not ended:
            return 0
        return len(ended - {sequence.request.request_id for sequence in (*self._scheduler.running, *self._scheduler.waiting)})

    def _kv_cache(self) -> KvCacheStats:
        scheduler, pool = self._scheduler, self._scheduler.pool
        return KvCacheStats(
            max_num_blocks=pool.num_blocks,
            free_num_blocks=pool.num_free,
            used_num_blocks=pool.num_blocks - pool.num_free,
            tokens_per_block=scheduler.block_size,
            cache_hit_rate=scheduler.num_prefix_hits / scheduler.num_prefix_queries if scheduler.num_prefix_queries else 0.0,
        )

    def _glances(self, step: Step) -> list[Glance]:
        waiting = self._scheduler.waiting.first(self._scheduler.max_num_seqs)
        known = dict.fromkeys([*step.num_tokens, *self._scheduler.running, *waiting])
        return [
            Glance(
                sequence.request.request_id,
                sequence.num_prompt_tokens,
                sequence.num_computed_tokens,
                sequence.num_output_tokens,
                sequence.status,
                sequence.queue_seconds is not None,
                sequence in step.num_tokens,
            )
            for sequence in known
        ]


def _batch(step: Step, begun: _Begun, deltas: dict[str, list[SequenceDelta]]) -> InflightBatchingStats:
    num_generating = len(step.num_tokens) - len(begun.contexts)
    num_tokens = sum(len(delta.token_ids) for news in deltas.values() for delta in news)
    num_speaking = sum(bool(delta.token_ids) for news in deltas.values() for delta in news)
    return InflightBatchingStats(
        num_scheduled_requests=len(step.num_tokens),
        num_context_requests=len(begun.contexts),
        num_gen_requests=num_generating,
        num_paused_requests=begun.num_preemptions,
        num_ctx_tokens=sum(begun.contexts.values()),
        avg_num_decoded_tokens_per_iter=num_tokens / num_speaking if num_speaking else 0.0,
    )


def _request_stats(number: int, glances: list[Glance]) -> RequestStatsPerIteration:
    """`glances` of one step, by request. Requests that are not an executor's have no number."""
    by_request: dict[str, list[Glance]] = {}
    for glance in glances:
        if glance.request_id.isdecimal():
            by_request.setdefault(glance.request_id, []).append(glance)
    stats = [_stats_of(int(request_id), members) for request_id, members in by_request.items()]
    return RequestStatsPerIteration(iter=number, request_stats=sorted(stats, key=lambda one: one.id))


def _stats_of(request_id: int, members: list[Glance]) -> RequestStats:
    return RequestStats(
        id=request_id,
        stage=_stage(members),
        context_prefill_position=min(members[0].num_computed_tokens, members[0].num_prompt_tokens),
        num_generated_tokens=sum(glance.num_output_tokens for glance in members),
        scheduled=any(glance.is_scheduled for glance in members),
        paused=any(glance.status is Status.WAITING and glance.has_run for glance in members),
    )


def _stage(members: list[Glance]) -> RequestStage:
    live = next((glance for glance in members if glance.status is not Status.FINISHED), None)
    if live is None:
        return RequestStage.GENERATION_COMPLETE
    if not any(glance.has_run for glance in members):
        return RequestStage.QUEUED
    is_context = live.num_computed_tokens < live.num_prompt_tokens
    return RequestStage.CONTEXT_IN_PROGRESS if is_context else RequestStage.GENERATION_IN_PROGRESS
