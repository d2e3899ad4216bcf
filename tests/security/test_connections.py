"""Connections: clients that are slow, silent or many hold nothing up, and what is no HTTP is answered without being quoted."""

import asyncio
import json
import logging
import resource
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import pytest
from aiohttp import web

from penstock.engine.errors import ConfigurationError
from penstock.engine.system.process import connection_limit
from penstock.serving.endpoints.errors import MAX_MESSAGE
from penstock.serving.options import ServerOptions
from tests.api.running_server import CHAT, Running, serve, until

SHORT = 0.05  # seconds: the deadline that is to pass
BODY = json.dumps(CHAT).encode()
HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


def headers(path: str = "/v1/chat/completions", length: int = len(BODY), more: str = "") -> bytes:
    return f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n{more}\r\n".encode()


@dataclass(frozen=True, slots=True)
class Client:
    """Writes bytes, and reads answers."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def answer(self, data: bytes = b"") -> tuple[int, dict[str, str], bytes]:
        """Status, headers by their names in small letters, and body."""
        self.writer.write(data)
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode()
        status, *lines = head.rstrip().split("\r\n")
        fields = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
        return int(status.split()[1]), fields, await self.reader.readexactly(int(fields.get("content-length", "0")))


@asynccontextmanager
async def connected(server: Running) -> AsyncIterator[Client]:
    reader, writer = await asyncio.open_connection(*server.listener.address)
    try:
        yield Client(reader, writer)
    finally:
        writer.close()


def talk(conversation: Callable[[Client], Awaitable[None]], options: ServerOptions | None = None) -> None:
    """Runs a conversation over one connection."""

    async def scenario(server: Running) -> None:
        async with connected(server) as client:
            await conversation(client)

    serve(scenario, options)


@pytest.mark.parametrize("sent", [b"", b"GET /he", b"GET /health HTTP/1.1\r\nHost: loc", HEALTH + b"G"])
def test_headers_that_do_not_arrive_end_the_connection(sent: bytes) -> None:
    async def conversation(client: Client) -> None:
        if sent.startswith(HEALTH):
            assert (await client.answer(HEALTH))[0] == 200
        client.writer.write(sent.removeprefix(HEALTH))
        assert await client.reader.read() == b""

    talk(conversation, ServerOptions(read_timeout=SHORT, keep_alive_timeout=0))


def test_a_body_that_drips_is_ended_with_408() -> None:
    async def conversation(client: Client) -> None:
        client.writer.write(headers(length=10_000))
        answer = asyncio.create_task(client.answer())
        while not answer.done():
            client.writer.write(b" ")
            await asyncio.sleep(SHORT / 10)
        status, fields, body = await answer
        assert (status, fields["connection"]) == (408, "close")
        assert "--read-timeout" in json.loads(body)["error"]["message"]

    talk(conversation, ServerOptions(read_timeout=SHORT))


def test_a_large_body_has_more_time_the_more_of_it_has_arrived() -> None:
    async def conversation(client: Client) -> None:
        padding = b" " * 2**20
        client.writer.write(headers(length=len(padding + BODY)) + padding)
        await asyncio.sleep(4 * SHORT)
        assert (await client.answer(BODY))[0] == 200

    talk(conversation, ServerOptions(read_timeout=SHORT))


def test_an_idle_connection_is_closed_and_a_used_one_is_not() -> None:
    async def conversation(client: Client) -> None:
        assert (await client.answer(HEALTH))[0] == 200
        assert (await client.answer(HEALTH))[0] == 200
        assert await client.reader.read() == b""

    talk(conversation, ServerOptions(keep_alive_timeout=SHORT))


@pytest.mark.parametrize(
    "offer",
    ["Upgrade: h2c\r\nConnection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: AAMAAABk\r\n", "Upgrade: foo/2\r\nConnection: Upgrade\r\n"],
)
def test_an_upgrade_that_is_offered_is_declined_and_the_connection_goes_on(offer: str) -> None:
    """As Java's client and `curl --http2` offer it with each request without TLS, bodies included."""

    async def conversation(client: Client) -> None:
        whole = headers(more=offer) + BODY
        for _ in range(2):
            assert (await client.answer(whole))[0] == 200
        for byte in range(0, len(whole), 7):
            client.writer.write(whole[byte : byte + 7])
            await asyncio.sleep(0)
        assert (await client.answer())[0] == 200
        assert (await client.answer(HEALTH))[0] == 200

    talk(conversation)


async def answer_much(request: web.Request) -> web.Response:
    return web.Response(body=b"x" * 2**24)


def test_an_answer_that_is_not_read_ends_its_connection() -> None:
    async def scenario(server: Running) -> None:
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect(server.listener.address)
            client.sendall(HEALTH.replace(b"/health", b"/much"))
            await until(lambda: server.listener.num_open == 1)
            await until(lambda: server.listener.num_open == 0)

    serve(scenario, ServerOptions(write_timeout=SHORT), routes=[web.get("/much", answer_much)])


@pytest.mark.parametrize("body", [CHAT, CHAT | {"stream": True}])
def test_no_deadline_ends_a_request_that_is_being_computed(body: dict[str, object]) -> None:
    async def scenario(server: Running) -> None:
        server.engine.gate = asyncio.Event()
        async with connected(server) as client:
            data = json.dumps(body).encode()
            answer = asyncio.create_task(client.answer(headers(length=len(data)) + data))
            await until(lambda: len(server.engine.requests) == 1)
            await asyncio.sleep(4 * SHORT)
            server.engine.gate.set()
            assert (await answer)[0] == 200

    serve(scenario, ServerOptions(read_timeout=SHORT, keep_alive_timeout=SHORT))


def test_connections_beyond_the_limit_wait_and_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(server: Running) -> None:
        async with AsyncExitStack() as stack:
            clients = [await stack.enter_async_context(connected(server)) for _ in range(2)]
            for _ in range(2):
                waiting = await stack.enter_async_context(connected(server))
                answer = asyncio.create_task(waiting.answer(HEALTH))
                for client in clients:
                    assert (await client.answer(HEALTH))[0] == 200
                assert (server.listener.num_open, answer.done()) == (2, False)
                clients.pop(0).writer.close()
                assert (await answer)[0] == 200
                clients.append(waiting)

    serve(scenario, ServerOptions(max_connections=2))
    (record,) = (record for record in caplog.records if record.levelname == "WARNING")
    assert record.message == "2 connections are open (--max-connections): new ones wait until some close"


@pytest.mark.parametrize(("descriptors", "limit"), [(64, 32), (1024, 960), (2**20, 16_384), (resource.RLIM_INFINITY, 16_384)])
def test_the_descriptors_bound_the_connections(descriptors: int, limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (descriptors, descriptors))
    assert connection_limit(None) == limit
    assert connection_limit(7) == 7
    if limit < 16_384:
        assert connection_limit(limit) == limit
        with pytest.raises(ConfigurationError, match=f"leaves {limit} for connections"):
            connection_limit(limit + 1)


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        (b"NONSENSE\r\nAuthorization: Bearer secret\r\n\r\n", "method is not valid"),
        (b"\x16\x03\x01 secret\r\n\r\n", "HTTPS"),
        (b"GET /health HTTP/1.1\r\nHost: a\r\nAuthorization Bearer secret\r\n\r\n", "not valid HTTP"),
        (b"GET /health HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer secret\nX: secret\x00\r\n\r\n", "not valid"),
        (b"GET /health HTTP/1.1\r\nAuthorization: Bearer " + b"secret" * 2000 + b"\r\n\r\n", "too long"),
        (headers(more="Content-Encoding: secret, gzip\r\nTransfer-Encoding: secret\r\n") + BODY, "not valid"),
    ],
)
def test_what_is_no_http_gets_openais_error_and_one_line_that_quotes_nothing(
    sent: bytes, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def conversation(client: Client) -> None:
        status, fields, body = await client.answer(sent)
        error = json.loads(body)["error"]
        assert (status, fields["content-type"], fields["server"]) == (400, "application/json", "penstock")
        assert message in error["message"]
        assert await client.reader.read() == b""

    with caplog.at_level(logging.INFO):
        talk(conversation)
    (record,) = caplog.records
    assert record.getMessage().startswith("127.0.0.1 400 error=")
    assert record.exc_info is None
    assert "secret" not in caplog.text


def test_clients_that_reset_their_connection_anywhere_leave_nothing(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(server: Running) -> None:
        request = headers() + BODY
        for length in range(0, len(request) + 1, 9):
            with socket.create_connection(server.listener.address) as client:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # closing sends RST
                client.sendall(request[:length])
                await asyncio.sleep(0)
        assert (await server.post("/v1/chat/completions", CHAT))[0] == 200
        await until(lambda: server.listener.num_open == 1)

    serve(scenario)
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_nothing_that_is_sent_begins_a_line_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async def conversation(client: Client) -> None:
        for more in (b"", b"x-request-id: a%0Ab\xc2\x85%s\r\n"):
            assert (await client.answer(b"GET /%0Afake%1b%0D%s HTTP/1.1\r\nHost: localhost\r\n" + more + b"\r\n"))[0] == 404

    with caplog.at_level(logging.INFO):
        talk(conversation)
    assert len(caplog.records) == 2
    assert all(record.getMessage().isprintable() for record in caplog.records)


def test_the_server_names_itself_without_a_version() -> None:
    async def conversation(client: Client) -> None:
        for request in (HEALTH, HEALTH.replace(b"/health", b"/nowhere")):
            assert (await client.answer(request))[1]["server"] == "penstock"

    talk(conversation)


def test_errors_quote_little_of_what_was_sent() -> None:
    async def scenario(server: Running) -> None:
        for body, field in (({"model": "m" * 10**6}, "model"), ({"f" * 10**6: 1}, "f" * 100)):
            status, answer = await server.post("/v1/chat/completions", CHAT | body)
            assert status in (400, 404)
            assert answer["error"]["param"].startswith(field)
            assert len(answer["error"]["param"]) <= MAX_MESSAGE + 10
            assert len(answer["error"]["message"]) <= MAX_MESSAGE + 10

    serve(scenario)


CONTINUE = "Expect: 100-continue\r\n"
KEY = "Authorization: Bearer right\r\n"


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (headers(more=CONTINUE), 401),
        (headers(more="Expect: tea\r\n"), 401),
        (headers(more=CONTINUE + KEY, length=2**30), 413),
        (headers(more=CONTINUE + KEY), 100),
    ],
)
def test_a_body_is_asked_for_only_where_the_key_is_right(sent: bytes, status: int) -> None:
    async def conversation(client: Client) -> None:
        assert (await client.answer(sent))[0] == status
        if status == 100:
            assert (await client.answer(BODY))[0] == 200

    talk(conversation, ServerOptions(api_keys=("right",)))
