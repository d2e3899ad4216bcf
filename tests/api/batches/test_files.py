"""/v1/files through the official client: what is kept, for which client, and within which bounds."""

import asyncio
import random
import stat
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
from openai import AsyncOpenAI

from penstock.api.batches import FILES
from penstock.api.requests import CHUNK
from penstock.engine.errors import ConfigurationError
from penstock.serving.batches import files as files_module
from penstock.serving.batches.files import Disk, FileLimits, FileStore, Upload
from tests.api.batches.client import file_server, with_key
from tests.api.scripted import client_of, scripted_server

Scenario = Callable[[AsyncOpenAI], Coroutine[Any, Any, None]]


def serve(scenario: Scenario, directory: Path, **options: Any) -> None:
    async def run() -> None:
        async with file_server(directory, **options) as (client, _):
            await asyncio.wait_for(scenario(client), 20)

    asyncio.run(run())


def form(*fields: tuple[str, Any]) -> aiohttp.FormData:
    data = aiohttp.FormData(default_to_multipart=True)
    for name, value in fields:
        data.add_field(name, value, **({"filename": "x"} if isinstance(value, bytes) else {}))
    return data


def kept_in(directory: Path) -> list[Path]:
    return [path for path in directory.rglob("*") if path.is_file() and path.name != "lock"]


def test_a_file_comes_back_as_it_was_sent(tmp_path: Path) -> None:
    content = random.Random(1).randbytes(3_000_000)

    async def scenario(client: AsyncOpenAI) -> None:
        file = await client.files.create(file=("my file.bin", content), purpose="user_data")
        assert (file.bytes, file.filename, file.purpose, file.status) == (len(content), "my file.bin", "user_data", "processed")
        assert file.id.startswith("file-")
        assert file.expires_at is None
        assert await client.files.retrieve(file.id) == file
        assert (await client.files.content(file.id)).content == content
        part = await client.files.content(file.id, extra_headers={"Range": "bytes=10-19"})
        assert part.content == content[10:20]
        assert (await client.files.delete(file.id)).deleted
        with pytest.raises(openai.NotFoundError):
            await client.files.content(file.id)
        assert not list((tmp_path / "files").iterdir())
        assert not list((tmp_path / "uploads").iterdir())

    serve(scenario, tmp_path)


def test_a_content_is_never_a_page_of_this_server(tmp_path: Path) -> None:
    async def scenario(client: AsyncOpenAI) -> None:
        file = await client.files.create(file=("page.html", b"<script>alert(1)</script>", "text/html"), purpose="user_data")
        headers = (await client.files.content(file.id)).response.headers
        assert headers["content-type"] == "application/octet-stream"
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["content-disposition"].startswith("attachment")

    serve(scenario, tmp_path)


def test_files_are_listed_in_pages(tmp_path: Path) -> None:
    async def scenario(client: AsyncOpenAI) -> None:
        ids = [(await client.files.create(file=("f", b"{}"), purpose=purpose)).id for purpose in ("batch", "user_data", "batch")]
        assert [file.id async for file in client.files.list(limit=1)] == ids[::-1]
        assert [file.id async for file in client.files.list(limit=2, order="asc")] == ids
        assert [file.id async for file in client.files.list(purpose="batch", order="asc")] == [ids[0], ids[2]]
        page = await client.files.list(limit=2)
        assert page.has_more
        with pytest.raises(openai.BadRequestError, match="after"):
            await client.files.list(after="file-unknown")
        with pytest.raises(openai.BadRequestError, match="limit"):
            await client.files.list(limit=0)

    serve(scenario, tmp_path)


def test_files_outlive_the_server_and_only_its_user_can_read_them(tmp_path: Path) -> None:
    directory = tmp_path / "kept"
    seen: list[Any] = []

    async def create(client: AsyncOpenAI) -> None:
        seen.extend([await client.files.create(file=(name, name.encode()), purpose="batch") for name in ("a", "b")])

    async def look(client: AsyncOpenAI) -> None:
        assert [file async for file in client.files.list(order="asc")] == seen
        assert (await client.files.content(seen[1].id)).content == b"b"

    serve(create, directory)
    serve(look, directory)
    for path in (directory, *directory.rglob("*")):
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path


def test_a_client_s_files_do_not_exist_for_another(tmp_path: Path) -> None:
    async def scenario(client: AsyncOpenAI) -> None:
        one, two = with_key(client, "one"), with_key(client, "two")
        file = await one.files.create(file=("f", b"{}"), purpose="batch")
        assert [each.id async for each in one.files.list()] == [file.id]
        assert [each.id async for each in two.files.list()] == []
        for attempt in (
            two.files.retrieve(file.id),
            two.files.content(file.id),
            two.files.delete(file.id),
            two.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"),
        ):
            with pytest.raises(openai.NotFoundError):
                await attempt
        with pytest.raises(openai.AuthenticationError):
            await with_key(client, "three").files.list()
        assert "one" not in (tmp_path / "files" / f"{file.id}.json").read_text()

    serve(scenario, tmp_path, api_keys=("one", "two"))


def test_names_are_only_metadata(tmp_path: Path) -> None:
    async def scenario(client: AsyncOpenAI) -> None:
        file = await client.files.create(file=("../../../escape", b"{}"), purpose="batch")
        assert file.filename in ("../../../escape", "escape")
        assert not list(tmp_path.parent.rglob("escape"))
        for path in ("..%2F..%2Fetc%2Fpasswd", "..%2Flock", f"{file.id}.json", "%00", "file-%ff"):
            with pytest.raises(openai.NotFoundError):
                await client.get(f"/files/{path}/content", cast_to=object)

    serve(scenario, tmp_path / "files")


def test_bounds_on_one_file_and_on_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(client: AsyncOpenAI) -> None:
        with pytest.raises(openai.APIStatusError) as too_large:
            await client.files.create(file=("f", b"x" * 1001), purpose="user_data")
        assert too_large.value.status_code == 413
        assert "larger than 1000 bytes (--max-file-size)" in too_large.value.message
        for _ in range(2):
            await client.files.create(file=("f", b"x" * 1000), purpose="user_data")
        with pytest.raises(openai.APIStatusError, match="--files-quota"):
            await client.files.create(file=("f", b"x" * 600), purpose="user_data")
        assert not list((tmp_path / "uploads").iterdir())
        await client.files.create(file=("f", b"x" * 500), purpose="user_data")
        monkeypatch.setattr(files_module, "MAX_FILES", 3)
        with pytest.raises(openai.APIStatusError, match="3 files at most"):
            await client.files.create(file=("f", b""), purpose="user_data")

    serve(scenario, tmp_path, max_file_size=1000, files_quota=2500)


def test_a_large_upload_is_refused_before_it_is_sent(tmp_path: Path) -> None:
    async def run() -> None:
        async with file_server(tmp_path, max_file_size=1000, max_body_size=100) as (client, scripted):
            await client.files.create(file=("f", b"x" * 500), purpose="user_data")  # the bound on other bodies is not that of files
            headers = {"Content-Type": "multipart/form-data; boundary=b", "Content-Length": "100000000"}
            async with aiohttp.ClientSession() as http, http.post(f"{scripted.base_url}/files", headers=headers, data=b"") as answer:
                assert answer.status == 413
                assert "larger than 1000 bytes (--max-file-size)" in (await answer.json())["error"]["message"]

    asyncio.run(asyncio.wait_for(run(), 20))


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ([("purpose", "batch")], "file"),
        ([("file", b"x")], "purpose"),
        ([("file", b"x"), ("purpose", "fine-tune")], "purpose"),
        ([("file", b"x"), ("purpose", "batch"), ("porpoise", "x")], "porpoise"),
        ([("file", b"x"), ("purpose", "batch"), ("purpose", "batch")], "purpose"),
        ([("file", b"x"), ("file", b"x"), ("purpose", "batch")], "file"),
        ([("file", b"x"), ("purpose", "b" * 5000)], "purpose"),
        ([("file", b"x"), ("purpose", "batch"), ("expires_after[seconds]", "7200")], "anchor"),
        ([("file", b"x"), ("purpose", "batch"), ("expires_after[anchor]", "created_at"), ("expires_after[seconds]", "10")], "seconds"),
    ],
)
def test_a_wrong_form_is_refused_by_its_field(tmp_path: Path, fields: list[tuple[str, Any]], named: str) -> None:
    async def run() -> None:
        async with file_server(tmp_path) as (_, scripted), aiohttp.ClientSession() as http:
            async with http.post(f"{scripted.base_url}/files", data=form(*fields)) as answer:
                body = await answer.json()
            assert answer.status == 400
            assert named in (body["error"]["param"] or "") + body["error"]["message"]
            assert not kept_in(tmp_path)

    asyncio.run(asyncio.wait_for(run(), 20))


@pytest.mark.parametrize("content_type", ["application/json", "multipart/form-data", "multipart/mixed; boundary=b"])
def test_what_is_no_form_is_refused(tmp_path: Path, content_type: str) -> None:
    async def run() -> None:
        async with (
            file_server(tmp_path) as (_, scripted),
            aiohttp.ClientSession() as http,
            http.post(f"{scripted.base_url}/files", data=b"{}", headers={"Content-Type": content_type}) as answer,
        ):
            assert answer.status == 400
            assert "form" in (await answer.json())["error"]["message"]

    asyncio.run(asyncio.wait_for(run(), 20))


@pytest.mark.filterwarnings("ignore::aiohttp.multipart.BadContentDispositionHeader")
@pytest.mark.filterwarnings("ignore::aiohttp.multipart.BadContentDispositionParam")
def test_mutated_forms_are_taken_or_refused(tmp_path: Path) -> None:
    purpose = b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    whole = purpose + b'--b\r\nContent-Disposition: form-data; name="file"; filename="x"\r\n\r\n{}\r\n--b--\r\n'
    randomness = random.Random(3)

    def mutated() -> bytes:
        data = bytearray(whole)
        for _ in range(randomness.randint(1, 4)):
            place = randomness.randrange(len(data))
            match randomness.randrange(3):
                case 0:
                    data[place] = randomness.randrange(256)
                case 1:
                    del data[place : place + randomness.randrange(1, 20)]
                case 2:
                    data[place:place] = data[: randomness.randrange(60)]
            data = data or bytearray(b"-")
        return bytes(data)

    async def run() -> None:
        async with file_server(tmp_path) as (_, scripted), aiohttp.ClientSession() as http:
            statuses = []
            for _ in range(200):
                headers = {"Content-Type": "multipart/form-data; boundary=b"}
                async with http.post(f"{scripted.base_url}/files", headers=headers, data=mutated()) as answer:
                    statuses.append(answer.status)
                    await answer.read()
            assert set(statuses) <= {200, 400}
            assert {200, 400} <= set(statuses)
            assert not list((tmp_path / "uploads").iterdir())

    asyncio.run(asyncio.wait_for(run(), 60))


def test_an_upload_that_is_cut_off_leaves_nothing(tmp_path: Path) -> None:
    async def run() -> None:
        async with file_server(tmp_path) as (client, scripted):
            host, port = scripted.server.host, scripted.server.port
            _, writer = await asyncio.open_connection(host, port)
            head = b"POST /v1/files HTTP/1.1\r\nHost: localhost\r\nContent-Type: multipart/form-data; boundary=b\r\n"
            head += b"Content-Length: 100000\r\n\r\n"
            writer.write(head + b'--b\r\nContent-Disposition: form-data; name="file"; filename="x"\r\n\r\n' + b"x" * 50000)
            await writer.drain()
            while not list((tmp_path / "uploads").iterdir()):  # noqa: ASYNC110
                await asyncio.sleep(0.002)
            writer.close()
            while list((tmp_path / "uploads").iterdir()):  # noqa: ASYNC110
                await asyncio.sleep(0.002)
            assert (await client.files.list()).data == []

    asyncio.run(asyncio.wait_for(run(), 20))


def test_a_full_disk_is_a_507_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(client: AsyncOpenAI) -> None:
        def fail(path: Path, data: bytes) -> None:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(files_module, "write_atomically", fail)
            with pytest.raises(openai.APIStatusError) as full:
                await client.files.create(file=("f", b"x"), purpose="batch")
            assert full.value.status_code == 507
        assert not kept_in(tmp_path)
        assert (await client.files.list()).data == []
        await client.files.create(file=("f", b"x"), purpose="batch")

    serve(scenario, tmp_path)


def test_files_expire(tmp_path: Path) -> None:
    async def run() -> None:
        async with file_server(tmp_path) as (client, scripted):
            store = scripted.server.app[FILES]  # type: ignore[attr-defined]
            month = await client.files.create(file=("f", b"x"), purpose="batch")
            hour = await client.files.create(file=("f", b"x"), purpose="user_data", expires_after={"anchor": "created_at", "seconds": 3600})
            assert month.expires_at == month.created_at + 30 * 86400
            assert hour.expires_at == hour.created_at + 3600
            store._now = lambda: hour.created_at + 3600
            with pytest.raises(openai.NotFoundError):
                await client.files.retrieve(hour.id)
            assert [file.id async for file in client.files.list()] == [month.id]
            await store.sweep()
            assert {path.name for path in (tmp_path / "files").iterdir()} == {month.id, f"{month.id}.json"}

    asyncio.run(asyncio.wait_for(run(), 20))


def test_what_a_crash_left_half_done_is_removed(tmp_path: Path) -> None:
    async def run() -> None:
        async with file_server(tmp_path) as (client, _):
            file = await client.files.create(file=("f", b"x"), purpose="batch")
        folder = tmp_path / "files"
        (tmp_path / "uploads" / "upload-1").write_bytes(b"half")
        (folder / "file-without-metadata").write_bytes(b"x")
        (folder / "file-1.json").write_bytes((folder / f"{file.id}.json").read_bytes().replace(file.id.encode(), b"file-1"))
        (folder / "file-2.json.tmp").write_bytes(b"{")
        async with file_server(tmp_path) as (client, _):
            assert [each.id async for each in client.files.list()] == [file.id]
        assert {path.name for path in folder.iterdir()} == {file.id, f"{file.id}.json"}
        assert not list((tmp_path / "uploads").iterdir())

    asyncio.run(asyncio.wait_for(run(), 20))


def test_a_directory_belongs_to_one_server(tmp_path: Path) -> None:
    disk = Disk(tmp_path)
    with pytest.raises(ConfigurationError, match="in use"):
        Disk(tmp_path)
    disk.close()
    other = Disk(tmp_path)
    assert FileStore(other, FileLimits(1, 1)).num_files == 0
    other.close()


def test_a_directory_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match="--files-dir"):
        Disk(tmp_path / "file" / "below")


def test_a_directory_that_others_can_write_to_is_refused(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(ConfigurationError, match="other users"):
        Disk(tmp_path / "open")


def test_an_upload_is_never_in_memory_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, sizes = Upload.write, []

    async def record(self: Upload, data: bytes) -> None:
        sizes.append(len(data))
        await write(self, data)

    async def scenario(client: AsyncOpenAI) -> None:
        monkeypatch.setattr(Upload, "write", record)
        await client.files.create(file=("f", bytes(5_000_000)), purpose="user_data")
        assert sum(sizes) == 5_000_000
        assert max(sizes) <= CHUNK

    serve(scenario, tmp_path)


def test_without_a_directory_the_routes_name_the_flag() -> None:
    async def run() -> None:
        async with scripted_server() as scripted, client_of(scripted.base_url) as client:
            for attempt in (
                client.files.create(file=("f", b"x"), purpose="batch"),
                client.files.retrieve("file-1"),
                client.batches.create(input_file_id="file-1", endpoint="/v1/completions", completion_window="24h"),
                client.batches.retrieve("batch_1"),
                client.batches.cancel("batch_1"),
            ):
                with pytest.raises(openai.NotFoundError, match="--files-dir"):
                    await attempt

    asyncio.run(asyncio.wait_for(run(), 20))
