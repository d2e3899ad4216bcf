"""Under overload a request is refused by its headers alone, before aiohttp's handler sees it, with the answer that handlers would give."""

import asyncio
import json
import logging
import socket
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from penstock.api import middleware
from penstock.api.app import GENERATION
from penstock.api.connections import REFUSALS, Connection
from penstock.api.middleware import GATE
from penstock.api.pooling import POOLING_ROUTES
from penstock.api.routes import ROUTES
from penstock.engine.errors import EngineUnavailable, ModelAsleep, PenstockError, QueueFull
from penstock.serving.limits import hash_of
from penstock.serving.options import ServerOptions
from tests.api.running_server import CHAT, Running, serve, until

FULL = QueueFull("10 sequences are waiting already; try again in 7 s", 7)
CHAT_PATH = "/v1/chat/completions"
ADMITTED = [route.path for route in GENERATION if route.is_admitted]
SEEN_BY_MIDDLEWARE = {"Sec-Fetch-Site": "none"}  # by which requests of browsers that people type in are known: nothing refuses them


def full(server: Running, refusal: PenstockError = FULL) -> None:
    server.engine.refusal = refusal


def num_handled(server: Running) -> int:
    """The requests that aiohttp has given to a handler, or to what refuses before handlers."""
    return server.listener.server.requests_count


def request_bytes(path: str = CHAT_PATH, body: bytes = b"{}", **headers: str) -> bytes:
    lines = {"Host": "localhost", "Content-Length": str(len(body))} | {name.replace("_", "-"): value for name, value in headers.items()}
    head = [f"POST {path} HTTP/1.1", *(f"{name}: {value}" for name, value in lines.items()), "", ""]
    return "\r\n".join(head).encode() + body


async def read_answer(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], Any]:
    """Status, headers and body."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    status_line, *lines = head.strip().split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    return int(status_line.split()[1]), headers, json.loads(await reader.readexactly(int(headers["content-length"])))


async def answers_on_one_connection(server: Running, *pieces: bytes, count: int = 1) -> list[tuple[int, dict[str, str], Any]]:
    """The answers to what is sent piece by piece, each read by the server before the next is sent."""
    reader, writer = await asyncio.open_connection(*server.listener.address)
    try:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            for _ in range(20):  # turns of the loop in which the server reads it
                await asyncio.sleep(0)
        return [await read_answer(reader) for _ in range(count)]
    finally:
        writer.close()


@pytest.mark.parametrize("path", ADMITTED)
@pytest.mark.parametrize("refusal", [FULL, EngineUnavailable("stopping", 3), ModelAsleep("asleep: an operator has to wake it", 10)])
def test_the_answer_is_that_of_the_handlers(path: str, refusal: PenstockError) -> None:
    async def scenario(server: Running) -> None:
        full(server, refusal)
        sent: list[tuple[int, dict[str, str], object]] = []
        for extra in ({}, {"anthropic-version": "2023-06-01"}):
            before = num_handled(server)
            for headers in (extra, extra | SEEN_BY_MIDDLEWARE):
                async with server.http.post(path, data=b"no JSON", headers={"x-request-id": "mine", **headers}) as response:
                    others = {name.lower(): value for name, value in response.headers.items() if name != "Date"}
                    assert response.headers["Date"].endswith(" GMT")
                    sent.append((response.status, others, await response.json()))
            assert num_handled(server) == before + 1
            assert sent[-1] == sent[-2]
        assert sent[0][0] == (429 if refusal is FULL else 503)
        assert sent[0][1]["x-request-id"] == "mine"

    serve(scenario)


def test_routes_say_which_of_them_refuse_by_the_headers() -> None:
    async def scenario(server: Running) -> None:
        full(server)
        routes = [route for route in server.app[ROUTES] if route.method == "POST" and route.request is not None]
        for path, is_admitted in [(path, route.is_admitted) for route in routes for path in route.paths if "{" not in path]:
            status, _ = await server.post(path, None, headers=SEEN_BY_MIDDLEWARE)
            assert (path, status == 429) == (path, is_admitted)

    serve(scenario)
    assert all(route.is_admitted for route in POOLING_ROUTES)


def test_what_is_not_refused_is_answered_as_ever() -> None:
    async def scenario(server: Running) -> None:
        for _ in range(2):
            status, answer = await server.post(CHAT_PATH, CHAT)
            assert (status, answer["choices"][0]["message"]["content"]) == (200, "Hello there.")
            full(server)
            assert (await server.post(CHAT_PATH, CHAT))[0] == 429
            server.engine.refusal = None

    serve(scenario)


def test_a_body_that_follows_its_headers_is_read_and_dropped() -> None:
    async def scenario(server: Running) -> None:
        full(server)
        large = request_bytes(body=b"x" * 300_000)
        pieces = (large[:-300_000], large[-300_000:-5], large[-5:] + request_bytes(x_request_id="second"))
        (first, _, _), (second, headers, _) = await answers_on_one_connection(server, *pieces, count=2)
        assert (first, second, headers["x-request-id"]) == (429, 429, "second")

    serve(scenario)


@pytest.mark.parametrize("cut", [1, 10, 40, len(request_bytes()) - 3])
def test_a_request_in_two_pieces_is_refused_as_a_whole(cut: int) -> None:
    async def scenario(server: Running) -> None:
        full(server)
        data = request_bytes(x_request_id="cut")
        ((status, headers, _), (last, _, _)) = await answers_on_one_connection(server, data[:cut], data[cut:], data, count=2)
        assert (status, headers["x-request-id"], last) == (429, "cut", 429)

    serve(scenario)


def test_pipelined_requests_are_answered_in_their_order() -> None:
    async def scenario(server: Running) -> None:
        server.engine.gate = asyncio.Event()
        reader, writer = await asyncio.open_connection(*server.listener.address)
        writer.write(request_bytes(body=json.dumps(CHAT).encode(), x_request_id="first"))
        await server.engine.happenings.get()
        full(server)
        for name in ("second", "third"):
            writer.write(request_bytes(x_request_id=name))
        await asyncio.sleep(0.01)
        server.engine.gate.set()
        answers = [await read_answer(reader) for _ in range(3)]
        writer.close()
        assert [(status, headers["x-request-id"]) for status, headers, _ in answers] == [(200, "first"), (429, "second"), (429, "third")]

    serve(scenario)


@pytest.mark.parametrize(
    ("change", "is_open"),
    [((b"HTTP/1.1", b"HTTP/1.0"), False), ((b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"), False), ((b"Host", b"host"), True)],
)
def test_a_connection_ends_where_the_client_says_so(change: tuple[bytes, bytes], is_open: bool) -> None:
    async def scenario(server: Running) -> None:
        full(server)
        reader, writer = await asyncio.open_connection(*server.listener.address)
        writer.write(request_bytes().replace(*change))
        assert (await read_answer(reader))[0] == 429
        if is_open:
            writer.write(request_bytes())
            assert (await read_answer(reader))[0] == 429
        else:
            assert await reader.read() == b""
        writer.close()

    serve(scenario)


def test_a_refusal_keeps_the_connection_for_as_long_as_an_answer_would() -> None:
    async def scenario(server: Running) -> None:
        assert (await server.post(CHAT_PATH, CHAT))[0] == 200
        (connection,) = server.listener.server.connections
        assert isinstance(connection, Connection)
        full(server)
        connection._next_keepalive_close_time = 0.0
        assert (await server.post(CHAT_PATH, CHAT))[0] == 429
        assert connection._next_keepalive_close_time > asyncio.get_running_loop().time() + 60
        assert server.listener.server.connections == [connection]

    serve(scenario, ServerOptions(keep_alive_timeout=75))


def test_refusals_are_counted_and_logged_with_their_reason(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(server: Running) -> None:
        full(server)
        for name in ("one", "two"):
            await server.post(CHAT_PATH, CHAT, headers={"x-request-id": name})
        assert 'http_requests_total{method="POST",route="/v1/chat/completions",status="429"} 2.0' in await text(server, "/metrics")
        server.app[REFUSALS].write_lines()
        assert [record.getMessage().split(" total=")[0] for record in caplog.records] == [
            f"127.0.0.1 POST /v1/chat/completions 429 id={name}" for name in ("one", "two")
        ]
        assert all(record.getMessage().endswith(f"error={str(FULL)!r}") for record in caplog.records)
        await server.post(CHAT_PATH, CHAT, headers={"x-request-id": "three"})

    with caplog.at_level(logging.INFO, "penstock.access"):
        serve(scenario)
    assert "id=three" in caplog.text  # written when the server ended


async def text(server: Running, path: str) -> str:
    async with server.http.get(path) as response:
        return await response.text()


@pytest.mark.parametrize(
    ("options", "headers", "status"),
    [
        (ServerOptions(api_keys=("secret",)), {}, 401),
        (ServerOptions(api_keys=("secret",)), {"Authorization": "Bearer wrong"}, 401),
        (ServerOptions(api_keys=("secret",)), {"Authorization": "Bearer secret"}, 429),
        (ServerOptions(allowed_hosts=("example.com",)), {"Host": "evil.example"}, 403),
        (ServerOptions(allowed_hosts=("example.com",)), {"Host": "example.com"}, 429),
        (ServerOptions(), {"Origin": "https://evil.example", "Content-Type": "text/plain"}, 415),
        (ServerOptions(max_body_size=3), {}, 413),
        (ServerOptions(), {"Expect": "100-continue"}, 429),
    ],
)
def test_what_the_middleware_refuses_is_refused_by_it(options: ServerOptions, headers: dict[str, str], status: int) -> None:
    async def scenario(server: Running) -> None:
        full(server)
        async with server.http.post(CHAT_PATH, json=CHAT, headers=headers) as response:
            assert response.status == status

    serve(scenario, options)


def test_a_server_that_stops_says_so_instead() -> None:
    async def scenario(server: Running) -> None:
        full(server)
        server.app[GATE].is_open = False
        async with server.http.post(CHAT_PATH, json=CHAT) as response:
            assert (response.status, response.headers["Connection"]) == (503, "close")

    serve(scenario)


def num_turns_until_healthy(num_refused: int) -> int:
    """The turns of the loop until a poll is answered that was sent after so many requests, each on a connection of its own."""
    turns: list[int] = []

    async def scenario(server: Running) -> None:
        full(server)
        with ExitStack() as stack:
            sockets = [stack.enter_context(socket.create_connection(server.listener.address)) for _ in range(num_refused + 1)]
            await until(lambda: server.listener.num_open == len(sockets))
            *refused, poll = sockets
            poll.setblocking(False)
            for each in refused:
                each.sendall(request_bytes())
            poll.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            count, num_tasks = 0, len(asyncio.all_tasks())
            while not is_readable(poll):
                count += 1
                await asyncio.sleep(0)
            turns.append(count)
            assert poll.recv(12) == b"HTTP/1.1 200"
            assert len(asyncio.all_tasks()) <= num_tasks
            assert all(each.recv(12) == b"HTTP/1.1 429" for each in refused)

    serve(scenario)
    return turns[0]


def is_readable(connection: socket.socket) -> bool:
    try:
        return bool(connection.recv(1, socket.MSG_PEEK))
    except BlockingIOError:
        return False


def test_a_poll_waits_for_no_more_turns_of_the_loop_where_requests_are_refused() -> None:
    assert num_turns_until_healthy(60) <= num_turns_until_healthy(0) + 2


def test_polls_are_answered_under_overload_and_metrics_do_not_grow() -> None:
    async def scenario(server: Running) -> None:
        full(server)
        sizes: list[int] = []
        for _ in range(2):
            for number in range(20):
                await server.post(CHAT_PATH, CHAT, headers={"x-request-id": f"id-{number}"})
            assert (await server.get("/ready"))[0] == (await server.get("/health"))[0] == 200
            sizes.append(len((await text(server, "/metrics")).splitlines()))
        assert sizes[1] - sizes[0] <= 3  # the polls themselves are counted: /ready, /health, /metrics

    serve(scenario)


def test_the_key_decides_the_priority_and_its_limits_are_in_the_answer(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(f'[keys.alice]\nhash = "{hash_of("alice")}"\npriority = 5\nrequests_per_minute = 60\n', encoding="utf-8")
    asked: list[int] = []

    async def scenario(server: Running) -> None:
        def check_admission(priority: int = 0) -> None:
            asked.append(priority)
            raise FULL

        server.engine.check_admission = check_admission  # type: ignore[method-assign]
        async with server.http.post(CHAT_PATH, json=CHAT, headers={"x-api-key": "alice"}) as response:
            assert (response.status, response.headers["x-ratelimit-remaining-requests"]) == (429, "60")
        assert asked == [5]

    serve(scenario, ServerOptions(keys_file=str(path)))


class Traces:
    """Counts what it is to export."""

    def __init__(self) -> None:
        self.num_recorded = 0

    def record(self, *_: object) -> None:
        self.num_recorded += 1

    def close(self) -> None: ...


def test_handlers_refuse_where_traces_are_exported(monkeypatch: pytest.MonkeyPatch) -> None:
    traces = Traces()
    monkeypatch.setattr(middleware, "make_tracer", lambda endpoint: traces)

    async def scenario(server: Running) -> None:
        full(server)
        assert (await server.post(CHAT_PATH, CHAT))[0] == 429
        assert (num_handled(server), traces.num_recorded) == (1, 1)

    serve(scenario)
