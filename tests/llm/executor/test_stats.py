"""What an executor counts, step by step."""

import json
import threading
from collections import Counter
from datetime import timedelta

from penstock.llm.executor.requests import OutputConfig, SamplingConfig
from penstock.llm.executor.stats import IterationStats, RequestStage
from tests.fakes import make_core, runner_of
from tests.llm.executors import ask, executor_over, make_executor, result_of, whole


def test_every_step_is_counted_once() -> None:
    with make_executor() as executor:
        result_of(executor, ask("hello", 6))
        first = executor.latest_iteration_stats()
        assert [stats.iter for stats in first] == list(range(1, 7))
        assert executor.latest_iteration_stats() == []
        result_of(executor, ask("hello", 2))
        assert [stats.iter for stats in executor.latest_iteration_stats()] == [7, 8]
    context, *generation = first
    assert (context.inflight_batching_stats.num_context_requests, context.inflight_batching_stats.num_ctx_tokens) == (1, 5)
    assert {
        (stats.inflight_batching_stats.num_context_requests, stats.inflight_batching_stats.num_gen_requests) for stats in generation
    } == {(0, 1)}
    assert [stats.num_new_active_requests for stats in first] == [1, 0, 0, 0, 0, 0]
    assert [stats.num_completed_requests for stats in first] == [0, 0, 0, 0, 0, 1]
    assert [stats.num_active_requests for stats in first] == [1, 1, 1, 1, 1, 0]
    for stats in first:
        cache = stats.kv_cache_stats
        assert cache.free_num_blocks + cache.used_num_blocks == cache.max_num_blocks == 64
        assert cache.tokens_per_block == 4
        assert stats.iter_latency_ms > 0
        assert stats.inflight_batching_stats.avg_num_decoded_tokens_per_iter == 1
    assert first[-1].kv_cache_stats.used_num_blocks == 0


def test_statistics_have_the_originals_names_and_json() -> None:
    with make_executor() as executor:
        request_id = executor.enqueue_request(ask("hello", 2))
        assert [response.request_id for response in executor.await_responses(timedelta(seconds=60))] == [request_id]
        assert executor.get_num_responses_ready() == 0
        stats, requests = executor.get_latest_iteration_stats()[0], executor.get_latest_request_stats()[0]
    written = json.loads(stats.to_json_str())
    assert written["iter"] == 1
    assert written["iterLatencyMS"] == stats.iter_latency_ms
    assert written["newActiveRequestsQueueLatencyMS"] == stats.new_active_requests_queue_latency_ms
    assert written["kvCacheStats"]["tokensPerBlock"] == 4
    assert written["inflightBatchingStats"]["numCtxTokens"] == 5
    of_request = json.loads(requests.to_json_str())
    assert of_request["iter"] == 1
    assert of_request["requestStats"] == [json.loads(requests.request_stats[0].to_json_str())]
    assert of_request["requestStats"][0]["stage"] == "GENERATION_IN_PROGRESS"
    assert of_request["requestStats"][0]["numGeneratedTokens"] == 1


def test_steps_beyond_the_bound_are_forgotten_and_a_bound_of_none_keeps_none() -> None:
    with executor_over(make_core(), iter_stats_max_iterations=3, request_stats_max_iterations=0) as executor:
        result_of(executor, ask("hello", 8))
        assert [stats.iter for stats in executor.latest_iteration_stats()] == [6, 7, 8]
        assert executor.latest_request_stats() == []


def test_requests_are_followed_from_the_queue_to_their_end() -> None:
    core = make_core(max_num_seqs=1)
    runner_of(core).gate = gate = threading.Event()
    with executor_over(core) as executor:
        first, second = executor.enqueue_requests([ask("first", 3), ask("x" * 70, 2)])
        gate.set()
        whole(executor, first)
        whole(executor, second)
        seen = [
            (request.id, request.stage, request.num_generated_tokens)
            for step in executor.latest_request_stats()
            for request in step.request_stats
        ]
        queued = [stats.num_queued_requests for stats in executor.latest_iteration_stats()]
    assert [entry for entry in seen if entry[0] == first] == [
        (first, RequestStage.GENERATION_IN_PROGRESS, 1),
        (first, RequestStage.GENERATION_IN_PROGRESS, 2),
        (first, RequestStage.GENERATION_COMPLETE, 3),
    ]
    stages = [stage for request_id, stage, _ in seen if request_id == second]
    assert stages == sorted(stages, key=lambda stage: stage.value)
    assert {RequestStage.QUEUED, RequestStage.CONTEXT_IN_PROGRESS, RequestStage.GENERATION_COMPLETE} <= set(stages)
    assert queued[:2] == [1, 1]
    assert queued[-1] == 0


def test_paused_requests_are_told_from_queued_ones() -> None:
    with make_executor(num_blocks=50, max_model_len=200) as executor:
        request_ids = executor.enqueue_requests([ask(f"{number}", 120) for number in range(2)])
        for request_id in request_ids:
            whole(executor, request_id)
        steps = executor.latest_request_stats()
        paused = [request for step in steps for request in step.request_stats if request.paused]
        iterations = executor.latest_iteration_stats()
    assert paused
    assert {request.stage for request in paused} == {RequestStage.CONTEXT_IN_PROGRESS}
    assert sum(stats.inflight_batching_stats.num_paused_requests for stats in iterations) >= 1


def test_steps_that_overlap_are_each_counted() -> None:
    with make_executor(is_async=True) as executor:
        for request_id in executor.enqueue_requests([ask("hello", 12), ask("world", 7)]):
            whole(executor, request_id)
        iterations = executor.latest_iteration_stats()
    assert [stats.iter for stats in iterations] == list(range(1, len(iterations) + 1))
    assert sum(stats.inflight_batching_stats.num_ctx_tokens for stats in iterations) == 10
    assert sum(stats.num_completed_requests for stats in iterations) == 2


def test_sequences_of_a_request_and_requests_with_drafts_are_counted() -> None:
    with make_executor(rows_for_weights=64.0) as executor:
        config = SamplingConfig(num_return_sequences=3)
        whole(executor, ask("abcabc", 10, sampling_config=config))
        iterations, steps = executor.latest_iteration_stats(), executor.latest_request_stats()
    assert max(stats.inflight_batching_stats.num_scheduled_requests for stats in iterations) == 3
    assert steps[-1].request_stats[0].num_generated_tokens <= 30
    assert len(iterations) == len(steps)


def test_cancelled_requests_and_failed_steps_leave_the_counts_right() -> None:
    core = make_core()
    with executor_over(core) as executor:
        runner_of(core).failure = ValueError("broken")
        whole(executor, ask())
        runner_of(core).failure = None
        request_id = executor.enqueue_request(ask("hello", 150, streaming=True))
        executor.await_responses(request_id)
        executor.cancel_request(request_id)
        whole(executor, request_id)
        result_of(executor, ask())
        iterations: list[IterationStats] = executor.latest_iteration_stats()
    assert [stats.iter for stats in iterations] == list(range(1, len(iterations) + 1))
    assert sum(stats.num_completed_requests for stats in iterations) == 2


def test_metrics_say_when_what_happened() -> None:
    with make_executor() as executor:
        config = OutputConfig(return_perf_metrics=True)
        responses = whole(executor, ask("x" * 9, 5, streaming=True, output_config=config))
        metrics = [response.result.request_perf_metrics for response in responses]
        again = result_of(executor, ask("x" * 9, 5, output_config=config)).request_perf_metrics
        assert result_of(executor, ask()).request_perf_metrics is None
    assert all(one is not None for one in metrics)
    last = metrics[-1]
    assert last is not None
    assert again is not None
    timing = last.timing_metrics
    moments = [timing.arrival_time, timing.first_scheduled_time, timing.first_token_time, timing.last_token_time]
    assert moments == sorted(moments, key=lambda moment: moment or 0.0)
    assert None not in moments
    assert [one.timing_metrics.last_token_time is None for one in metrics if one is not None] == [True] * 4 + [False]
    assert last.last_iter == last.iter
    assert last.first_iter is not None
    assert last.last_iter is not None
    assert last.last_iter >= last.first_iter
    cache = again.kv_cache_metrics
    assert (cache.num_reused_blocks, cache.num_missed_blocks, cache.num_total_allocated_blocks, cache.num_new_allocated_blocks) == (
        2,
        1,
        4,
        2,
    )
    assert Counter([cache.kv_cache_hit_rate]) == {2 / 3: 1}
