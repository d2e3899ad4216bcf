"""OpenTelemetry traces: a span for each request, with events at the ends of its time in the queue and of its prefill.

Spans are made when a request is over, from what has been measured of it: while it runs, tracing costs nothing. A thread exports them over
OTLP, and drops those that find its queue full. OpenTelemetry is the extra `otel`, and imported only where traces are wanted.
"""

import logging
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from penstock import __version__
from penstock.engine.errors import ConfigurationError
from penstock.serving.observability.metrics import LoggedTimer, RequestTimer

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span

    from penstock.engine.sampling.params import SamplingParams

log = logging.getLogger(__name__)

EXTRA = "pip install 'penstock[otel]'"
ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
PROTOCOL_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
EXPORTERS = {"http/protobuf": "opentelemetry.exporter.otlp.proto.http", "grpc": "opentelemetry.exporter.otlp.proto.grpc"}
TRACES_PATH = "/v1/traces"  # of an endpoint that speaks HTTP
PROVIDER = "penstock"
CLOSE_SECONDS = 3.0  # for spans that are not exported yet when the server ends


@dataclass(frozen=True, slots=True)
class TraceIds:
    """Of a span, in hexadecimal digits."""

    trace_id: str
    span_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedRequest:
    """An HTTP request that is over. `operation` is GenAI's name of what it asked for, None where that is nothing of a model.

    `started` and `ended` are by the monotonic clock; `route` is None for a path without a route; `key` is the name of the API key.
    """

    method: str
    route: str | None
    status: int
    request_id: str
    started: float
    ended: float
    operation: str | None = None
    is_streamed: bool = False
    key: str | None = None
    timer: LoggedTimer | None = None

    @property
    def name(self) -> str:
        """Of its span. No client chooses it: a model's name is that of one that is served."""
        if self.operation is not None and self.timer is not None and self.timer.model is not None:
            return f"{self.operation} {self.timer.model}"
        return f"{self.method} {self.route}" if self.route is not None else self.method


def is_tracing_wanted(endpoint: str | None) -> bool:
    """Whether traces are exported: to `endpoint`, or to where OpenTelemetry's environment variables say."""
    if os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False
    if endpoint is not None:
        return True
    is_off = os.environ.get("OTEL_TRACES_EXPORTER", "otlp").strip().lower() != "otlp"
    return not is_off and any(os.environ.get(name) for name in ENDPOINT_VARIABLES)


def check_tracing(endpoint: str | None) -> None:
    """Raises `ConfigurationError` where traces cannot be exported as asked. Imports nothing.

    Variables that are set for all programs of a machine must not keep the server from its start: where they alone ask for traces,
    OpenTelemetry may be missing.
    """
    missing = missing_module() if is_tracing_wanted(endpoint) else None
    if endpoint is not None and missing is not None:
        raise ConfigurationError(f"--otlp-endpoint: there is no {missing}: {EXTRA}")


def missing_module() -> str | None:
    """What of OpenTelemetry is not installed. Raises `ConfigurationError` for a protocol that is not known."""
    wanted = ("opentelemetry.sdk", _exporter_module())
    return next((name for name in wanted if not _is_installed(name)), None)


def _is_installed(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # of a package above it
        return False


def _exporter_module() -> str:
    protocol = next((os.environ[name] for name in PROTOCOL_VARIABLES if os.environ.get(name)), "http/protobuf")
    if protocol not in EXPORTERS:
        raise ConfigurationError(f"{PROTOCOL_VARIABLES[1]} must be one of {', '.join(EXPORTERS)}, got {protocol!r}")
    return EXPORTERS[protocol]


def make_tracer(endpoint: str | None) -> "Tracer | None":
    """None where no traces are wanted, and, with a warning, where OpenTelemetry is missing. `check_tracing` has been called before."""
    if not is_tracing_wanted(endpoint):
        return None
    if (missing := missing_module()) is not None:
        log.warning("%s is set, and no traces are exported: there is no %s: %s", ENDPOINT_VARIABLES[1], missing, EXTRA)
        return None
    module = _exporter_module()
    if endpoint is not None and module == EXPORTERS["http/protobuf"]:
        endpoint = endpoint.rstrip("/").removesuffix(TRACES_PATH) + TRACES_PATH
    return Tracer(import_module(f"{module}.trace_exporter").OTLPSpanExporter(endpoint=endpoint))


class Tracer:
    """Makes spans of finished requests, on one thread. The exporter works in another."""

    def __init__(self, exporter: "SpanExporter") -> None:
        from opentelemetry import propagate, trace
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        own = {"service.name": PROVIDER, "service.version": __version__}
        # The environment's own names come last, so that they win: OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES.
        resource = Resource(own).merge(Resource.create()) if _names_service() else Resource.create(own)
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer(PROVIDER, __version__)
        self._extract, self._trace = propagate.extract, trace

    def record(self, request: FinishedRequest, headers: Mapping[str, str]) -> TraceIds:
        """`headers` may have the `traceparent` of a client's span, which becomes the parent."""
        clock = time.time_ns() - round(time.monotonic() * 1e9)
        span = self._tracer.start_span(
            request.name,
            context=self._extract(headers),
            kind=self._trace.SpanKind.SERVER,
            attributes=_http_attributes(request),
            start_time=_nanoseconds(request.started, clock),
        )
        if span.is_recording():
            self._describe(span, request, clock)
        span.end(_nanoseconds(request.ended, clock))
        context = span.get_span_context()
        return TraceIds(self._trace.format_trace_id(context.trace_id), self._trace.format_span_id(context.span_id))

    def _describe(self, span: "Span", request: FinishedRequest, clock: int) -> None:
        timer = request.timer
        attributes: dict[str, Any] = {}
        if request.operation is not None and timer is not None:
            attributes |= _model_attributes(request, timer)
        if isinstance(timer, RequestTimer):
            attributes |= _generation_attributes(request, timer)
            for name, moment in _events(request, timer):  # a child span for each phase would take twice as long as all of this
                span.add_event(name, timestamp=_nanoseconds(moment, clock))
        has_failed = isinstance(timer, RequestTimer) and "error" in timer.finish_reasons
        if request.status >= 500 or has_failed:
            attributes["error.type"] = "error" if has_failed else str(request.status)
            span.set_status(self._trace.StatusCode.ERROR)
        span.set_attributes({name: value for name, value in attributes.items() if value is not None})

    def close(self) -> None:
        """Exports what is left, where that takes no longer than a few seconds."""
        closing = threading.Thread(target=self._provider.shutdown, name="tracing-shutdown", daemon=True)
        closing.start()
        closing.join(CLOSE_SECONDS)


def _names_service() -> bool:
    return bool(os.environ.get("OTEL_SERVICE_NAME")) or "service.name=" in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "")


def _nanoseconds(moment: float, clock: int) -> int:
    """A time of the monotonic clock as the SDK wants it; `clock` is what that clock lacks of the time since 1970."""
    return clock + round(moment * 1e9)


def _http_attributes(request: FinishedRequest) -> dict[str, Any]:
    attributes: dict[str, Any] = {
        "http.request.method": request.method,
        "http.response.status_code": request.status,
        "http.route": request.route,
        "gen_ai.request.id": request.request_id,
        "penstock.key": request.key,
    }
    return {name: value for name, value in attributes.items() if value is not None}


def _model_attributes(request: FinishedRequest, timer: LoggedTimer) -> dict[str, Any]:
    """GenAI's semantic conventions."""
    return {
        "gen_ai.operation.name": request.operation,
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": timer.model,
        "gen_ai.response.model": timer.model,
        "gen_ai.usage.input_tokens": timer.num_prompt_tokens,
    }


def _generation_attributes(request: FinishedRequest, timer: RequestTimer) -> dict[str, Any]:
    """The same for a model that generates, and vLLM's names of latencies, which the conventions do not have."""
    wanted: dict[str, Any] = {
        "gen_ai.request.stream": request.is_streamed,
        "gen_ai.usage.output_tokens": timer.num_generation_tokens,
        "gen_ai.usage.cache_read.input_tokens": timer.num_cached_tokens,
        "gen_ai.response.finish_reasons": timer.finish_reasons or None,
        "gen_ai.response.time_to_first_chunk": timer.time_to_first_token if request.is_streamed else None,
        "gen_ai.latency.time_to_first_token": timer.time_to_first_token,
        "gen_ai.latency.time_in_queue": timer.queue_seconds,
        "gen_ai.latency.time_in_model_prefill": timer.prefill_seconds,
        "gen_ai.latency.time_in_model_decode": _decode_seconds(request, timer),
        "gen_ai.latency.e2e": request.ended - request.started,
    }
    return wanted if timer.params is None else wanted | _parameter_attributes(timer.params)


def _parameter_attributes(params: "SamplingParams") -> dict[str, Any]:
    # Numbers only: stop strings are a client's text.
    return {
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.top_k": float(params.top_k) if params.top_k > 0 else None,
        "gen_ai.request.frequency_penalty": params.frequency_penalty,
        "gen_ai.request.presence_penalty": params.presence_penalty,
        "gen_ai.request.seed": params.seed,
        "gen_ai.request.choice.count": params.n if params.n != 1 else None,
    }


def _decode_seconds(request: FinishedRequest, timer: RequestTimer) -> float | None:
    """From the first token of the request to the end of its last sequence."""
    if timer.time_to_first_token is None or timer.finished is None:
        return None
    return timer.finished - request.started - timer.time_to_first_token


def _events(request: FinishedRequest, timer: RequestTimer) -> list[tuple[str, float]]:
    """Of the first prompt, by the monotonic clock."""
    if timer.time_to_first_token is None:
        return []
    first_token = request.started + timer.time_to_first_token
    return [("scheduled", max(request.started, first_token - (timer.prefill_seconds or 0.0))), ("first_token", first_token)]
