"""The scripted server with an HTTP client of its own, for tests of what surrounds the handlers."""

import asyncio
import socket
from collections.abc import Awaitable, Callable, Iterable
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import aiohttp
from aiohttp import web

from penstock.api.app import build_app, build_runner
from penstock.api.connections import Listener
from penstock.engine.core import EngineStats
from penstock.engine.kv_cache.blocks import CacheInfo
from penstock.engine.scheduling.step import STEP_BOUNDS, DraftCounts
from penstock.engine.system.process import Histogram
from penstock.serving.context import ServerContext, Workers
from penstock.serving.options import ServerOptions
from tests.api.scripted import MODEL, RecordingCompiler, ScriptedEngine, byte_tokenizer, scripted_context

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}


STATS = EngineStats(
    num_running=2,
    num_waiting=1,
    kv_cache_usage=0.25,
    num_prefix_cache_queries=100,
    num_prefix_cache_hits=40,
    num_prompt_tokens=60,
    num_generation_tokens=7,
    num_forced_tokens=2,
    num_preemptions=3,
    step_tokens=Histogram(STEP_BOUNDS, [1, 5, 3] + 11 * [0], 67.0),
    drafts={"ngram": DraftCounts(9, [1, 0, 2]), "prediction": DraftCounts(3, [0, 0, 1])},
    cache=CacheInfo(block_size=16, num_blocks=500, dtype="bfloat16", has_prefix_caching=True),
)


class CountingEngine(ScriptedEngine):
    """Also has a state of health and, instead of counters, constants."""

    is_healthy: bool = True

    def stats(self) -> EngineStats:
        return STATS


@dataclass(frozen=True, slots=True)
class Running:
    url: str
    app: web.Application
    engine: CountingEngine
    context: ServerContext
    http: aiohttp.ClientSession
    listener: Listener

    async def get(self, path: str, **options: Any) -> tuple[int, Any]:
        async with self.http.get(path, **options) as response:
            return response.status, await response.json()

    async def post(self, path: str, body: object, **options: Any) -> tuple[int, Any]:
        async with self.http.post(path, json=body, **options) as response:
            return response.status, await response.json()


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - what is waited for happens in code that knows no events
        await asyncio.sleep(0.001)


def serve(
    scenario: Callable[[Running], Awaitable[None]],
    options: ServerOptions | None = None,
    routes: Iterable[web.RouteDef] = (),
    loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None,
) -> None:
    """Runs a test's coroutine against a server with `options` and, beside its own, `routes`."""

    async def run() -> None:
        engine = CountingEngine(byte_tokenizer())
        with Workers() as workers:
            context = scripted_context(engine, RecordingCompiler(), workers, options=options or ServerOptions())
            app = build_app(context)
            app.add_routes(routes)
            runner = build_runner(app)
            await runner.setup()
            try:
                with closing(Listener(runner, socket.create_server(("127.0.0.1", 0)), context.options)) as listener:
                    listener.start()
                    url = "http://{}:{}".format(*listener.address)
                    async with aiohttp.ClientSession(url) as http:
                        await scenario(Running(url, app, engine, context, http, listener))
            finally:
                await runner.cleanup()

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(run())
