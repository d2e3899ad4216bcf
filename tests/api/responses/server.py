"""The scripted server's Responses API with a plain HTTP client, and a client's reading of its streams."""

import asyncio
import json
from collections.abc import Callable, Coroutine
from typing import Any

import aiohttp

from tests.api.scripted import MODEL, Scripted, scripted_server


class Api:
    """The server, and requests to it."""

    def __init__(self, server: Scripted, http: aiohttp.ClientSession) -> None:
        self.server = server
        self.engine = server.engine
        self.http = http

    @property
    def prompt(self) -> str:
        """The last request's."""
        token_ids = self.engine.requests[-1].prompt_token_ids
        tokenizer = self.engine.tokenizer
        return b"".join(tokenizer.token_bytes(token_id) or tokenizer.token_text(token_id).encode() for token_id in token_ids).decode()

    async def call(self, method: str, path: str, body: Any = None, key: str | None = None) -> tuple[int, Any]:
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        async with self.http.request(method, self.server.base_url + path, json=body, headers=headers) as response:
            return response.status, await response.json()

    async def create(self, **body: Any) -> Any:
        status, response = await self.call("POST", "/responses", {"model": MODEL} | body)
        assert status == 200, response
        return response

    async def refusal(self, body: Any) -> tuple[str | None, str]:
        status, answer = await self.call("POST", "/responses", {"model": MODEL} | body)
        assert status == 400, answer
        return answer["error"]["param"], answer["error"]["message"]

    async def stream(self, **body: Any) -> list[dict[str, Any]]:
        async with self.http.post(self.server.base_url + "/responses", json={"model": MODEL, "stream": True} | body) as response:
            assert response.status == 200
            return events_of(await response.text())


def serve(scenario: Callable[[Api], Coroutine[Any, Any, None]], engine: dict[str, Any] | None = None, **settings: Any) -> None:
    async def run() -> None:
        async with scripted_server(engine, **settings) as server, aiohttp.ClientSession() as http:
            await scenario(Api(server, http))

    asyncio.run(asyncio.wait_for(run(), 60))


def events_of(stream: str) -> list[dict[str, Any]]:
    """Asserts that each event is named after its type, and that the stream ends as clients expect."""
    *events, done, rest = stream.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    decoded = []
    for event in events:
        name, data = event.split("\n")
        decoded.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {decoded[-1]['type']}"
    return decoded


def folded(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The response that the events add up to, as a client reads them. Asserts their grammar."""
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    is_queued = events[1]["type"] == "response.queued"
    opening = ["response.created", *["response.queued"] * is_queued, "response.in_progress"]
    assert [event["type"] for event in events[: len(opening)]] == opening
    assert [event["response"]["status"] for event in events[: 1 + is_queued]] == ["queued" if is_queued else "in_progress"] * (
        1 + is_queued
    )
    final: dict[str, Any] = events[-1]["response"]
    assert events[-1]["type"] == f"response.{'incomplete' if final['status'] == 'cancelled' else final['status']}"
    output: list[dict[str, Any]] = []
    is_open = False
    for event in events[len(opening) : -1]:
        kind = event["type"].removeprefix("response.")
        assert not event.get("error")
        if kind == "output_item.added":
            assert not is_open
            assert event["output_index"] == len(output)
            assert event["item"]["status"] == "in_progress"
            output.append(event["item"])
            is_open = True
            continue
        assert is_open, "every other event is of the open item"
        assert event["output_index"] == len(output) - 1
        if kind == "output_item.done":
            is_open = False
            known_at_the_end = {name: event["item"][name] for name in ("status", "encrypted_content") if name in event["item"]}
            assert output[-1] | known_at_the_end == event["item"]
            output[-1] = event["item"]
            continue
        assert event["item_id"] == output[-1]["id"]
        fold_into(output[-1], kind, event)
    assert not is_open
    return final | {"output": output}


def fold_into(item: dict[str, Any], kind: str, event: dict[str, Any]) -> None:
    match kind:
        case "content_part.added":
            assert event["content_index"] == len(item["content"])
            item["content"].append(event["part"])
        case "output_text.delta":
            item["content"][event["content_index"]]["text"] += event["delta"]
            item["content"][event["content_index"]]["logprobs"] += event["logprobs"]
        case "output_text.done":
            part = item["content"][event["content_index"]]
            assert (part["text"], part["logprobs"]) == (event["text"], event["logprobs"])
        case "content_part.done":
            assert item["content"][event["content_index"]] == event["part"]
        case "reasoning_text.delta":
            item["content"] = item["content"] or [{"type": "reasoning_text", "text": ""}]
            item["content"][0]["text"] += event["delta"]
        case "reasoning_text.done":
            assert item["content"] == [{"type": "reasoning_text", "text": event["text"]}]
        case "reasoning_summary_part.added":
            item["summary"].append(event["part"])
        case "reasoning_summary_text.delta":
            item["summary"][event["summary_index"]]["text"] += event["delta"]
        case "reasoning_summary_text.done":
            assert item["summary"][event["summary_index"]]["text"] == event["text"]
        case "reasoning_summary_part.done":
            assert item["summary"][event["summary_index"]] == event["part"]
        case "function_call_arguments.delta":
            item["arguments"] += event["delta"]
        case "function_call_arguments.done":
            assert (item["name"], item["arguments"]) == (event["name"], event["arguments"])
        case _:
            raise AssertionError(f"unknown event {kind}")
