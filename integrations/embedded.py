"""A server inside another program: the model and the whole application, without a socket, under that program's event loop."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace

from aiohttp import web

from penstock.api.app import build_app, build_runner
from penstock.api.connections import raise_descriptor_limit
from penstock.api.middleware import GATE
from penstock.assembly import Assembled, AssembledModels, AssembledPooling, AssembledSpeech
from penstock.cli.flags import parse_arguments
from penstock.engine.errors import ConfigurationError
from penstock.integrations.connection import Call, Head, answer
from penstock.plugins.manager import Plugins
from penstock.server import load_model
from penstock.serving.options import Arguments

# What one of several servers would have for itself alone, or listen to by itself.
REFUSED = {
    "admin": "it listens to no socket of its own",
    "api_servers": "it is one process, and there may be several of it",
    "distributed_address": "ranks meet where they have been placed",
    "files_dir": "files and batches would be those of one replica: run a server of their own",
    "response_store": "stored responses would be those of one replica",
}


def read_flags(flags: Sequence[str]) -> Arguments:
    """Those of `penstock serve`. Raises `ConfigurationError`, also for flags that only a server with a socket of its own can have."""
    arguments = parse_arguments(list(flags))
    for option, value in arguments.values():
        if option.name in REFUSED and value != option.default:
            raise ConfigurationError(f"{option.shown(value)}: {REFUSED[option.name]}")
    # Clients come through another server, which decides where it listens. --allowed-hosts still says by what names they may come.
    return replace(arguments, host="0.0.0.0")


class EmbeddedServer:
    """Loads the model when it is made, which takes seconds. The engine starts with the first call, in that call's event loop."""

    def __init__(self, arguments: Arguments) -> None:
        raise_descriptor_limit()
        self.arguments = arguments
        plugins = Plugins.start(
            arguments.plugins, arguments.without, reasoning_parser=arguments.reasoning_parser, tool_parser=arguments.tool_parser
        )
        self.assembled: Assembled | AssembledPooling | AssembledSpeech | AssembledModels = load_model(arguments, plugins)
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
