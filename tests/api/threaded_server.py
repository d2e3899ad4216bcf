"""A server as the command line assembles it, on an event loop in a thread of its own."""

import asyncio
import threading
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from aiohttp import web

from penstock.api.app import build_app, build_runner
from penstock.assembly import assemble_generation
from penstock.cli.flags import parse_arguments
from penstock.plugins.manager import Plugins
from penstock.serving.context import LocalContext
from penstock.serving.models.startup import ModelFiles

T = TypeVar("T")


class ThreadedServer:
    """`url` ends in `/v1`. `call` runs a coroutine on the server's loop."""

    def __init__(self, flags: Sequence[str]) -> None:
        arguments = parse_arguments(list(flags))
        plugins = Plugins.start(arguments.plugins, arguments.without)
        self.context: LocalContext = assemble_generation(arguments, plugins, ModelFiles.of(arguments)).context
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="server")
        self._thread.start()
        self.url = self.call(self._start())

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(60)

    def close(self) -> None:
        self.call(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _start(self) -> str:
        await self.context.engine.start()
        self._runner = build_runner(build_app(self.context))
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        host, port = self._runner.addresses[0][:2]
        return f"http://{host}:{port}/v1"

    async def _stop(self) -> None:
        self.context.engine.check_integrity()
        await self.context.engine.stop()
        await self._runner.cleanup()
        self.context.close()
