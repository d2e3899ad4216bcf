"""Traces through a real OpenTelemetry collector: `scripts/test -m clients`, which fetches it once."""

import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from penstock.serving.options import ServerOptions
from tests.api.observability.otlp_collector import Collector, collecting
from tests.api.running_server import CHAT, Running, serve
from tests.clients.programs import collector

pytestmark = pytest.mark.clients
TRACE_ID, PARENT_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
PATIENCE = 20.0


def free_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return f"127.0.0.1:{free.getsockname()[1]}"


@contextmanager
def forwarding(target: Collector, directory: Path) -> Iterator[str]:
    """The URL of a collector that sends on what it receives."""
    http, grpc = free_address(), free_address()
    receiver = ["--otlp-http-endpoint", http, "--otlp-grpc-endpoint", grpc]
    exporter = ["--exporter", "otlp", "--otlp-exporter-endpoint", target.url, "--otlp-exporter-protocol", "http"]
    command = [str(collector()), "start", *receiver, *exporter, "--disable-batching"]
    with (directory / "log").open("w") as log:
        process = subprocess.Popen(command, cwd=directory, stdout=log, stderr=log)
    try:
        end = time.monotonic() + PATIENCE
        while not is_listening(http):
            assert process.poll() is None, (directory / "log").read_text()
            assert time.monotonic() < end, "the collector does not listen"
            time.sleep(0.05)
        yield f"http://{http}"
    finally:
        process.kill()
        process.wait()


def is_listening(address: str) -> bool:
    host, _, port = address.partition(":")
    try:
        socket.create_connection((host, int(port))).close()
    except OSError:
        return False
    return True


def test_a_collector_receives_spans_and_sends_them_on(tmp_path: Path) -> None:
    async def scenario(server: Running) -> None:
        for _ in range(20):
            headers = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01"}
            assert (await server.post("/v1/chat/completions", CHAT, headers=headers))[0] == 200

    with collecting() as target, forwarding(target, tmp_path) as url:
        serve(scenario, ServerOptions(otlp_endpoint=url))
        end = time.monotonic() + PATIENCE
        while len(target.spans) < 20 and time.monotonic() < end:
            time.sleep(0.05)
        requests = [span for span in target.spans if span.name == "chat scripted"]
        assert len(requests) == len(target.spans) == 20
        assert {(span.trace_id, span.parent_id) for span in requests} == {(TRACE_ID, PARENT_ID)}
        assert {span.attributes["gen_ai.usage.output_tokens"] for span in requests} == {12}
        assert {span.resource["service.name"] for span in target.spans} == {"penstock"}
