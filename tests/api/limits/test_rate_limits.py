"""Limits of keys over HTTP: refused before the body is read, with the headers that clients' libraries know."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import anthropic
import anyio
import openai
import pytest

from penstock.api.requests import LEDGER
from penstock.serving.limits import hash_of
from penstock.serving.options import ServerOptions
from tests.api.running_server import CHAT, Running, serve, until
from tests.api.scripted import MODEL

KEY = {"Authorization": "Bearer secret"}
PATH = "/v1/chat/completions"
MESSAGES = {"model": MODEL, "max_tokens": 500, "messages": [{"role": "user", "content": "Hi"}]}


@pytest.fixture
def options(tmp_path: Path) -> Callable[..., ServerOptions]:
    def make(*limits: str, **others: object) -> ServerOptions:
        path = tmp_path / "keys.toml"
        path.write_text("\n".join(("[keys.alice]", f'hash = "{hash_of("secret")}"', *limits)), encoding="utf-8")
        return ServerOptions(keys_file=str(path), keep_alive_interval=0, **others)  # type: ignore[arg-type]

    return make


def test_a_key_that_has_sent_its_requests_is_refused_before_the_body_is_read(options: Callable[..., ServerOptions]) -> None:
    async def scenario(server: Running) -> None:
        for remaining in ("1", "0"):
            async with server.http.post(PATH, json=CHAT, headers=KEY) as response:
                assert (response.status, response.headers["x-ratelimit-remaining-requests"]) == (200, remaining)
                assert response.headers["x-ratelimit-limit-requests"] == "2"
        async with server.http.post(PATH, data=b"this is no JSON", headers=KEY) as response:
            error = (await response.json())["error"]
            assert (response.status, error["code"], error["type"]) == (429, "rate_limit_exceeded", "RateLimitError")
            assert 25 <= int(response.headers["Retry-After"]) <= 30
            assert response.headers["x-ratelimit-remaining-requests"] == "0"
        async with server.http.post("/v1/messages", data=b"this is no JSON", headers={"x-api-key": "secret"}) as response:
            assert (response.status, (await response.json())["error"]["type"]) == (429, "rate_limit_error")
            assert 25 <= int(response.headers["retry-after"]) <= 30
        assert (await server.get("/v1/models", headers=KEY))[0] == 200, "only requests for the model count"

    serve(scenario, options("requests_per_minute = 2"))


@pytest.mark.parametrize("is_streamed", [False, True])
def test_tokens_of_prompts_and_answers_count(options: Callable[..., ServerOptions], is_streamed: bool) -> None:
    async def scenario(server: Running) -> None:
        async with server.http.post(PATH, json=CHAT | {"stream": is_streamed}, headers=KEY) as response:
            assert response.status == 200
            await response.read()
        (usage,) = server.app[LEDGER]
        await until(lambda: not usage.open_requests)
        (request,) = server.engine.requests
        assert (usage.num_prompt_tokens, usage.num_generation_tokens) == (len(request.prompt_token_ids), 12)
        async with server.http.post(PATH, data=b"", headers=KEY) as response:
            assert (response.status, response.headers["x-ratelimit-remaining-tokens"]) == (429, "0")

    serve(scenario, options("tokens_per_minute = 20"))


def test_a_key_has_so_many_requests_at_a_time_and_a_client_that_leaves_frees_its_place(options: Callable[..., ServerOptions]) -> None:
    async def scenario(server: Running) -> None:
        server.engine.gate = asyncio.Event()
        first = asyncio.create_task(server.post(PATH, CHAT, headers=KEY))
        await server.engine.happenings.get()
        status, answer = await server.post(PATH, CHAT, headers=KEY)
        assert (status, answer["error"]["code"]) == (429, "rate_limit_exceeded")
        first.cancel()
        (usage,) = server.app[LEDGER]
        await until(lambda: not usage.open_requests)
        server.engine.gate.set()
        assert (await server.post(PATH, CHAT, headers=KEY))[0] == 200

    serve(scenario, options("max_concurrent_requests = 1"))


def test_a_response_in_the_background_is_open_until_it_ends(options: Callable[..., ServerOptions]) -> None:
    async def scenario(server: Running) -> None:
        server.engine.gate = asyncio.Event()
        body = {"model": MODEL, "input": "Hi", "background": True}
        assert (await server.post("/v1/responses", body, headers=KEY))[0] == 200
        assert (await server.post("/v1/responses", body, headers=KEY))[0] == 429
        server.engine.gate.set()
        (usage,) = server.app[LEDGER]
        await until(lambda: not usage.open_requests)
        assert usage.num_generation_tokens == 12

    serve(scenario, options("max_concurrent_requests = 1"))


def test_answers_have_the_keys_cap_and_more_is_refused(options: Callable[..., ServerOptions]) -> None:
    async def scenario(server: Running) -> None:
        for path, name, body in (
            (PATH, "max_tokens", CHAT),
            (PATH, "max_completion_tokens", CHAT),
            ("/v1/completions", "max_tokens", {"prompt": "Hi"}),
            ("/v1/responses", "max_output_tokens", {"model": MODEL, "input": "Hi"}),
        ):
            status, answer = await server.post(path, body | {name: 6}, headers=KEY)
            assert (status, answer["error"]["param"]) == (400, name)
            assert "at most 5 for this API key" in answer["error"]["message"]
            assert (await server.post(path, body, headers=KEY))[0] == 200
            assert (await server.post(path, body | {name: 4}, headers=KEY))[0] == 200
            assert [request.params.max_tokens for request in server.engine.requests[-2:]] == [5, 4]
        assert (await server.post("/v1/messages", MESSAGES, headers=KEY))[0] == 200
        assert server.engine.requests[-1].params.max_tokens == 5, "clients of that API always send a number"

    serve(scenario, options("max_tokens = 5"))


def test_requests_have_the_priority_of_their_key_and_may_only_ask_for_less(options: Callable[..., ServerOptions]) -> None:
    async def scenario(server: Running) -> None:
        for fields in ({}, {"priority": 7}):
            assert (await server.post(PATH, CHAT | fields, headers=KEY))[0] == 200
        status, answer = await server.post(PATH, CHAT | {"priority": 4}, headers=KEY)
        assert (status, answer["error"]["param"]) == (400, "priority")
        assert [request.priority for request in server.engine.requests] == [5, 7]

    serve(scenario, options("priority = 5", min_priority=0))


def test_the_libraries_of_openai_and_anthropic_wait_as_long_as_they_are_asked_to(
    options: Callable[..., ServerOptions], monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[float] = []

    async def scenario(server: Running) -> None:
        async def sleep(seconds: float) -> None:
            waited.append(seconds)
            (usage,) = server.app[LEDGER]
            assert usage.requests is not None
            usage.requests.take(-1)

        monkeypatch.setattr(anyio, "sleep", sleep)
        messages = [{"role": "user", "content": "Hi"}]
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="secret") as client:
            for _ in range(2):
                raw = await client.chat.completions.with_raw_response.create(model=MODEL, messages=messages)  # type: ignore[arg-type]
            assert raw.headers["x-ratelimit-limit-requests"] == "1"
            assert raw.parse().choices[0].message.content == "Hello there."
        async with anthropic.AsyncAnthropic(base_url=server.url, api_key="secret") as other:
            message = await other.messages.create(model=MODEL, max_tokens=50, messages=messages)  # type: ignore[arg-type]
            assert message.stop_reason == "end_turn"
            with pytest.raises(anthropic.RateLimitError):
                await other.with_options(max_retries=0).messages.create(model=MODEL, max_tokens=50, messages=messages)  # type: ignore[arg-type]
        assert len(waited) == 2
        assert all(55 <= seconds <= 60 for seconds in waited)

    serve(scenario, options("requests_per_minute = 1"))


def test_usage_by_key_is_in_the_metrics(options: Callable[..., ServerOptions]) -> None:
    async def scenario(server: Running) -> None:
        await server.post(PATH, CHAT, headers=KEY)
        async with server.http.get("/metrics", headers=KEY) as response:
            text = await response.text()
        assert f'penstock:key_requests_total{{key="alice",model_name="{MODEL}"}} 1.0' in text
        assert f'penstock:key_generation_tokens_total{{key="alice",model_name="{MODEL}"}} 12.0' in text

    serve(scenario, options())
