"""`--metric-prefix vllm`: what dashboards and routers that were made for vLLM look for."""

from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry, Counter, Histogram, Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from penstock.engine.adapters.registry import AdapterStats
from penstock.serving.observability.exposition import SAME_IN_VLLM, merged_text, metrics_text
from penstock.serving.observability.metrics import HttpRequests, Metrics, merged_registry, report_of
from tests.api.running_server import STATS

# The samples that the queries of vLLM's own Grafana dashboard name, in its versions of 2024 to 2026.
DASHBOARD = {
    "vllm:e2e_request_latency_seconds_bucket",
    "vllm:e2e_request_latency_seconds_count",
    "vllm:e2e_request_latency_seconds_sum",
    "vllm:generation_tokens_total",
    "vllm:gpu_cache_usage_perc",
    "vllm:inter_token_latency_seconds_bucket",
    "vllm:inter_token_latency_seconds_count",
    "vllm:inter_token_latency_seconds_sum",
    "vllm:kv_cache_usage_perc",
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:prompt_tokens_total",
    "vllm:request_decode_time_seconds_sum",
    "vllm:request_generation_tokens_bucket",
    "vllm:request_max_num_generation_tokens_sum",
    "vllm:request_prefill_time_seconds_sum",
    "vllm:request_prompt_tokens_bucket",
    "vllm:request_queue_time_seconds_sum",
    "vllm:request_success_total",
    "vllm:time_per_output_token_seconds_bucket",
    "vllm:time_per_output_token_seconds_count",
    "vllm:time_per_output_token_seconds_sum",
    "vllm:time_to_first_token_seconds_bucket",
    "vllm:time_to_first_token_seconds_count",
    "vllm:time_to_first_token_seconds_sum",
}
# Of vLLM's metrics, what alerts, autoscalers and routers use beside those: their types.
TYPES = {
    "vllm:cache_config_info": "gauge",
    "vllm:iteration_tokens_total": "histogram",
    "vllm:kv_cache_usage_perc": "gauge",
    "vllm:lora_requests_info": "gauge",
    "vllm:num_preemptions": "counter",
    "vllm:prefix_cache_hits": "counter",
    "vllm:prefix_cache_queries": "counter",
    "vllm:request_inference_time_seconds": "histogram",
    "vllm:request_params_max_tokens": "histogram",
    "vllm:request_params_n": "histogram",
    "vllm:request_success": "counter",
    "vllm:request_time_per_output_token_seconds": "histogram",
    "vllm:spec_decode_num_accepted_tokens": "counter",
    "vllm:spec_decode_num_accepted_tokens_per_pos": "counter",
    "vllm:spec_decode_num_draft_tokens": "counter",
    "vllm:spec_decode_num_drafts": "counter",
}
ADAPTERS = replace(STATS, adapters=AdapterStats(running=("a", "b"), waiting=("c",), num_slots=4))


def families(metrics: Metrics) -> dict[str, Metric]:
    return {family.name: family for family in text_string_to_metric_families(metrics_text(metrics.registry, "vllm").decode())}


@pytest.fixture
def shown() -> dict[str, Metric]:
    return families(Metrics(lambda: ADAPTERS, "m"))


def test_every_sample_of_vllms_dashboard_is_there_with_its_labels(shown: dict[str, Metric]) -> None:
    samples = {sample.name: sample for family in shown.values() for sample in family.samples}
    assert not DASHBOARD - samples.keys()
    for name in DASHBOARD:
        labels = dict(samples[name].labels)
        assert (labels.pop("model_name"), labels.pop("engine")) == ("m", "0")
        assert set(labels) <= {"le", "finished_reason"}


def test_metrics_have_vllms_types(shown: dict[str, Metric]) -> None:
    assert {name: shown[name].type for name in TYPES} == TYPES


def test_both_names_have_the_same_values(shown: dict[str, Metric]) -> None:
    names = {name.removeprefix("vllm:") for name in shown if name.startswith("vllm:") and not name.endswith("_created")}
    assert names == SAME_IN_VLLM | {"time_per_output_token_seconds", "gpu_cache_usage_perc"}
    for name in SAME_IN_VLLM - {"lora_requests_info"}:  # whose value is the time
        ours, theirs = shown[f"penstock:{name}"], shown[f"vllm:{name}"]
        assert [sample.value for sample in ours.samples] == [sample.value for sample in theirs.samples]
        assert ours.documentation == theirs.documentation


def test_adapters_and_the_cache_have_vllms_labels_alone(shown: dict[str, Metric]) -> None:
    """Those of the Gateway API inference extension's model server protocol."""
    (adapters,), (cache,) = shown["vllm:lora_requests_info"].samples, shown["vllm:cache_config_info"].samples
    assert adapters.labels == {"max_lora": "4", "running_lora_adapters": "a,b", "waiting_lora_adapters": "c"}
    assert adapters.value > 1e9
    labels = {"engine": "0", "block_size": "16", "num_gpu_blocks": "500", "cache_dtype": "bfloat16", "enable_prefix_caching": "True"}
    assert (cache.labels, cache.value) == (labels, 1)


def test_without_the_prefix_there_are_no_names_of_vllms() -> None:
    assert b"vllm" not in metrics_text(Metrics(lambda: STATS, "m").registry, "penstock")


def test_http_requests_are_shown_as_vllms_server_counts_them() -> None:
    metrics, requests = Metrics(lambda: STATS, "m"), HttpRequests()
    metrics.registry.register(requests)
    for status in (200, 201, 429):
        requests.count("POST", "/v1/chat/completions", status)
    found = {
        (sample.labels["handler"], sample.labels["method"], sample.labels["status"]): sample.value
        for sample in families(metrics)["http_requests"].samples
    }
    assert found == {("/v1/chat/completions", "POST", "2xx"): 2, ("/v1/chat/completions", "POST", "4xx"): 1}


def test_the_metrics_of_several_processes_are_summed_under_both_names() -> None:
    servers = [Metrics(None, "m") for _ in range(3)]
    for number, server in enumerate(servers, start=1):
        server.registry.register(requests := HttpRequests())
        requests.count("GET", "/health", 200)
        for _ in range(number):
            server.count_finished("stop")
            server.time_to_first_token.observe(0.2)
    merged = merged_registry([], [report_of(server.registry) for server in servers])
    samples = {
        (sample.name, sample.labels.get("finished_reason") or sample.labels.get("le")): sample.value
        for family in text_string_to_metric_families(metrics_text(merged, "vllm").decode())
        for sample in family.samples
    }
    for prefix in ("penstock", "vllm"):
        assert samples[f"{prefix}:request_success_total", "stop"] == 6
        assert samples[f"{prefix}:time_to_first_token_seconds_bucket", "0.1"] == 0
        assert samples[f"{prefix}:time_to_first_token_seconds_bucket", "0.25"] == 6
        assert samples[f"{prefix}:time_to_first_token_seconds_sum", None] == pytest.approx(1.2)
    assert samples["penstock:http_requests_total", None] == samples["http_requests_total", None] == 3


def test_labels_are_from_lists_whatever_is_asked_for() -> None:
    """A hundred thousand methods, paths and statuses of clients leave the metrics as large as a hundred."""
    metrics, requests = Metrics(lambda: STATS, "m"), HttpRequests()
    metrics.registry.register(requests)
    sizes = []
    for number in range(100_000):
        requests.count(f"FOO{number}", None, 404)
        requests.count("POST", "/v1/chat/completions", 200)
        if number in (100, 99_999):
            sizes.append(metrics_text(metrics.registry, "vllm").count(b"\n"))
    assert sizes[0] == sizes[1]


def text_of(count: int) -> str:
    registry = CollectorRegistry()
    Counter("penstock:requests", "Requests.", ["reason"], registry=registry).labels('a "quoted"\nreason').inc(count)
    Histogram("penstock:seconds", "Seconds.", buckets=(1, 2), registry=registry).observe(1.5)
    return generate_latest(registry).decode()


def test_each_family_is_there_once_with_the_samples_of_all() -> None:
    texts = {"first": text_of(1), "second": text_of(2)}
    merged = merged_text(texts, "replica").decode()
    assert merged.count("# TYPE penstock:requests_total counter") == 1
    families = list(text_string_to_metric_families(merged))
    assert len({family.name for family in families}) == len(families)
    for name, text in texts.items():
        expected = {family.name: family.samples for family in text_string_to_metric_families(text)}
        for family in families:
            own = [sample for sample in family.samples if sample.labels["replica"] == name]
            assert [
                sample._replace(labels={label: value for label, value in sample.labels.items() if label != "replica"}) for sample in own
            ] == expected[family.name]
