"""Time limits of requests over HTTP: an error before the first token, what there is of the answer after it."""

import time

import pytest

from penstock.serving.options import ServerOptions
from tests.api.running_server import CHAT, Running, serve
from tests.api.scripted import MODEL

PATH = "/v1/chat/completions"


@pytest.mark.parametrize(
    ("fields", "headers", "operators", "seconds"),
    [
        ({"timeout": 5}, {}, 0, 5),
        ({}, {"x-request-timeout": "2.5"}, 0, 2.5),
        ({"timeout": 5}, {"x-request-timeout": "2"}, 0, 5),
        ({}, {}, 7, 7),
        ({"timeout": 50}, {}, 7, 7),
        ({"timeout": 5}, {}, 7, 5),
        ({}, {}, 0, None),
    ],
)
def test_the_deadline_is_the_requests_own_as_far_as_the_operator_allows(
    fields: dict[str, float], headers: dict[str, str], operators: float, seconds: float | None
) -> None:
    async def scenario(server: Running) -> None:
        bodies: dict[str, dict[str, object]] = {
            PATH: {**CHAT},
            "/v1/completions": {"prompt": "Hi"},
            "/v1/responses": {"model": MODEL, "input": "Hi"},
            "/v1/messages": {**CHAT, "max_tokens": 5},
        }
        for path, body in bodies.items():
            before = time.monotonic()
            assert (await server.post(path, body | fields, headers=headers))[0] == 200
            deadline = server.engine.requests[-1].deadline
            if seconds is None:
                assert deadline is None
            else:
                assert deadline is not None
                assert before + seconds <= deadline <= time.monotonic() + seconds

    serve(scenario, ServerOptions(request_timeout=operators, keep_alive_interval=0))


@pytest.mark.parametrize("value", ["0", "-1", "nan", "soon", "1e9", ""])
def test_a_header_that_is_no_time_is_refused(value: str) -> None:
    async def scenario(server: Running) -> None:
        status, answer = await server.post(PATH, CHAT, headers={"x-request-timeout": value})
        assert (status, answer["error"]["param"]) == (400, "x-request-timeout")

    serve(scenario)


@pytest.mark.parametrize("value", [0, -1, 1e9, "5"])
def test_a_field_that_is_no_time_is_refused(value: object) -> None:
    async def scenario(server: Running) -> None:
        status, answer = await server.post(PATH, CHAT | {"timeout": value})
        assert (status, answer["error"]["param"]) == (400, "timeout")

    serve(scenario)


@pytest.mark.parametrize("is_streamed", [False, True])
def test_without_a_token_by_then_it_is_an_error(is_streamed: bool) -> None:
    async def scenario(server: Running) -> None:
        server.engine.expiry_step = 0
        status, answer = await server.post(PATH, CHAT | {"timeout": 5, "stream": is_streamed})
        assert (status, answer["error"]["code"], answer["error"]["type"]) == (504, "timeout", "TimeoutError")
        status, answer = await server.post("/v1/messages", CHAT | {"timeout": 5, "max_tokens": 5, "stream": is_streamed})
        assert (status, answer["error"]["type"]) == (504, "timeout_error")

    serve(scenario, ServerOptions(keep_alive_interval=0))


def test_an_answer_that_has_begun_ends_there_as_at_its_length() -> None:
    async def scenario(server: Running) -> None:
        server.engine.expiry_step = 5
        _, answer = await server.post(PATH, CHAT | {"timeout": 5})
        (choice,) = answer["choices"]
        assert (choice["message"]["content"], choice["finish_reason"], choice["stop_reason"]) == ("Hello", "length", "timeout")
        async with server.http.post(PATH, json=CHAT | {"timeout": 5, "stream": True}) as response:
            streamed = await response.text()
        assert '"finish_reason":"length","stop_reason":"timeout"' in streamed
        assert streamed.endswith("data: [DONE]\n\n")
        _, message = await server.post("/v1/messages", CHAT | {"timeout": 5, "max_tokens": 50})
        assert (message["content"][0]["text"], message["stop_reason"]) == ("Hello", "max_tokens")
        async with server.http.get("/metrics") as response:
            assert 'finished_reason="timed_out"' in await response.text()

    serve(scenario, ServerOptions(keep_alive_interval=0))
