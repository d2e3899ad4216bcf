"""The small endpoints, and the official client against them."""

import asyncio
from typing import Any

import openai
import pytest

from penstock import __version__
from penstock.serving.options import ServerOptions
from tests.api.running_server import CHAT, Running, serve
from tests.api.scripted import MAX_MODEL_LEN, MODEL


def test_models_are_listed_under_every_name_with_their_context() -> None:
    async def scenario(server: Running) -> None:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
            listed = (await client.models.list()).data
            assert [model.id for model in listed] == [MODEL, "alias"]
            assert {model.model_extra["max_model_len"] for model in listed if model.model_extra} == {MAX_MODEL_LEN}
            assert (await client.models.retrieve("alias")).id == "alias"
            with pytest.raises(openai.NotFoundError, match="absent/model"):
                await client.models.retrieve("absent/model")

    serve(scenario)


def test_the_official_client_authenticates_and_streams() -> None:
    async def scenario(server: Running) -> None:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="secret") as client:
            stream = await client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "Hi"}], stream=True)
            text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
            assert text == "Hello there."
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="wrong", max_retries=0) as client:
            with pytest.raises(openai.AuthenticationError):
                await client.models.list()

    serve(scenario, ServerOptions(api_keys=("secret",)))


def test_health_follows_the_engine() -> None:
    async def scenario(server: Running) -> None:
        assert await server.get("/health") == (200, {"status": "ok"})
        server.engine.is_healthy = False
        assert await server.get("/health") == (503, {"status": "unhealthy"})

    serve(scenario)


def test_routes_for_audio_and_generated_images_say_that_they_are_not_served() -> None:
    async def scenario(server: Running) -> None:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            with pytest.raises(openai.BadRequestError, match="no audio is read"):
                await client.audio.transcriptions.create(model="whisper-1", file=b"RIFF")
            with pytest.raises(openai.BadRequestError, match="no audio is generated"):
                await client.audio.speech.create(model="tts-1", voice="alloy", input="Hello")
            with pytest.raises(openai.BadRequestError, match="no images are generated"):
                await client.images.generate(prompt="a cat")

    serve(scenario)


def test_the_version_is_the_packages() -> None:
    async def scenario(server: Running) -> None:
        assert await server.get("/version") == (200, {"version": __version__})

    serve(scenario)


def test_a_prompt_goes_to_tokens_and_back() -> None:
    async def scenario(server: Running) -> None:
        text = "héllo <think>"
        status, body = await server.post("/tokenize", {"model": MODEL, "prompt": text, "return_token_strs": True})
        assert status == 200
        assert body["count"] == len(body["tokens"]) == len(text.encode()) - len("<think>") + 1
        assert body["max_model_len"] == MAX_MODEL_LEN
        assert body["token_strs"][-1] == "<think>"
        assert await server.post("/detokenize", {"tokens": body["tokens"]}) == (200, {"prompt": text})

    serve(scenario)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT),
        ("/v1/messages", CHAT | {"max_tokens": 5}),
        ("/v1/responses", {"input": "Hi"}),
        ("/v1/completions", {"prompt": "Hi"}),
    ],
)
@pytest.mark.parametrize("model", [{}, {"model": None}, {"model": ""}])
def test_a_conversation_names_its_model(path: str, body: dict[str, Any], model: dict[str, Any]) -> None:
    async def scenario(server: Running) -> None:
        status, answer = await server.post(path, {name: value for name, value in body.items() if name != "model"} | model)
        if path == "/v1/completions":
            assert (status, answer["model"]) == (200, MODEL)
        else:
            assert status == 400
            assert answer["error"]["message"] == "Object missing required field `model`. Served here: scripted, alias."
            assert answer["error"].get("param") == (None if path == "/v1/messages" else "model")

    serve(scenario)


def test_a_conversation_is_tokenized_as_chat_would() -> None:
    async def scenario(server: Running) -> None:
        _, tokenized = await server.post("/tokenize", CHAT)
        _, answered = await server.post("/v1/chat/completions", CHAT)
        assert tokenized["count"] == answered["usage"]["prompt_tokens"]
        assert server.engine.requests[0].prompt_token_ids == tokenized["tokens"]

    serve(scenario)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": []}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"prompt": "a", "promt": "b"}, "promt"),
        ("/tokenize", CHAT | {"chat_template": "x"}, "chat_template"),
        ("/tokenize", CHAT | {"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ("/tokenize", {"prompt": "\ud800"}, None),
        ("/detokenize", {"tokens": [1, -1]}, "tokens[1]"),
        ("/detokenize", {"tokens": [10**6]}, "tokens[0]"),
        ("/detokenize", {"tokens": [10**30]}, "tokens[0]"),
    ],
)
def test_a_wrong_field_is_named(path: str, body: dict[str, object], param: str | None) -> None:
    async def scenario(server: Running) -> None:
        status, answer = await server.post(path, body)
        assert (status, answer["error"]["param"]) == (400, param)

    serve(scenario)


@pytest.mark.parametrize(("path", "body"), [("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": []})])
def test_an_unknown_model_is_404(path: str, body: dict[str, object]) -> None:
    async def scenario(server: Running) -> None:
        status, answer = await server.post(path, body | {"model": "gpt-4"})
        assert (status, answer["error"]["code"]) == (404, "model_not_found")

    serve(scenario)


def test_ignored_fields_are_named_where_they_are_allowed() -> None:
    async def scenario(server: Running) -> None:
        async with server.http.post("/tokenize", json={"prompt": "a", "promt": "b"}) as response:
            assert response.status == 200
            assert response.headers["x-ignored-fields"] == "promt"

    serve(scenario, ServerOptions(allow_unknown_fields=True))


def test_many_clients_are_answered_side_by_side() -> None:
    async def scenario(server: Running) -> None:
        answers = await asyncio.gather(*(server.post("/v1/chat/completions", CHAT) for _ in range(32)))
        assert {(status, body["choices"][0]["message"]["content"]) for status, body in answers} == {(200, "Hello there.")}

    serve(scenario)
