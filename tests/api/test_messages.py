"""The Messages API, as the official client sees it."""

import asyncio
import json
import random
import re
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import anthropic
import pytest
from anthropic import AsyncAnthropic, DefaultAsyncHttpxClient
from pydantic import BaseModel

from penstock.api.middleware import GATE
from penstock.engine.errors import EngineUnavailable, GenerationFailed, PenstockError, QueueFull
from penstock.plugins.tools.json_formats import HERMES
from penstock.serving.options import ServerOptions
from penstock.serving.templates.rendering import ChatTemplate
from tests.api.improvised import Improvised, improvise
from tests.api.running_server import Running, serve
from tests.api.scripted import CHATML, MODEL, Scripted, scripted_server

HELLO: list[Any] = [{"role": "user", "content": "Hello"}]
WEATHER: Any = {"name": "weather", "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}}}
ASKED: dict[str, Any] = {"model": MODEL, "max_tokens": 100, "messages": HELLO}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln", "days": [1, 2]}}\n</tool_call>'

Scenario = Callable[[AsyncAnthropic, Scripted], Awaitable[None]]


def client_of(url: str, **options: Any) -> AsyncAnthropic:
    """Without certificates, which take longer to load than most tests run."""
    settings: dict[str, Any] = {"api_key": "none", "timeout": 20, "max_retries": 0} | options
    return AsyncAnthropic(base_url=url.removesuffix("/v1"), http_client=DefaultAsyncHttpxClient(verify=False), **settings)


def talk(scenario: Scenario, answer: str = "Hello there.", engine: dict[str, Any] | None = None, **settings: Any) -> None:
    async def run() -> None:
        async with (
            scripted_server({"answers": [answer]} | (engine or {}), **settings) as server,
            client_of(server.base_url) as client,
        ):
            await asyncio.wait_for(scenario(client, server), 20)

    asyncio.run(run())


async def ask(client: AsyncAnthropic, **fields: Any) -> Any:
    """The message. Asserts that a stream of it keeps to the grammar of events, and that the client adds it up to the same."""
    whole = await client.messages.create(**ASKED | fields)
    async with client.messages.stream(**ASKED | fields) as stream:
        events = [event async for event in stream]
        summed = await stream.get_final_message()
    check_events(events)
    assert plain(summed) == plain(whole)
    return whole


def plain(message: Any) -> dict[str, Any]:
    """What does not differ from answer to answer. Of a call that was cut the client keeps less than the server."""
    fields: dict[str, Any] = message.model_dump()
    del fields["id"]
    for block in fields["content"]:
        block.pop("parsed_output", None)
        if block["type"] == "tool_use":
            del block["id"]
            if message.stop_reason != "tool_use":
                del block["input"]
    return fields


def check_events(events: list[Any]) -> None:
    """The stream's grammar: one block open at a time, numbered by position, and no delta of another kind."""
    raw = [event for event in events if event.type not in ("text", "thinking", "signature", "input_json")]
    assert [event.type for event in raw[:1]] == ["message_start"]
    assert [event.type for event in raw[-2:]] == ["message_delta", "message_stop"]
    assert raw[0].message.usage.input_tokens > 0
    assert raw[0].message.stop_reason is None
    kinds = {"text": {"text_delta"}, "thinking": {"thinking_delta", "signature_delta"}, "tool_use": {"input_json_delta"}}
    number, kind = 0, None
    for event in raw[1:-2]:
        assert event.index == number
        if event.type == "content_block_start":
            assert kind is None, "one block at a time"
            kind = event.content_block.type
        elif event.type == "content_block_stop":
            assert kind is not None
            number, kind = number + 1, None
        else:
            assert event.type == "content_block_delta"
            assert kind is not None
            assert event.delta.type in kinds[kind]
    assert kind is None
    assert number > 0


def test_thinking_is_a_signed_block_before_the_text() -> None:
    async def scenario(client: AsyncAnthropic, server: Scripted) -> None:
        message = await ask(client, thinking={"type": "adaptive"})
        thinking, text = message.content
        assert (message.type, message.role, message.model, message.stop_reason) == ("message", "assistant", MODEL, "end_turn")
        assert (thinking.type, thinking.thinking, text.type, text.text) == ("thinking", "Hm.", "text", "Hello there.")
        assert thinking.signature
        assert message.usage.output_tokens_details.thinking_tokens == 4
        history = [*HELLO, {"role": "assistant", "content": message.content}, *HELLO]
        await client.messages.create(**ASKED | {"messages": history})
        thinking.thinking = "Changed."
        with pytest.raises(anthropic.BadRequestError, match="signature"):
            await client.messages.create(**ASKED | {"messages": history})

    talk(scenario, "Hm.</think>Hello there.", thinks=True)


def test_thinking_that_is_omitted_is_a_signed_block_without_text() -> None:
    async def scenario(client: AsyncAnthropic, server: Scripted) -> None:
        thinking, text = (await ask(client, thinking={"type": "adaptive", "display": "omitted"})).content
        assert (thinking.type, thinking.thinking, text.text) == ("thinking", "", "Hello there.")
        assert thinking.signature

    talk(scenario, "Hm.</think>Hello there.", thinks=True)


def test_calls_are_blocks_with_their_input_and_come_back_as_the_model_knows_them() -> None:
    async def scenario(client: AsyncAnthropic, server: Scripted) -> None:
        message = await ask(client, tools=[WEATHER], max_tokens=500)
        text, *calls = message.content
        assert (text.text, message.stop_reason) == ("Let me look.\n", "tool_use")
        assert [(call.name, call.input) for call in calls] == [("weather", {"city": "Köln", "days": [1, 2]})] * 2
        assert len({call.id for call in calls}) == 2
        results = [{"type": "tool_result", "tool_use_id": call.id, "content": "rain"} for call in calls]
        history = [*HELLO, {"role": "assistant", "content": message.content}, {"role": "user", "content": results}]
        written = "({{ call.id }}, {{ call.function.arguments }})"
        template = f"{{% for message in messages %}}{{% for call in message.tool_calls or [] %}}{written}{{% endfor %}}{{% endfor %}}"
        server.context.chat_template = ChatTemplate(template + CHATML)
        await client.messages.create(**ASKED | {"messages": history, "tools": [WEATHER]})
        prompt = server.engine.tokenizer.decode(server.engine.requests[-1].prompt_token_ids, skip_special_tokens=False)
        arguments = json.dumps(calls[0].input, ensure_ascii=False)
        assert prompt.startswith("".join(f"({call.id.removeprefix('toolu_')}, {arguments})" for call in calls))

    talk(scenario, f"Let me look.\n{CALL}\n{CALL}", tool_parser=HERMES, max_model_len=2000)


def test_a_call_that_the_model_left_unfinished_is_not_to_be_run() -> None:
    async def scenario(client: AsyncAnthropic, server: Scripted) -> None:
        message = await ask(client, tools=[WEATHER])
        assert (message.stop_reason, message.content[0].input) == ("end_turn", {"city": "Köln"})

    talk(scenario, CALL.split(', "days')[0], tool_parser=HERMES, max_model_len=2000)


def test_beside_a_call_there_is_no_empty_text_and_an_answer_of_nothing_has_one() -> None:
    async def calls(client: AsyncAnthropic, server: Scripted) -> None:
        message = await ask(client, tools=[WEATHER], thinking={"type": "adaptive"})
        assert [block.type for block in message.content] == ["thinking", "tool_use"]

    async def nothing(client: AsyncAnthropic, server: Scripted) -> None:
        message = await ask(client)
        assert [(block.type, block.text) for block in message.content] == [("text", "")]

    talk(calls, f"Hm.</think>\n\n{CALL}", thinks=True, tool_parser=HERMES, max_model_len=2000)
    talk(nothing, "")
    talk(nothing, " \n")


@pytest.mark.parametrize(
    ("fields", "expected", "text"),
    [
        ({"stop_sequences": ["zz", "the"]}, ("stop_sequence", "the"), "Hello "),
        ({"max_tokens": 5}, ("max_tokens", None), "Hello"),
        ({"max_tokens": 32_000}, ("end_turn", None), "Hello there."),
    ],
)
def test_why_an_answer_ended(fields: dict[str, Any], expected: tuple[str, str | None], text: str) -> None:
    async def scenario(client: AsyncAnthropic, server: Scripted) -> None:
        message = await ask(client, **fields)
        assert (message.stop_reason, message.stop_sequence) == expected
        assert message.content[0].text == text

    talk(scenario)


def test_an_answer_that_the_context_ends_says_so() -> None:
    async def scenario(client: AsyncAnthropic, server: Scripted) -> None:
        message = await ask(client, max_tokens=32_000)
        assert message.stop_reason == "model_context_window_exceeded"
        usage = message.usage
        assert usage.input_tokens + usage.cache_read_input_tokens + usage.output_tokens == 60

    talk(scenario, "x" * 100, max_model_len=60)


def test_a_prefill_is_continued() -> None:
    async def scenario(client: AsyncAnthropic, server: Scripted) -> None:
        message = await ask(client, messages=[*HELLO, {"role": "assistant", "content": "Well, "}])
        assert message.content[0].text == "Hello there."
        tokenizer = server.engine.tokenizer
        assert tokenizer.decode(server.engine.requests[-1].prompt_token_ids).endswith("assistant\nWell, ")

    talk(scenario)


PIECES = ("<think>", "</think>", "word", " ", "\n\n", "é", CALL, CALL[:60], "<tool_call>", "x" * 9)


def test_any_transcript_cut_anywhere_is_the_same_streamed_and_whole() -> None:
    rng = random.Random(1)

    async def scenario(client: AsyncAnthropic, server: Scripted) -> None:
        for _ in range(60):
            server.engine.answers = ["".join(rng.choices(PIECES, k=rng.randrange(6)))]
            server.engine.tokens_per_step = rng.choice((1, 2, 7, 100))
            fields: dict[str, Any] = {"thinking": {"type": "adaptive"}} if rng.random() < 0.5 else {}
            message = await ask(client, tools=[WEATHER], max_tokens=rng.randrange(1, 120), **fields)
            texts = [block.text for block in message.content if block.type == "text"]
            assert len(message.content) == 1 or all(text.strip() for text in texts)

    talk(scenario, thinks=True, tool_parser=HERMES, max_model_len=2000)


def test_usage_is_the_prompt_in_three_parts() -> None:
    async def scenario(client: AsyncAnthropic, server: Scripted) -> None:
        count = (await client.messages.count_tokens(model=MODEL, messages=HELLO)).input_tokens
        plain, marked = await ask(client), await ask(client, cache_control={"type": "ephemeral", "ttl": "1h"})
        total = len(server.engine.requests[0].prompt_token_ids)
        assert count == total
        assert plain.usage.cache_read_input_tokens == 16
        assert (plain.usage.input_tokens, plain.usage.cache_creation_input_tokens) == (total - 16, 0)
        assert (marked.usage.input_tokens, marked.usage.cache_creation_input_tokens) == (1, total - 17)
        assert marked.usage.cache_creation.ephemeral_1h_input_tokens == total - 17
        assert [request.retention is None for request in server.engine.requests] == [True, True, False, False]

    talk(scenario)


def test_a_count_is_an_object_of_one_field_and_may_be_beyond_the_context() -> None:
    async def scenario(server: Running) -> None:
        body = {"model": MODEL, "messages": [{"role": "user", "content": "x" * 1000}], "system": "Be brief.", "tools": []}
        status, counted = await server.post("/v1/messages/count_tokens", body)
        assert (status, list(counted)) == (200, ["input_tokens"])
        assert counted["input_tokens"] > 1000

    serve(scenario)


def test_the_prefix_is_read_from_the_cache_although_the_billing_header_changes() -> None:
    async def scenario(server: Improvised) -> None:
        async with client_of(str(server.client.base_url).removesuffix("/")) as client:
            messages: list[Any] = [{"role": "user", "content": "What is the weather like? " * 20}]
            for turn in range(3):
                billing: Any = {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.1; cch={turn}{turn};"}
                system = [billing, {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
                answer = await client.messages.create(model=MODEL, max_tokens=5, system=system, messages=messages)
                cached = answer.usage.cache_read_input_tokens
                assert cached is not None
                assert (cached > 400) == (turn > 0)
                messages += [{"role": "assistant", "content": "Rain."}, {"role": "user", "content": "And now?"}]

    improvise(scenario)


class City(BaseModel):
    name: str
    population: int


def test_a_parsed_answer_is_held_to_the_schema() -> None:
    async def scenario(client: AsyncAnthropic, server: Scripted) -> None:
        parsed = await client.messages.parse(model=MODEL, max_tokens=100, messages=HELLO, output_format=City)
        assert parsed.parsed_output == City(name="Köln", population=1)
        [(spec, _)] = server.compiler.specs
        assert json.loads(spec.text)["required"] == ["name", "population"]
        assert not spec.is_lenient

    talk(scenario, '{"name": "Köln", "population": 1}')


def test_the_beta_client_and_its_fields_are_served_and_named() -> None:
    async def scenario(client: AsyncAnthropic, server: Scripted) -> None:
        edits: Any = {"edits": [{"type": "clear_tool_uses_20250919"}]}
        search: Any = {"type": "web_search_20250305", "name": "web_search"}
        raw = await client.beta.messages.with_raw_response.create(
            **ASKED, betas=["context-management-2025-06-27"], context_management=edits, tools=[search], metadata={"user_id": "u"}
        )
        assert raw.headers["x-ignored-fields"] == "context_management"
        assert raw.headers["x-ignored-tools"] == "tools[0]: web_search_20250305"
        assert raw.headers["request-id"] == raw.headers["x-request-id"]
        async with client.beta.messages.stream(**ASKED) as stream:
            assert "".join([text async for text in stream.text_stream]) == "Hello there."

    talk(scenario)


@pytest.mark.parametrize(
    ("path", "fields", "options", "status", "kind", "words"),
    [
        ("/v1/messages", {"max_tokens": None}, {}, 400, "invalid_request_error", "max_tokens"),
        ("/v1/messages", {"messages": []}, {}, 400, "invalid_request_error", "messages"),
        ("/v1/messages", {"model": "claude"}, {}, 404, "not_found_error", "claude"),
        ("/v1/messages", {"temperature": 9}, {}, 400, "invalid_request_error", "temperature"),
        ("/v1/messages", {"system": "x" * 1000}, {}, 400, "invalid_request_error", r"^prompt is too long: 10\d\d tokens > 399 maximum$"),
        ("/v1/messages", {"tools": [WEATHER]}, {}, 400, "invalid_request_error", "tool"),
        ("/v1/messages/batches", {}, {}, 404, "not_found_error", "nothing at /v1/messages/batches"),
        ("/v1/messages", {}, {"api_keys": ("secret",)}, 401, "authentication_error", "x-api-key"),
        ("/v1/messages/count_tokens", {}, {"api_keys": ("secret",)}, 401, "authentication_error", "x-api-key"),
        ("/v1/messages", {"system": "x" * 300}, {"max_body_size": 200}, 413, "request_too_large", "200 bytes"),
        ("/v1/messages", {}, {"allowed_hosts": ("a.b",)}, 403, "permission_error", "allowed-hosts"),
    ],
)
def test_errors_have_the_apis_body(path: str, fields: dict[str, Any], options: dict[str, Any], status: int, kind: str, words: str) -> None:
    async def scenario(server: Running) -> None:
        headers = {"Host": "evil.test"} if status == 403 else {}
        async with server.http.post(path, json=ASKED | fields, headers=headers) as response:
            body = await response.json()
            assert response.status == status
            assert body.keys() == {"type", "error", "request_id"}
            assert (body["type"], body["error"]["type"]) == ("error", kind)
            assert response.headers["request-id"] == body["request_id"]
            assert re.search(words, body["error"]["message"])

    serve(scenario, ServerOptions(**options))


@pytest.mark.parametrize(
    ("refusal", "status", "kind"),
    [
        (QueueFull("the queue is full", 7), 429, "rate_limit_error"),
        (EngineUnavailable("stopping", 7), 503, "overloaded_error"),
        (GenerationFailed("out of memory"), 500, "api_error"),
    ],
)
def test_an_engine_that_refuses_is_an_error_that_clients_retry(refusal: PenstockError, status: int, kind: str) -> None:
    async def scenario(client: AsyncAnthropic, server: Scripted) -> None:
        for stream in (False, True):
            with pytest.raises(anthropic.APIStatusError) as raised:
                await client.messages.create(**ASKED, stream=stream)
            error = raised.value
            assert (error.status_code, error.body["error"]["type"]) == (status, kind)  # type: ignore[index]
            assert error.response.headers.get("retry-after") == ("7" if status in (429, 503) else None)

    talk(scenario, engine={"refusal": refusal})


def test_a_server_that_stops_is_overloaded() -> None:
    async def scenario(server: Running) -> None:
        server.app[GATE].is_open = False
        async with server.http.post("/v1/messages", json=ASKED) as response:
            assert (response.status, response.headers["Retry-After"]) == (503, "1")
            assert (await response.json())["error"]["type"] == "overloaded_error"

    serve(scenario)


def test_an_error_in_mid_stream_is_an_event() -> None:
    async def scenario(client: AsyncAnthropic, server: Scripted) -> None:
        async with aiohttp.ClientSession() as http, http.post(f"{server.base_url}/messages", json=ASKED | {"stream": True}) as response:
            *_, last = (await response.text()).removesuffix("\n\n").split("\n\n")
        name, data = last.split("\n")
        error = json.loads(data.removeprefix("data: "))
        assert name == "event: error"
        assert error == {"type": "error", "error": {"type": "api_error", "message": "broken"}, "request_id": response.headers["request-id"]}
        with pytest.raises(anthropic.APIStatusError, match="broken"):
            async with client.messages.stream(**ASKED) as stream:
                await stream.get_final_message()

    talk(scenario, engine={"failure": "broken"})


def test_an_idle_stream_has_pings() -> None:
    async def scenario(client: AsyncAnthropic, server: Scripted) -> None:
        server.engine.gate = asyncio.Event()
        async with aiohttp.ClientSession() as http, http.post(f"{server.base_url}/messages", json=ASKED | {"stream": True}) as response:
            assert await response.content.readuntil(b"\n\n") == b'event: ping\ndata: {"type":"ping"}\n\n'
            server.engine.gate.set()
            text = await response.text()
        assert text.endswith('event: message_stop\ndata: {"type":"message_stop"}\n\n')

    talk(scenario, options=ServerOptions(keep_alive_interval=0.01))


@pytest.mark.parametrize("credentials", [{"api_key": "secret"}, {"api_key": None, "auth_token": "secret"}])
def test_a_key_may_come_in_either_header_on_every_route(credentials: dict[str, Any]) -> None:
    async def scenario(server: Running) -> None:
        async with client_of(server.url, **credentials) as client:
            assert (await client.messages.create(**ASKED)).stop_reason == "end_turn"
            assert [model.id async for model in client.models.list()] == [MODEL, "alias"]
        name = "x-api-key" if credentials["api_key"] else "Authorization"
        value = "secret" if credentials["api_key"] else "Bearer secret"
        assert (await server.get("/v1/models", headers={name: value}))[1]["object"] == "list"
        assert (await server.get("/v1/models", headers={name: f"{value}x"}))[0] == 401

    serve(scenario, ServerOptions(api_keys=("other", "secret")))


def test_models_come_in_pages() -> None:
    async def scenario(client: AsyncAnthropic, server: Scripted) -> None:
        page = await client.models.list(limit=1)
        assert ([model.id for model in page.data], page.has_more, page.first_id, page.last_id) == ([MODEL], True, MODEL, MODEL)
        assert [model.id async for model in client.models.list(limit=1)] == [MODEL, "alias"]
        assert [model.id for model in (await client.models.list(before_id="alias")).data] == [MODEL]
        model = await client.models.retrieve("alias")
        assert (model.type, model.display_name, model.created_at.tzinfo is not None) == ("model", "alias", True)
        for limit, cursor in ((0, "alias"), (5, "unknown")):
            with pytest.raises(anthropic.BadRequestError):
                await client.models.list(limit=limit, after_id=cursor)
        with pytest.raises(anthropic.NotFoundError) as raised:
            await client.models.retrieve("unknown")
        assert raised.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]

    talk(scenario)


def test_a_system_message_in_the_middle_is_where_the_template_takes_it() -> None:
    refusing = "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('no') }}{% endif %}{% endfor %}"

    async def scenario(client: AsyncAnthropic, server: Scripted) -> None:
        for template, expected in ((CHATML, "<|im_start|>system\nBe brief."), (refusing + CHATML, "Hello\n<system>\nBe brief.\n</system>")):
            server.context.chat_template = ChatTemplate(template)
            late: Any = {"role": "system", "content": "Be brief."}
            await client.messages.create(**ASKED | {"messages": [*HELLO, late]})
            prompt = server.engine.tokenizer.decode(server.engine.requests[-1].prompt_token_ids, skip_special_tokens=False)
            assert expected in prompt

    talk(scenario)
