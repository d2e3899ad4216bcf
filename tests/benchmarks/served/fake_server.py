"""A chat endpoint that answers at once, in the test's process or in its own: `python -m tests.benchmarks.served.fake_server --port N`."""

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

ROLE = {"choices": [{"delta": {"role": "assistant", "content": ""}}]}
TEXT = {"choices": [{"delta": {"content": "time"}}], "usage": None}
LONGEST = 15_000  # characters
FINISH = {"choices": [{"delta": {}, "finish_reason": "length"}]}


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, Any]:
    return {"choices": [], "usage": {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens}}


def sse(*events: dict[str, Any]) -> bytes:
    return b": comment\r\n\r\n" + b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events) + b"data: [DONE]\n\n"


class FakeServer:
    """Streams as many chunks as it is asked for tokens, and counts them only with `has_usage`.

    Refuses the field `refused`. Answers long prompts only once `concurrency` of them are there. Fails after so many requests. With
    `holds_longest`, begins to answer prompts of thousands of words, and goes on until the client has gone.
    """

    def __init__(
        self,
        refused: str | None = None,
        has_usage: bool = True,
        concurrency: int = 1,
        fails_after: int = 1_000_000,
        holds_longest: bool = True,
    ) -> None:
        self.refused = refused
        self.has_usage = has_usage
        self.bodies: list[dict[str, Any]] = []
        self.num_running = self.most_running = 0
        self.barrier = asyncio.Barrier(concurrency)
        self.fails_after = fails_after
        self.holds_longest = holds_longest
        self.num_held = 0

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "fake"}]})

    async def chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if self.refused in body:
            return web.json_response({"detail": f"Unexpected fields in the request: {{'{self.refused}'}}"}, status=422)
        self.bodies.append(body)
        if len(self.bodies) > self.fails_after:
            return web.json_response({"error": {"message": "out of memory"}}, status=500)
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        length = len(body["messages"][0]["content"])
        if length > LONGEST:
            return await self.long_answer(request)
        if length > 100:
            async with asyncio.timeout(60):
                await self.barrier.wait()
        response = web.StreamResponse()
        await response.prepare(request)
        count = body["max_tokens"]
        await response.write(sse(ROLE, *[TEXT] * count, FINISH, *([usage(100, count)] if self.has_usage else [])))
        self.num_running -= 1
        return response

    async def long_answer(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(sse(ROLE))
        await asyncio.sleep(0.1)  # has not begun
        assert self.num_running == 1, "the others wait for its first token"
        await response.write(sse(TEXT))
        self.num_held += 1
        try:
            if self.holds_longest:
                await asyncio.Event().wait()
            await response.write(sse(FINISH, usage(100, 1)))
        finally:
            self.num_held -= 1
            self.num_running -= 1
        return response

    async def health(self, request: web.Request) -> web.Response:
        return web.Response()

    def application(self) -> web.Application:
        application = web.Application()
        application.add_routes(
            [web.get("/health", self.health), web.get("/v1/models", self.models), web.post("/v1/chat/completions", self.chat)]
        )
        return application

    async def while_up(self, drive: Callable[[str], Awaitable[None]]) -> None:
        """Awaits `drive(url)` while it serves at a free port."""
        runner = web.AppRunner(self.application(), handler_cancellation=True)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        try:
            await drive(f"http://127.0.0.1:{runner.addresses[0][1]}")
        finally:
            await runner.cleanup()


if __name__ == "__main__":
    web.run_app(FakeServer().application(), host="127.0.0.1", port=int(sys.argv[2]), print=None)
