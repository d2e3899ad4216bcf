"""The store of responses: what is evicted, whose a response is, and what a file survives."""

import asyncio
import json
import sqlite3
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from penstock.engine.errors import ConfigurationError, InvalidRequest, NoSuchObject, NoSuchPreviousResponse
from penstock.serving.responses.store import ResponseStore, StoredResponse, StoreLimits


def stored(name: str, *, owner: str = "", previous: str | None = None, status: str = "completed", size: int = 0) -> StoredResponse:
    output = [{"id": f"msg_{name}", "type": "message", "text": "x" * size}]
    response = json.dumps({"id": name, "status": status, "output": output}).encode()
    return StoredResponse(name, owner, status, previous, response, json.dumps([{"id": f"in_{name}"}]).encode())


def run(scenario: Callable[[ResponseStore], Coroutine[Any, Any, None]], store: ResponseStore) -> None:
    try:
        asyncio.run(scenario(store))
    finally:
        store.close()


class Clock:
    """Goes on by a second with each look."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


async def kept(store: ResponseStore, *names: str) -> list[str]:
    """Those of the names that are there. Looking counts as a use."""
    found = []
    for name in names:
        try:
            found.append((await store.get("", name)).id)
        except NoSuchObject:
            continue
    return found


def test_the_responses_not_used_for_longest_are_evicted_and_none_that_runs() -> None:
    async def scenario(store: ResponseStore) -> None:
        await store.put(stored("running", status="in_progress"))
        for name in "abc":
            await store.put(stored(name))
        await store.get("", "a")
        await store.put(stored("d"))
        assert await kept(store, *"abcd", "running") == ["a", "c", "d", "running"]
        assert (await store.statistics())[0] == 4

    run(scenario, ResponseStore(limits=StoreLimits(max_count=4), clock=Clock()))


def test_bytes_are_bounded() -> None:
    async def scenario(store: ResponseStore) -> None:
        for name in "abcd":
            await store.put(stored(name, size=1000))
            assert (await store.statistics())[1] <= 2500
        assert await kept(store, *"abcd") == ["c", "d"]
        await store.put(stored("large", size=5000))
        assert await kept(store, "large", *"abcd") == ["c", "d"], "what has no room at all evicts no other"

    run(scenario, ResponseStore(limits=StoreLimits(max_bytes=2500), clock=Clock()))


def test_what_is_not_used_for_too_long_is_evicted() -> None:
    clock = Clock()

    async def scenario(store: ResponseStore) -> None:
        await store.put(stored("old"))
        await store.put(stored("used"))
        clock.now += 50
        await store.get("", "used")
        clock.now += 50
        await store.put(stored("new"))
        assert await kept(store, "old", "used", "new") == ["used", "new"]

    run(scenario, ResponseStore(limits=StoreLimits(max_age=80), clock=clock))


def test_a_chain_is_used_as_a_whole_and_loses_its_end_first() -> None:
    async def scenario(store: ResponseStore) -> None:
        await store.put(stored("a"))
        await store.put(stored("b", previous="a"))
        await store.put(stored("x"))
        assert [each.id for each in await store.chain("", "b", "p")] == ["a", "b"]
        await store.put(stored("y"))
        assert (await store.chain("", "b", "p"))[0].id == "a"
        await store.put(stored("z"))
        await store.put(stored("z2"))
        assert await kept(store, "a", "b") == ["a"]
        await store.put(stored("running", previous="a", status="queued"))
        with pytest.raises(InvalidRequest, match="not complete yet"):
            await store.chain("", "running", "p")

    run(scenario, ResponseStore(limits=StoreLimits(max_count=3), clock=Clock()))


def test_an_owner_evicts_no_response_of_another() -> None:
    async def scenario(store: ResponseStore) -> None:
        await store.put(stored("first", owner="one"))
        for number in range(5):
            await store.put(stored(f"many_{number}", owner="two"))
        await store.put(stored("large", owner="two", size=2000))
        assert (await store.get("one", "first")).id == "first"
        assert (await store.statistics())[0] == 3
        assert [(await store.get("two", f"many_{number}")).id for number in (3, 4)] == ["many_3", "many_4"]

    run(scenario, ResponseStore(limits=StoreLimits(max_count=4, max_bytes=3000, num_owners=2), clock=Clock()))


def test_those_of_keys_that_are_gone_are_evicted_like_others() -> None:
    async def scenario(store: ResponseStore) -> None:
        for owner in ("gone", "gone too", "here"):
            await store.put(stored(owner, owner=owner))
        assert (await store.statistics())[0] == 2
        assert (await store.get("here", "here")).id == "here"

    run(scenario, ResponseStore(limits=StoreLimits(max_count=2, num_owners=2), clock=Clock()))


def test_a_response_is_read_once_for_all_of_its_items(monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[str] = []
    read = StoredResponse.output_items

    def watched(response: StoredResponse) -> list[dict[str, Any]]:
        reads.append(response.id)
        return read(response)

    monkeypatch.setattr(StoredResponse, "output_items", watched)

    async def scenario(store: ResponseStore) -> None:
        output = [{"id": f"msg_{number}", "type": "message"} for number in range(100)]
        response = json.dumps({"id": "a", "status": "completed", "output": output}).encode()
        await store.put(StoredResponse("a", "", "completed", None, response, b"[]"))
        wanted = {f"msg_{number}": "p" for number in range(100)}
        assert len(await store.items("", wanted, 10**6)) == 100
        assert reads == ["a"]
        await store.put(StoredResponse("b", "", "completed", None, response.replace(b"msg_", b"other_"), b"[]"))
        assert len(await store.items("", wanted | {"other_1": "q"}, 100)) == 100, "no more is read once it is too much"

    run(scenario, ResponseStore())


def test_a_response_and_its_items_are_their_owners_alone() -> None:
    async def scenario(store: ResponseStore) -> None:
        await store.put(stored("a", owner="one"))
        items = await store.items("one", {"msg_a": "p", "in_a": "q"}, 10**6)
        assert {item_id: item["id"] for item_id, (item, _) in items.items()} == {"msg_a": "msg_a", "in_a": "in_a"}
        for call in (
            store.get("two", "a"),
            store.items("two", {"msg_a": "p"}, 100),
            store.delete("two", "a"),
        ):
            with pytest.raises(NoSuchObject):
                await call
        with pytest.raises(NoSuchPreviousResponse):
            await store.chain("two", "a", "p")
        await store.delete("one", "a")
        with pytest.raises(NoSuchObject):
            await store.items("one", {"msg_a": "p"}, 100)

    run(scenario, ResponseStore())


def test_a_file_survives_a_restart_and_fails_what_was_running(tmp_path: Path) -> None:
    path = tmp_path / "responses.sqlite"

    async def before(store: ResponseStore) -> None:
        await store.put(stored("a"))
        await store.put(stored("b", status="in_progress"))

    async def after(store: ResponseStore) -> None:
        assert await store.get("", "a") == stored("a")
        failed = await store.get("", "b")
        assert failed.status == "failed"
        assert json.loads(failed.response)["error"]["code"] == "server_error"

    run(before, ResponseStore(str(path)))
    assert path.stat().st_mode & 0o077 == 0
    run(after, ResponseStore(str(path)))


def test_processes_share_a_file(tmp_path: Path) -> None:
    path = str(tmp_path / "responses.sqlite")

    async def scenario(store: ResponseStore) -> None:
        other = ResponseStore(path, is_shared=True)
        await other.put(stored("a"))
        assert (await store.get("", "a")).id == "a"
        other.close()

    run(scenario, ResponseStore(path, is_shared=True))


def test_a_file_that_is_something_else_is_refused_and_left_alone(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("no database " * 100)
    with pytest.raises(ConfigurationError, match="--response-store"):
        ResponseStore(str(text))
    assert text.read_text() == "no database " * 100
    foreign = tmp_path / "foreign.sqlite"
    with sqlite3.connect(foreign) as database:
        database.execute("CREATE TABLE t (x)")
    database.close()
    before = foreign.read_bytes()
    with pytest.raises(ConfigurationError, match="another program's"):
        ResponseStore(str(foreign))
    assert foreign.read_bytes() == before
    with pytest.raises(ConfigurationError, match="--response-store"):
        ResponseStore(str(tmp_path / "nowhere" / "file"))


def test_a_file_belongs_to_one_server(tmp_path: Path) -> None:
    path = str(tmp_path / "responses.sqlite")
    store = ResponseStore(path)
    with pytest.raises(ConfigurationError, match="another server uses"):
        ResponseStore(path)
    store.close()
    ResponseStore(path).close()


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "responses.sqlite"

    async def fill(store: ResponseStore) -> None:
        for number in range(50):
            await store.put(stored(str(number), size=2000))

    run(fill, ResponseStore(str(path)))
    data = bytearray(path.read_bytes())
    data[4096:-4096] = bytes(len(data) - 8192)
    path.write_bytes(data)
    with pytest.raises(ConfigurationError, match="--response-store"):
        ResponseStore(str(path))


def test_a_full_disk_is_logged_and_fails_no_answer(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(store: ResponseStore) -> None:
        await store.put(stored("a"))
        store._database.execute("PRAGMA max_page_count = 1")
        await store.put(stored("b", size=100_000))
        assert await kept(store, "a", "b") == ["a"]

    run(scenario, ResponseStore(str(tmp_path / "responses.sqlite")))
    assert "response b is not stored" in caplog.text
