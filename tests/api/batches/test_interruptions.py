"""Batches that are cancelled, expire or meet a full disk, and what a crash or a stop leaves of them."""

import asyncio
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import openai
import pytest
from openai import AsyncOpenAI

from penstock.api.batches import BATCHES
from penstock.serving.batches.lines import LineFile, OutputLine
from tests.api.batches.client import begun, by_custom_id, file_server, finished, jsonl, request_line, serve, start_batch
from tests.api.scripted import Scripted


class FirstOnly(asyncio.Event):
    """Lets so many requests pass, and no other."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self._left = count

    async def wait(self) -> Literal[True]:
        self._left -= 1
        return True if self._left >= 0 else await super().wait()


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

    asyncio.run(asyncio.wait_for(run(), 120))


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
        batch_id = asyncio.run(asyncio.wait_for(crash(number), 120))
        asyncio.run(asyncio.wait_for(go_on(number, batch_id), 120))


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

    assert len(asyncio.run(asyncio.wait_for(run(), 120))) > 10


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

    asyncio.run(asyncio.wait_for(run(), 120))


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

    asyncio.run(asyncio.wait_for(run(), 120))


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


def test_a_line_is_not_split_by_what_other_programs_take_for_the_end_of_a_line(tmp_path: Path) -> None:
    ends = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"
    file = LineFile(tmp_path / "lines")
    file.append(OutputLine("batch_req_a_1", f"é{ends}ü"))
    file.append(OutputLine("batch_req_a_2", "€ 𝄞"))
    written = (tmp_path / "lines").read_text()
    assert [json.loads(line)["custom_id"] for line in written.splitlines()] == [f"é{ends}ü", "€ 𝄞"]
    assert "€ 𝄞" in written  # nothing else is escaped
