"""One replica: the whole server of one model, or of several, in an actor of Ray Serve."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

from aiohttp import web
from ray import serve
from ray.actor import ActorHandle

from penstock.api.app import build_app, build_runner
from penstock.api.connections import raise_descriptor_limit
from penstock.api.middleware import GATE
from penstock.assembly import Assembled, AssembledModels, AssembledPooling
from penstock.cli.flags import parse_arguments
from penstock.engine.errors import ConfigurationError, InvalidRequest
from penstock.integrations.connection import Call, Head, answer
from penstock.integrations.ray.ranks import start_ranks
from penstock.integrations.ray.router import Prefixes
from penstock.plugins.manager import Plugins
from penstock.server import load_model
from penstock.serving.context import LocalContext
from penstock.serving.options import Arguments

log = logging.getLogger("penstock.ray")

REPLICA_HEADER = "x-replica"  # which one has answered, by Serve's name for it

# What a replica would have for itself alone, or listen to by itself.
REFUSED = {
    "files_dir": "files and batches would be those of one replica: run a server of their own",
    "response_store": "stored responses would be those of one replica",
    "admin": "a replica listens to no socket of its own",
    "api_servers": "replicas are processes of their own",
    "distributed_address": "ranks meet where Ray has placed them",
}


def read_flags(flags: Sequence[str]) -> Arguments:
    """Raises `ConfigurationError`, for flags that a replica cannot have as well."""
    arguments = parse_arguments(list(flags))
    for option, value in arguments.values():
        if option.name in REFUSED and value != option.default:
            raise ConfigurationError(f"{option.shown(value)}: {REFUSED[option.name]}")
    # Clients come through Serve's proxy, which decides where it listens. --allowed-hosts still names the hosts that they may ask for.
    return replace(arguments, host="0.0.0.0")


class Replica:
    """Answers calls by the application that `penstock serve` has, with the same flags.

    `max_adapters` is how many adapters below --adapter-dir are loaded at a time, as requests ask for them by name. Ranks are `is_one_node`
    where the placement group is on one. Serve replaces replicas whose arguments change, and `version` is one that has no other meaning.
    """

    def __init__(self, flags: Sequence[str], max_adapters: int = 0, *, is_one_node: bool = True, version: str | None = None) -> None:
        raise_descriptor_limit()
        self._arguments = read_flags(flags)
        self._name = serve.get_replica_context().replica_id.unique_id
        self._ranks: list[ActorHandle] = []
        engine = self._arguments.engine
        if engine.tensor_parallel_size > 1:
            address, self._ranks = start_ranks(engine.tensor_parallel_size, engine.num_threads, is_one_node=is_one_node)
            self._arguments = replace(self._arguments, engine=replace(engine, distributed_address=address))
        self._assembled = self._load()
        self._app: web.Application | None = None
        self._runner: web.AppRunner | None = None
        self._starting = asyncio.Lock()
        self._resident = serve.multiplexed(max_num_models_per_replica=max_adapters)(self._load_adapter) if max_adapters else None

    def _load(self) -> Assembled | AssembledPooling | AssembledModels:
        arguments = self._arguments
        plugins = Plugins.start(
            arguments.plugins, arguments.without, reasoning_parser=arguments.reasoning_parser, tool_parser=arguments.tool_parser
        )
        return load_model(arguments, plugins)

    async def _server(self) -> web.Server:
        """Starts the engine with the first call, which is Serve's for the state of health: constructors have no event loop."""
        async with self._starting:
            if self._runner is None:
                await self._assembled.context.engine.start()
                self._app = build_app(self._assembled.context)
                runner = build_runner(self._app)
                await runner.setup()
                self._runner = runner
        assert self._runner.server is not None
        return self._runner.server

    async def answer(self, call: Call, prefixes: Prefixes, client: str | None = None) -> AsyncGenerator[Head | bytes, None]:
        """The head of the answer, then its body as it comes. `prefixes` are for the router, which has seen them."""
        server = await self._server()
        await self._have_adapter(call)
        async with aclosing(answer(server, call, client)) as pieces:
            async for piece in pieces:
                yield replace(piece, headers=[*piece.headers, (REPLICA_HEADER, self._name)]) if isinstance(piece, Head) else piece

    async def _have_adapter(self, call: Call) -> None:
        model_id = serve.get_multiplexed_model_id()
        context = self._assembled.context
        if self._resident is None or not model_id or not isinstance(context, LocalContext) or model_id in context.model_names:
            return
        try:
            await self._resident(model_id)
        except InvalidRequest:
            log.info("there is no adapter %r", model_id)  # which the application answers

    async def _load_adapter(self, name: str) -> "LoadedAdapter":
        context = self._assembled.context
        assert isinstance(context, LocalContext)
        root = context.options.adapter_dir
        if root is None:
            raise InvalidRequest("adapters are loaded from --adapter-dir", "model")
        if context.adapters.get(name) is None:
            await context.adapters.load(name, Path(name), Path(root))
        return LoadedAdapter(context, name)

    async def check_health(self) -> None:
        """Raises `RuntimeError` where the engine has failed, upon which Serve replaces the replica."""
        await self._server()
        if not self._assembled.context.engine.is_healthy:
            raise RuntimeError("the engine has failed")

    def record_autoscaling_stats(self) -> dict[str, float]:
        """The sequences that run and those that wait, for `autoscaling.by_load`."""
        context = self._assembled.context
        if not isinstance(context, LocalContext):
            return {}
        stats = context.engine.stats()
        return {"running": float(stats.num_running), "waiting": float(stats.num_waiting)}

    async def __del__(self) -> None:
        """Serve calls it once the replica's requests have ended, or `graceful_shutdown_timeout_s` later."""
        if self._runner is None or self._app is None:
            return
        runner, self._runner = self._runner, None
        self._app[GATE].is_open = False
        await self._assembled.context.engine.stop(0)
        await runner.cleanup()
        self._assembled.context.close()


class LoadedAdapter:
    """An adapter that Serve's multiplexing keeps, and unloads when another one needs its place."""

    def __init__(self, context: LocalContext, name: str) -> None:
        self._context, self._name = context, name

    def __del__(self) -> None:
        if self._context.adapters.get(self._name) is not None:
            self._context.adapters.remove(self._name)
