"""What `/metrics` answers: the registry in Prometheus's text format, on request with vLLM's names as well."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from penstock.serving.observability.metrics import PREFIX
from penstock.serving.options import MetricPrefix

VLLM_PREFIX = "vllm:"
# Metrics of ours that vLLM has under the same name, and those for which dashboards may know an older name of vLLM's as well.
SAME_IN_VLLM = frozenset(
    {
        "cache_config_info",
        "e2e_request_latency_seconds",
        "generation_tokens",
        "inter_token_latency_seconds",
        "iteration_tokens_total",
        "kv_cache_usage_perc",
        "lora_requests_info",
        "num_preemptions",
        "num_requests_running",
        "num_requests_waiting",
        "prefix_cache_hits",
        "prefix_cache_queries",
        "prompt_tokens",
        "request_decode_time_seconds",
        "request_generation_tokens",
        "request_inference_time_seconds",
        "request_max_num_generation_tokens",
        "request_params_max_tokens",
        "request_params_n",
        "request_prefill_time_seconds",
        "request_prompt_tokens",
        "request_queue_time_seconds",
        "request_success",
        "request_time_per_output_token_seconds",
        "spec_decode_num_accepted_tokens",
        "spec_decode_num_accepted_tokens_per_pos",
        "spec_decode_num_draft_tokens",
        "spec_decode_num_drafts",
        "time_to_first_token_seconds",
    }
)
OLDER_IN_VLLM = {
    "inter_token_latency_seconds": "time_per_output_token_seconds",
    "kv_cache_usage_perc": "gpu_cache_usage_perc",
}
ENGINE = {"engine": "0"}  # vLLM's label of one of several engines
# Where vLLM has other labels than `model_name` and `engine`: the names of ours that are left out, and those that are added.
VLLM_LABELS: Mapping[str, tuple[str, dict[str, str]]] = {
    "cache_config_info": ("model_name", ENGINE),
    "lora_requests_info": ("model_name", {}),
}


def metrics_text(registry: CollectorRegistry, prefix: MetricPrefix) -> bytes:
    """The registry in Prometheus's text format."""
    return generate_latest(registry if prefix == "penstock" else VllmNames(registry))


def merged_text(texts: Mapping[str, str], label: str) -> bytes:
    """What several servers show as one text: each server's samples have its key in `texts` as the value of `label`."""
    return generate_latest(LabelledTexts(texts, label))


class LabelledTexts(Collector):
    """As `merged_text`. A family is written once, though several texts have it."""

    def __init__(self, texts: Mapping[str, str], label: str) -> None:
        self._texts, self._label = texts, label

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for value, text in self._texts.items():
            for family in text_string_to_metric_families(text):
                samples = [sample._replace(labels={**sample.labels, self._label: value}) for sample in family.samples]
                if families.setdefault(family.name, family) is family:
                    family.samples = samples
                else:
                    families[family.name].samples += samples
        yield from families.values()


class VllmNames(Collector):
    """All metrics of a registry, and those that vLLM has once more, under its names and with its labels."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def describe(self) -> list[Metric]:
        return []  # the names are known when metrics are collected

    def collect(self) -> Iterator[Metric]:
        for family in self._registry.collect():
            yield family
            yield from in_vllm(family)


def in_vllm(family: Metric) -> Iterator[Metric]:
    """The same as vLLM shows it: under one name, under two, or not at all."""
    name = family.name.removeprefix(PREFIX)
    if name == "http_requests":
        yield _renamed(family, name, _http_samples(family.samples))
    if name not in SAME_IN_VLLM:
        return
    left_out, added = VLLM_LABELS.get(name, ("", ENGINE))
    for theirs in (name, *([OLDER_IN_VLLM[name]] if name in OLDER_IN_VLLM else [])):
        samples = [
            sample._replace(
                name=f"{VLLM_PREFIX}{theirs}{sample.name.removeprefix(family.name)}",
                labels={label: value for label, value in sample.labels.items() if label != left_out} | added,
            )
            for sample in family.samples
        ]
        yield _renamed(family, VLLM_PREFIX + theirs, samples)


def _renamed(family: Metric, name: str, samples: Iterable[Sample]) -> Metric:
    metric = Metric(name, family.documentation, family.type)
    metric.samples = list(samples)
    return metric


def _http_samples(samples: Iterable[Sample]) -> Iterator[Sample]:
    """As the instrumentation of vLLM's HTTP server counts: by `handler`, and by the first digit of the status."""
    counts: Counter[tuple[str, str, str]] = Counter()
    for sample in samples:
        counts[sample.labels["route"], f"{sample.labels['status'][0]}xx", sample.labels["method"]] += int(sample.value)
    for (handler, status, method), count in counts.items():
        yield Sample("http_requests_total", {"handler": handler, "status": status, "method": method}, count)
