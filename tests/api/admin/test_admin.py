"""The admin interface over HTTP: every route, what each refuses, and the API beside it meanwhile."""

import asyncio
import io
import json
import logging
import socket
import stat
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp.test_utils import TestServer

from penstock.api.admin.app import build_admin_app
from penstock.api.admin.routes import ADMIN_ROUTES, Administration
from penstock.api.admin.sockets import bound, shown_address
from penstock.api.app import build_app
from penstock.engine.control import sleep
from penstock.engine.core import EngineCore
from penstock.engine.errors import ConfigurationError, StartFailed
from penstock.serving.context import LocalContext
from penstock.serving.options import AdminAddress, ServerOptions
from penstock.serving.templates.rendering import ChatTemplate
from tests.api.remote.loopback import connected, engine_server
from tests.api.scripted import CHATML, CancellingServer
from tests.engine.running import until
from tests.fakes import letter_after, make_core
from tests.llm.executors import context_over

MESSAGE = {"model": "fake", "max_tokens": 150, "messages": [{"role": "user", "content": "Hi"}]}
STREAM = {"prompt": "Once upon a time", "max_tokens": 100, "ignore_eos": True, "temperature": 0}


@pytest.fixture(autouse=True)
def spill_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sleep, "spill_directory", lambda: tmp_path)


@dataclass(frozen=True)
class Served:
    """`admin` and `api` are clients of the two interfaces of one server."""

    admin: aiohttp.ClientSession
    api: aiohttp.ClientSession
    core: EngineCore
    context: LocalContext

    async def ask(self, method: str, path: str, **options: Any) -> tuple[int, Any]:
        async with self.admin.request(method, path, **options) as response:
            return response.status, await response.json()

    async def post(self, path: str, body: object = None) -> tuple[int, Any]:
        return await self.ask("POST", path, json={} if body is None else body)

    async def get(self, path: str) -> Any:
        status, body = await self.ask("GET", path)
        assert status == 200, body
        return body

    async def ask_api(self, path: str, body: object, **options: Any) -> tuple[int, Any]:
        async with self.api.post(path, json=body, **options) as response:
            return response.status, await response.json()

    async def complete(self, **fields: Any) -> tuple[int, Any]:
        return await self.ask_api("/v1/completions", STREAM | fields)


@asynccontextmanager
async def clients(*servers: TestServer) -> AsyncIterator[list[aiohttp.ClientSession]]:
    """One for each of the servers, which are started."""
    async with AsyncExitStack() as on_exit:
        started = [await on_exit.enter_async_context(server) for server in servers]
        yield [await on_exit.enter_async_context(aiohttp.ClientSession(server.make_url(""))) for server in started]


@asynccontextmanager
async def administering(administration: Administration) -> AsyncIterator[aiohttp.ClientSession]:
    """A client of the admin interface alone."""
    async with clients(TestServer(build_admin_app(administration, "127.0.0.1", None), host="127.0.0.1")) as (client,):
        yield client


@asynccontextmanager
async def served(
    *, key: str | None = None, host: str = "127.0.0.1", options: ServerOptions | None = None, **settings: Any
) -> AsyncIterator[Served]:
    core = make_core(letter_after, num_blocks=2048, **settings)
    context = context_over(core)
    context.chat_template, context.options = ChatTemplate(CHATML), options or ServerOptions()
    await context.engine.start()
    try:
        admin = build_admin_app(Administration(context), host, key)
        async with clients(CancellingServer(build_app(context)), TestServer(admin, host="127.0.0.1")) as (api, ours):
            yield Served(ours, api, core, context)
    finally:
        await context.engine.stop()
        context.close()


def run(scenario: Callable[[Served], Awaitable[None]], **settings: Any) -> None:
    async def test() -> None:
        async with asyncio.timeout(60), served(**settings) as server:
            await scenario(server)

    asyncio.run(test())


def test_requests_are_listed_without_their_text_and_aborted() -> None:
    async def scenario(server: Served) -> None:
        assert await server.get("/requests") == {"requests": []}
        streams = [asyncio.create_task(server.complete(max_tokens=150, n=number)) for number in (1, 2)]
        await until(lambda: server.core.stats().num_steps > 3 and server.context.engine.num_requests == 2)
        listed = (await server.get("/requests"))["requests"]
        assert {one["num_sequences"] for one in listed} == {1, 2}
        assert "Once" not in json.dumps(listed)
        for one in listed:
            assert (one["state"], one["model"]) == ("running", "fake")
            assert one["num_prompt_tokens"] == len(STREAM["prompt"])  # type: ignore[arg-type]
            assert one["num_output_tokens"] > 0
            assert one["num_blocks"] > 0
            assert one["age"] > 0
        first = listed[0]["id"]
        assert await server.post("/requests/abort", {"ids": [first, "other", first]}) == (200, {"aborted": [first], "unknown": ["other"]})
        status, body = await streams[0]
        assert (status, body["error"]["message"]) == (400, "the request was aborted by an operator")
        status, body = await server.post("/requests/abort", {"all": True})
        assert (status, len(body["aborted"])) == (200, 1)
        assert (await streams[1])[0] == 400
        assert await server.get("/requests") == {"requests": []}
        assert (await server.post("/requests/abort", {"ids": [first]}))[1] == {"aborted": [], "unknown": [first]}

    run(scenario)


def test_requests_are_found_by_the_id_in_the_headers_of_their_answers() -> None:
    chat = {"model": "fake", "max_tokens": 140, "messages": MESSAGE["messages"]}
    asked: list[tuple[str, dict[str, Any]]] = [
        ("/v1/completions", STREAM | {"prompt": ["a", "b"], "max_tokens": 150}),
        ("/v1/chat/completions", chat),
        ("/v1/messages", MESSAGE),
        ("/v1/responses", {"model": "fake", "input": "Hi"}),
    ]

    async def listed_while_running(server: Served, number: int) -> list[dict[str, Any]]:
        await until(lambda: server.context.engine.num_requests == number)
        listed: list[dict[str, Any]] = (await server.get("/requests"))["requests"]
        return listed

    async def scenario(server: Served) -> None:
        for path, body in asked:
            stream = asyncio.create_task(server.ask_api(path, body, headers={"x-request-id": "mine"}))
            number = len(body["prompt"]) if isinstance(body.get("prompt"), list) else 1
            listed = await listed_while_running(server, number)
            assert [one["http_id"] for one in listed] == ["mine"] * number, path
            ids = [one["id"] for one in listed]
            status, said = await server.post("/requests/abort", {"ids": ["mine", "other", ids[0]]})
            assert (status, said) == (200, {"aborted": ids, "unknown": ["other"]})
            assert (await stream)[0] == 400

    run(scenario)


def test_what_an_operator_aborts_is_counted_as_aborted() -> None:
    async def scenario(server: Served) -> None:
        stream = asyncio.create_task(server.complete(max_tokens=150))
        await until(lambda: server.context.engine.num_requests == 1)
        await server.post("/requests/abort", {"all": True})
        assert (await stream)[0] == 400
        async with server.api.get("/metrics") as response:
            shown = await response.text()
        for reason, count in (("abort", "1.0"), ("error", "0.0")):
            assert f'penstock:request_success_total{{finished_reason="{reason}",model_name="fake"}} {count}' in shown

    run(scenario)


def test_a_stream_that_is_aborted_ends_with_an_error_event() -> None:
    async def scenario(server: Served) -> None:
        async with server.api.post("/v1/completions", json=STREAM | {"stream": True, "max_tokens": 180}) as response:
            await response.content.readline()
            await server.post("/requests/abort", {"all": True})
            said = await response.text()
        assert "aborted by an operator" in said

    run(scenario)


def test_requests_have_the_name_of_their_key() -> None:
    async def scenario(server: Served) -> None:
        headers = {"Authorization": "Bearer secret"}
        for path, body in (("/v1/completions", STREAM), ("/v1/messages", MESSAGE)):
            stream = asyncio.create_task(server.ask_api(path, body, headers=headers))
            await until(lambda: server.context.engine.num_requests == 1)
            [listed] = (await server.get("/requests"))["requests"]
            assert listed["client"]
            assert "secret" not in json.dumps(listed)
            await server.post("/requests/abort", {"all": True})
            assert (await stream)[0] == 400

    run(scenario, options=ServerOptions(api_keys=("secret",)))


@pytest.mark.parametrize("body", [{}, {"ids": ["a"], "all": True}])
def test_what_to_abort_has_to_be_said(body: dict[str, Any]) -> None:
    async def scenario(server: Served) -> None:
        status, answer = await server.post("/requests/abort", body)
        assert (status, answer["error"]["param"]) == (400, "ids")

    run(scenario)


def test_the_prefix_cache_is_reset_in_memory_and_on_disk(tmp_path: Path) -> None:
    async def scenario(server: Served) -> None:
        async def num_cached() -> int:
            _, body = await server.complete(prompt="a" * 40)
            return int(body["usage"]["prompt_tokens_details"]["cached_tokens"])

        assert await num_cached() == 0
        assert await num_cached() > 0
        status, body = await server.post("/prefix-cache/reset")
        assert status == 200
        assert body["blocks"] > 0
        assert body["files"] == 0
        persistence = server.core.scheduler.persistence
        assert persistence is not None
        files = persistence.files
        assert files is not None
        await until(lambda: files.stats.num_written > 0)
        assert (await server.post("/prefix-cache/reset", {"disk": True}))[1]["files"] > 0
        assert not list(tmp_path.rglob("*.kv"))  # noqa: ASYNC240
        assert await num_cached() == 0

    run(scenario, kv_cache_dir=tmp_path / "kv")


def test_a_reset_of_the_disk_takes_a_directory() -> None:
    async def scenario(server: Served) -> None:
        status, body = await server.post("/prefix-cache/reset", {"disk": True})
        assert (status, body["error"]["param"]) == (400, "disk")
        assert (await server.post("/reset_prefix_cache"))[0] == 200

    run(scenario)


def test_a_model_sleeps_and_wakes_with_a_word_to_its_clients() -> None:
    async def scenario(server: Served) -> None:
        _, before = await server.complete()
        status, slept = await server.post("/sleep", {"level": 2})
        assert (status, slept["state"], slept["level"]) == (200, "asleep", 2)
        assert slept["freed_kv_cache_bytes"] > 0
        assert await server.get("/is_sleeping") == {"is_sleeping": True}
        assert (await server.get("/models"))["models"][0]["state"] == "asleep"
        async with server.api.post("/v1/completions", json=STREAM) as response:
            assert response.status == 503
            assert response.headers["Retry-After"] == str(sleep.RETRY_AFTER)
            assert "asleep" in (await response.json())["error"]["message"]
        async with server.api.post("/tokenize", json={"prompt": "abc"}) as response:
            assert response.status == 200
        for path, status in (("/health", 200), ("/ready", 503)):
            async with server.api.get(path) as response:
                assert response.status == status
        status, body = await server.post("/profile")
        assert (status, body["error"]["message"]) == (409, "the model is asleep: it computes no steps")
        assert (await server.post("/wake"))[1]["state"] == "awake"
        async with server.api.get("/ready") as response:
            assert await response.json() == {"status": "ready"}
        _, after = await server.complete()
        assert after["choices"] == before["choices"]

    run(scenario)


def test_sleep_takes_vllms_paths_and_query() -> None:
    async def scenario(server: Served) -> None:
        status, body = await server.ask("POST", "/sleep?level=2&mode=abort&wake_on_request=true")
        assert (status, body["level"], body["wakes_on_request"]) == (200, 2, True)
        assert (await server.complete())[0] == 200
        assert (await server.ask("POST", "/sleep?level=1"))[0] == 200
        assert (await server.ask("POST", "/wake_up"))[1]["state"] == "awake"
        assert (await server.ask("POST", "/sleep?level=9"))[0] == 400
        assert (await server.ask("POST", "/sleep?deep=true"))[0] == 400

    run(scenario)


def test_the_level_of_the_log_is_set() -> None:
    package = logging.getLogger("penstock")
    before = package.level

    async def scenario(server: Served) -> None:
        assert await server.post("/log-level", {"level": "error"}) == (200, {"level": "error"})
        assert await server.get("/log-level") == {"level": "error"}
        assert not logging.getLogger("penstock.engine").isEnabledFor(logging.WARNING)
        assert (await server.post("/log-level", {"level": "loud"}))[0] == 400

    try:
        run(scenario)
    finally:
        package.setLevel(before)


def test_a_profile_is_a_trace_of_the_next_steps() -> None:
    async def scenario(server: Served) -> None:
        taking = asyncio.create_task(server.post("/profile", {"steps": 5, "timeout": 30}))
        await until(lambda: server.context.engine.profiler.recording is not None)
        assert (await server.post("/profile"))[0] == 409
        assert (await server.complete())[0] == 200
        status, trace = await taking
        assert status == 200
        assert trace["penstock"] == {"steps": 5}
        spans = [event for event in trace["traceEvents"] if event.get("cat") == "penstock"]
        assert {span["name"] for span in spans} >= {"schedule", "build", "update"}
        assert all(span["ph"] == "X" and span["dur"] >= 0 for span in spans)
        assert sum(span["name"] == "update" for span in spans) == 5

    run(scenario)


def test_a_profile_of_an_idle_engine_ends_by_the_clock() -> None:
    async def scenario(server: Served) -> None:
        status, trace = await server.post("/profile", {"steps": 5, "timeout": 0.01})
        assert (status, trace["penstock"]) == (200, {"steps": 0})

    run(scenario)


def test_counters_and_stacks_say_what_the_server_does() -> None:
    async def scenario(server: Served) -> None:
        await server.complete()
        stats = await server.get("/stats")
        [engine] = stats["engines"].values()
        assert engine["counters"]["num_generation_tokens"] == STREAM["max_tokens"]
        assert stats["process"]["rss_bytes"] > 2**20
        assert engine["sleep"]["state"] == "awake"
        stacks = await server.get("/threads")
        assert "MainThread" in {one["name"] for one in stacks["threads"]}
        assert "engine" in {one["name"] for one in stacks["tasks"]}

    run(scenario)


def test_adapters_are_refused_where_the_engine_has_none() -> None:
    async def scenario(server: Served) -> None:
        assert (await server.post("/adapters/load", {"name": "a", "path": "nowhere"}))[0] == 400
        assert (await server.post("/adapters/unload", {"name": "a"}))[0] == 404

    run(scenario)


BAD_BODIES = [
    *(b"[", b"[]", b"1", b"\xff", b"[" * 9999, b'{"level": "2"}', b'{"level": 1.5}', b'{"level": 9}'),
    *(b'{"mode": "soon"}', b'{"timeout": -1}', b'{"timeout": 1e300}', b'{"other": 1}', b'{"wake_on_request": 1}'),
]


def test_malformed_options_are_refused_and_change_nothing() -> None:
    async def scenario(server: Served) -> None:
        for body in BAD_BODIES:
            status, answer = await server.ask("POST", "/sleep", data=body)
            assert status == 400, body
            assert answer["error"]["message"]
            assert server.context.engine.sleeper.is_awake

    run(scenario)


def test_a_large_body_is_refused_on_every_route() -> None:
    async def scenario(server: Served) -> None:
        for route in ADMIN_ROUTES:
            if route.method == "POST":
                status, _ = await server.ask("POST", route.path, data=io.BytesIO(b" " * 10_000_000))
                assert status == 413, route.path

                async def pieces() -> AsyncIterator[bytes]:
                    for _ in range(10):
                        yield b" " * 10_000

                assert (await server.ask("POST", route.path, data=pieces()))[0] == 413, route.path

    run(scenario)


def test_other_methods_and_paths_are_refused() -> None:
    async def scenario(server: Served) -> None:
        asked = [("GET", "/wake", 405), ("DELETE", "/requests", 405), ("GET", "/v1/models", 404), ("PUT", "/sleep", 405)]
        for method, path, status in asked:
            answer = await server.ask(method, path)
            assert answer[0] == status, (method, path)
            assert answer[1]["error"]["message"]

    run(scenario)


def test_pages_in_browsers_are_refused() -> None:
    origins = [{"Origin": "http://evil.example"}, {"Origin": "null"}, {"Sec-Fetch-Site": "same-origin"}, {"Host": "evil.example"}]

    async def scenario(server: Served) -> None:
        for headers in origins:
            assert (await server.ask("POST", "/sleep", headers=headers))[0] == 403, headers
        assert server.context.engine.sleeper.is_awake

    run(scenario)


def test_every_route_takes_the_key_where_there_is_one() -> None:
    async def scenario(server: Served) -> None:
        for route in ADMIN_ROUTES:
            for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic key"}, {"Authorization": "Bearer key "[:-2]}):
                assert (await server.ask(route.method, route.path, headers=headers))[0] == 401, route.path
        assert (await server.ask("GET", "/requests", headers={"Authorization": "Bearer key"}))[0] == 200

    run(scenario, key="key")


def test_api_servers_refuse_requests_while_the_model_sleeps_and_their_requests_are_listed() -> None:
    async def test() -> None:
        core = make_core(letter_after, num_blocks=2048)
        context = context_over(core)
        await context.engine.start()
        server = engine_server(context)
        context.engine.sleeper.on_change = server.send_state
        admin = build_admin_app(Administration(context, server), "127.0.0.1", None)
        async with (
            connected(server, context) as (remote, connection),
            clients(CancellingServer(build_app(remote)), TestServer(admin)) as (api, ours),
        ):
            both = Served(ours, api, core, context)
            stream = asyncio.create_task(both.complete(max_tokens=180))
            await until(lambda: context.engine.num_requests == 1)
            [listed] = (await both.get("/requests"))["requests"]
            assert listed["http_id"]
            assert (await both.post("/requests/abort", {"ids": [listed["id"]]}))[1]["aborted"] == [listed["id"]]
            assert (await stream)[0] == 400
            for path, status in (("/sleep", 503), ("/wake", 200)):
                assert (await both.post(path))[0] == 200
                while (await both.complete())[0] != status:  # noqa: ASYNC110 - the state travels
                    await asyncio.sleep(0)
            assert (await both.post("/adapters/load", {"name": "a", "path": "b"}))[0] == 400
            await until(lambda: connection.num_streams == 0)
        await context.engine.stop()
        context.close()

    asyncio.run(test())


def test_a_socket_is_for_its_user_alone_and_removed_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "admin.sock"
    with bound(AdminAddress.read(f"unix:{path}")) as listener:
        assert listener is not None
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert shown_address(listener) == f"unix:{path}"
        listener.listen()
        with pytest.raises(StartFailed, match="another process"), bound(AdminAddress(path=str(path))):
            pass
    assert not path.exists()


def test_a_socket_that_a_killed_server_has_left_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "admin.sock"
    with closing(socket.socket(socket.AF_UNIX)) as left:
        left.bind(str(path))
    with bound(AdminAddress(path=str(path))):
        assert path.exists()


def test_the_socket_of_another_server_is_not_removed_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "admin.sock"
    with bound(AdminAddress(path=str(path))):
        path.rename(tmp_path / "old.sock")  # so that the inode is not used again
        with closing(socket.socket(socket.AF_UNIX)) as other:
            other.bind(str(path))
    assert path.exists()


def test_a_file_at_the_path_stays(tmp_path: Path) -> None:
    path = tmp_path / "admin.sock"
    path.write_text("precious", encoding="utf-8")
    with pytest.raises(ConfigurationError, match="is no socket"), bound(AdminAddress(path=str(path))):
        pass
    assert path.read_text(encoding="utf-8") == "precious"


def test_an_address_in_use_is_refused() -> None:
    with bound(AdminAddress("127.0.0.1", 0)) as listener:
        assert listener is not None
        listener.listen()
        port = listener.getsockname()[1]
        with pytest.raises(StartFailed, match=f"--admin 127.0.0.1:{port}: "), bound(AdminAddress("127.0.0.1", port)):
            pass
