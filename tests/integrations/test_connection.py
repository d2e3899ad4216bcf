"""The application over a connection in memory, beside the same over a socket."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from penstock.api.app import build_app, build_runner
from penstock.integrations.embedded import Call, Head, answer
from tests.api.running_server import Running, serve, until
from tests.api.scripted import MODEL

JSON = [("Content-Type", "application/json")]
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}


async def whole(server: web.Server, call: Call) -> tuple[Head, bytes]:
    head, *pieces = [piece async for piece in answer(server, call)]
    assert isinstance(head, Head)
    return head, b"".join(piece for piece in pieces if isinstance(piece, bytes))


def call_of(body: object, path: str = "/v1/chat/completions") -> Call:
    return Call("POST", path, JSON, json.dumps(body).encode())


def with_server(scenario: Callable[[Running, web.Server], Awaitable[None]]) -> None:
    async def run(running: Running) -> None:
        runner = build_runner(build_app(running.context))
        await runner.setup()
        assert runner.server is not None
        try:
            await scenario(running, runner.server)
        finally:
            await runner.cleanup()

    serve(run)


def without_id(body: Any) -> Any:
    return {name: value for name, value in body.items() if name not in ("id", "created")}


def test_an_answer_is_that_of_the_socket() -> None:
    async def scenario(running: Running, server: web.Server) -> None:
        head, body = await whole(server, call_of(CHAT))
        status, expected = await running.post("/v1/chat/completions", CHAT)
        assert head.status == status == 200
        assert without_id(json.loads(body)) == without_id(expected)
        assert dict(head.headers)["Content-Length"] == str(len(body))

    with_server(scenario)


def test_a_stream_has_the_events_of_the_socket_and_no_chunks() -> None:
    async def scenario(running: Running, server: web.Server) -> None:
        head, body = await whole(server, call_of(CHAT | {"stream": True}))
        async with running.http.post("/v1/chat/completions", json=CHAT | {"stream": True}) as response:
            expected = await response.read()
        assert dict(head.headers)["Content-Type"].startswith("text/event-stream")
        assert "Transfer-Encoding" not in dict(head.headers)

        def events(text: bytes) -> list[Any]:
            lines = [line.removeprefix(b"data: ") for line in text.split(b"\n\n") if line]
            return [line if line == b"[DONE]" else without_id(json.loads(line)) for line in lines]

        assert events(body) == events(expected)

    with_server(scenario)


def test_errors_keep_their_status() -> None:
    async def scenario(running: Running, server: web.Server) -> None:
        head, body = await whole(server, call_of(CHAT | {"model": "another"}))
        assert head.status == 404
        assert json.loads(body)["error"]["param"] == "model"
        assert (await whole(server, Call("GET", "/nowhere", [])))[0].status == 404
        assert (await whole(server, Call("GET", "/v1/models", [])))[0].status == 200

    with_server(scenario)


def test_a_caller_that_leaves_aborts_its_request() -> None:
    async def scenario(running: Running, server: web.Server) -> None:
        entered, left = asyncio.Event(), asyncio.Event()

        async def wait(request: web.Request) -> web.Response:
            entered.set()
            try:
                await asyncio.Event().wait()
            finally:
                left.set()
            raise AssertionError

        app = web.Application()
        app.router.add_get("/", wait)
        runner = build_runner(app)
        await runner.setup()
        assert runner.server is not None
        pieces = answer(runner.server, Call("GET", "/", []))
        first = asyncio.ensure_future(anext(pieces))
        await entered.wait()
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        await asyncio.wait_for(left.wait(), 30)
        await runner.cleanup()

    with_server(scenario)


def test_a_handler_waits_for_a_caller_that_does_not_read() -> None:
    async def scenario(running: Running, server: web.Server) -> None:
        num_written = 0

        async def write(request: web.Request) -> web.StreamResponse:
            nonlocal num_written
            response = web.StreamResponse()
            await response.prepare(request)
            for _ in range(100):
                await response.write(bytes(10_000))
                num_written += 1
            return response

        app = web.Application()
        app.router.add_get("/", write)
        runner = build_runner(app)
        await runner.setup()
        assert runner.server is not None
        pieces = answer(runner.server, Call("GET", "/", []))
        assert isinstance(await anext(pieces), Head)
        await until(lambda: num_written >= 5)
        for _ in range(20):
            await asyncio.sleep(0)
        assert num_written < 20
        assert sum([len(piece) async for piece in pieces if isinstance(piece, bytes)]) == 1_000_000
        await runner.cleanup()

    with_server(scenario)
