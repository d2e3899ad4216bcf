"""What /metrics shows, and where the numbers come from."""

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import replace

import pytest
from prometheus_client import Histogram
from prometheus_client.parser import text_string_to_metric_families

from penstock.engine.deltas import FinishReason, PromptInfo, SequenceDelta
from penstock.engine.errors import EngineUnavailable, PenstockError, QueueFull
from penstock.engine.kv_cache.block_files import BlockFileStats
from penstock.engine.kv_cache.persistence import PersistenceStats
from penstock.engine.sampling.params import SamplingParams
from penstock.serving.observability.exposition import metrics_text
from penstock.serving.observability.metrics import Metrics, RequestMetrics
from tests.api.running_server import CHAT, STATS, Running, serve, until


def text_of(metrics: RequestMetrics) -> str:
    return metrics_text(metrics.registry, "penstock").decode()


def values(text: str) -> dict[str, float]:
    """Every sample that has no labels beside the model's name, and those by finish reason."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if not set(sample.labels) - {"model_name"}:
                found[sample.name] = sample.value
            elif "finished_reason" in sample.labels:
                found[f"{sample.name}/{sample.labels['finished_reason']}"] = sample.value
    return found


def test_the_engines_counters_are_read_when_asked_for() -> None:
    shown = values(text_of(Metrics(lambda: STATS, "m")))
    expected = {
        "penstock:num_requests_running": 2,
        "penstock:num_requests_waiting": 1,
        "penstock:kv_cache_usage_perc": 0.25,
        "penstock:prefix_cache_queries_total": 100,
        "penstock:prefix_cache_hits_total": 40,
        "penstock:prompt_tokens_total": 60,
        "penstock:generation_tokens_total": 7,
        "penstock:num_preemptions_total": 3,
        "penstock:spec_decode_num_drafts_total": 4,
        "penstock:spec_decode_num_draft_tokens_total": 12,
        "penstock:spec_decode_num_accepted_tokens_total": 6,
        "penstock:iteration_tokens_total_count": 9,
        "penstock:iteration_tokens_total_sum": 67,
    }
    assert shown.items() >= expected.items()


def test_blocks_of_the_directory_are_counted_where_there_is_one() -> None:
    assert "kv_cache_dir" not in text_of(Metrics(lambda: STATS, "m"))
    files = BlockFileStats(num_written=5, num_bytes_written=500, num_read=3, num_bytes_read=300, num_rejected=1, num_write_errors=2)
    persistent = replace(STATS, persistence=PersistenceStats(files, num_hits=2, num_dropped=4))
    text = text_of(Metrics(lambda: persistent, "m"))
    expected = {
        "penstock:kv_cache_dir_hits_total": 2,
        "penstock:kv_cache_dir_blocks_written_total": 5,
        "penstock:kv_cache_dir_bytes_written_total": 500,
        "penstock:kv_cache_dir_blocks_read_total": 3,
        "penstock:kv_cache_dir_bytes_read_total": 300,
        "penstock:kv_cache_dir_blocks_rejected_total": 1,
        "penstock:kv_cache_dir_blocks_dropped_total": 4,
        "penstock:kv_cache_dir_blocks_evicted_total": 0,
    }
    assert values(text).items() >= expected.items()
    assert 'kv_cache_dir_errors_total{model_name="m",operation="write"} 2.0' in text


def test_drafts_are_counted_by_the_positions_up_to_which_they_were_right() -> None:
    text = text_of(Metrics(lambda: STATS, "m"))
    for position, count in enumerate((3, 3)):
        assert f'spec_decode_num_accepted_tokens_per_pos_total{{model_name="m",position="{position}"}} {count}.0' in text
    for proposer, num_drafted, counts in (("ngram", 9, (2, 2)), ("prediction", 3, (1, 1))):
        assert f'spec_decode_num_draft_tokens_by_proposer_total{{model_name="m",proposer="{proposer}"}} {num_drafted}.0' in text
        for position, count in enumerate(counts):
            labels = f'model_name="m",position="{position}",proposer="{proposer}"'
            assert f"spec_decode_num_accepted_tokens_per_pos_by_proposer_total{{{labels}}} {count}.0" in text


def test_two_servers_in_one_process_do_not_share_a_registry() -> None:
    first, second = Metrics(lambda: STATS, "a"), Metrics(lambda: STATS, "b")
    first.count_finished("stop")
    assert values(text_of(first))["penstock:request_success_total/stop"] == 1
    assert values(text_of(second))["penstock:request_success_total/stop"] == 0


def test_a_watched_stream_is_counted_and_passed_on_unchanged() -> None:
    deltas = [
        SequenceDelta(0, [1], prompt=PromptInfo(5, 3, queue_seconds=0.25, prefill_seconds=0.5)),
        SequenceDelta(1, [1, 2], prompt=PromptInfo(5, 0)),
        SequenceDelta(0, [3]),
        SequenceDelta(0, finish_reason=FinishReason.STOP),
        SequenceDelta(1, [4], finish_reason=FinishReason.LENGTH),
    ]

    async def stream() -> AsyncGenerator[SequenceDelta, None]:
        for delta in deltas:
            yield delta

    async def scenario() -> None:
        metrics = Metrics(lambda: STATS, "m")
        timer = metrics.begin(0.0)
        assert [delta async for delta in timer.watch(stream(), SamplingParams(n=2, max_tokens=7))] == deltas
        assert (timer.num_prompt_tokens, timer.num_cached_tokens, timer.num_generation_tokens) == (5, 3, 5)
        assert timer.finish_reasons == ["stop", "length"]
        shown = values(text_of(metrics))
        expected = {
            "penstock:request_success_total/stop": 1,
            "penstock:request_success_total/length": 1,
            "penstock:time_to_first_token_seconds_count": 1,
            "penstock:inter_token_latency_seconds_count": 2,
            "penstock:e2e_request_latency_seconds_count": 2,
            "penstock:request_queue_time_seconds_sum": 0.25,
            "penstock:request_prompt_tokens_sum": 5,
            "penstock:request_prefill_time_seconds_sum": 0.5,
            "penstock:request_decode_time_seconds_count": 2,
            "penstock:request_inference_time_seconds_count": 2,
            "penstock:request_time_per_output_token_seconds_count": 2,
            "penstock:request_generation_tokens_sum": 5,
            "penstock:request_max_num_generation_tokens_sum": 3,
            "penstock:request_params_n_sum": 2,
            "penstock:request_params_max_tokens_sum": 7,
        }
        assert shown.items() >= expected.items()

    asyncio.run(scenario())


def test_closing_a_watched_stream_closes_what_it_watches() -> None:
    closed = []

    async def stream() -> AsyncGenerator[SequenceDelta, None]:
        try:
            while True:
                yield SequenceDelta(0, [1])
        finally:
            closed.append(True)

    async def scenario() -> None:
        watched = Metrics(lambda: STATS, "m").begin(0.0).watch(stream(), SamplingParams())
        await anext(watched)
        await watched.aclose()

    asyncio.run(scenario())
    assert closed == [True]


def test_requests_over_http_are_counted() -> None:
    async def scenario(server: Running) -> None:
        await server.post("/v1/chat/completions", CHAT)
        await server.post("/v1/completions", {"model": CHAT["model"], "prompt": ["a", "bc"]})
        async with server.http.get("/metrics") as response:
            assert response.content_type == "text/plain"
            shown = values(await response.text())
        assert shown["penstock:request_success_total/stop"] == 3
        assert shown["penstock:request_prompt_tokens_count"] == 3
        assert shown["penstock:time_to_first_token_seconds_count"] == 2

    serve(scenario)


def test_http_requests_are_counted_by_route_and_never_by_a_clients_own_words() -> None:
    async def scenario(server: Running) -> None:
        await server.post("/v1/chat/completions", CHAT)
        await server.post("/v1/chat/completions", CHAT | {"model": "another"})
        for number in range(50):
            await server.get(f"/nowhere/{number}?{number}")
            await server.get(f"/v1/models/{number}")
            async with server.http.request("PROPFIND", f"/{number}") as response:
                assert response.status == 404
        async with server.http.get("/metrics") as response:
            text = await response.text()
        families = {family.name: family.samples for family in text_string_to_metric_families(text)}
        found = {(one.labels["method"], one.labels["route"], one.labels["status"]): one.value for one in families["penstock:http_requests"]}
        assert found == {
            ("POST", "/v1/chat/completions", "200"): 1,
            ("POST", "/v1/chat/completions", "404"): 1,
            ("GET", "other", "404"): 50,
            ("GET", "/v1/models/{name}", "404"): 50,
            ("other", "other", "404"): 50,
        }

    serve(scenario)


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_request_that_its_client_leaves_is_counted_as_aborted(is_streamed: bool) -> None:
    async def scenario(server: Running) -> None:
        server.engine.gate, server.engine.gate_step = asyncio.Event(), int(is_streamed)
        body = CHAT | {"n": 2, "stream": is_streamed}
        if is_streamed:
            async with server.http.post("/v1/chat/completions", json=body) as response:
                await response.content.readline()
                response.close()
        else:
            client = asyncio.create_task(server.post("/v1/chat/completions", body))
            assert await server.engine.happenings.get() == "begun"
            client.cancel()
        await until(lambda: server.engine.aborted == 1)
        async with server.http.get("/metrics") as response:
            shown = values(await response.text())
        ended = {name: value for name, value in shown.items() if "request_success_total" in name and value}
        assert ended == {"penstock:request_success_total/abort": 2}
        assert shown["penstock:e2e_request_latency_seconds_count"] == 2
        assert shown["penstock:request_queue_time_seconds_count"] == 1
        assert shown["penstock:request_prompt_tokens_count"] == is_streamed

    serve(scenario)


@pytest.mark.parametrize("refusal", [QueueFull("full"), EngineUnavailable("stopping")])
def test_what_the_engine_refuses_has_not_waited(refusal: PenstockError) -> None:
    async def stream() -> AsyncGenerator[SequenceDelta, None]:
        raise refusal
        yield

    async def scenario() -> None:
        metrics = Metrics(lambda: STATS, "m")
        with pytest.raises(type(refusal)):
            await anext(metrics.begin(0.0).watch(stream(), SamplingParams()))
        shown = values(text_of(metrics))
        assert shown["penstock:request_queue_time_seconds_count"] == shown["penstock:e2e_request_latency_seconds_count"] == 0

    asyncio.run(scenario())


@pytest.mark.parametrize(("reason", "expected"), [(FinishReason.STOP, ["stop", "abort"]), (FinishReason.ERROR, ["error"])])
def test_of_a_stream_that_is_closed_what_has_not_ended_is_aborted(reason: FinishReason, expected: list[str]) -> None:
    """Unless an error is why it is closed."""

    async def stream() -> AsyncGenerator[SequenceDelta, None]:
        yield SequenceDelta(0, [1], prompt=PromptInfo(5, 3))
        yield SequenceDelta(0, finish_reason=reason)
        yield SequenceDelta(1, [2])

    async def scenario() -> None:
        metrics = Metrics(lambda: STATS, "m")
        timer = metrics.begin(0.0)
        watched = timer.watch(stream(), SamplingParams(n=2))
        await anext(watched)
        await anext(watched)
        await watched.aclose()
        assert timer.finish_reasons == expected
        shown = values(text_of(metrics))
        assert shown["penstock:request_max_num_generation_tokens_count"] == shown["penstock:request_queue_time_seconds_count"] == 1

    asyncio.run(scenario())


def test_what_compiling_took_and_the_cache_spared_is_shown() -> None:
    async def scenario(server: Running) -> None:
        async with server.http.get("/metrics") as response:
            text = await response.text()
        shown = values(text)
        expected = {
            "cache_queries_total": 9,
            "cache_hits_total": 6,
            "cache_entries": 2,
            "cache_bytes": 300,
            "num_compiling": 1,
            "num_waiting": 4,
        }
        assert shown.items() >= {f"penstock:grammar_{name}": value for name, value in expected.items()}.items()
        samples = {family.name: family.samples for family in text_string_to_metric_families(text)}
        attempts = {
            (sample.labels["backend"], sample.labels["outcome"]): sample.value for sample in samples["penstock:grammar_compilations"]
        }
        assert attempts == {("fast", "compiled"): 2, ("fast", "refused"): 1}
        times = {sample.labels.get("le", sample.name[-5:]): sample.value for sample in samples["penstock:grammar_compile_seconds"]}
        assert (times["0.001"], times["0.0025"], times["0.005"], times["10.0"], times["+Inf"], times["count"]) == (1, 1, 2, 2, 3, 3)
        assert times["s_sum"] == pytest.approx(20.004)

    serve(scenario)


def test_a_histogram_of_tokens_is_exposed_as_any_other() -> None:
    metrics = Metrics(lambda: STATS, "m")
    library = Histogram("other", "", ["model_name"], registry=metrics.registry).labels("m")
    for seconds in (0.001, 0.0011, 0.3, 99.0):
        metrics.inter_token_latency.observe(seconds)
        library.observe(seconds)
    families = {family.name: family for family in text_string_to_metric_families(text_of(metrics))}
    ours, other = families["penstock:inter_token_latency_seconds"], families["other"]
    assert ours.type == other.type == "histogram"
    found = {sample.labels.get("le", sample.name): sample.value for sample in ours.samples}
    assert found["0.001"] == 1
    assert found["0.0025"] == found["0.25"] == 2
    assert found["0.5"] == found["5.0"] == 3
    assert found["+Inf"] == found["penstock:inter_token_latency_seconds_count"] == 4
    assert found["penstock:inter_token_latency_seconds_sum"] == pytest.approx(99.3021)
    kinds = [{(sample.name.removeprefix(family.name), *sorted(sample.labels)) for sample in family.samples} for family in (ours, other)]
    assert kinds[0] == kinds[1]
