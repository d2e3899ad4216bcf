"""One replica: the whole server of one model, or of several, in an actor of Ray Serve. Where several processes compute the model, the other
ranks are actors in the further bundles of its placement group.
"""

import logging
import os
import socket
import subprocess
import sys
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.actor import ActorHandle
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from penstock.engine.errors import ConfigurationError, InvalidRequest
from penstock.integrations.embedded import REPLICA_HEADER, Call, EmbeddedServer, Head, read_flags
from penstock.integrations.routing import Prefixes
from penstock.serving.context import LocalContext

LOCAL = "127.0.0.1"


class Rank:
    """Runs `penstock worker` in a process that ends with this actor, and with rank 0. Its device is the one that Ray gives the actor."""

    def __init__(self, address: str, rank: int, num_threads: int | None) -> None:
        command = [sys.executable, "-P", "-m", "penstock.server", "worker", "--join", address, "--rank", str(rank)]
        threads = [] if num_threads is None else ["--threads", str(num_threads)]
        environment = os.environ | {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        self._process = subprocess.Popen([*command, *threads], env=environment, stdin=subprocess.DEVNULL)

    def wait(self) -> int:
        """The exit code, once the rank has ended."""
        return self._process.wait()


def start_ranks(size: int, num_threads: int | None, *, is_one_node: bool) -> tuple[str, list[ActorHandle[Any]]]:
    """Starts ranks 1 to `size` - 1, which end when their handles are dropped. Returns the address at which rank 0 has to meet them.

    Raises `ConfigurationError` where this replica has no placement group of so many bundles.
    """
    group: PlacementGroup | None = ray.util.get_current_placement_group()
    if group is None or group.bundle_count < size:
        raise ConfigurationError(f"a model of {size} ranks: the replica has no placement group of {size} bundles")
    host = LOCAL if is_one_node else ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
    with socket.create_server((host, 0)) as listener:
        address = f"{host}:{listener.getsockname()[1]}"
    ranks: list[Any] = []
    for rank in range(1, size):
        resources = group.bundle_specs[rank]
        strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank)
        actor = ray.remote(Rank).options(
            num_cpus=resources.get("CPU", 0), num_gpus=resources.get("GPU", 0), scheduling_strategy=strategy, max_concurrency=1
        )
        ranks.append(actor.remote(address, rank, num_threads))
    return address, ranks


log = logging.getLogger("penstock.ray")


class Replica:
    """Answers calls by the application that `penstock serve` has, with the same flags.

    `max_adapters` is how many adapters below --adapter-dir are loaded at a time, as requests ask for them by name. Ranks are `is_one_node`
    where the placement group is on one. Serve replaces replicas whose arguments change, and `version` is one that has no other meaning.
    """

    def __init__(self, flags: Sequence[str], max_adapters: int = 0, *, is_one_node: bool = True, version: str | None = None) -> None:
        self._has_server = False  # Serve calls `__del__` also where this fails
        arguments = read_flags(flags)
        engine = arguments.engine
        self._name = serve.get_replica_context().replica_id.unique_id
        self._ranks: list[ActorHandle[Any]] = []
        if engine.num_ranks > 1:
            address, self._ranks = start_ranks(engine.num_ranks, engine.num_threads, is_one_node=is_one_node)
            arguments = replace(arguments, engine=replace(engine, distributed_address=address))
        self._server = EmbeddedServer(arguments)
        self._has_server = True

        async def load(name: str) -> LoadedAdapter:  # no method: Serve keeps its own attributes on the function
            return await self._load_adapter(name)

        self._resident = serve.multiplexed(max_num_models_per_replica=max_adapters)(load) if max_adapters else None

    async def answer(self, call: Call, prefixes: Prefixes, client: str | None = None) -> AsyncGenerator[Head | bytes, None]:
        """The head of the answer, then its body as it comes. `prefixes` are for the router, which has seen them."""
        await self._have_adapter()
        async with aclosing(await self._server.answer(call, client)) as pieces:
            async for piece in pieces:
                yield replace(piece, headers=[*piece.headers, (REPLICA_HEADER, self._name)]) if isinstance(piece, Head) else piece

    async def answer_whole(self, call: Call, client: str | None = None) -> tuple[Head, bytes]:
        """As `answer`, all at once: for calls that all replicas get."""
        head, *pieces = [piece async for piece in self.answer(call, Prefixes(), client)]
        assert isinstance(head, Head)
        return head, b"".join(piece for piece in pieces if isinstance(piece, bytes))

    async def _have_adapter(self) -> None:
        name, context = serve.get_multiplexed_model_id(), self._server.assembled.context
        if self._resident is None or not name or not isinstance(context, LocalContext) or name in context.model_names:
            return
        try:
            await self._resident(name)
        except InvalidRequest:
            log.info("there is no adapter %r", name)  # which the application answers

    async def _load_adapter(self, name: str) -> "LoadedAdapter":
        context = self._server.assembled.context
        assert isinstance(context, LocalContext)
        root = context.options.adapter_dir
        assert root is not None, "there are adapters to be loaded only where there is a directory of them"
        if context.adapters.get(name) is None:
            await context.adapters.load(name, Path(name), Path(root))
        return LoadedAdapter(context, name)

    async def check_health(self) -> None:
        """Raises `RuntimeError` where the engine has failed, upon which Serve replaces the replica."""
        await self._server.start()
        if not self._server.is_healthy:
            raise RuntimeError("the engine has failed")

    def record_autoscaling_stats(self) -> dict[str, float]:
        """The sequences that run and those that wait, for `by_load`."""
        context = self._server.assembled.context
        if not isinstance(context, LocalContext):
            return {}
        stats = context.engine.stats()
        return {"running": float(stats.num_running), "waiting": float(stats.num_waiting)}

    async def __del__(self) -> None:
        """Serve calls it once the replica's requests have ended, or `graceful_shutdown_timeout_s` after it was to end."""
        if self._has_server:
            await self._server.stop()


class LoadedAdapter:
    """An adapter that Serve's multiplexing keeps, and unloads when another one needs its place."""

    def __init__(self, context: LocalContext, name: str) -> None:
        self._context, self._name = context, name
        self._is_loaded = True

    def __del__(self) -> None:
        """Serve calls it to unload the adapter, and Python once more."""
        is_loaded, self._is_loaded = self._is_loaded, False
        if is_loaded and self._context.adapters.get(self._name) is not None:
            self._context.adapters.remove(self._name)
