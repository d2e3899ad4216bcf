"""A server with several models: every route asks the one that `model` names."""

import asyncio
import gc
import json
import random
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from penstock.api import models
from penstock.engine.errors import ConfigurationError, ModelNotLoaded
from penstock.plugins.reasoning.formats import FORMATS
from penstock.serving.limits import hash_of
from penstock.serving.models.pool import PoolLimits
from penstock.serving.options import ServerOptions
from tests.api.models.server import LIMITS, OPTIONS, ModelsServer, chat, models_server, spec
from tests.api.running_server import until

Scenario = Callable[[ModelsServer], Awaitable[None]]


def serve(scenario: Scenario, names: str = "abc", limits: PoolLimits = LIMITS, options: ServerOptions = OPTIONS, **settings: Any) -> None:
    async def run() -> None:
        async with models_server([spec(name) for name in names], limits, options, **settings) as server:
            await scenario(server)

    asyncio.run(run())


def said(body: Any) -> str:
    text: str = body["choices"][0]["message"]["content"]
    return text


def test_every_route_asks_the_model_that_is_named() -> None:
    async def scenario(server: ModelsServer) -> None:
        for name in "ab":
            message = [{"role": "user", "content": "Hi"}]
            _, answer = await server.chat(name)
            assert (said(answer), answer["model"]) == (f"I am {name}.", name)
            _, answer = await server.post("/v1/completions", {"model": name, "prompt": "Hi"})
            assert answer["choices"][0]["text"] == f"I am {name}."
            _, answer = await server.post("/v1/responses", {"model": name, "input": "Hi"})
            assert answer["output"][0]["content"][0]["text"] == f"I am {name}."
            _, answer = await server.post("/v1/messages", {"model": name, "messages": message, "max_tokens": 99})
            assert answer["content"][0]["text"] == f"I am {name}."
            assert (await server.post("/v1/messages/count_tokens", {"model": name, "messages": message}))[0] == 200
            assert (await server.post("/tokenize", {"model": name, "prompt": "Hi"}))[1]["tokens"] == [39, 72]
            assert (await server.post("/detokenize", {"model": name, "tokens": [39, 72]}))[1]["prompt"] == "Hi"
            assert (await server.post("/v1/grammar/check", {"model": name, "guided_regex": "a"}))[0] == 200
            azure = f"/openai/deployments/{name}/chat/completions"
            assert said((await server.post(azure, {"messages": message}))[1]) == f"I am {name}."
        assert server.loader.loads == ["a", "b"]

    serve(scenario)


def test_a_model_has_its_own_parsers() -> None:
    async def scenario(server: ModelsServer) -> None:
        await server.chat("a")
        server.loader.engines["a"].answers = ["thought</think>answer"]
        message = (await server.chat("a"))[1]["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == ("thought", "answer")
        await server.chat("b")
        server.loader.engines["b"].answers = ["thought</think>answer"]
        assert said((await server.chat("b"))[1]) == "thought</think>answer"

    serve(scenario, settings={"a": {"reasoning_parser": FORMATS["deepseek_r1"]}})


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("/v1/chat/completions", {"model": "x", "messages": []}, 404, "The model `x` does not exist. Served here: a, b, c."),
        ("/v1/completions", {"model": "../../etc/passwd", "prompt": "a"}, 404, "The model `../../etc/passwd` does not exist. Served here"),
        ("/v1/messages", {"model": "x", "messages": []}, 404, "The model `x` does not exist."),
        ("/tokenize", {"prompt": "a"}, 400, "Object missing required field `model`. Served here: a, b, c."),
        ("/v1/chat/completions", {"model": 5}, 400, "Expected `str | null`, got `int` - at `$.model`"),
        ("/v1/chat/completions", [], 400, "Expected `object`, got `array`"),
        ("/v1/chat/completions", {"model": "a", "messages": [], "temprature": 1}, 400, "unknown field `temprature`; did you mean"),
        ("/v1/embeddings", {"model": "a", "input": "x"}, 400, "`a` is a model that generates text; it is served by /v1/chat/completions"),
    ],
)
def test_what_cannot_be_asked_is_refused(path: str, body: Any, status: int, message: str) -> None:
    async def scenario(server: ModelsServer) -> None:
        got, answer = await server.post(path, body)
        assert got == status
        assert message in answer["error"]["message"]

    serve(scenario)


def test_v1_models_lists_all_names_with_their_states() -> None:
    async def scenario(server: ModelsServer) -> None:
        await server.chat("first")
        _, listed = await server.get("/v1/models")
        cards = [(card["id"], card["root"], card["state"], card["max_model_len"]) for card in listed["data"]]
        assert cards == [("a", "a", "loaded", 400), ("first", "a", "loaded", 400), ("b", "b", "unloaded", None)]
        assert (await server.get("/v1/models/b"))[1]["tasks"] == ["generate"]
        assert (await server.get("/v1/models/x"))[0] == 404
        _, page = await server.get("/v1/models", headers={"anthropic-version": "2023-06-01"})
        assert [(model["id"], model["max_input_tokens"]) for model in page["data"]] == [("a", 400), ("first", 400), ("b", None)]

    async def run() -> None:
        async with models_server([spec("a", aliases=("first",)), spec("b")]) as server:
            await scenario(server)

    asyncio.run(run())


def test_a_stream_gets_comments_while_its_model_is_loaded() -> None:
    async def scenario(server: ModelsServer) -> None:
        assert server.loader.gate is not None
        async with server.http.post("/v1/chat/completions", json=chat("a", stream=True)) as response:
            assert (response.status, response.content_type) == (200, "text/event-stream")
            for _ in range(2):
                assert await response.content.readuntil(b"\n\n") == b": keep-alive\n\n"
            server.loader.gate.set()
            events = [event for event in (await response.text()).split("\n\n") if event.startswith("data: {")]
        text = "".join(json.loads(event[6:])["choices"][0]["delta"].get("content", "") for event in events)
        assert text == "I am a."

    gate = asyncio.Event()
    serve(scenario, options=ServerOptions(keep_alive_interval=0.01), gate=gate)


@pytest.mark.parametrize(
    ("path", "event", "ending"),
    [
        ("/v1/chat/completions", "data: {", "data: [DONE]"),
        ("/v1/messages", "event: error", ""),
        ("/v1/responses", "event: error", ""),
    ],
)
@pytest.mark.parametrize("is_loaded", [False, True])
def test_an_error_after_comments_is_an_event_of_the_endpoint(path: str, event: str, ending: str, *, is_loaded: bool) -> None:
    async def scenario(server: ModelsServer) -> None:
        assert server.loader.gate is not None
        mistake = {"temperature": -1} if is_loaded else {}
        if not is_loaded:
            server.loader.failures["a"] = [ConfigurationError("no weights")]
        body = chat("a", stream=True, max_tokens=9) | mistake
        if path == "/v1/responses":
            body = {"model": "a", "input": "Hi", "stream": True, **mistake}
        async with server.http.post(path, json=body) as response:
            await response.content.readuntil(b": keep-alive\n\n")
            server.loader.gate.set()
            rest = [each for each in (await response.text()).split("\n\n") if each and not each.startswith(":")]
        assert rest[0].startswith(event)
        assert ("temperature" if is_loaded else "the model `a` cannot be loaded: no weights") in rest[0]
        assert rest[1:] == [ending] * bool(ending)

    serve(scenario, options=ServerOptions(keep_alive_interval=0.01), gate=asyncio.Event())


def test_a_failed_load_answers_all_that_wait_and_is_tried_again() -> None:
    async def scenario(server: ModelsServer) -> None:
        answers = await asyncio.gather(*(server.chat("a") for _ in range(3)))
        assert {status for status, _ in answers} == {503}
        error = answers[0][1]["error"]
        assert (error["code"], error["message"]) == ("model_not_loaded", "the model `a` cannot be loaded: no weights")
        assert (await server.get("/v1/models/a"))[1]["state"] == "failed"
        assert said((await server.chat("a"))[1]) == "I am a."

    serve(scenario, failures={"a": [ConfigurationError("no weights")]})


def test_a_request_that_waits_too_long_gets_503_with_retry_after() -> None:
    async def scenario(server: ModelsServer) -> None:
        async with server.http.post("/v1/chat/completions", json=chat("a")) as response:
            assert response.status == 503
            assert int(response.headers["Retry-After"]) >= 1
            assert "the model `a` is still being loaded: try again later" in await response.text()
        assert server.loader.gate is not None
        server.loader.gate.set()

    serve(scenario, limits=PoolLimits(num_bytes=2, wait_seconds=0.01), gate=asyncio.Event())


def test_a_swap_waits_for_requests_in_flight() -> None:
    async def scenario(server: ModelsServer) -> None:
        await asyncio.gather(server.chat("a"), server.chat("b"))
        gate = asyncio.Event()
        for name in "ab":
            server.loader.engines[name].gate, server.loader.engines[name].gate_step = gate, 3
        running = [asyncio.ensure_future(server.chat(name)) for name in "ab"]
        await until(lambda: all(model.num_users for model in list(server.pool)[:2]))
        swap = asyncio.ensure_future(server.chat("c"))
        await until(lambda: bool(server.pool.find("c").waiting))
        assert server.loader.loaded == {"a", "b"}
        gate.set()
        assert said((await swap)[1]) == "I am c."
        assert [said(body) for _, body in await asyncio.gather(*running)] == ["I am a.", "I am b."]

    serve(scenario)


def test_a_response_in_the_background_keeps_its_model_and_is_found_without_it() -> None:
    async def scenario(server: ModelsServer) -> None:
        await server.chat("a")
        engine = server.loader.engines["a"]
        engine.gate, engine.gate_step = asyncio.Event(), 3
        _, begun = await server.post("/v1/responses", {"model": "a", "input": "Hi", "background": True})
        unloading = asyncio.ensure_future(server.pool.unload(server.pool.find("a")))
        await asyncio.sleep(0.01)
        assert not unloading.done()
        engine.gate.set()
        await unloading
        _, found = await server.get(f"/v1/responses/{begun['id']}")
        assert (found["status"], found["output"][0]["content"][0]["text"]) == ("completed", "I am a.")
        assert (await server.get(f"/v1/responses/{begun['id']}/input_items"))[0] == 200
        _, continued = await server.post("/v1/responses", {"model": "b", "input": "And?", "previous_response_id": begun["id"]})
        assert continued["output"][0]["content"][0]["text"] == "I am b."
        assert server.loader.loads == ["a", "b"]

    serve(scenario)


def test_nothing_keeps_the_tokenizer_of_an_unloaded_model() -> None:
    async def scenario(server: ModelsServer) -> None:
        await server.chat("a")
        await server.post("/v1/completions", {"model": "a", "prompt": "Hi", "echo": True})
        tokenizer = weakref.ref(server.loader.engines.pop("a").tokenizer)
        await server.pool.unload(server.pool.find("a"))
        await server.chat("b")  # the last request of a connection keeps its objects
        gc.collect()
        assert tokenizer() is None

    serve(scenario)


def test_metrics_are_per_model_and_count_on_over_loads() -> None:
    async def scenario(server: ModelsServer) -> None:
        for name in ("a", "b", "a", "c", "a"):
            await server.chat(name)
        await server.pool.unload(server.pool.find("a"))
        await server.chat("a")
        async with server.http.get("/metrics") as response:
            text = await response.text()
        finished = 'penstock:request_success_total{finished_reason="stop",model_name="%s"} %.1f'
        for name, count in (("a", 4), ("b", 1), ("c", 1)):
            assert finished % (name, count) in text
        assert 'penstock:model_loads_total{model_name="a"} 2.0' in text
        assert 'penstock:model_loaded{model_name="a"} 1.0' in text
        assert text.count("# TYPE penstock:request_success_total counter") == 1
        assert 'penstock:num_requests_running{model_name="b"}' not in text, "it is not loaded"

    serve(scenario)


def test_a_key_loads_no_model_that_it_may_not_use(tmp_path: Path) -> None:
    async def scenario(server: ModelsServer) -> None:
        headers = {"Authorization": "Bearer secret"}
        assert (await server.post("/v1/chat/completions", chat("a"), headers=headers))[0] == 200
        for path, body in (("/v1/chat/completions", chat("b")), ("/tokenize", {"model": "b", "prompt": "x"})):
            status, answer = await server.post(path, body, headers=headers)
            assert (status, server.loader.loads) == (404, ["a"])
            assert answer["error"]["message"] == "The model `b` does not exist, or this API key may not use it. It may use: a."
        assert [card["id"] for card in (await server.get("/v1/models", headers=headers))[1]["data"]] == ["a"]
        assert (await server.get("/v1/models/b", headers=headers))[0] == 404
        assert (await server.chat("a"))[0] == 401

    keys = tmp_path / "keys.toml"
    keys.write_text(f'[keys.alice]\nhash = "{hash_of("secret")}"\nmodels = ["a"]\n', encoding="utf-8")
    keys.chmod(0o600)
    serve(scenario, options=ServerOptions(keep_alive_interval=0, keys_file=str(keys)))


def test_requests_that_wait_for_a_model_are_open_ones_of_their_key(tmp_path: Path) -> None:
    async def scenario(server: ModelsServer) -> None:
        headers = {"Authorization": "Bearer secret"}
        first = asyncio.create_task(server.post("/v1/chat/completions", chat("a"), headers=headers))
        await until(lambda: bool(server.pool.find("a").waiting))
        status, answer = await server.post("/v1/chat/completions", chat("a"), headers=headers)
        assert (status, answer["error"]["code"]) == (429, "rate_limit_exceeded")
        assert server.loader.gate is not None
        server.loader.gate.set()
        assert (await first)[0] == 200
        assert (await server.post("/v1/chat/completions", chat("a"), headers=headers))[0] == 200

    keys = tmp_path / "keys.toml"
    keys.write_text(f'[keys.alice]\nhash = "{hash_of("secret")}"\nmax_concurrent_requests = 1\n', encoding="utf-8")
    keys.chmod(0o600)
    serve(scenario, options=ServerOptions(keep_alive_interval=0, keys_file=str(keys)), gate=asyncio.Event())


def test_a_model_is_released_where_the_client_leaves_just_when_it_is_lent(monkeypatch: pytest.MonkeyPatch) -> None:
    @asynccontextmanager
    async def interrupted(request: web.Request, interval: float) -> AsyncIterator[None]:
        yield
        raise ConnectionResetError

    monkeypatch.setattr(models, "keeping_alive", interrupted)

    async def scenario(server: ModelsServer) -> None:
        assert (await server.chat("a"))[0] == 500
        assert server.pool.find("a").num_users == 0

    serve(scenario)


def test_errors_of_a_failed_load_do_not_keep_requests() -> None:
    async def refused(server: ModelsServer) -> BaseException:
        with pytest.raises(ModelNotLoaded) as error:
            await server.pool.wait_for(server.pool.find("a"))
        return error.value

    async def scenario(server: ModelsServer) -> None:
        assert len({id(error) for error in [await refused(server) for _ in range(3)]}) == 3

    serve(scenario, failures={"a": [ConfigurationError("no weights")]}, limits=PoolLimits(num_bytes=2, wait_seconds=60, pause_seconds=60))


def test_a_deadline_counts_while_a_model_is_waited_for() -> None:
    async def scenario(server: ModelsServer) -> None:
        status, answer = await server.chat("a", timeout=0.01)
        assert (status, answer["error"]["code"]) == (504, "timeout")
        assert server.loader.gate is not None
        server.loader.gate.set()

    serve(scenario, gate=asyncio.Event())


def test_lines_of_a_batch_name_their_models(tmp_path: Path) -> None:
    async def scenario(server: ModelsServer) -> None:
        lines = [{"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": chat(name)} for name in "ab"]
        form = aiohttp.FormData({"purpose": "batch"})
        form.add_field("file", "\n".join(map(json.dumps, lines)), filename="batch.jsonl")
        async with server.http.post("/v1/files", data=form) as response:
            file = await response.json()
        body = {"input_file_id": file["id"], "endpoint": "/v1/chat/completions", "completion_window": "24h"}
        _, batch = await server.post("/v1/batches", body)
        assert batch["model"] is None
        while batch["status"] not in ("completed", "failed"):
            await asyncio.sleep(0.005)
            _, batch = await server.get(f"/v1/batches/{batch['id']}")
        async with server.http.get(f"/v1/files/{batch['output_file_id']}/content") as response:
            answers = [json.loads(line) for line in (await response.text()).splitlines()]
        assert {each["custom_id"]: said(each["response"]["body"]) for each in answers} == {"a": "I am a.", "b": "I am b."}

    serve(scenario, options=ServerOptions(keep_alive_interval=0, files_dir=str(tmp_path)))


@pytest.mark.parametrize(("num_requests", "num_loads"), [(60, 10), pytest.param(2000, 400, marks=pytest.mark.thorough)])
def test_any_mix_of_requests_gets_the_answers_of_each_model_alone(num_requests: int, num_loads: int) -> None:
    async def scenario(server: ModelsServer) -> None:
        draw = random.Random(5)

        async def request(name: str) -> None:
            kind = draw.random()
            if kind < 0.4:
                status, body = await server.chat(name)
                assert (status, said(body)) == (200, f"I am {name}.")
            elif kind < 0.5:
                async with server.http.post("/tokenize", json={"model": name, "prompt": "abc"}) as response:
                    assert (response.status, (await response.json())["count"]) == (200, 3)
            else:
                async with server.http.post("/v1/completions", json={"model": name, "prompt": "a", "stream": True}) as response:
                    events = [line[6:] for line in (await response.text()).splitlines() if line.startswith("data: {")]
                assert "".join(json.loads(event)["choices"][0]["text"] for event in events) == f"I am {name}."

        tasks: list[asyncio.Future[None]] = []
        for _ in range(num_requests):
            tasks.append(asyncio.ensure_future(request(draw.choice("abcd"))))
            if draw.random() < 0.25:
                draw.choice(tasks).cancel()
            if draw.random() < 0.1:
                tasks.append(asyncio.ensure_future(server.pool.unload(server.pool.find(draw.choice("abcd")))))
            await asyncio.sleep(draw.random() * 0.004)
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        assert {type(each) for each in ended} == {type(None), asyncio.CancelledError}
        await until(lambda: not any(model.num_users for model in server.pool))
        assert len(server.loader.loads) > num_loads

    serve(scenario, names="abcd")
