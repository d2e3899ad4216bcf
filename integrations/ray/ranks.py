"""The other ranks of a replica that several processes compute: actors in the further bundles of its placement group."""

import os
import socket
import subprocess
import sys
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from penstock.engine.errors import ConfigurationError

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
