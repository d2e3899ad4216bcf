"""A collector that keeps what it is sent over OTLP, read with the protocol's own protobufs."""

import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from google.protobuf.json_format import MessageToDict  # type: ignore[import-untyped]
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest, ExportTraceServiceResponse


@dataclass(frozen=True)
class ReceivedSpan:
    name: str
    kind: str
    trace_id: str
    span_id: str
    parent_id: str
    start: int
    end: int
    status: str
    events: dict[str, int]
    attributes: dict[str, Any]
    resource: dict[str, Any]


@dataclass
class Collector:
    """Answers with `status`, once `gate` is set."""

    url: str = ""
    status: int = 200
    gate: threading.Event = field(default_factory=threading.Event)
    bodies: list[bytes] = field(default_factory=list)

    @property
    def spans(self) -> list[ReceivedSpan]:
        found = []
        for body in self.bodies:
            for group in ExportTraceServiceRequest.FromString(body).resource_spans:
                resource = attributes_of(group.resource.attributes)
                found += [received(span, resource) for scope in group.scope_spans for span in scope.spans]
        return found

    def named(self, name: str) -> ReceivedSpan:
        (span,) = (span for span in self.spans if span.name == name)
        return span


def received(span: Any, resource: dict[str, Any]) -> ReceivedSpan:
    return ReceivedSpan(
        span.name,
        span.SpanKind.Name(span.kind),
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        span.start_time_unix_nano,
        span.end_time_unix_nano,
        span.status.StatusCode.Name(span.status.code),
        {event.name: event.time_unix_nano for event in span.events},
        attributes_of(span.attributes),
        resource,
    )


def attributes_of(pairs: Any) -> dict[str, Any]:
    return {pair.key: plain(MessageToDict(pair.value)) for pair in pairs}


def plain(value: dict[str, Any]) -> Any:
    """A value as JSON spells it: {"intValue": "3"}, {"arrayValue": {"values": [...]}}."""
    ((kind, content),) = value.items()
    if kind == "arrayValue":
        return [plain(item) for item in content.get("values", [])]
    return int(content) if kind == "intValue" else content


@contextmanager
def collecting() -> Iterator[Collector]:
    collector = Collector()
    collector.gate.set()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            body = self.rfile.read(int(self.headers["Content-Length"]))
            collector.bodies.append(gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body)
            collector.gate.wait()
            self.send_response(collector.status)
            self.end_headers()
            self.wfile.write(ExportTraceServiceResponse().SerializeToString())

        def log_message(self, *args: object) -> None:
            """Nothing: tests look at what was received."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        collector.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield collector
        finally:
            collector.gate.set()
            server.shutdown()
            thread.join()
