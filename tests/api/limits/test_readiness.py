"""/ready says where to send requests, /health whether the server works."""

import asyncio

import pytest

from penstock.api.middleware import GATE
from penstock.serving.options import ServerOptions
from tests.api.running_server import CHAT, Running, serve


def test_a_server_is_ready_without_a_key() -> None:
    async def scenario(server: Running) -> None:
        assert await server.get("/ready") == (200, {"status": "ready"})

    serve(scenario, ServerOptions(api_keys=("secret",)))


def test_a_server_whose_engine_cannot_answer_is_neither_ready_nor_healthy() -> None:
    async def scenario(server: Running) -> None:
        server.engine.is_healthy = False
        for path in ("/ready", "/health"):
            async with server.http.get(path) as response:
                assert (response.status, response.headers["Retry-After"]) == (503, "1")
                assert await response.json() == {"status": "unhealthy"}

    serve(scenario)


@pytest.mark.parametrize("path", ["/health", "/ping"])
def test_a_server_that_drains_is_healthy_and_not_ready_and_ends_what_it_has_begun(path: str) -> None:
    async def scenario(server: Running) -> None:
        server.engine.gate = asyncio.Event()
        running = asyncio.create_task(server.post("/v1/chat/completions", CHAT))
        await server.engine.happenings.get()
        draining = asyncio.create_task(server.app[GATE].drain(60))
        await asyncio.sleep(0)
        assert await server.get("/ready") == (503, {"status": "draining"})
        assert await server.get(path) == (200, {"status": "draining"})
        status, answer = await server.post("/v1/chat/completions", CHAT)
        assert (status, answer["error"]["message"]) == (503, "the server is shutting down")
        assert (await server.get("/v1/models"))[0] == 503
        async with server.http.get("/metrics") as response:
            assert response.status == 200
            assert 'penstock:http_requests_total{method="POST",route="/v1/chat/completions",status="503"} 1.0' in await response.text()
        server.engine.gate.set()
        assert (await running)[0] == 200
        assert await draining

    serve(scenario)
