"""What clients have stored, damaged on the disk: the rest is served, and what is damaged is set aside or refused, never deleted."""

import asyncio
import json
import os
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec import Raw

from penstock.engine.errors import ConfigurationError
from penstock.serving.batches.lines import BatchUsage, LineFile, LineResponse, OutputLine, line_id
from penstock.serving.responses.store import APPLICATION_ID, ResponseStore, StoredResponse
from tests.api.batches.client import by_custom_id, file_server, finished, request_line, start_batch

DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda content: b"",
    "cut": lambda content: content[: len(content) // 2],
    "zeros": lambda content: bytes(len(content)),
    "garbage": lambda content: os.urandom(len(content)),
    "another version": lambda content: json.dumps({"version": 2, "contents": [1]}).encode(),
    "another name": lambda content: content.replace(b'"id":"', b'"id":"../'),
    "nested": lambda content: b"[" * 10**5,
}


@pytest.mark.parametrize(
    "damage",
    ["cut", "another name", *(pytest.param(name, marks=pytest.mark.thorough) for name in sorted(DAMAGES.keys() - {"cut", "another name"}))],
)
def test_a_file_or_a_batch_whose_metadata_are_damaged_is_set_aside(tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        async with file_server(tmp_path) as (client, _):
            kept, lost = [await client.files.create(file=("f", b"{}"), purpose="user_data") for _ in range(2)]
            batches = [await finished(client, await start_batch(client, [request_line("a")])) for _ in range(2)]
        for path in (tmp_path / "files" / f"{lost.id}.json", tmp_path / "batches" / f"{batches[0].id}.json"):
            path.write_bytes(DAMAGES[damage](path.read_bytes()))
        for _ in range(2):
            async with file_server(tmp_path) as (client, _):
                ids = {file.id async for file in client.files.list()}
                assert kept.id in ids
                assert lost.id not in ids
                assert [batch.id async for batch in client.batches.list()] == [batches[1].id]
                assert set(await by_custom_id(client, batches[1].output_file_id)) == {"a"}

    asyncio.run(asyncio.wait_for(run(), 120))
    aside = {path.name for path in (tmp_path / "damaged").iterdir()}
    assert {name.removesuffix(".json").partition("-")[0].partition("_")[0] for name in aside} == {"file", "batch"}
    assert len([name for name in aside if not name.endswith(".json")]) == 1, "the content of the file is kept"
    assert caplog.text.count("is damaged, and set aside") == 2


def test_lines_of_a_batch_after_one_that_is_damaged_are_answered_again(tmp_path: Path) -> None:
    lines = LineFile(tmp_path / "out.jsonl")
    for number in range(3):
        lines.append(OutputLine(line_id("k", number), str(number), response=LineResponse(200, "r", Raw(b"{}"))))
    whole = (tmp_path / "out.jsonl").read_bytes().splitlines(keepends=True)
    for bad in (b"\0" * 40 + b"\n", b'{"id": "not a number"}\n', b'{"id": 5}\n', b"\xff\xfe\n"):
        (tmp_path / "out.jsonl").write_bytes(whole[0] + bad + whole[2])
        assert LineFile(tmp_path / "out.jsonl").recover(BatchUsage()) == {0}
        assert (tmp_path / "out.jsonl").read_bytes() == whole[0]


def store_of(path: Path, count: int = 50) -> None:
    async def put() -> None:
        store = ResponseStore(str(path))
        for number in range(count):
            response = json.dumps({"id": f"resp_{number}", "output": []}).encode()
            await store.put(StoredResponse(f"resp_{number}", "owner", "completed", None, response, b"[]", b"x" * 3000))
        store.close()

    asyncio.run(put())


def overwrite(path: Path, start: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(start)
        file.write(data)


def set_version(path: Path, name: str, number: int) -> None:
    with sqlite3.connect(path) as database:
        database.execute(f"PRAGMA {name} = {number}")
    database.close()


BREAK: dict[str, Callable[[Path], Any]] = {
    "cut": lambda path: os.truncate(path, path.stat().st_size // 2),
    "header": lambda path: overwrite(path, 0, b"no database"),
    "garbage": lambda path: path.write_bytes(os.urandom(2**16)),
    "zeros": lambda path: overwrite(path, 4096, bytes(2**14)),
    "another program's": lambda path: set_version(path, "application_id", APPLICATION_ID + 1),
}


@pytest.mark.parametrize("damage", BREAK)
def test_a_store_of_responses_that_is_damaged_is_refused_by_name_and_left_as_it_is(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "responses.sqlite"
    store_of(path)
    BREAK[damage](path)
    content = path.read_bytes()
    with pytest.raises(ConfigurationError, match=f"--response-store: {path} (is|cannot be used)"):
        ResponseStore(str(path))
    assert path.read_bytes() == content


def test_a_journal_that_is_damaged_costs_its_own_responses_at_most(tmp_path: Path) -> None:
    """SQLite's journal has checksums; what it holds after the damage is as if it had not been written."""
    path = tmp_path / "responses.sqlite"
    store_of(path)
    Path(f"{path}-wal").write_bytes(os.urandom(40_000))
    Path(f"{path}-wal").chmod(0o600)

    async def read() -> None:
        store = ResponseStore(str(path))
        assert (await store.statistics())[0] == 50
        store.close()

    asyncio.run(read())


@pytest.mark.parametrize("jump", [-10 * 365 * 86400, 10 * 365 * 86400])
def test_a_clock_that_jumps_and_comes_back_loses_no_response_that_is_in_use(tmp_path: Path, jump: float) -> None:
    """A machine may start with a wrong clock, which is set once the network is there."""
    now = 1e9

    async def run() -> None:
        nonlocal now
        store = ResponseStore(str(tmp_path / "responses.sqlite"), clock=lambda: now)

        async def put(name: str) -> None:
            response = json.dumps({"id": name, "output": []}).encode()
            await store.put(StoredResponse(name, "owner", "completed", None, response, b"[]"))

        await put("before")
        now += jump
        assert (await store.get("owner", "before")).id == "before"
        await put("meanwhile")
        now -= jump
        assert (await store.get("owner", "meanwhile")).id == "meanwhile"
        await put("after")
        assert (await store.get("owner", "before")).id == "before"
        store.close()

    asyncio.run(run())
