"""No route, method, path or header gets past the API key, however a request is written."""

import asyncio
import json
import re
from itertools import product

from benchmarks.hostile_attacks import HEADERS_AROUND_THE_KEY, PATHS_AROUND_THE_KEY
from penstock.api.middleware import needs_key
from penstock.api.pages.playground import page_files
from penstock.serving.options import ServerOptions
from tests.api.running_server import CHAT, Running, serve

METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "PROPFIND")
WRONG: tuple[dict[str, str], ...] = (
    {},
    {"Authorization": "Bearer wrong"},
    {"Authorization": "Bearer"},
    {"Authorization": "bearer  "},
    {"Authorization": "Basic cmlnaHQ="},
    {"Authorization": "right"},
    {"Authorization": "Bearer right2"},
    {"Authorization": "Bearer " + "x" * 7000},
    {"x-api-key": "wrong"},
    {"x-api-key": ""},
    {"api-key": "Bearer right"},
)
OPEN = {"/health", "/ping", "/ready", "/openapi.json", "/docs", "/docs/x", *page_files()}
WITH_KEY = ServerOptions(api_keys=("right",), files_dir=None)


def test_every_route_of_the_router_asks_for_the_key_with_every_method() -> None:
    """The router itself is asked which routes there are, so that none can be forgotten."""

    async def scenario(server: Running) -> None:
        templates = {resource.canonical for resource in server.app.router.resources()}
        paths = {re.sub(r"\{\w+\}", "x", template) for template in templates}
        assert len(paths) > 30
        closed = [path for path in sorted(paths) if needs_key(path, WITH_KEY)]
        assert {path for path in paths if path not in closed} <= OPEN
        for number, (path, method) in enumerate(product(closed, METHODS)):
            for headers in WRONG if number % 7 == 0 else WRONG[:2]:
                async with server.http.request(method, path, headers=headers) as response:
                    assert response.status == 401, (method, path, headers)
        assert server.engine.requests == []

    serve(scenario, WITH_KEY)


async def statuses(server: Running, data: bytes) -> list[int]:
    """Of all answers that come over one connection before it is closed."""
    reader, writer = await asyncio.open_connection(*server.listener.address)
    writer.write(data)
    answer = await asyncio.wait_for(reader.read(), 60)
    writer.close()
    return [int(status) for status in re.findall(rb"^HTTP/1\.[01] (\d{3})", answer, re.MULTILINE)]


def request(method: str, path: str, *lines: str, body: str = "") -> bytes:
    head = [f"{method} {path} HTTP/1.1", *([] if any(line.startswith("Host:") for line in lines) else ["Host: localhost"]), *lines]
    return ("\r\n".join(head) + "\r\nConnection: close\r\n\r\n" + body).encode("latin-1")


def test_no_way_to_write_a_path_or_a_header_is_taken_for_a_route_without_a_key() -> None:
    async def scenario(server: Running) -> None:
        for path in (*PATHS_AROUND_THE_KEY, "/ping;/v1/models", "/health%2f..%2fv1/models", "/docs/../v1/models", "/docs/..%2fv1/models"):
            (status,) = await statuses(server, request("GET", path))
            assert status in (400, 401, 404), path
        for line in (*HEADERS_AROUND_THE_KEY, "X-Forwarded-Path: /health", "X-HTTP-Method: GET", "Forwarded: for=127.0.0.1"):
            (status,) = await statuses(server, request("GET", "/v1/models", line))
            assert status in (400, 401, 403), line
        assert await statuses(server, request("GET", "/v1/models", "Authorization: Bearer right")) == [200]

    serve(scenario, WITH_KEY)


def test_a_request_within_another_one_is_not_answered() -> None:
    """Two lengths, or two ways to say where a body ends, are how a request is smuggled past a proxy."""
    inner = "GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer right\r\n\r\n"
    body = json.dumps(CHAT)

    async def scenario(server: Running) -> None:
        for lines, sent in (
            (("Content-Length: 2", f"Content-Length: {len(inner) + 2}"), "{}" + inner),
            (("Content-Length: 2", "Transfer-Encoding: chunked"), "0\r\n\r\n" + inner),
            (("Transfer-Encoding: chunked, identity",), "0\r\n\r\n" + inner),
            (("Transfer-Encoding: identity, chunked", "Content-Length: 5"), "0\r\n\r\n" + inner),
            ((f"Content-Length: +{len(body)}",), body + inner),
            ((f"Content-Length: {len(body)} ",), body),
        ):
            answers = await statuses(server, request("POST", "/v1/chat/completions", *lines, body=sent))
            assert len(answers) == 1, lines
            assert answers[0] in (400, 401), lines
        data = request("GET", "/v1/models").replace(b"\r\n", b"\n") + inner.encode()
        assert await statuses(server, data) == [400]

    serve(scenario, WITH_KEY)
