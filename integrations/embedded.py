"""A server inside another program: the model and the whole application, without a socket, under that program's event loop."""

import asyncio
from collections.abc import AsyncGenerator

from aiohttp import web

from penstock.api.app import build_app, build_runner
from penstock.api.middleware import GATE
from penstock.integrations.connection import Call, Head, answer
from penstock.integrations.loading import load
from penstock.serving.options import Arguments


class EmbeddedServer:
    """Loads the model when it is made, which takes seconds. The engine starts with the first call, in that call's event loop."""

    def __init__(self, arguments: Arguments) -> None:
        self.assembled = load(arguments)
        self._starting = asyncio.Lock()
        self._runner: web.AppRunner | None = None

    async def start(self) -> web.Server:
        """Does nothing where it has started already."""
        async with self._starting:
            if self._runner is None:
                await self.assembled.context.engine.start()
                runner = build_runner(build_app(self.assembled.context))
                await runner.setup()
                self._runner = runner
        assert self._runner.server is not None
        return self._runner.server

    async def answer(self, call: Call, client: str | None = None) -> AsyncGenerator[Head | bytes, None]:
        """As `connection.answer`."""
        return answer(await self.start(), call, client)

    @property
    def is_healthy(self) -> bool:
        return self.assembled.context.engine.is_healthy

    async def stop(self) -> None:
        """Ends what still runs. The requests have ended by now, or are to be aborted."""
        runner, self._runner = self._runner, None
        if runner is None:
            return
        runner.app[GATE].is_open = False
        await self.assembled.context.engine.stop(0)
        await runner.cleanup()
        self.assembled.context.close()
