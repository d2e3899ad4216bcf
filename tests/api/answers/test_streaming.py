"""What goes over the wire while a stream runs: the end, errors on the way, signs of life, and clients that leave."""

import asyncio
import json
from collections.abc import Callable, Coroutine
from typing import Any

import aiohttp
import pytest

from penstock.engine.errors import EngineUnavailable, GenerationFailed, PenstockError, QueueFull
from penstock.serving.options import ServerOptions
from tests.api.scripted import MODEL, Scripted, scripted_server

Scenario = Callable[[aiohttp.ClientSession, Scripted], Coroutine[Any, Any, None]]
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}]}
TEXTS = {"prompt": ["a", "b", "c"]}
BODIES = [("/chat/completions", CHAT), ("/completions", TEXTS)]


def serve(scenario: Scenario, engine: dict[str, Any] | None = None, **settings: Any) -> None:
    async def run() -> None:
        async with scripted_server(engine, **settings) as scripted, aiohttp.ClientSession() as client:
            await asyncio.wait_for(scenario(client, scripted), 20)

    asyncio.run(run())


async def lines_of(response: aiohttp.ClientResponse) -> list[str]:
    assert response.headers["Content-Type"].startswith("text/event-stream")
    text = await response.text()
    assert text.endswith("\n\n")
    return text.removesuffix("\n\n").split("\n\n")


@pytest.mark.parametrize(("path", "body"), BODIES)
def test_a_stream_ends_with_done_and_has_one_finish_per_choice(path: str, body: dict[str, Any]) -> None:
    async def scenario(client: aiohttp.ClientSession, scripted: Scripted) -> None:
        async with client.post(scripted.base_url + path, json=body | {"stream": True, "n": 2}) as response:
            *chunks, done = await lines_of(response)
        assert done == "data: [DONE]"
        choices = [choice for chunk in chunks for choice in json.loads(chunk.removeprefix("data: "))["choices"]]
        finished = [choice["index"] for choice in choices if choice["finish_reason"] is not None]
        assert sorted(finished) == list(range(2 * len(body.get("prompt", "x"))))
        assert all("usage" not in json.loads(chunk.removeprefix("data: ")) for chunk in chunks)

    serve(scenario)


@pytest.mark.parametrize(("path", "body"), BODIES)
@pytest.mark.parametrize(
    ("refusal", "status", "kind"),
    [
        (QueueFull("the queue is full", 7), 429, "RateLimitError"),
        (EngineUnavailable("stopping", 7), 503, "ServiceUnavailableError"),
        (GenerationFailed("out of memory"), 500, "InternalServerError"),
    ],
)
def test_an_error_before_the_first_token_is_an_http_status(
    path: str, body: dict[str, Any], refusal: PenstockError, status: int, kind: str
) -> None:
    async def scenario(client: aiohttp.ClientSession, scripted: Scripted) -> None:
        for stream in (False, True):
            async with client.post(scripted.base_url + path, json=body | {"stream": stream}) as response:
                assert response.status == status
                assert response.headers.get("Retry-After") == ("7" if status in (429, 503) else None)
                error = (await response.json())["error"]
                assert (error["type"], error["message"]) == (kind, str(refusal))
                assert set(error) == {"message", "type", "param", "code"}

    serve(scenario, {"refusal": refusal})


@pytest.mark.parametrize(("path", "body"), BODIES)
def test_an_error_on_the_way_is_an_event_and_then_the_end(path: str, body: dict[str, Any]) -> None:
    async def scenario(client: aiohttp.ClientSession, scripted: Scripted) -> None:
        async with client.post(scripted.base_url + path, json=body | {"stream": True}) as response:
            assert response.status == 200
            *chunks, error, done = await lines_of(response)
        assert len(chunks) >= 2
        assert json.loads(error.removeprefix("data: "))["error"]["message"] == "out of memory"
        assert done == "data: [DONE]"
        async with client.post(scripted.base_url + path, json=body) as response:
            assert response.status == 500
            assert (await response.json())["error"]["message"] == "out of memory"

    serve(scenario, {"failure": "out of memory"})


def test_comments_keep_an_idle_stream_alive_and_errors_after_them_are_events() -> None:
    async def scenario(client: aiohttp.ClientSession, scripted: Scripted) -> None:
        scripted.engine.gate = asyncio.Event()
        async with client.post(scripted.base_url + "/chat/completions", json=CHAT | {"stream": True}) as response:
            first = b""
            while first.count(b": keep-alive\n\n") < 3:
                assert not response.content.at_eof(), first
                first += await response.content.readany()
            scripted.engine.gate.set()
            rest = await response.text()
        assert rest.endswith("data: [DONE]\n\n")
        assert "Hello" in "".join(
            json.loads(line.removeprefix("data: "))["choices"][0]["delta"].get("content", "")
            for line in rest.split("\n\n")
            if line.startswith("data: {")
        )

    serve(scenario, options=ServerOptions(keep_alive_interval=0.01))


@pytest.mark.parametrize(("path", "body"), BODIES)
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_aborts_its_requests(path: str, body: dict[str, Any], stream: bool) -> None:
    num_requests = len(body.get("prompt", "x"))

    async def scenario(client: aiohttp.ClientSession, scripted: Scripted) -> None:
        scripted.engine.gate = asyncio.Event()
        asking = asyncio.create_task(client.post(scripted.base_url + path, json=body | {"stream": stream}))
        for happening in ("begun", "aborted"):
            assert [await scripted.engine.happenings.get() for _ in range(num_requests)] == [happening] * num_requests
            asking.cancel()

    serve(scenario)


def test_a_client_that_leaves_in_mid_stream_aborts_its_request() -> None:
    async def scenario(client: aiohttp.ClientSession, scripted: Scripted) -> None:
        async with client.post(scripted.base_url + "/chat/completions", json=CHAT | {"stream": True}) as response:
            await response.content.readany()
            response.close()
        assert [await scripted.engine.happenings.get() for _ in range(2)] == ["begun", "aborted"]

    serve(scenario, {"gate": asyncio.Event(), "gate_step": 3})


@pytest.mark.parametrize("stream", [False, True])
def test_ignored_fields_are_named_in_a_header_where_they_are_allowed(stream: bool) -> None:
    async def scenario(client: aiohttp.ClientSession, scripted: Scripted) -> None:
        body = CHAT | {"stream": stream, "frobnicate": 1, "bad\r\nheader: x": 2}
        async with client.post(scripted.base_url + "/chat/completions", json=body) as response:
            assert response.status == 200
            assert response.headers["x-ignored-fields"] == "frobnicate, bad%0D%0Aheader%3A x"
        async with client.post(scripted.base_url + "/chat/completions", json=CHAT | {"guided_grammar": "x"}) as response:
            assert response.status == 400, "a constraint is never ignored"

    serve(scenario, options=ServerOptions(allow_unknown_fields=True))


def test_a_large_body_is_decoded_all_the_same() -> None:
    async def scenario(client: aiohttp.ClientSession, scripted: Scripted) -> None:
        body = {"model": MODEL, "messages": [{"role": "user", "content": "x" * 200_000}]}
        async with client.post(scripted.base_url + "/chat/completions", json=body) as response:
            assert response.status == 400
            assert (await response.json())["error"]["code"] == "context_length_exceeded"

    serve(scenario)
