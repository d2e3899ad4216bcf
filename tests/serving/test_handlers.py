"""The endpoints as calls of Python: they answer as the server does, where aiohttp cannot be imported as well."""

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.engine.errors import QueueFull
from penstock.integrations.embedded import Call, EmbeddedServer, Head, read_flags
from penstock.serving.endpoints.handlers import Handlers
from tests.api.pooling.server import PoolingServer, serve_pooling
from tests.api.scripted import ScriptedEngine, scripted_server
from tests.encoders import embedding_directory

ROOT = Path(__file__).parent.parent.parent
CHAT: dict[str, Any] = {"model": "demo", "messages": [{"role": "user", "content": "Hi"}]}
CALLS: list[tuple[str, str, Any]] = [
    ("POST", "/v1/chat/completions", CHAT),
    ("POST", "/v1/chat/completions", CHAT | {"stream": True, "stream_options": {"include_usage": True}}),
    ("POST", "/v1/chat/completions", CHAT | {"logprobs": True, "n": 2}),
    ("POST", "/v1/completions", {"model": "demo", "prompt": ["a", "b"], "max_tokens": 5}),
    ("POST", "/v1/completions", {"model": "demo", "prompt": "a", "stream": True}),
    ("POST", "/tokenize", {"messages": CHAT["messages"]}),
    ("POST", "/detokenize", {"tokens": [72, 105]}),
    ("GET", "/v1/models", None),
    ("GET", "/health", None),
    ("POST", "/v1/chat/completions", CHAT | {"temperature": -1}),
    ("POST", "/v1/chat/completions", CHAT | {"model": "other", "stream": True}),
    ("POST", "/v1/chat/completions", CHAT | {"promt": ""}),
    ("POST", "/v1/audio/transcriptions", {}),
]
VARYING = ("id", "created")


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    script = tmp_path_factory.mktemp("script") / "answers.jsonl"
    script.write_text('{"model": {"name": "demo"}}\n{"content": "one two three"}\n', encoding="utf-8")
    return ["--model", f"scripted:{script}", "--kv-cache-memory", "16MiB", "--device", "cpu", "--speculation", "none"]


def comparable(status: int, kind: str, content: str) -> tuple[int, str, list[Any]]:
    """The bodies of an answer, without what differs from one answer to the next."""
    if kind.startswith("application/json"):
        bodies = [json.loads(content)]
    else:
        assert content.endswith("data: [DONE]\n\n")
        bodies = [json.loads(event.removeprefix("data: ")) for event in content.removesuffix("data: [DONE]\n\n").split("\n\n") if event]
    for body in bodies:
        for entry in (body, *body.get("data", ())) if isinstance(body, dict) else ():
            for name in VARYING:
                entry.pop(name, None) if entry is body or name == "created" else None
    return status, kind.partition(";")[0], bodies


async def served(flags: list[str]) -> list[tuple[int, str, list[Any]]]:
    """What the whole server answers."""
    server, found = EmbeddedServer(read_flags(flags)), []
    for method, path, body in CALLS:
        content = b"" if body is None else json.dumps(body).encode()
        head, *pieces = [piece async for piece in await server.answer(Call(method, path, [("Content-Type", "application/json")], content))]
        assert isinstance(head, Head)
        kind = next(value for name, value in head.headers if name.lower() == "content-type")
        found.append(comparable(head.status, kind, b"".join(piece for piece in pieces if isinstance(piece, bytes)).decode()))
    await server.stop()
    return found


def test_where_aiohttp_cannot_be_imported_handlers_answer_as_the_server(flags: list[str]) -> None:
    command = [sys.executable, "-W", "ignore", "-m", "tests.serving.without_aiohttp", *flags]
    done = subprocess.run(command, input=json.dumps(CALLS), cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    answers: list[tuple[int, str, list[str]]] = json.loads(done.stdout)
    found = [comparable(status, kind, "".join(pieces)) for status, kind, pieces in answers]
    assert found == asyncio.run(served(flags))
    assert found[0][2][0]["choices"][0]["message"]["content"] == "one two three"
    assert len(answers[1][2]) > 3, "a stream comes in pieces"
    assert [status for status, _, _ in found] == [200] * 9 + [400, 404, 400, 400]


def with_handlers(engine: dict[str, Any], scenario: Callable[[Handlers, ScriptedEngine], Awaitable[None]]) -> None:
    async def run() -> None:
        async with scripted_server(engine) as server:
            await scenario(Handlers(server.context), server.engine)

    asyncio.run(run())


def streamed(**fields: Any) -> bytes:
    return json.dumps({"prompt": "a", "stream": True, **fields}).encode()


def test_a_stream_that_is_closed_aborts_its_request() -> None:
    async def scenario(handlers: Handlers, engine: ScriptedEngine) -> None:
        reply = await handlers.answer("POST", "/v1/completions", streamed(), client="someone", request_id="mine")
        assert isinstance(reply.content, AsyncGenerator)
        assert (await anext(reply.content)).startswith(b"data: {")
        await reply.content.aclose()
        assert engine.aborted == 1
        assert engine.requests[0].http_id == "mine"

    with_handlers({"answers": ["a long answer " * 20]}, scenario)


def test_an_error_before_the_first_token_keeps_its_status() -> None:
    async def scenario(handlers: Handlers, engine: ScriptedEngine) -> None:
        reply = await handlers.answer("POST", "/v1/completions", streamed())
        assert (reply.status, reply.headers["Retry-After"]) == (429, "7")
        assert isinstance(reply.content, bytes)
        assert json.loads(reply.content)["error"]["code"] == "queue_full"

    with_handlers({"refusal": QueueFull("full", 7)}, scenario)


def test_an_error_in_mid_stream_is_its_last_event_but_one() -> None:
    async def scenario(handlers: Handlers, engine: ScriptedEngine) -> None:
        reply = await handlers.answer("POST", "/v1/completions", streamed())
        assert isinstance(reply.content, AsyncGenerator)
        *_, error, done = [piece async for piece in reply.content]
        assert b"out of memory" in error
        assert done == b"data: [DONE]\n\n"

    with_handlers({"failure": "out of memory"}, scenario)


def test_paths_of_other_models_and_of_none_are_refused() -> None:
    async def scenario(handlers: Handlers, engine: ScriptedEngine) -> None:
        for path, status in (("/v1/embeddings", 400), ("/nowhere", 404)):
            reply = await handlers.answer("POST", path, b"{}")
            assert reply.status == status
        assert (await handlers.answer("GET", "/v1/chat/completions")).status == 404

    with_handlers({}, scenario)


def test_a_time_limit_in_the_body_ends_the_answer() -> None:
    async def scenario(handlers: Handlers, engine: ScriptedEngine) -> None:
        await handlers.answer("POST", "/v1/completions", json.dumps({"prompt": "a", "timeout": 50}).encode())
        (request,) = engine.requests
        assert request.deadline is not None
        assert 40 < request.deadline - time.monotonic() <= 50

    with_handlers({}, scenario)


def test_a_pooling_models_handlers_answer_as_its_server(tmp_path: Path) -> None:
    body = json.dumps({"input": ["one", "two"], "encoding_format": "base64"})

    async def scenario(server: PoolingServer) -> None:
        reply = await Handlers(server.context).answer("POST", "/v1/embeddings", body.encode())
        status, expected = await server.post("/v1/embeddings", json.loads(body))
        assert (reply.status, status) == (200, 200)
        assert isinstance(reply.content, bytes)
        assert json.loads(reply.content)["data"] == expected["data"]
        refused = await Handlers(server.context).answer("POST", "/v1/completions", b"{}")
        assert refused.status == 400

    serve_pooling(embedding_directory(tmp_path), scenario)


def test_a_stream_that_is_closed_before_its_first_event_aborts_its_request() -> None:
    async def scenario(handlers: Handlers, engine: ScriptedEngine) -> None:
        reply = await handlers.answer("POST", "/v1/completions", streamed())
        assert isinstance(reply.content, AsyncGenerator)
        await reply.content.aclose()
        assert engine.aborted == 1

    with_handlers({"answers": ["a long answer " * 20]}, scenario)
