"""The access log in JSON: one object per request, with its times and counts, and nothing of what was said."""

import json
import logging
from typing import Any

import pytest

from penstock.serving.observability.logs import JsonFormatter
from penstock.serving.options import ServerOptions
from tests.api.running_server import CHAT, Running, serve


def entries(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    return [json.loads(JsonFormatter().format(record)) for record in caplog.records if record.name == "penstock.access"]


def test_a_request_has_its_model_tokens_and_times(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(server: Running) -> None:
        await server.post("/v1/chat/completions?key=secret", CHAT, headers={"x-request-id": "logged"})
        await server.post("/v1/completions", {"model": "alias", "prompt": ["a", "bc"], "max_tokens": 2})

    with caplog.at_level(logging.INFO, "penstock.access"):
        serve(scenario)
    chat, completion = entries(caplog)
    times = {name: chat.pop(name) for name in ("duration_ms", "first_token_ms", "queue_ms", "prefill_ms", "timestamp")}
    assert times["duration_ms"] >= times["first_token_ms"] >= 0
    assert chat == {
        "level": "info",
        "logger": "penstock.access",
        "message": "POST /v1/chat/completions 200",
        "request_id": "logged",
        "client": "127.0.0.1",
        "method": "POST",
        "path": "/v1/chat/completions",
        "route": "/v1/chat/completions",
        "status": 200,
        "model": "scripted",
        "prompt_tokens": 21,
        "cached_tokens": 16,
        "output_tokens": 12,
        "finish_reasons": ["stop"],
    }
    assert (completion["model"], completion["prompt_tokens"], completion["output_tokens"]) == ("alias", 3, 4)
    assert completion["finish_reasons"] == ["length", "length"]


def test_a_refusal_says_why(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(server: Running) -> None:
        await server.post("/v1/chat/completions", CHAT | {"temprature": 1})
        await server.get("/nowhere/%0a%1b[31m")

    with caplog.at_level(logging.INFO, "penstock.access"):
        serve(scenario)
    misspelt, lost = entries(caplog)
    assert misspelt["field"] == "temprature"
    assert misspelt["error"] == "unknown field `temprature`; did you mean `temperature`?"
    assert "model" not in misspelt
    assert (lost["status"], lost["path"], lost.get("route")) == (404, "/nowhere/%0A%1B%5B31m", None)


def test_nothing_of_prompts_and_answers_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    secret = "Xyzzy plugh"
    asked: list[tuple[str, dict[str, Any]]] = [
        ("/v1/chat/completions", CHAT | {"messages": [{"role": "user", "content": secret}], "stop": [secret], "user": secret}),
        ("/v1/completions", {"model": CHAT["model"], "prompt": secret, "stop": secret}),
        ("/v1/messages", {"model": CHAT["model"], "max_tokens": 5, "messages": [{"role": "user", "content": secret}], "system": secret}),
        ("/v1/responses", {"model": CHAT["model"], "input": secret, "instructions": secret}),
        ("/tokenize", {"model": CHAT["model"], "prompt": secret}),
        ("/v1/chat/completions", CHAT | {"messages": [{"role": "user", "content": secret * 1000}]}),
    ]

    async def scenario(server: Running) -> None:
        server.engine.answers = [secret]
        for path, body in asked:
            await server.post(path, body)
            async with server.http.post(path, json=body | {"stream": True}) as response:
                await response.read()

    with caplog.at_level(logging.DEBUG):
        serve(scenario)
    logged = [record for record in caplog.records if record.name.startswith("penstock")]
    assert len([record for record in logged if record.name == "penstock.access"]) == 2 * len(asked)
    for record in logged:
        assert "Xyzzy" not in JsonFormatter().format(record)
        assert "Xyzzy" not in record.getMessage()


def test_a_request_has_the_name_of_its_key_and_never_the_key(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(server: Running) -> None:
        await server.post("/v1/chat/completions", CHAT, headers={"Authorization": "Bearer sk-second"})
        await server.post("/v1/chat/completions", CHAT, headers={"x-api-key": "sk-wrong"})

    with caplog.at_level(logging.INFO, "penstock.access"):
        serve(scenario, ServerOptions(api_keys=("sk-first", "sk-second")))
    known, unknown = entries(caplog)
    assert (known["status"], known["key"]) == (200, "api-key-2")
    assert (unknown["status"], unknown.get("key")) == (401, None)
    assert " key=api-key-2 first=" in caplog.text
    assert "sk-" not in caplog.text
