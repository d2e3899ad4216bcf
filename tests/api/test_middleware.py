"""Request ids, the access log, keys, CORS, sizes, and errors as OpenAI's body."""

import asyncio
import gzip
import json
import logging
import socket
from urllib.parse import urlsplit

import aiohttp
import pytest
from aiohttp import web

from penstock.api.app import COMMON, GENERATION
from penstock.api.middleware import GATE
from penstock.api.routes import path_template
from penstock.engine.errors import GenerationFailed
from penstock.serving.endpoints.models import POOLING_PATHS
from penstock.serving.options import ServerOptions
from tests.api.running_server import CHAT, Running, serve, until

OPEN = ("/health", "/ping", "/ready")
ROUTES = [
    *(f"{route.method} {path_template(path)}" for route in (*COMMON, *GENERATION) for path in route.paths if path not in OPEN),
    *(f"POST {path}" for path in POOLING_PATHS),
    "GET /nowhere",
]


async def fail(request: web.Request) -> web.Response:
    raise ZeroDivisionError("secret detail")


async def fail_in_step(request: web.Request) -> web.Response:
    raise GenerationFailed("the step ran out of memory")


async def fail_halfway(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    await response.write(b"half")
    raise ZeroDivisionError("secret detail")


FAILING = [web.get("/fail", fail), web.get("/step", fail_in_step), web.get("/halfway", fail_halfway)]


def test_a_clients_request_id_is_echoed_and_a_missing_or_odd_one_replaced() -> None:
    async def scenario(server: Running) -> None:
        async with server.http.get("/health", headers={"x-request-id": "my-id-1"}) as response:
            assert response.headers["x-request-id"] == "my-id-1"
        for odd in ("", "a b", "x" * 200):
            async with server.http.get("/health", headers={"x-request-id": odd}) as response:
                assert len(response.headers["x-request-id"]) == 32

    serve(scenario)


def test_streams_carry_the_request_id_too() -> None:
    async def scenario(server: Running) -> None:
        headers = {"x-request-id": "streamed"}
        async with server.http.post("/v1/chat/completions", json=CHAT | {"stream": True}, headers=headers) as response:
            assert response.headers["x-request-id"] == "streamed"
            assert (await response.read()).endswith(b"data: [DONE]\n\n")

    serve(scenario)


def test_the_access_log_has_one_line_per_request_with_id_and_timings(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(server: Running) -> None:
        await server.post("/v1/chat/completions", CHAT, headers={"x-request-id": "logged"})
        await server.get("/nowhere", headers={"x-request-id": "lost"})

    with caplog.at_level(logging.INFO, "penstock.access"):
        serve(scenario)
    chat, lost = (record.message for record in caplog.records if record.name == "penstock.access")
    assert "POST /v1/chat/completions 200 id=logged total=" in chat
    assert "ms first=" in chat
    assert chat.endswith("output=12")
    assert "GET /nowhere 404 id=lost total=" in lost


def test_the_access_log_says_why_a_request_was_refused(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(server: Running) -> None:
        await server.post("/v1/chat/completions", CHAT | {"temprature": 1})
        await server.post("/v1/chat/completions", CHAT | {"a\nb" + "c" * 1000: 1})

    with caplog.at_level(logging.INFO, "penstock.access"):
        serve(scenario)
    misspelt, odd = (record.message for record in caplog.records if record.name == "penstock.access")
    assert misspelt.endswith("field='temprature' error='unknown field `temprature`; did you mean `temperature`?'")
    assert r"field='a\nbccc" in odd
    assert "\n" not in odd
    assert len(odd) < 1000


@pytest.mark.parametrize(("level", "num_lines"), [(logging.INFO, 0), (logging.DEBUG, 3)])
def test_polls_that_find_all_well_are_logged_for_debugging_only(caplog: pytest.LogCaptureFixture, level: int, num_lines: int) -> None:
    async def scenario(server: Running) -> None:
        for path in ("/health", "/ping", "/metrics"):
            async with server.http.get(path) as response:
                assert response.status == 200

    with caplog.at_level(level, "penstock.access"):
        serve(scenario)
    assert len([record for record in caplog.records if record.name == "penstock.access"]) == num_lines


def test_a_poll_that_fails_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(server: Running) -> None:
        server.engine.is_healthy = False
        assert (await server.get("/health"))[0] == 503

    with caplog.at_level(logging.INFO, "penstock.access"):
        serve(scenario)
    assert "GET /health 503" in caplog.text


def test_a_client_that_leaves_is_logged_as_gone_and_its_generation_ends(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(server: Running) -> None:
        server.engine.gate = asyncio.Event()
        client = asyncio.create_task(server.post("/v1/chat/completions", CHAT))
        assert await server.engine.happenings.get() == "begun"
        client.cancel()
        assert await server.engine.happenings.get() == "aborted"

    with caplog.at_level(logging.INFO, "penstock.access"):
        serve(scenario)
    assert "/v1/chat/completions 499" in caplog.text


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_a_client_that_leaves_with_the_last_byte_has_had_its_answer(caplog: pytest.LogCaptureFixture, loop: str) -> None:
    module = pytest.importorskip(loop)
    body = json.dumps({**CHAT, "stream": True}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"

    def read_all_and_leave(port: int) -> None:
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(head.encode() + body)
            received = b""
            while not received.endswith(b"[DONE]\n\n\r\n0\r\n\r\n"):
                received += connection.recv(2**16)

    async def scenario(server: Running) -> None:
        port = urlsplit(server.url).port
        assert port is not None
        for _ in range(20):
            await asyncio.to_thread(read_all_and_leave, port)

    with caplog.at_level(logging.INFO, "penstock.access"):
        serve(scenario, loop_factory=module.new_event_loop)
    logged = [record.getMessage() for record in caplog.records if record.name == "penstock.access"]
    assert [" 200 " in line for line in logged] == [True] * 20, logged


@pytest.mark.parametrize(
    ("method", "path", "status", "kind", "words"),
    [
        ("GET", "/nowhere", 404, "NotFoundError", "nothing at /nowhere"),
        ("GET", "/v1/chat/completions", 405, "BadRequestError", "takes POST, not GET"),
        ("POST", "/v1/models", 405, "BadRequestError", "not POST"),
        ("GET", "/fail", 500, "InternalServerError", "internal server error"),
        ("GET", "/step", 500, "InternalServerError", "ran out of memory"),
    ],
)
def test_every_error_has_openais_body(method: str, path: str, status: int, kind: str, words: str) -> None:
    async def scenario(server: Running) -> None:
        async with server.http.request(method, path) as response:
            error = (await response.json())["error"]
        assert response.status == status
        assert set(error) == {"message", "type", "param", "code"}
        assert error["type"] == kind
        assert words in error["message"]

    serve(scenario, routes=FAILING)


def test_an_unexpected_error_is_logged_with_the_id_and_not_shown(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(server: Running) -> None:
        _, body = await server.get("/fail", headers={"x-request-id": "findme"})
        assert "secret" not in json.dumps(body)

    serve(scenario, routes=FAILING)
    record = next(record for record in caplog.records if "findme" in record.message)
    assert record.exc_info is not None
    assert "secret detail" in str(record.exc_info[1])


def test_a_response_that_fails_halfway_does_not_look_whole() -> None:
    async def scenario(server: Running) -> None:
        with pytest.raises(aiohttp.ClientError):
            async with server.http.get("/halfway") as response:
                await response.read()

    serve(scenario, routes=FAILING)


@pytest.mark.parametrize("route", ROUTES)
def test_every_route_asks_for_the_key(route: str) -> None:
    method, path = route.split()

    async def scenario(server: Running) -> None:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic right"}, {"Authorization": "right"}):
            async with server.http.request(method, path, headers=headers) as response:
                error = (await response.json())["error"]
            assert response.status == 401
            if path.startswith("/v1/messages"):
                assert error.keys() == {"type", "message"}
                assert error["type"] == "authentication_error"
            else:
                assert error["code"] == "invalid_api_key"
                assert error["type"] == "AuthenticationError"
        for headers in ({"Authorization": "Bearer right"}, {"Authorization": "bearer also right"}, {"x-api-key": "right"}):
            async with server.http.request(method, path, headers=headers) as response:
                assert response.status != 401

    serve(scenario, ServerOptions(api_keys=("right", "also right")))


@pytest.mark.parametrize("metrics_without_key", [True, False])
def test_health_checks_need_no_key_and_metrics_none_where_the_operator_says_so(metrics_without_key: bool) -> None:
    async def scenario(server: Running) -> None:
        assert (await server.get("/health"))[0] == 200
        assert (await server.get("/ping"))[0] == 200
        async with server.http.get("/metrics") as response:
            assert response.status == (200 if metrics_without_key else 401)
        assert (await server.get("/v1/models"))[0] == 401

    serve(scenario, ServerOptions(api_keys=("right",), metrics_without_key=metrics_without_key))


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"api-key": "right"}, 200),
        ({"api-key": "wrong"}, 401),
        ({"api-key": ""}, 401),
        ({"Authorization": "Bearer wrong", "api-key": "right"}, 401),
        ({"Authorization": "Basic right"}, 401),
    ],
)
def test_a_key_may_come_in_the_header_of_azures_clients(headers: dict[str, str], status: int) -> None:
    async def scenario(server: Running) -> None:
        assert (await server.get("/v1/models", headers=headers))[0] == status

    serve(scenario, ServerOptions(api_keys=("right",)))


def test_a_request_id_in_the_body_is_the_requests_where_the_header_has_none() -> None:
    async def scenario(server: Running) -> None:
        for path, body in (("/v1/chat/completions", CHAT), ("/v1/completions", {"prompt": "Hi"})):
            for headers, expected in (({}, "mine"), ({"x-request-id": "a b"}, "mine"), ({"x-request-id": "header's"}, "header's")):
                async with server.http.post(path, json=body | {"request_id": "mine"}, headers=headers) as response:
                    assert response.headers["x-request-id"] == expected
        status, answer = await server.post("/v1/chat/completions", CHAT | {"request_id": "a\nb"})
        assert (status, answer["error"]["param"]) == (400, "request_id")

    serve(scenario)


@pytest.mark.parametrize("is_announced", [True, False])
def test_a_body_beyond_the_limit_is_413(is_announced: bool) -> None:
    async def chunks(data: bytes) -> object:
        yield data

    async def scenario(server: Running) -> None:
        data = json.dumps(CHAT | {"user": "x" * 2000}).encode()
        async with server.http.post("/v1/chat/completions", data=data if is_announced else chunks(data)) as response:
            assert response.status == 413
            assert "larger than 1000 bytes" in (await response.json())["error"]["message"]
        assert (await server.post("/v1/chat/completions", CHAT))[0] == 200

    serve(scenario, ServerOptions(max_body_size=1000))


def test_a_body_in_an_encoding_that_is_not_known_is_415() -> None:
    async def scenario(server: Running) -> None:
        for encoding in ("gzip, gzip", "compress"):
            headers = {"Content-Encoding": encoding, "Content-Type": "application/json"}
            async with server.http.post("/v1/chat/completions", data=gzip.compress(gzip.compress(b"{}")), headers=headers) as response:
                assert response.status == 415
                assert encoding in (await response.json())["error"]["message"]

    serve(scenario)


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_a_body_that_is_not_encoded_as_it_says_is_the_clients_mistake(encoding: str, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(server: Running) -> None:
        data = json.dumps(CHAT).encode()
        async with server.http.post("/v1/chat/completions", data=data, headers={"Content-Encoding": encoding}) as response:
            assert (response.status, response.headers["Connection"]) == (400, "close")
            assert "encoded" in (await response.json())["error"]["message"]
        assert (await server.post("/v1/chat/completions", CHAT))[0] == 200

    serve(scenario)
    assert not [record for record in caplog.records if record.levelname != "INFO"]


def test_an_unknown_expectation_is_refused_with_a_status() -> None:
    async def scenario(server: Running) -> None:
        async with server.http.post("/v1/chat/completions", json=CHAT, headers={"Expect": "tea"}) as response:
            assert response.status == 417

    serve(scenario)


def test_preflights_and_responses_carry_cors_headers_for_allowed_origins_only() -> None:
    async def scenario(server: Running) -> None:
        asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization, content-type"}
        async with server.http.options("/v1/chat/completions", headers=asked | {"Origin": "http://good"}) as response:
            assert response.status == 204
            assert response.headers["Access-Control-Allow-Origin"] == "http://good"
            assert response.headers["Access-Control-Allow-Headers"] == "authorization, content-type"
            assert "POST" in response.headers["Access-Control-Allow-Methods"]
        async with server.http.options("/v1/chat/completions", headers=asked | {"Origin": "http://bad"}) as response:
            assert response.status == 401
            assert "Access-Control-Allow-Origin" not in response.headers
        headers = {"Origin": "http://good", "Authorization": "Bearer key"}
        async with server.http.post("/v1/chat/completions", json=CHAT | {"stream": True}, headers=headers) as response:
            assert response.headers["Access-Control-Allow-Origin"] == "http://good"

    serve(scenario, ServerOptions(allowed_origins=("http://good",), api_keys=("key",)))


def test_a_star_allows_every_origin() -> None:
    async def scenario(server: Running) -> None:
        async with server.http.get("/health", headers={"Origin": "http://any"}) as response:
            assert response.headers["Access-Control-Allow-Origin"] == "*"
            assert "Access-Control-Allow-Credentials" not in response.headers

    serve(scenario, ServerOptions(allowed_origins=("*",)))


def test_pages_may_read_the_headers_that_say_something_of_the_answer() -> None:
    async def scenario(server: Running) -> None:
        async with server.http.post("/v1/chat/completions", json=CHAT, headers={"Origin": "http://any"}) as response:
            exposed = response.headers["Access-Control-Expose-Headers"].split(", ")
            of_requests = ["x-ignored-fields", "x-ignored-tools", "x-truncated-items"]
            of_limits = [f"x-ratelimit-{what}-{kind}" for kind in ("requests", "tokens") for what in ("limit", "remaining", "reset")]
            assert exposed == ["x-request-id", "request-id", "retry-after", "x-structured-output-warning", *of_requests, *of_limits]

    serve(scenario, ServerOptions(allowed_origins=("*",)))


def test_a_server_that_stops_refuses_new_requests_and_finishes_those_it_has() -> None:
    async def scenario(server: Running) -> None:
        server.engine.gate = asyncio.Event()
        running = asyncio.create_task(server.post("/v1/chat/completions", CHAT))
        gate = server.app[GATE]
        await until(lambda: len(server.engine.requests) == 1)
        assert not await gate.drain(0.01)
        status, body = await server.post("/v1/chat/completions", CHAT)
        assert (status, body["error"]["type"]) == (503, "ServiceUnavailableError")
        assert await server.get("/ready") == (503, {"status": "draining"})
        server.engine.gate.set()
        assert await gate.drain(30)
        status, body = await running
        assert (status, body["choices"][0]["message"]["content"]) == (200, "Hello there.")

    serve(scenario)
