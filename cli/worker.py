"""`penstock worker`: another rank than 0 of a model that several processes share. It computes what rank 0 orders, and ends with that."""

import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from penstock.cli.flags import WorkerArguments
from penstock.engine.build import forward_over, least_blocks, load, release_forward
from penstock.engine.config import EngineConfig
from penstock.engine.errors import ConfigurationError
from penstock.engine.model.forward import ForwardPass
from penstock.engine.model.loader import LoadedModel
from penstock.engine.model.store import resolve_model
from penstock.engine.native.runtime import num_model_threads, prepare_loops
from penstock.engine.options import address_of
from penstock.engine.parallel.group import EXIT_SECONDS, Order, RankFailed, Ranks
from penstock.engine.parallel.rendezvous import Launch, joined
from penstock.engine.pooling.files import model_kind
from penstock.engine.system.cache import redirect_compiler_caches
from penstock.engine.system.process import end_after_parent

JOIN_SECONDS = 600.0  # for a rank 0 that is still to be started


def run_worker_command(arguments: WorkerArguments) -> int:
    host, port = address_of(arguments.join)
    launch = Launch(local_rank=arguments.local_rank, num_local=int(os.environ.get("LOCAL_WORLD_SIZE", "1")), host=host, port=port)
    return run_rank(launch, arguments.rank, arguments.model, arguments.num_threads)


def run_rank_of_torchrun() -> int:
    """In place of a server, in the processes that torchrun has started beside that of rank 0."""
    launch = Launch.of_environment()
    assert launch.rank is not None
    return run_rank(launch, launch.rank)


def run_rank(launch: Launch, rank: int, model: str | None = None, num_threads: int | None = None) -> int:
    """Returns the exit code: 0 where rank 0 has ended this one, 1 where that or another rank is lost. Raises `ConfigurationError`."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # a terminal's Ctrl-C goes to all processes: rank 0 ends them once requests have ended
    if "LOCAL_WORLD_SIZE" in os.environ:
        end_after_parent(os.getppid(), EXIT_SECONDS)
    redirect_compiler_caches()
    with joined(launch, rank, JOIN_SECONDS) as (ranks, config):
        config = replace(config, model=model or config.model, num_threads=num_threads or config.num_threads)
        try:
            directory = resolve_model(config.model, config.trust_remote_code)
            if model_kind(directory) == "pooling":
                from penstock.engine.pooling.loader import load_ready

                pooling = load_ready(directory, config, ranks)
                obey(ranks, config, pooling.device, {Order.POOL: pooling.follow})
            else:
                loaded = load(directory, config, ranks)
                obey(ranks, config, loaded.device, Follower(loaded, config).orders)
        except ConfigurationError as error:
            ranks.report(str(error))
            raise
        except RankFailed:
            return 1
        except Exception as error:
            ranks.report(f"{type(error).__name__}: {error}")
            raise
    return 0


def obey(ranks: Ranks, config: EngineConfig, device: torch.device, orders: Mapping[Order, Callable[[Tensor], object]]) -> None:
    """Carries out the orders of rank 0. Returns when that has ended."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        prepare_loops(num_model_threads(config), config.pin_threads)
    while (order := Order(int((message := ranks.receive())[0]))) is not Order.STOP:
        orders[order](message[1:])


class Follower:
    """What rank 0 has the other ranks do for a model that generates, by `orders`."""

    def __init__(self, loaded: LoadedModel, config: EngineConfig) -> None:
        self._loaded, self._config = loaded, config
        self._passes: ForwardPass | None = None
        self.orders: dict[Order, Callable[[Tensor], object]] = {
            Order.SIZE: lambda message: least_blocks(loaded, config, int(message[0])),
            Order.BUILD: self._build,
            Order.STEP: lambda message: self.passes.follow(message),
            Order.CAPTURE: self._capture,
            Order.ADAPTER: lambda message: self.passes.keep(message),
            Order.RELEASE: self._release,
        }

    @property
    def passes(self) -> ForwardPass:
        assert self._passes is not None, "rank 0 orders steps once there is a KV cache"
        return self._passes

    def _build(self, message: Tensor) -> None:
        num_blocks, has_graphs = message.tolist()
        self._passes = forward_over(self._loaded, self._config, num_blocks, has_graphs=bool(has_graphs))

    def _capture(self, message: Tensor) -> None:
        graphs = self.passes.adapted_graphs if message[0] else self.passes.graphs
        assert graphs is not None, "rank 0 has them"
        graphs.capture_next()

    def _release(self, _: Tensor) -> None:
        release_forward(self.passes)
        self._passes = None
