"""A model's handlers as a program in which aiohttp cannot be imported: prints a line of JSON with the answers to the calls on its input.

`python -m tests.serving.without_aiohttp FLAGS` reads a list of [method, path, body] in JSON.
"""

import asyncio
import json
import sys
from typing import Any

sys.modules["aiohttp"] = None  # type: ignore[assignment]


async def run(flags: list[str], calls: list[tuple[str, str, Any]]) -> list[tuple[int, str, list[str]]]:
    from penstock.integrations.embedded import load, read_flags
    from penstock.serving.context import ModelContext
    from penstock.serving.endpoints.handlers import Handlers

    context = load(read_flags(flags)).context
    assert isinstance(context, ModelContext)
    await context.engine.start()
    handlers, found = Handlers(context), []
    for method, path, body in calls:
        reply = await handlers.answer(method, path, b"" if body is None else json.dumps(body).encode())
        content = [reply.content] if isinstance(reply.content, bytes) else [piece async for piece in reply.content]
        found.append((reply.status, reply.headers["Content-Type"], [piece.decode() for piece in content]))
    await context.engine.stop(0)
    context.close()
    return found


if __name__ == "__main__":
    print(json.dumps(asyncio.run(run(sys.argv[1:], json.load(sys.stdin)))))
