"""/v1/batches through the official client: what is answered and what is refused."""

import asyncio
import json
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
from openai import AsyncOpenAI

from penstock.api.batches import BATCHES
from penstock.engine.errors import QueueFull
from penstock.engine.request import BACKGROUND
from penstock.serving.batches import lines as lines_module
from penstock.serving.limits import hash_of
from penstock.serving.options import ServerOptions
from tests.api.batches.client import begun, by_custom_id, finished, lines_of, request_line, serve, start_batch, with_key
from tests.api.bodies.mutations import CHAT, mutated_bodies
from tests.api.pooling.server import PoolingServer, serve_pooling
from tests.api.running_server import STATS
from tests.api.scripted import MODEL, Scripted, ScriptedEngine, client_of


def test_each_line_has_the_answer_of_its_endpoint(tmp_path: Path) -> None:
    async def scenario(client: AsyncOpenAI, scripted: Scripted) -> None:
        lines = [request_line("whole"), request_line("cut", max_tokens=2), "", request_line("wrong", temperature=-1)]
        lines += [request_line("streamed", stream=True), request_line("unknown", foo=1)]
        batch = await start_batch(client, lines, metadata={"run": "7"})
        assert (batch.status, batch.endpoint, batch.metadata) == ("validating", "/v1/chat/completions", {"run": "7"})
        done = await finished(client, batch)
        assert done.status == "completed"
        assert done.created_at <= done.in_progress_at <= done.finalizing_at <= done.completed_at < done.expires_at  # type: ignore[operator]
        assert (done.request_counts.total, done.request_counts.completed, done.request_counts.failed) == (5, 2, 3)  # type: ignore[union-attr]
        answers, errors = await by_custom_id(client, done.output_file_id), await by_custom_id(client, done.error_file_id)
        direct = await client.chat.completions.create(model="scripted", messages=[{"role": "user", "content": "Hi"}])
        body = answers["whole"]["response"]["body"]
        assert body["choices"] == [choice.model_dump(exclude_unset=True) for choice in direct.choices]
        assert body["usage"] == direct.usage.model_dump(exclude_unset=True)  # type: ignore[union-attr]
        assert answers["cut"]["response"]["body"]["choices"][0]["finish_reason"] == "length"
        for line in (*answers.values(), *errors.values()):
            assert set(line) == {"id", "custom_id", "response", "error"}
            assert line["id"].startswith("batch_req_")
            assert line["error"] is None
            assert set(line["response"]) == {"status_code", "request_id", "body"}
        params = {name: line["response"]["body"]["error"]["param"] for name, line in errors.items()}
        assert params == {"wrong": "temperature", "streamed": "stream", "unknown": "foo"}
        assert {line["response"]["status_code"] for line in errors.values()} == {400}
        usage = [line["response"]["body"]["usage"] for line in answers.values()]
        assert done.usage.total_tokens == sum(each["total_tokens"] for each in usage)  # type: ignore[union-attr]
        assert done.usage.input_tokens_details.cached_tokens == 32  # type: ignore[union-attr]

    serve(scenario, tmp_path)


BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}]},
    "/v1/completions": {"prompt": "Hi"},
    "/v1/responses": {"input": "Hi", "model": "scripted"},
}


def test_the_example_of_the_docs_is_answered(tmp_path: Path) -> None:
    page = (Path(__file__).parents[3] / "docs/batches.md").read_text(encoding="utf-8")
    start = page.index("lines = [")
    names: dict[str, Any] = {}
    exec(page[start : page.index("file = client", start)].replace("SmolLM2-135M-Instruct", MODEL), names)

    async def scenario(client: AsyncOpenAI, scripted: Scripted) -> None:
        done = await finished(client, await start_batch(client, names["lines"]))
        assert set(await by_custom_id(client, done.output_file_id)) == {"France", "Peru", "Japan"}

    serve(scenario, tmp_path)


def test_requests_of_a_batch_have_the_lowest_priority_on_every_endpoint_whatever_they_say(tmp_path: Path) -> None:
    async def scenario(client: AsyncOpenAI, scripted: Scripted) -> None:
        endpoints = scripted.server.app[BATCHES].endpoints  # type: ignore[attr-defined]
        assert {"/v1/chat/completions", "/v1/completions"} <= set(endpoints) <= set(BODIES)
        for endpoint in endpoints:
            lines = [
                {"custom_id": name, "method": "POST", "url": endpoint, "body": {"model": "scripted"} | BODIES[endpoint] | more}
                for name, more in (("a", {"priority": 5}), ("b", {}), ("c", {"stream": True}), ("d", {"background": True}))
            ]
            scripted.engine.requests.clear()
            done = await finished(client, await start_batch(client, lines, endpoint))
            assert [request.priority for request in scripted.engine.requests] == [BACKGROUND] * 2
            answers, errors = await by_custom_id(client, done.output_file_id), await by_custom_id(client, done.error_file_id)
            assert (sorted(answers), sorted(errors)) == (["a", "b"], ["c", "d"])
            assert done.usage is not None
            assert done.usage.output_tokens == 2 * 12

    serve(scenario, tmp_path)


def test_completions_may_be_asked_and_other_endpoints_not(tmp_path: Path) -> None:
    async def scenario(client: AsyncOpenAI, scripted: Scripted) -> None:
        done = await finished(client, await start_batch(client, [request_line("a", url="/v1/completions")], "/v1/completions"))
        (line,) = await lines_of(client, done.output_file_id)
        assert line["response"]["body"]["choices"][0]["text"] == "Hello there."
        for endpoint in ("/v1/embeddings", "/v1/moderations", "/metrics"):
            with pytest.raises(openai.BadRequestError, match="/v1/completions"):
                await start_batch(client, [request_line("a")], endpoint)
        with pytest.raises(openai.BadRequestError, match="completion_window"):
            await client.batches.create(input_file_id="file-1", endpoint="/v1/completions", completion_window="1h")  # type: ignore[arg-type]
        file = await client.files.create(file=("f", b"{}"), purpose="user_data")
        with pytest.raises(openai.BadRequestError, match="purpose"):
            await client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
        with pytest.raises(openai.NotFoundError) as caught:
            await client.batches.create(input_file_id="file-1", endpoint="/v1/completions", completion_window="24h")
        assert caught.value.param == "input_file_id"

    serve(scenario, tmp_path)


@pytest.mark.parametrize(
    ("line", "code", "param"),
    [
        ("{", "invalid_json_line", None),
        ("[1]", "invalid_json_line", None),
        ("null", "invalid_json_line", None),
        ("[" * 5000, "invalid_json_line", None),
        (request_line("first"), "duplicate_custom_id", "custom_id"),
        (request_line("a") | {"custom_id": None}, "missing_required_parameter", "custom_id"),
        (request_line("a") | {"custom_id": 7}, "invalid_value", "custom_id"),
        (request_line("a") | {"custom_id": "x" * 1000}, "invalid_value", "custom_id"),
        (request_line("a") | {"method": "GET"}, "invalid_method", "method"),
        (request_line("a") | {"url": "/v1/completions"}, "url_mismatch", "url"),
        ({"custom_id": "a", "method": "POST"}, "missing_required_parameter", "url"),
        ({"custom_id": "a", "method": "POST", "url": "/v1/chat/completions"}, "missing_required_parameter", "body"),
        (request_line("a") | {"body": []}, "invalid_value", "body"),
        (request_line("a", model="gpt-5"), "model_not_found", "body.model"),
        (request_line("a", text="x" * 100_000), "invalid_json_line", None),
    ],
)
def test_a_wrong_line_fails_the_batch_by_its_number(tmp_path: Path, line: Any, code: str, param: str | None) -> None:
    async def scenario(client: AsyncOpenAI, scripted: Scripted) -> None:
        done = await finished(client, await start_batch(client, [request_line("first"), "", line]))
        assert done.status == "failed"
        assert done.failed_at
        assert done.errors is not None
        assert [(error.code, error.param, error.line) for error in done.errors.data or []] == [(code, param, 3)]
        assert not scripted.engine.requests
        assert done.output_file_id is None

    serve(scenario, tmp_path, max_body_size=20_000)


def test_an_empty_file_and_one_with_too_many_requests_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(client: AsyncOpenAI, scripted: Scripted) -> None:
        monkeypatch.setattr(lines_module, "MAX_REQUESTS", 2)
        for lines, code in (([""], "empty_file"), ([request_line(str(number)) for number in range(3)], "too_many_tasks")):
            done = await finished(client, await start_batch(client, lines))
            assert done.status == "failed"
            assert done.errors is not None
            assert [error.code for error in done.errors.data or []] == [code]

    serve(scenario, tmp_path)


def test_mutated_bodies_have_an_answer_each_and_none_is_our_fault(tmp_path: Path) -> None:
    async def scenario(client: AsyncOpenAI, scripted: Scripted) -> None:
        bodies = [body for body in mutated_bodies(CHAT, 120, seed=5) if is_object_for_us(body)]
        parts = [b'{"custom_id":"%d","method":"POST","url":"/v1/chat/completions","body":%b}' % each for each in enumerate(bodies)]
        file = await client.files.create(file=("f", b"\n".join(parts)), purpose="batch")
        batch = await client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
        done = await finished(client, batch)
        answers, errors = await by_custom_id(client, done.output_file_id), await by_custom_id(client, done.error_file_id)
        assert len(answers) + len(errors) == len(bodies) > 40
        assert {line["response"]["status_code"] for line in errors.values()} <= {400, 404}

    serve(scenario, tmp_path)


def is_object_for_us(body: bytes) -> bool:
    try:
        value = json.loads(body)
    except ValueError:
        return False
    return isinstance(value, dict) and value.get("model") == "scripted" and b"\n" not in body


def test_mutated_creations_are_taken_or_refused(tmp_path: Path) -> None:
    async def scenario(client: AsyncOpenAI, scripted: Scripted) -> None:
        file = await client.files.create(file=("f", b"{}"), purpose="batch")
        whole = {
            "input_file_id": file.id,
            "endpoint": "/v1/completions",
            "completion_window": "24h",
            "metadata": {"a": "b"},
            "output_expires_after": {"anchor": "created_at", "seconds": 3600},
        }
        statuses = set()
        async with aiohttp.ClientSession() as http:
            for body in mutated_bodies(whole, 80, seed=2):
                async with http.post(f"{scripted.base_url}/batches", data=body, headers={"Content-Type": "application/json"}) as answer:
                    statuses.add(answer.status)
        assert {200, 400} <= statuses <= {200, 400, 404}

    serve(scenario, tmp_path)


def test_at_most_so_many_requests_are_in_flight_and_batches_take_turns(tmp_path: Path) -> None:
    gate = asyncio.Event()

    async def scenario(client: AsyncOpenAI, scripted: Scripted) -> None:
        lines = [request_line(str(number), text=f"{name}") for name in "ab" for number in range(6)]
        first, second = await start_batch(client, lines[:6]), await start_batch(client, lines[6:])
        await begun(scripted, 4)
        await asyncio.sleep(0.05)
        assert len(scripted.engine.requests) == 4
        gate.set()
        assert (await finished(client, first)).status == (await finished(client, second)).status == "completed"
        assert len(scripted.engine.requests) == 12

    serve(scenario, tmp_path, {"gate": gate}, max_batch_requests=4)


def test_a_full_queue_is_waited_for(tmp_path: Path) -> None:
    async def scenario(client: AsyncOpenAI, scripted: Scripted) -> None:
        scripted.engine.refusal = QueueFull("full", retry_after=0)
        batch = await start_batch(client, [request_line("a")])
        while batch.status != "in_progress":
            batch = await client.batches.retrieve(batch.id)
        await asyncio.sleep(0.02)
        scripted.engine.refusal = None
        done = await finished(client, batch)
        assert list(await by_custom_id(client, done.output_file_id)) == ["a"]
        assert done.error_file_id is None

    serve(scenario, tmp_path)


def test_a_batch_has_the_limits_of_the_key_that_created_it(tmp_path: Path) -> None:
    tables = {"first": "", "second": 'models = ["other"]', "third": "max_tokens = 3"}
    keys = "".join(f'[keys.{name}]\nhash = "{hash_of(name)}"\ntenant = "team"\n{limits}\n' for name, limits in tables.items())
    (tmp_path / "keys.toml").write_text(keys, encoding="utf-8")

    async def scenario(client: AsyncOpenAI, scripted: Scripted) -> None:
        for name, status in (("first", 200), ("second", 404), ("third", 400)):
            own = with_key(client, name)
            batch = await finished(own, await start_batch(own, [request_line("a", max_tokens=4)]))
            (line,) = await lines_of(own, batch.output_file_id or batch.error_file_id)
            assert line["response"]["status_code"] == status, name

    serve(scenario, tmp_path, keys_file=str(tmp_path / "keys.toml"))


def test_a_client_s_batches_do_not_exist_for_another(tmp_path: Path) -> None:
    async def scenario(client: AsyncOpenAI, scripted: Scripted) -> None:
        one, two = with_key(client, "one"), with_key(client, "two")
        batch = await finished(one, await start_batch(one, [request_line("a")]))
        assert batch.status == "completed"
        assert [each.id async for each in one.batches.list()] == [batch.id]
        assert [each.id async for each in two.batches.list()] == []
        for attempt in (two.batches.retrieve(batch.id), two.batches.cancel(batch.id), two.files.content(batch.output_file_id or "")):
            with pytest.raises(openai.NotFoundError):
                await attempt
        own = await one.chat.completions.create(model="scripted", messages=[{"role": "user", "content": "Hi"}])
        assert own.choices
        salts = {request.cache_salt for request in scripted.engine.requests}
        assert len(salts) == 1, "a batch shares the prefix cache with its client's other requests, and with no other client's"
        await two.chat.completions.create(model="scripted", messages=[{"role": "user", "content": "Hi"}])
        assert scripted.engine.requests[-1].cache_salt not in salts

    serve(scenario, tmp_path, api_keys=("one", "two"))


def test_responses_of_a_batch_are_those_of_its_client(tmp_path: Path) -> None:
    """They continue its other responses, take its sealed reasoning, and can be asked for."""
    path = "/v1/responses"

    def line(custom_id: str, **fields: Any) -> dict[str, Any]:
        return {"custom_id": custom_id, "method": "POST", "url": path, "body": {"model": MODEL, "input": "Hi", **fields}}

    async def scenario(client: AsyncOpenAI, scripted: Scripted) -> None:
        one, two = with_key(client, "one"), with_key(client, "two")
        first = await one.responses.create(model=MODEL, input="Hi", include=["reasoning.encrypted_content"])
        sealed = next(item for item in first.output if item.type == "reasoning").encrypted_content
        reasoning = [{"type": "reasoning", "summary": [], "encrypted_content": sealed}, {"role": "user", "content": "Hi"}]
        lines = [line("continued", previous_response_id=first.id), line("sealed", input=reasoning)]

        foreign = await finished(two, await start_batch(two, lines, endpoint=path))
        refused = await by_custom_id(two, foreign.error_file_id)
        assert {name: answer["response"]["status_code"] for name, answer in refused.items()} == {"continued": 400, "sealed": 400}
        batch = await finished(one, await start_batch(one, lines, endpoint=path))
        answers = await by_custom_id(one, batch.output_file_id)
        assert set(answers) == {"continued", "sealed"}
        made = answers["continued"]["response"]["body"]["id"]
        assert (await one.responses.retrieve(made)).previous_response_id == first.id
        with pytest.raises(openai.NotFoundError):
            await two.responses.retrieve(made)

    serve(scenario, tmp_path, {"answers": ["<think>Well</think>Hello"]}, thinks=True, api_keys=("one", "two"))


def test_batches_are_listed_in_pages(tmp_path: Path) -> None:
    async def scenario(client: AsyncOpenAI, scripted: Scripted) -> None:
        ids = [(await start_batch(client, [request_line("a")])).id for _ in range(3)]
        assert [batch.id async for batch in client.batches.list(limit=2)] == ids[::-1]
        with pytest.raises(openai.BadRequestError, match="limit"):
            await client.batches.list(limit=101)

    serve(scenario, tmp_path)


def test_an_input_file_stays_while_its_batch_runs(tmp_path: Path) -> None:
    gate = asyncio.Event()

    async def scenario(client: AsyncOpenAI, scripted: Scripted) -> None:
        batch = await start_batch(client, [request_line("a")])
        with pytest.raises(openai.BadRequestError, match="still reads"):
            await client.files.delete(batch.input_file_id)
        gate.set()
        await finished(client, batch)
        assert (await client.files.delete(batch.input_file_id)).deleted

    serve(scenario, tmp_path, {"gate": gate})


def test_output_files_expire_as_asked(tmp_path: Path) -> None:
    async def scenario(client: AsyncOpenAI, scripted: Scripted) -> None:
        after: Any = {"anchor": "created_at", "seconds": 7200}
        done = await finished(client, await start_batch(client, [request_line("a")], output_expires_after=after))
        file = await client.files.retrieve(done.output_file_id or "")
        assert (file.purpose, file.expires_at) == ("batch_output", file.created_at + 7200)

    serve(scenario, tmp_path)


def test_batches_are_in_the_metrics_and_in_the_access_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(client: AsyncOpenAI, scripted: Scripted) -> None:
        done = await finished(client, await start_batch(client, [request_line("a"), request_line("b", temperature=-1)]))
        async with aiohttp.ClientSession() as http, http.get(scripted.base_url.removesuffix("/v1") + "/metrics") as answer:
            lines = (await answer.text()).splitlines()
        assert 'penstock:batch_requests_total{model_name="scripted",outcome="completed"} 1.0' in lines
        assert 'penstock:batch_requests_total{model_name="scripted",outcome="failed"} 1.0' in lines
        assert 'penstock:batches_unfinished{model_name="scripted"} 0.0' in lines
        assert 'penstock:files{model_name="scripted"} 3.0' in lines
        assert 'penstock:time_to_first_token_seconds_count{model_name="scripted"} 0.0' in lines, "batches wait as long as they have to"
        logged = [record.getMessage() for record in caplog.records if record.getMessage().startswith("batch POST")]
        key = done.id.removeprefix("batch_")
        assert [f"id=batch_req_{key}_{number}" in line for number, line in enumerate(sorted(logged), 1)] == [True, True]

    monkeypatch.setattr(ScriptedEngine, "stats", lambda self: STATS)
    with caplog.at_level("INFO", "penstock.access"):
        serve(scenario, tmp_path)


def test_embeddings_may_be_asked_of_a_model_that_makes_them(tmp_path: Path, embedder: Path) -> None:
    texts = {"a": "Paris", "b": "The cat sat on the mat."}

    async def scenario(server: PoolingServer) -> None:
        async with client_of(f"{server.url}/v1") as client:
            lines = [
                {"custom_id": name, "method": "POST", "url": "/v1/embeddings", "body": {"model": "tiny", "input": text}}
                for name, text in texts.items()
            ]
            done = await finished(client, await start_batch(client, lines, "/v1/embeddings"))
            answers = await by_custom_id(client, done.output_file_id)
            for name, text in texts.items():
                direct = await client.embeddings.create(model="tiny", input=text, encoding_format="float")
                assert answers[name]["response"]["body"]["data"][0]["embedding"] == pytest.approx(direct.data[0].embedding, abs=1e-6)
            assert done.usage is not None
            assert done.usage.input_tokens == done.usage.total_tokens > 0
            with pytest.raises(openai.BadRequestError, match="/v1/embeddings"):
                await start_batch(client, [request_line("a")])

    serve_pooling(embedder, scenario, ServerOptions(files_dir=str(tmp_path)))
