"""Bodies with mistakes become requests or are refused: no route fails.

`scripts/test tests/api/bodies/test_mutated_bodies.py --mutated-bodies 10000` sends as many over HTTP, to all routes.
"""

import asyncio
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

import msgspec
import pytest
from aiohttp import ClientSession
from msgspec import inspect as types

from benchmarks.attacker import INTERNALS
from penstock.api.errors import body_of
from penstock.api.pooling import POOLING_ROUTES
from penstock.api.routes import JSON, ROUTES, Route, path_template
from penstock.engine.errors import InvalidRequest
from penstock.plugins.reasoning.formats import FORMATS
from penstock.plugins.tools.json_formats import HERMES
from penstock.serving.anthropic import CountTokensRequest, MessagesRequest, ThinkingSigner, chat_request
from penstock.serving.context import ServerContext, Workers
from penstock.serving.endpoints.bodies import decode
from penstock.serving.preparing import ChatOptions, count_prompt_tokens, prepare_chat, prepare_completion
from penstock.serving.requests import ChatCompletionRequest, CompletionRequest
from tests.api.bodies.mutations import CHAT, COMPLETION, CONSTRAINED, EXAMPLES, MESSAGES, example_of, mutated_bodies
from tests.api.pooling.server import PoolingServer, serve_pooling
from tests.api.pooling.test_pooling import BODIES
from tests.api.running_server import Running, serve
from tests.api.scripted import RecordingCompiler, ScriptedEngine, byte_tokenizer, scripted_context

Take = Callable[[ServerContext, bytes, bool], Coroutine[Any, Any, object]]


async def take_chat(context: ServerContext, data: bytes, allow_unknown_fields: bool) -> object:
    body, _ = decode(data, ChatCompletionRequest, allow_unknown_fields=allow_unknown_fields)
    return await prepare_chat(context, body, len(data))


async def take_completion(context: ServerContext, data: bytes, allow_unknown_fields: bool) -> object:
    body, _ = decode(data, CompletionRequest, allow_unknown_fields=allow_unknown_fields)
    return await prepare_completion(context, body, len(data), "id")


async def take_messages(context: ServerContext, data: bytes, is_count: bool) -> object:
    """What is wrong with a body is found alike by both routes."""
    kind: type[MessagesRequest | CountTokensRequest] = CountTokensRequest if is_count else MessagesRequest
    body, _ = decode(data, kind, allow_unknown_fields=True)
    conversion = chat_request(body, ThinkingSigner(), takes_late_system=not is_count)
    if is_count:
        return await count_prompt_tokens(context, conversion.body, len(data))
    return await prepare_chat(context, conversion.body, len(data), ChatOptions(clamps_max_tokens=True))


@pytest.mark.parametrize(
    ("take", "whole"),
    [(take_chat, CHAT), (take_completion, COMPLETION), (take_completion, CONSTRAINED), (take_messages, MESSAGES)],
)
def test_a_mutated_body_becomes_a_request_or_is_refused(take: Take, whole: dict[str, Any]) -> None:
    async def run() -> None:
        taken = refused = 0
        with Workers() as workers:
            engine = ScriptedEngine(byte_tokenizer())
            context = scripted_context(engine, RecordingCompiler(), workers, reasoning_parser=FORMATS["deepseek_r1"], tool_parser=HERMES)
            await take(context, msgspec.json.encode(whole), False)
            for number, data in enumerate(mutated_bodies(whole, 400, seed=1)):
                try:
                    await take(context, data, number % 3 == 0)
                    taken += 1
                except InvalidRequest as error:
                    refused += 1
                    msgspec.json.encode(body_of(error))
        assert taken > 20
        assert refused > 100

    asyncio.run(run())


async def statuses_of(http: ClientSession, routes: Iterable[Route], count: int) -> Counter[int]:
    """How often each status was the answer to mutated bodies, `count` over all routes. Asserts that none is a failure of the server."""
    taking = [route for route in routes if route.request is not None and route.request_media_type == JSON]
    statuses: Counter[int] = Counter()
    for seed, route in enumerate(taking):
        whole = (EXAMPLES | BODIES).get(route.path) or example_of(types.type_info(route.request))
        path = path_template(route.path).format_map(defaultdict(lambda: "scripted"))
        for data in mutated_bodies(whole, -(-count // len(taking)), seed):
            async with http.request(route.method, path, data=data) as response:
                text = await response.text()
            statuses[response.status] += 1
            assert response.status < 500, (path, data, text)
            assert response.status == 200 or json.loads(text)["error"]["message"], (path, data, text)
            assert response.status == 200 or not INTERNALS.search(text.encode()), (path, data, text)
    return statuses


@pytest.fixture
def count(pytestconfig: pytest.Config) -> int:
    number: int = pytestconfig.getoption("--mutated-bodies")
    return number


def test_no_route_fails_at_a_mutated_body(count: int) -> None:
    async def scenario(server: Running) -> None:
        routes: list[Route] = server.app[ROUTES]
        assert {200, 400} <= (await statuses_of(server.http, routes, count)).keys()

    serve(scenario)


@pytest.mark.parametrize("model", ["embedder", "cross_encoder"])
def test_no_route_for_pooling_fails_at_a_mutated_body(request: pytest.FixtureRequest, model: str, count: int) -> None:
    async def scenario(server: PoolingServer) -> None:
        assert {200, 400} <= (await statuses_of(server.http, POOLING_ROUTES, count)).keys()

    serve_pooling(request.getfixturevalue(model), scenario)
