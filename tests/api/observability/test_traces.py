"""Traces: what a collector receives of requests, and that exporting neither delays nor fails any."""

import asyncio
import logging
from collections.abc import Iterator

import pytest

from penstock.api.middleware import AccessEntry
from penstock.engine.errors import ConfigurationError
from penstock.serving.observability import tracing
from penstock.serving.observability.tracing import check_tracing, is_tracing_wanted, make_tracer
from penstock.serving.options import ServerOptions
from tests.api.observability.otlp_collector import Collector, collecting
from tests.api.running_server import CHAT, Running, serve

TRACE_ID, PARENT_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
PARENT = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01"}


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    for name in (*tracing.ENDPOINT_VARIABLES, *tracing.PROTOCOL_VARIABLES, "OTEL_SDK_DISABLED", "OTEL_SERVICE_NAME"):
        monkeypatch.delenv(name, raising=False)
    with collecting() as collector:
        yield collector


def options(collector: Collector) -> ServerOptions:
    return ServerOptions(otlp_endpoint=collector.url)


def test_a_request_is_a_span_with_the_clients_parent_and_events_of_its_phases(collector: Collector) -> None:
    async def scenario(server: Running) -> None:
        body = CHAT | {"temperature": 0.5, "max_tokens": 20, "seed": 3, "stream": True, "stop": ["secret"]}
        async with server.http.post("/v1/chat/completions", json=body, headers=PARENT | {"x-request-id": "traced"}) as response:
            await response.read()

    serve(scenario, options(collector))
    span = collector.named("chat scripted")
    assert (span.trace_id, span.parent_id, span.kind, span.status) == (TRACE_ID, PARENT_ID, "SPAN_KIND_SERVER", "STATUS_CODE_UNSET")
    times = {name: span.attributes.pop(name) for name in [*span.attributes] if "latency" in name or "time_to" in name}
    assert span.attributes == {
        "http.request.method": "POST",
        "http.route": "/v1/chat/completions",
        "http.response.status_code": 200,
        "gen_ai.request.id": "traced",
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "penstock",
        "gen_ai.request.model": "scripted",
        "gen_ai.response.model": "scripted",
        "gen_ai.request.stream": True,
        "gen_ai.request.max_tokens": 20,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.request.frequency_penalty": 0.0,
        "gen_ai.request.presence_penalty": 0.0,
        "gen_ai.request.seed": 3,
        "gen_ai.usage.input_tokens": 21,
        "gen_ai.usage.cache_read.input_tokens": 16,
        "gen_ai.usage.output_tokens": 12,
        "gen_ai.response.finish_reasons": ["stop"],
    }
    first = times["gen_ai.latency.time_to_first_token"]
    assert times["gen_ai.response.time_to_first_chunk"] == first
    assert 0 < first <= times["gen_ai.latency.e2e"]
    phases = {"gen_ai.latency.time_in_queue", "gen_ai.latency.time_in_model_prefill", "gen_ai.latency.time_in_model_decode"}
    assert phases <= times.keys()
    assert (span.resource["service.name"], span.resource["telemetry.sdk.name"]) == ("penstock", "opentelemetry")
    assert span.start <= span.events["scheduled"] <= span.events["first_token"] <= span.end
    assert len(collector.spans) == 1


def test_other_routes_have_spans_by_their_templates_and_polls_have_none(collector: Collector, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(server: Running) -> None:
        await server.post("/v1/completions", {"model": CHAT["model"], "prompt": "a", "n": 2})
        await server.get("/v1/models/another?x=1")
        await server.get("/nowhere/at/all")
        for path in ("/health", "/ping", "/metrics"):
            async with server.http.get(path) as response:
                assert response.status == 200

    with caplog.at_level(logging.INFO, "penstock.access"):
        serve(scenario, options(collector))
    spans = {span.name: span for span in collector.spans}
    assert spans.keys() == {"text_completion scripted", "GET /v1/models/{name}", "GET"}
    assert spans["text_completion scripted"].attributes["gen_ai.request.choice.count"] == 2
    assert spans["text_completion scripted"].attributes["gen_ai.response.finish_reasons"] == ["stop", "stop"]
    assert spans["GET"].attributes["http.response.status_code"] == 404
    roots = [span.trace_id for span in collector.spans if not span.parent_id]
    entries = [record.msg for record in caplog.records if record.name == "penstock.access"]
    logged = [entry.fields["trace_id"] for entry in entries if isinstance(entry, AccessEntry)]
    assert logged == roots


def test_a_failed_answer_is_an_error(collector: Collector) -> None:
    async def scenario(server: Running) -> None:
        server.engine.failure = "the model failed"
        await server.post("/v1/chat/completions", CHAT)

    serve(scenario, options(collector))
    span = collector.named("chat scripted")
    assert (span.status, span.attributes["error.type"]) == ("STATUS_CODE_ERROR", "error")
    assert span.attributes["http.response.status_code"] == 500


def test_a_trace_that_cannot_be_made_fails_no_request(
    collector: Collector, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object) -> None:
        raise RuntimeError("a plug-in of OpenTelemetry failed")

    async def scenario(server: Running) -> None:
        monkeypatch.setattr(tracing.Tracer, "record", fail)
        assert (await server.post("/v1/chat/completions", CHAT, headers={"x-request-id": "untraced"}))[0] == 200

    serve(scenario, options(collector))
    assert "no trace was made of request untraced" in caplog.text


def test_a_client_that_has_not_sampled_its_trace_gets_none(collector: Collector) -> None:
    async def scenario(server: Running) -> None:
        await server.post("/v1/chat/completions", CHAT, headers={"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-00"})
        await server.post("/v1/chat/completions", CHAT, headers={"traceparent": "00-not a traceparent"})

    serve(scenario, options(collector))
    assert [span.parent_id for span in collector.spans if span.name == "chat scripted"] == [""]


@pytest.mark.parametrize("kind", ["hangs", "fails", "is not there"])
def test_a_collector_that_does_not_answer_delays_no_request_and_no_shutdown(
    collector: Collector, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "1")  # ms: it exports while requests are answered
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "8")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "8")
    monkeypatch.setattr(tracing, "CLOSE_SECONDS", 0.01)
    logging.getLogger("opentelemetry").disabled = True
    if kind == "hangs":
        collector.gate.clear()
    collector.status = 503
    endpoint = "http://127.0.0.1:1" if kind == "is not there" else collector.url

    async def scenario(server: Running) -> None:
        statuses = {(await server.post("/v1/chat/completions", CHAT))[0] for _ in range(30)}
        assert statuses == {200}

    async def in_time() -> None:
        await asyncio.to_thread(serve, scenario, ServerOptions(otlp_endpoint=endpoint))

    asyncio.run(asyncio.wait_for(in_time(), 60))


def test_opentelemetrys_variables_say_where_traces_go_and_whose_they_are(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "gzip")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "service.name=gateway,deployment.environment=test")

    async def scenario(server: Running) -> None:
        await server.post("/v1/chat/completions", CHAT)

    serve(scenario)
    resource = collector.named("chat scripted").resource
    assert (resource["service.name"], resource["deployment.environment"]) == ("gateway", "test")


@pytest.mark.parametrize(
    ("endpoint", "variables", "is_wanted"),
    [
        (None, {}, False),
        ("http://a", {}, True),
        (None, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://a"}, True),
        (None, {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://a"}, True),
        (None, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://a", "OTEL_TRACES_EXPORTER": "none"}, False),
        ("http://a", {"OTEL_TRACES_EXPORTER": "none"}, True),
        ("http://a", {"OTEL_SDK_DISABLED": "true"}, False),
    ],
)
def test_when_traces_are_exported(
    endpoint: str | None, variables: dict[str, str], is_wanted: bool, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert is_tracing_wanted(endpoint) == is_wanted


def test_what_cannot_be_exported_to_is_refused_at_the_start(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "carrier pigeon")
    with pytest.raises(ConfigurationError, match="OTEL_EXPORTER_OTLP_PROTOCOL must be one of http/protobuf, grpc, got 'carrier pigeon'"):
        check_tracing(collector.url)


def test_without_opentelemetry_the_flag_is_refused_and_variables_alone_are_a_warning(
    collector: Collector, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tracing, "find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match=r"--otlp-endpoint: there is no opentelemetry.sdk: pip install 'penstock\[otel\]'"):
        check_tracing(collector.url)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
    check_tracing(None)
    assert make_tracer(None) is None
    assert "no traces are exported: there is no opentelemetry.sdk" in caplog.text
