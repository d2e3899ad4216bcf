"""The Responses API over HTTP: one fold makes items and events, requests are those of chat completions, and OpenAI's client works."""

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from penstock.api.middleware import GATE
from penstock.api.responses.endpoint import BACKGROUND
from penstock.engine.errors import QueueFull
from penstock.plugins.tools.json_formats import HERMES
from penstock.serving.options import ServerOptions
from penstock.serving.responses.store import ResponseStore
from penstock.serving.templates.rendering import ChatTemplate
from tests.api.improvised import PROMPT_END, Improvised, improvise
from tests.api.responses.server import Api, events_of, folded, serve
from tests.api.running_server import until
from tests.api.scripted import MODEL, client_of

KEYS = """
id object created_at completed_at status incomplete_details model previous_response_id instructions output error tools tool_choice
truncation parallel_tool_calls text top_p presence_penalty frequency_penalty top_logprobs temperature reasoning usage max_output_tokens
max_tool_calls store background service_tier metadata safety_identifier prompt_cache_key
"""
TOOL: dict[str, Any] = {"type": "function", "name": "f", "parameters": {"type": "object"}}
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": [1, "é"]}}\n</tool_call>'


def without_identity(response: dict[str, Any]) -> dict[str, Any]:
    """Ids and times differ between two requests."""
    output = [{name: value for name, value in item.items() if name not in ("id", "call_id")} for item in response["output"]]
    return {name: value for name, value in response.items() if name not in ("id", "created_at", "completed_at")} | {"output": output}


def transcript(rng: random.Random) -> str:
    parts = [rng.choice(["Let me see.</think>", "</think>", "é\n</think>\n\n"])]
    parts += rng.choices(["Hello é. ", CALL, "a <b> ", "", "日本", CALL + "\n"], k=rng.randrange(4))
    return "".join(parts)


def test_the_events_of_any_answer_add_up_to_the_whole_one() -> None:
    rng = random.Random(7)

    async def scenario(api: Api) -> None:
        for _ in range(80):
            answer = transcript(rng)
            api.engine.answers, api.engine.tokens_per_step = [answer], rng.choice([1, 2, 7, 100])
            num_tokens = len(api.engine.tokenizer.encode(answer, add_special_tokens=False))
            body: dict[str, Any] = {"input": "Hi", "tools": rng.choice([[], [TOOL]])}
            if rng.random() < 0.7:
                body["max_output_tokens"] = rng.randint(1, num_tokens + 1)
            if rng.random() < 0.4:
                body["reasoning"] = {"summary": "auto"}
            if rng.random() < 0.4:
                body["include"] = rng.sample(["reasoning.encrypted_content", "message.output_text.logprobs"], rng.randint(1, 2))
            whole = await api.create(**body)
            events = await api.stream(**body)
            streamed = folded(events)
            assert streamed == events[-1]["response"], "ids included"
            assert without_identity(streamed) == without_identity(whole)
            assert {item["status"] for item in whole["output"][:-1]} <= {"completed"}
            if whole["status"] == "incomplete":
                assert whole["incomplete_details"] == {"reason": "max_output_tokens"}
                assert whole["output"][-1]["status"] == "incomplete"
            else:
                assert (whole["status"], whole["incomplete_details"]) == ("completed", None)
            assert set(KEYS.split()) <= whole.keys()
            assert whole["usage"]["output_tokens"] <= body.get("max_output_tokens", 1000)

    serve(scenario, thinks=True, tool_parser=HERMES)


def test_reasoning_text_and_calls_are_items_with_ids_of_their_own() -> None:
    async def scenario(api: Api) -> None:
        response = await api.create(input="Hi", tools=[TOOL], metadata={"a": "b"}, prompt_cache_key="k")
        reasoning, message, call = response["output"]
        assert reasoning["content"] == [{"type": "reasoning_text", "text": "Think."}]
        assert message["content"] == [{"type": "output_text", "text": "Hello ", "annotations": [], "logprobs": []}]
        assert (call["name"], json.loads(call["arguments"])) == ("f", {"a": [1, "é"]})
        assert [item["id"].split("_")[0] for item in response["output"]] == ["rs", "msg", "fc"]
        assert call["call_id"].startswith("call_")
        assert response["id"].startswith("resp_")
        assert (response["metadata"], response["prompt_cache_key"]) == ({"a": "b"}, "k")
        assert response["tools"] == [TOOL | {"description": None, "strict": None}]

    serve(scenario, {"answers": ["Think.</think>Hello " + CALL]}, thinks=True, tool_parser=HERMES)


def test_tools_that_are_not_functions_are_skipped_and_named() -> None:
    async def scenario(api: Api) -> None:
        tools = [{"type": "web_search"}, TOOL, {"type": "mcp", "server_label": "x"}]
        url = api.server.base_url + "/responses"
        async with api.http.post(url, json={"model": MODEL, "input": "Hi", "tools": tools}) as response:
            assert response.headers["x-ignored-tools"] == "web_search, mcp"
        assert api.prompt.startswith("f\n<|im_start|>")
        assert (await api.refusal({"input": "Hi", "tools": [*tools, TOOL | {"name": ""}]}))[0] == "tools[3].name"
        forced = {"input": "Hi", "tools": tools, "tool_choice": {"type": "web_search"}}
        assert (await api.refusal(forced))[0] == "tool_choice.type"

    serve(scenario, tool_parser=HERMES)


def test_tool_choice_has_all_its_forms() -> None:
    async def scenario(api: Api) -> None:
        tools = [TOOL, TOOL | {"name": "g"}]
        allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "g"}, {"type": "web_search"}]}
        for choice in ("auto", "none", "required", {"type": "function", "name": "g"}, allowed):
            response = await api.create(input="Hi", tools=tools, tool_choice=choice, max_output_tokens=3)
            assert response["tool_choice"] == choice
        assert len(api.server.compiler.specs) == 3, "required, one function, and allowed tools"
        assert (await api.create(input="Hi", tools=[{"type": "web_search"}], tool_choice="auto"))["status"] == "completed"
        wrong = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "h"}]}
        assert (await api.refusal({"input": "Hi", "tools": tools, "tool_choice": wrong}))[0] == "tool_choice.tools[0]"

    serve(scenario, tool_parser=HERMES)


def call_item(number: int) -> dict[str, Any]:
    return {"type": "function_call", "call_id": f"c{number}", "name": "f", "arguments": "{}"}


def test_items_become_the_messages_of_a_conversation() -> None:
    items: list[Any] = [
        {"role": "developer", "content": "Obey"},
        {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "Hm"}]},
        {"type": "message", "role": "assistant", "phase": "commentary", "content": [{"type": "output_text", "text": "I call"}]},
        call_item(1),
        call_item(2),
        {"type": "function_call_output", "call_id": "c1", "output": "one"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "two"}]},
    ]
    template = (
        "{% for tool in tools or [] %}{{ tool.function.name }}\n{% endfor %}"
        "{% for m in messages %}{{ m.role }}|{{ m.reasoning_content or '' }}|{{ m.content }}|"
        "{% for call in m.tool_calls or [] %}{{ call.id }}{{ call.function.name }}{{ call.function.arguments }}{% endfor %}"
        "|{{ m.tool_call_id or '' }}\n{% endfor %}"
    )

    async def scenario(api: Api) -> None:
        await api.create(input=items, instructions="Be brief", tools=[TOOL])
        said = "f\nsystem||Be brief\n\nObey||\nuser||Hi||\nassistant|Hm|I call|c1f{}c2f{}|\ntool||one||c1\ntool||two||c2\n"
        assert api.prompt == said

    serve(scenario, tool_parser=HERMES, chat_template=ChatTemplate(template))


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({}, "input"),
    ({"input": "x", "model": None}, "model"),
    ({"input": 7}, "input"),
    ({"input": [{"role": "critic", "content": "x"}]}, "input[0].role"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content[0]"),
    ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text"),
    ({"input": [{"type": "computer_call"}]}, "input[0].type"),
    ({"input": [{"type": "function_call_output", "call_id": "x", "output": ""}]}, "input[0].call_id"),
    ({"input": [{"type": "reasoning", "encrypted_content": "AAAA"}]}, "input[0].encrypted_content"),
    ({"input": "x", "include": ["everything"]}, "include[0]"),
    ({"input": "x", "metadata": {"k" * 65: "v"}}, "metadata"),
    ({"input": "x", "metadata": {str(number): "" for number in range(17)}}, "metadata"),
    ({"input": "x", "max_output_tokens": 0}, "max_output_tokens"),
    ({"input": "x", "max_output_tokens": 10**6}, "max_output_tokens"),
    ({"input": "x" * 1000}, "input"),
    ({"input": "x", "temperature": 3}, "temperature"),
    ({"input": "x" * 500, "truncation": "auto"}, "input"),
    ({"input": "x", "conversation": "conv_1"}, "conversation"),
    ({"input": "x", "n": 2}, "n"),
    ({"input": "x", "response_format": {"type": "text"}}, "response_format"),
    ({"input": "x", "text": {"format": {"type": "json_schema", "name": "s"}}}, "text.format.schema"),
    ({"input": "x", "text": {"format": {"type": "json_schema", "name": "s", "schema": 7}}}, "text.format.schema"),
    ({"input": "x", "tools": [{"name": "f"}]}, "tools[0].type"),
    ({"input": "x", "tools": [TOOL | {"parameters": {"type": "array"}}]}, "tools[0].parameters.type"),
    ({"input": "x", "tools": [TOOL | {"name": "`tools[9]` `messages[9]`\n"}]}, "tools[0].name"),
    ({"input": "x", "background": True, "store": False}, "background"),
    ({"input": "x", "reasoning": {"effort": "much"}}, "reasoning.effort"),
    ({"input": "x", "inpt": "x"}, "inpt"),
]


def test_bad_requests_are_refused_with_the_path() -> None:
    async def scenario(api: Api) -> None:
        for body, param in REFUSED:
            found, message = await api.refusal(body)
            assert (found or "").startswith(param), body
            for name in ("messages", "response_format.", "max_completion_tokens", "tool_choice.allowed_tools", ".function."):
                assert name not in message

    serve(scenario, tool_parser=HERMES)


def test_fields_reach_the_engine_and_the_template() -> None:
    async def scenario(api: Api) -> None:
        schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
        response = await api.create(
            input="Hi",
            temperature=0.5,
            top_p=0.9,
            top_k=3,
            thinking_token_budget=9,
            max_output_tokens=50,
            cache_salt="salt",
            reasoning={"effort": "high"},
            chat_template_kwargs={"enable_thinking": True},
            text={"format": {"type": "json_schema", "name": "s", "schema": schema, "strict": True}, "verbosity": "low"},
            client_metadata={"x": 1},
        )
        request = api.engine.requests[-1]
        assert (request.params.temperature, request.params.top_k, request.params.max_tokens) == (0.5, 3, 50)
        assert request.params.thinking_token_budget == 9
        assert request.cache_salt == "salt"
        assert api.prompt.endswith("<think>\n")
        assert json.loads(api.server.compiler.specs[-1][0].text)["properties"] == schema["properties"]
        assert response["text"]["format"] == {"type": "json_schema", "name": "s", "description": None, "schema": schema, "strict": True}
        assert (response["temperature"], response["top_p"], response["reasoning"]["effort"]) == (0.5, 0.9, "high")

    serve(scenario, {"answers": ["</think>{}"]}, thinks=True)


def test_log_probabilities_are_of_the_text_alone() -> None:
    async def scenario(api: Api) -> None:
        for body in ({"include": ["message.output_text.logprobs"]}, {"top_logprobs": 1}):
            response = await api.create(input="Hi", tools=[TOOL], **body)
            [part] = response["output"][1]["content"]
            assert "".join(entry["token"] for entry in part["logprobs"]).startswith("Hello")
            assert {len(entry["top_logprobs"]) for entry in part["logprobs"]} == {body.get("top_logprobs", 0)}

    serve(scenario, {"answers": ["Hm.</think>Hello" + CALL]}, thinks=True, tool_parser=HERMES)


def test_an_empty_input_is_answered() -> None:
    async def scenario(api: Api) -> None:
        empty_inputs: list[Any] = ["", []]
        for empty in empty_inputs:
            response = await api.create(input=empty, max_output_tokens=1)
            assert response["status"] == "incomplete"

    serve(scenario)


def test_a_conversation_continues_a_stored_response_without_its_instructions() -> None:
    async def scenario(api: Api) -> None:
        first = await api.create(input="One", instructions="Shout")
        second = await api.create(input="Two", previous_response_id=first["id"])
        before = "<|im_start|>user\nOne<|im_end|>\n<|im_start|>assistant\nHello there.<|im_end|>\n<|im_start|>user\nTwo<|im_end|>\n"
        assert api.prompt == before + "<|im_start|>assistant\n"
        assert second["previous_response_id"] == first["id"]
        await api.create(input=[{"type": "item_reference", "id": second["output"][0]["id"]}, {"role": "user", "content": "?"}])
        assert "assistant\nHello there.<|im_end|>\n<|im_start|>user\n?" in api.prompt
        unknown, body = await api.call("POST", "/responses", {"model": MODEL, "input": "x", "previous_response_id": "resp_none"})
        assert (unknown, body["error"]["param"], body["error"]["code"]) == (400, "previous_response_id", "previous_response_not_found")
        unstored = await api.create(input="One", store=False)
        assert (await api.call("GET", f"/responses/{unstored['id']}"))[0] == 404
        count = await api.call("POST", "/responses/input_tokens", {"input": "Two", "previous_response_id": first["id"]})
        assert count == (200, {"object": "response.input_tokens", "input_tokens": second["usage"]["input_tokens"]})

    serve(scenario)


def test_items_that_are_referred_to_count_as_parts_of_the_body() -> None:
    async def scenario(api: Api) -> None:
        item = {"role": "user", "id": "msg_long", "content": "x", "note": "y" * 5000}
        await api.create(input=[item])
        reference = {"type": "item_reference", "id": "msg_long"}
        await api.create(input=[reference])
        param, message = await api.refusal({"input": [reference] * 3})
        assert param == "input[1]"
        assert "larger than a body may be" in message

    serve(scenario, options=ServerOptions(keep_alive_interval=0, max_body_size=10_000))


def test_a_conversation_that_is_too_long_loses_its_oldest_turns_where_it_is_asked_to() -> None:
    turns: list[Any] = [{"role": "developer", "content": "Be brief."}]
    for number in range(6):
        turns += [{"role": "user", "content": f"{number}" * 50}, {"role": "assistant", "content": "x" * 20}]
    turns.append({"role": "user", "content": "Now?"})

    async def scenario(api: Api) -> None:
        param, _ = await api.refusal({"input": turns})
        assert param == "input"
        body = {"model": MODEL, "input": turns, "instructions": "Shout.", "truncation": "auto", "max_output_tokens": 20}
        async with api.http.post(api.server.base_url + "/responses", json=body) as answer:
            response = await answer.json()
            assert answer.status == 200, response
            assert int(answer.headers["x-truncated-items"]) % 2 == 0
        assert response["truncation"] == "auto"
        assert response["usage"]["input_tokens"] == len(api.engine.requests[-1].prompt_token_ids)
        assert api.prompt.startswith("<|im_start|>system\nShout.\n\nBe brief.<|im_end|>\n<|im_start|>user\n")
        assert [digit for digit in "012345" if digit * 50 in api.prompt] == list("345"), "as many as there is room for"
        assert "user\nNow?" in api.prompt
        _, counted = await api.call("POST", "/responses/input_tokens", body)
        assert counted["input_tokens"] == response["usage"]["input_tokens"]
        _, listed = await api.call("GET", f"/responses/{response['id']}/input_items?limit=100")
        assert len(listed["data"]) == len(turns)
        status, _ = await api.call("POST", "/responses", body | {"max_output_tokens": 380})
        assert status == 400
        short = await api.create(input="Hi", truncation="auto")
        assert short["truncation"] == "auto"

    serve(scenario)


def test_stored_responses_are_shown_listed_and_deleted() -> None:
    async def scenario(api: Api) -> None:
        response = await api.create(input=[{"role": "user", "content": str(number)} for number in range(5)])
        path = f"/responses/{response['id']}"
        assert await api.call("GET", path) == (200, response)
        _, page = await api.call("GET", path + "/input_items?limit=2")
        assert [item["content"][0]["text"] for item in page["data"]] == ["4", "3"]
        assert page["has_more"]
        _, rest = await api.call("GET", path + f"/input_items?limit=10&after={page['last_id']}")
        assert [item["content"][0]["text"] for item in rest["data"]] == ["2", "1", "0"]
        assert not rest["has_more"]
        for query in ("limit=0", "limit=x", "order=up"):
            assert (await api.call("GET", f"{path}/input_items?{query}"))[0] == 400
        assert (await api.call("POST", path + "/cancel"))[0] == 400
        assert (await api.call("GET", path + "?stream=true"))[0] == 400
        assert await api.call("DELETE", path) == (200, {"id": response["id"], "object": "response", "deleted": True})
        for method in ("GET", "DELETE"):
            status, body = await api.call(method, path)
            assert (status, body["error"]["type"]) == (404, "NotFoundError")

    serve(scenario)


def test_a_stored_response_belongs_to_its_api_key() -> None:
    async def scenario(api: Api) -> None:
        include = ["reasoning.encrypted_content"]
        _, response = await api.call("POST", "/responses", {"model": MODEL, "input": "x", "include": include}, "one")
        path = f"/responses/{response['id']}"
        assert (await api.call("GET", path, key="one"))[0] == 200
        for method, at in (("GET", path), ("DELETE", path), ("POST", path + "/cancel"), ("GET", path + "/input_items")):
            assert (await api.call(method, at, key="two"))[0] == 404
        continued = {"model": MODEL, "input": "x", "previous_response_id": response["id"]}
        assert (await api.call("POST", "/responses", continued, "two"))[1]["error"]["code"] == "previous_response_not_found"
        reasoning = response["output"][0] | {"content": []}
        again = {"model": MODEL, "input": [reasoning, {"role": "user", "content": "x"}]}
        assert (await api.call("POST", "/responses", again, "one"))[0] == 200
        status, refused = await api.call("POST", "/responses", again, "two")
        assert (status, refused["error"]["param"]) == (400, "input[0].encrypted_content")

    serve(scenario, {"answers": ["Hm.</think>Yes."]}, thinks=True, options=ServerOptions(keep_alive_interval=0, api_keys=("one", "two")))


def test_a_response_in_the_background_is_followed_replayed_and_cancelled() -> None:
    async def scenario(api: Api) -> None:
        gate = api.engine.gate = asyncio.Event()
        queued = await api.create(input="x", background=True)
        assert queued["status"] == "queued"
        path = f"/responses/{queued['id']}"
        _, waiting = await api.call("GET", path)
        assert waiting["status"] == "queued"
        gate_of_the_server = api.server.server.app[GATE]  # type: ignore[attr-defined]
        assert gate_of_the_server.num_inside == 1, "a server that is stopping waits for it"
        status, error = await api.call("POST", "/responses", {"model": MODEL, "input": "y", "previous_response_id": queued["id"]})
        assert (status, error["error"]["param"]) == (400, "previous_response_id")
        following = asyncio.create_task(api.http.get(api.server.base_url + path + "?stream=true"))
        gate.set()
        async with await following as stream:
            followed = events_of(await stream.text())
        assert folded(followed) == followed[-1]["response"]
        _, final = await api.call("GET", path)
        assert final == followed[-1]["response"]
        async with api.http.get(api.server.base_url + path + "?stream=true&starting_after=4") as stream:
            assert events_of(await stream.text()) == followed[5:]
        assert await api.call("POST", path + "/cancel") == (200, final)

    serve(scenario)


@pytest.mark.parametrize("num_steps", [0, 2])
def test_a_response_in_the_background_is_cancelled(num_steps: int) -> None:
    """In the queue, and after its first tokens. Its stream ends with an event that clients know as the last."""

    async def scenario(api: Api) -> None:
        api.engine.gate, api.engine.gate_step = asyncio.Event(), num_steps
        path = f"/responses/{(await api.create(input='x', background=True))['id']}"
        await until(lambda: status_of(api) == ("in_progress" if num_steps else "queued"))
        following = asyncio.create_task(api.http.get(api.server.base_url + path + "?stream=true"))
        _, cancelled = await api.call("POST", path + "/cancel")
        assert cancelled["status"] == "cancelled"
        assert await api.call("GET", path) == (200, cancelled)
        await until(lambda: api.engine.aborted == 1)
        async with await following as stream:
            events = events_of(await stream.text())
        assert (events[-1]["type"], events[-1]["response"]) == ("response.incomplete", cancelled)
        if num_steps:
            assert folded(events) == cancelled
            assert cancelled["output"][0]["status"] == "incomplete"
        else:
            assert [event["type"] for event in events] == ["response.created", "response.queued", "response.incomplete"]

    serve(scenario)


def test_a_response_in_the_background_for_which_the_queue_has_no_room_is_refused_at_once() -> None:
    async def scenario(api: Api) -> None:
        api.engine.check_admission = lambda priority=0: None  # type: ignore[method-assign] # there was room when the body came
        status, error = await api.call("POST", "/responses", {"model": MODEL, "input": "x", "background": True})
        assert (status, error["error"]["message"]) == (429, "full")
        assert (await api.server.context.responses.statistics())[0] == 0

    serve(scenario, {"refusal": QueueFull("full")})


def status_of(api: Api) -> str:
    """That of the only response in the background."""
    [running] = api.server.server.app[BACKGROUND].values()  # type: ignore[attr-defined]
    return str(running.fold.response.status)


def test_a_failure_in_mid_stream_is_an_error_and_a_failed_response_that_is_stored() -> None:
    async def scenario(api: Api) -> None:
        events = await api.stream(input="x")
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        error, failed = events[-2:]
        assert (error["type"], error["error"]["message"], error["message"]) == ("error", "boom", "boom")
        assert failed["type"] == "response.failed"
        assert failed["response"]["error"] == {"code": "server_error", "message": "boom"}
        assert [item["status"] for item in failed["response"]["output"]] == ["incomplete"]
        assert (await api.call("GET", f"/responses/{failed['response']['id']}"))[1] == failed["response"]
        assert (await api.call("POST", "/responses", {"model": MODEL, "input": "x"}))[0] == 500

    serve(scenario, {"failure": "boom"})


def test_what_is_refused_before_the_first_event_keeps_its_status() -> None:
    async def scenario(api: Api) -> None:
        for options in ({"stream": True}, {}, {"background": True}):
            assert (await api.call("POST", "/responses", {"model": MODEL, "input": "x"} | options))[0] == 429

    serve(scenario, {"refusal": QueueFull("full")})


def test_a_conversation_goes_on_after_a_restart(tmp_path: Path) -> None:
    path, ids = str(tmp_path / "responses.sqlite"), list[str]()

    async def before(api: Api) -> None:
        ids.append((await api.create(input="One"))["id"])

    async def after(api: Api) -> None:
        await api.create(input="Two", previous_response_id=ids[0])
        assert "One<|im_end|>\n<|im_start|>assistant\nHello there." in api.prompt

    for scenario in (before, after):
        serve(scenario, responses=ResponseStore(path))


def test_a_shared_store_takes_no_responses_in_the_background(tmp_path: Path) -> None:
    async def scenario(api: Api) -> None:
        assert (await api.refusal({"input": "x", "background": True}))[0] == "background"

    serve(scenario, responses=ResponseStore(str(tmp_path / "responses.sqlite"), is_shared=True))


class Answer(BaseModel):
    number: int


def test_the_official_client_creates_streams_parses_and_manages_responses() -> None:
    async def scenario(api: Api) -> None:
        async with client_of(api.server.base_url) as client:
            created = await client.responses.create(model=MODEL, input="Hi")
            assert created.output_text == '{"number": 7}'
            async with client.responses.stream(model=MODEL, input="Hi", text_format=Answer) as stream:
                texts = [event.delta async for event in stream if event.type == "response.output_text.delta"]
                final = await stream.get_final_response()
            assert "".join(texts) == final.output_text
            assert final.output_parsed == Answer(number=7)
            parsed = await client.responses.parse(model=MODEL, input="Hi", text_format=Answer)
            assert parsed.output_parsed == Answer(number=7)
            assert (await client.responses.retrieve(created.id)).output_text == created.output_text
            items = [item async for item in client.responses.input_items.list(created.id)]
            assert [item.type for item in items] == ["message"]
            tokens = await client.responses.input_tokens.count(model=MODEL, input="Hi")
            assert created.usage is not None
            assert tokens.input_tokens == created.usage.input_tokens
            api.engine.gate = asyncio.Event()
            running = await client.responses.create(model=MODEL, input="Hi", background=True)
            assert (await client.responses.cancel(running.id)).status == "cancelled"
            api.engine.gate = None
            begun = await client.responses.create(model=MODEL, input="Hi", background=True, stream=True)
            events = [event async for event in begun]
            again = await client.responses.retrieve(events[-1].response.id, stream=True, starting_after=2)  # type: ignore[union-attr]
            assert [event async for event in again] == events[3:]
            await client.responses.delete(created.id)
            with pytest.raises(openai.NotFoundError):
                await client.responses.retrieve(created.id)
            api.engine.failure = "boom"
            with pytest.raises(openai.APIError, match="boom"):
                async with client.responses.stream(model=MODEL, input="Hi") as stream:
                    await stream.until_done()

    serve(scenario, {"answers": ['{"number": 7}']})


def test_the_next_turn_finds_all_of_the_last_one_in_the_prefix_cache() -> None:
    async def scenario(server: Improvised) -> None:
        turn = "{% if m.role == 'assistant' %}" + PROMPT_END + "{{ m.content }}{% else %}\n{{ m.content }}{% endif %}"
        server.context.chat_template = ChatTemplate("{% for m in messages %}" + turn + "{% endfor %}" + PROMPT_END)
        letters = server.context.tokenizer.encode("abcdefgh", add_special_tokens=False)
        ask: Any = server.client.responses.create
        options: dict[str, Any] = {"model": MODEL, "max_output_tokens": 70, "extra_body": {"allowed_token_ids": letters}}
        first = await ask(input="x" * 20, **options)
        second = await ask(input="And?", previous_response_id=first.id, **options)
        third = await ask(input="And?", previous_response_id=second.id, **options)
        assert first.usage.input_tokens_details.cached_tokens == 0
        for before, after in ((first, second), (second, third)):
            block_size = 64
            reused = after.usage.input_tokens_details.cached_tokens
            assert reused == (before.usage.total_tokens - 1) // block_size * block_size > before.usage.input_tokens

    improvise(scenario, plugins=())


def test_the_list_of_models_has_what_codex_looks_for() -> None:
    async def scenario(api: Api) -> None:
        _, listed = await api.call("GET", "/models")
        assert listed["models"] == []

    serve(scenario)
