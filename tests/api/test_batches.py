"""/v1/batches through the official client: what is answered, what is refused, and what a crash leaves."""

import asyncio
import json
import os
import shutil
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Literal

import aiohttp
import openai
import pytest
from openai import AsyncOpenAI

from penstock.api.batches.endpoint import BATCHES
from penstock.engine.errors import QueueFull
from penstock.engine.request import BACKGROUND
from penstock.serving.batches import lines as lines_module
from penstock.serving.batches.lines import LineFile, OutputLine
from penstock.serving.options import ServerOptions
from tests.api.batch_client import by_custom_id, file_server, finished, jsonl, lines_of, request_line, start_batch, with_key
from tests.api.mutations import CHAT, mutated_bodies
from tests.api.pooling_server import PoolingServer, serve_pooling
from tests.api.running_server import STATS
from tests.api.scripted import MODEL, Scripted, ScriptedEngine, client_of

Scenario = Callable[[AsyncOpenAI, Scripted], Coroutine[Any, Any, None]]


def serve(scenario: Scenario, directory: Path, engine: dict[str, Any] | None = None, **options: Any) -> None:
    async def run() -> None:
        async with file_server(directory, engine, **options) as (client, scripted):
            await asyncio.wait_for(scenario(client, scripted), 30)

    asyncio.run(run())


class FirstOnly(asyncio.Event):
    """Lets so many requests pass, and no other."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self._left = count

    async def wait(self) -> Literal[True]:
        self._left -= 1
        return True if self._left >= 0 else await super().wait()


async def begun(scripted: Scripted, count: int) -> None:
    while len(scripted.engine.requests) < count:  # noqa: ASYNC110
        await asyncio.sleep(0.002)


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
    page = (Path(__file__).parents[2] / "docs/batches.md").read_text(encoding="utf-8")
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


def test_cancelling_aborts_what_is_in_flight_and_keeps_what_is_answered(tmp_path: Path) -> None:
    async def scenario(client: AsyncOpenAI, scripted: Scripted) -> None:
        batch = await start_batch(client, [request_line(str(number)) for number in range(6)])
        await begun(scripted, 4)
        batch = await client.batches.cancel(batch.id)
        assert batch.status in ("cancelling", "cancelled")
        done = await finished(client, batch)
        assert done.status == "cancelled"
        assert done.cancelling_at <= done.cancelled_at  # type: ignore[operator]
        assert scripted.engine.aborted == 2
        answers, errors = await by_custom_id(client, done.output_file_id), await by_custom_id(client, done.error_file_id)
        assert (len(answers), sorted((*answers, *errors))) == (2, list("012345"))
        assert {line["error"]["code"] for line in errors.values()} == {"batch_cancelled"}
        assert (done.request_counts.completed, done.request_counts.failed) == (len(answers), len(errors))  # type: ignore[union-attr]
        with pytest.raises(openai.BadRequestError, match="cancelled"):
            await client.batches.cancel(batch.id)

    serve(scenario, tmp_path, {"gate": FirstOnly(2)}, max_batch_requests=2)


def test_a_batch_expires_with_what_is_answered(tmp_path: Path) -> None:
    gate = asyncio.Event()

    async def run() -> None:
        async with file_server(tmp_path, {"gate": gate}) as (client, scripted):
            batch = await start_batch(client, [request_line("a"), request_line("b")])
            await begun(scripted, 2)
        async with file_server(tmp_path, {"gate": gate}) as (client, scripted):
            store = scripted.server.app[BATCHES]  # type: ignore[attr-defined]
            await store.stop()
            store._now = lambda: batch.expires_at
            store.start()
            done = await finished(client, batch)
            assert done.status == "expired"
            assert done.expired_at == batch.expires_at
            assert done.output_file_id is None
            errors = await by_custom_id(client, done.error_file_id)
            assert {name: line["error"]["code"] for name, line in errors.items()} == {"a": "batch_expired", "b": "batch_expired"}
            assert {line["response"] for line in errors.values()} == {None}

    asyncio.run(asyncio.wait_for(run(), 20))


def test_after_a_crash_at_any_line_the_batch_goes_on_where_it_was(tmp_path: Path) -> None:
    """A copy of the directory is what a killed server would have left."""
    names = [str(number) for number in range(8)]

    async def crash(number: int) -> str:
        async with file_server(tmp_path / f"live{number}", {"gate": FirstOnly(number)}, max_batch_requests=2) as (client, scripted):
            batch = await start_batch(client, [request_line(name) for name in names])
            await begun(scripted, number + 2)
            shutil.copytree(tmp_path / f"live{number}", tmp_path / f"killed{number}")
        return batch.id

    async def go_on(number: int, batch_id: str) -> None:
        directory = tmp_path / f"killed{number}"
        written = directory / "batches" / f"{batch_id}.output.jsonl"
        before = written.read_bytes() if number else b""
        assert before.count(b"\n") == number
        with written.open("ab") as file:
            file.write(b'{"id":"batch_req_x_8","custom_id":"half of a li')
        async with file_server(directory) as (client, scripted):
            done = await finished(client, await client.batches.retrieve(batch_id))
            assert done.status == "completed"
            content = (await client.files.content(done.output_file_id or "")).content
            assert content.startswith(before)
            assert sorted(await by_custom_id(client, done.output_file_id)) == names
            assert len(scripted.engine.requests) == len(names) - number
            assert done.request_counts.completed == len(names)  # type: ignore[union-attr]
            assert done.usage.output_tokens == len(names) * 12  # type: ignore[union-attr]

    for number in range(0, 7, 2):
        batch_id = asyncio.run(asyncio.wait_for(crash(number), 20))
        asyncio.run(asyncio.wait_for(go_on(number, batch_id), 20))


def test_after_a_crash_at_any_moment_no_line_is_lost_and_none_is_there_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies of the directory, between all steps of the work on the disk, are what servers that are killed there would leave."""
    lines = [request_line("good"), request_line("bad", temperature=-1)]
    live, killed = tmp_path / "live", tmp_path / "killed"

    async def go_on(directory: Path, batch_id: str) -> None:
        async with file_server(directory) as (client, _):
            done = await finished(client, await client.batches.retrieve(batch_id))
            assert done.status == "completed"
            assert list(await by_custom_id(client, done.output_file_id)) == ["good"]
            assert list(await by_custom_id(client, done.error_file_id)) == ["bad"]
            assert len((await client.files.list()).data) == 3
            assert {path.name for path in (directory / "batches").iterdir()} == {f"{batch_id}.json"}

    async def run() -> list[Path]:
        copies: dict[int, Path] = {}

        def copy() -> None:
            contents = sorted((str(path), path.read_bytes()) for path in live.rglob("*") if path.is_file())
            key = hash(tuple(contents))
            if key not in copies and list((live / "batches").glob("*.json")):
                copies[key] = killed / str(len(copies))
                shutil.copytree(live, copies[key])

        sync = os.fsync

        def copy_and_sync(descriptor: int) -> None:
            copy()
            sync(descriptor)

        def copying(job: Callable[[], Any]) -> Any:
            def run_job() -> Any:
                result = job()
                copy()
                return result

            return disk_run(run_job)

        async with file_server(live) as (client, scripted):
            disk = scripted.server.app[BATCHES]._disk  # type: ignore[attr-defined]
            disk_run = disk.run
            with monkeypatch.context() as patch:
                patch.setattr(disk, "run", copying)
                patch.setattr(os, "fsync", copy_and_sync)
                batch = await finished(client, await start_batch(client, lines))
        for directory in copies.values():
            await go_on(directory, batch.id)
        return list(copies.values())

    assert len(asyncio.run(asyncio.wait_for(run(), 30))) > 10


def test_stopping_ends_the_work_at_once_and_the_next_start_goes_on(tmp_path: Path) -> None:
    async def run() -> None:
        gate = asyncio.Event()
        async with file_server(tmp_path, {"gate": gate}) as (client, scripted):
            batch = await start_batch(client, [request_line("a"), request_line("b")])
            await begun(scripted, 2)
            await scripted.server.app[BATCHES].stop()  # type: ignore[attr-defined]
            assert scripted.engine.aborted == 2
            assert (await client.batches.retrieve(batch.id)).status == "in_progress"
        async with file_server(tmp_path) as (client, scripted):
            done = await finished(client, await client.batches.retrieve(batch.id))
            assert sorted(await by_custom_id(client, done.output_file_id)) == ["a", "b"]

    asyncio.run(asyncio.wait_for(run(), 20))


def test_a_server_with_another_model_leaves_a_batch_as_it_is(tmp_path: Path) -> None:
    async def run() -> None:
        async with file_server(tmp_path, {"gate": asyncio.Event()}) as (client, scripted):
            one, two = [await start_batch(client, [request_line("a")]) for _ in range(2)]
            await begun(scripted, 2)
        for path in (tmp_path / "batches").glob("*.json"):
            path.write_bytes(path.read_bytes().replace(b'"model":"scripted"', b'"model":"other"'))
        async with file_server(tmp_path) as (client, scripted):
            assert (await client.batches.retrieve(one.id)).status == "in_progress"
            await client.batches.cancel(two.id)
            assert (await finished(client, await client.batches.retrieve(two.id))).status == "cancelled"
            assert not scripted.engine.requests
        for path in (tmp_path / "batches").glob("*.json"):
            path.write_bytes(path.read_bytes().replace(b'"model":"other"', b'"model":"scripted"'))
        async with file_server(tmp_path) as (client, _):
            assert (await finished(client, await client.batches.retrieve(one.id))).status == "completed"

    asyncio.run(asyncio.wait_for(run(), 20))


def test_a_batch_is_made_although_its_client_does_not_wait(tmp_path: Path) -> None:
    async def scenario(client: AsyncOpenAI, scripted: Scripted) -> None:
        store = scripted.server.app[BATCHES]  # type: ignore[attr-defined]
        file = await client.files.create(file=("f", jsonl([request_line("a")])), purpose="batch")
        creation = asyncio.create_task(store.create("", "/v1/chat/completions", file.id))
        await asyncio.sleep(0)
        creation.cancel()
        while not (batches := (await client.batches.list()).data):
            pass
        assert (await finished(client, batches[0])).status == "completed"

    serve(scenario, tmp_path)


def test_a_full_disk_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    append = LineFile.append
    num_failures = 0

    def fail_at_first(self: LineFile, line: OutputLine) -> None:
        nonlocal num_failures
        if num_failures < 3:
            num_failures += 1
            raise OSError(28, "No space left on device")
        append(self, line)

    async def scenario(client: AsyncOpenAI, scripted: Scripted) -> None:
        store = scripted.server.app[BATCHES]  # type: ignore[attr-defined]
        monkeypatch.setattr(type(store._limits), "retry_seconds", 0.001)
        monkeypatch.setattr(LineFile, "append", fail_at_first)
        done = await finished(client, await start_batch(client, [request_line("a"), request_line("b")]))
        assert sorted(await by_custom_id(client, done.output_file_id)) == ["a", "b"]
        assert num_failures == 3
        assert len(scripted.engine.requests) == 2

    serve(scenario, tmp_path)


def test_half_a_line_is_cut_off_where_the_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = LineFile(tmp_path / "lines")
    file.append(OutputLine("batch_req_a_1", "a"))
    write = os.write

    def write_some(descriptor: int, data: bytes) -> int:
        if len(data) <= 20:
            raise OSError(28, "No space left on device")
        return write(descriptor, data[:20])

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", write_some)
        with pytest.raises(OSError, match="space"):
            file.append(OutputLine("batch_req_a_2", "b"))
    file.append(OutputLine("batch_req_a_3", "c"))
    assert [json.loads(line)["custom_id"] for line in (tmp_path / "lines").read_text().splitlines()] == ["a", "c"]


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
