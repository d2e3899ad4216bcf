"""Chat bodies that clients send, recorded from the clients themselves: each is answered with 200, and as its fields ask."""

import json
from pathlib import Path
from typing import Any

import aiohttp
import jsonschema  # type: ignore[import-untyped]
import pytest

from tests.api.improvised import MODEL, Improvised, improvise

RECORDED = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(Path(__file__).parent.glob("*.json"))}


def test_the_clients_are_those_that_are_promised() -> None:
    assert set(RECORDED) == {
        *("dspy", "haystack", "instructor", "langchain", "litellm", "llama-index", "llm", "open-webui", "openai-agents", "pydantic-ai")
    }
    bodies = [body for recorded in RECORDED.values() for body in recorded["requests"]]
    for wanted in ("tools", "tool_choice", "response_format", "stream"):
        assert any(body.get(wanted) for body in bodies), wanted


@pytest.mark.parametrize("client", RECORDED)
def test_what_a_client_sends_is_answered_as_it_asks(client: str) -> None:
    async def scenario(server: Improvised) -> None:
        async with aiohttp.ClientSession() as http:
            for body in RECORDED[client]["requests"]:
                assert body["model"] == MODEL
                roomy = body | {name: 1500 for name in ("max_tokens", "max_completion_tokens") if name in body}
                async with http.post(f"{server.client.base_url}chat/completions", json=roomy) as response:
                    text = await response.text()
                    assert response.status == 200, text
                check(body, events(text) if body.get("stream") else [json.loads(text)])

    improvise(scenario)


def events(text: str) -> list[dict[str, Any]]:
    *data, done = [line.removeprefix("data: ") for line in text.split("\n\n") if line.startswith("data: ")]
    assert done == "[DONE]"
    return [json.loads(each) for each in data]


def check(body: dict[str, Any], answers: list[dict[str, Any]]) -> None:
    """Asserts that an answer, in one body or in chunks, keeps to what was asked for."""
    assert not any("error" in answer for answer in answers), answers
    choices = [choice for answer in answers for choice in answer["choices"]]
    assert {choice["index"] for choice in choices} == set(range(body.get("n") or 1))
    first = [choice for choice in choices if choice["index"] == 0]
    messages = [choice["message" if "message" in choice else "delta"] for choice in first]
    content = "".join(message.get("content") or "" for message in messages)
    calls = [call for message in messages for call in message.get("tool_calls") or ()]
    names = {call["function"]["name"] for call in calls if call["function"].get("name")}
    assert ("usage" in answers[-1]) == (not body.get("stream") or bool((body.get("stream_options") or {}).get("include_usage")))
    assert any(choice.get("logprobs") for choice in first) == bool(body.get("logprobs"))
    assert names <= {tool["function"]["name"] for tool in body.get("tools") or ()}
    match body.get("tool_choice"):
        case "required":
            assert names
        case {"function": {"name": name}}:
            assert names == {name}
    match body.get("response_format"):
        case {"type": "json_object"} if not calls:
            assert isinstance(json.loads(content), dict)
        case {"type": "json_schema", "json_schema": {"schema": schema}} if not calls:
            jsonschema.validate(json.loads(content), schema)
