"""How the ranks of a model find each other: started by rank 0, by torchrun, or by hand on other machines.

They meet at rank 0's store (`torch.distributed.TCPStore`), where the others learn what is to be computed. Nothing of it is authenticated or
encrypted, so it belongs on a network of these machines alone.
"""

import contextlib
import importlib.metadata
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING

import msgspec
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from penstock import __version__
from penstock.engine.config import EngineConfig
from penstock.engine.errors import ConfigurationError
from penstock.engine.native.runtime import num_model_threads
from penstock.engine.options import address_of
from penstock.engine.parallel.group import ALONE, Channel, Group, RankFailed, Ranks, end
from penstock.engine.parallel.sharding import check_model, check_options

if TYPE_CHECKING:
    from transformers import PretrainedConfig

LOCAL = "127.0.0.1"
MEETING = "penstock/meeting"
HELLO_SECONDS, MAX_HELLO = 10.0, 64  # for what a connection says first, in bytes
COLLECTIVE_SECONDS = 600.0  # for a rank that is alive and does not answer, such as one that compiles kernels
BACKEND = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}


class Meeting(msgspec.Struct):
    """What the others learn from rank 0 before they join: where it listens, and what is to be computed, by which versions."""

    port: int
    size: int
    device_type: str
    versions: dict[str, str]
    config: EngineConfig


@dataclass(frozen=True, slots=True)
class Launch:
    """How this process was started among others: by torchrun, with its variables, where there is a `rank`."""

    rank: int | None = None
    size: int = 1
    local_rank: int = 0
    num_local: int = 1
    host: str = LOCAL
    port: int = 0
    has_store: bool = False  # torchrun serves one

    @classmethod
    def of_environment(cls) -> "Launch":
        given = os.environ
        if "TORCHELASTIC_RUN_ID" not in given:
            return cls()
        return cls(
            rank=int(given["RANK"]),
            size=int(given["WORLD_SIZE"]),
            local_rank=int(given["LOCAL_RANK"]),
            num_local=int(given["LOCAL_WORLD_SIZE"]),
            host=given["MASTER_ADDR"],
            port=int(given["MASTER_PORT"]),
            has_store=given.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        )

    def store(self, *, is_leader: bool, seconds: float) -> tuple[Store, int]:
        """The ranks' store, and its port. Raises `ConfigurationError` where the address cannot be taken, or nothing answers there."""
        is_master = is_leader and not self.has_store
        try:
            # By itself a store listens on every interface of the machine.
            listener = _listener(self.host, self.port) if is_master else None
            whole = TCPStore(
                self.host,
                self.port if listener is None else listener.getsockname()[1],
                is_master=is_master,
                timeout=timedelta(seconds=seconds),
                wait_for_workers=False,
                master_listen_fd=None if listener is None else listener.detach(),
            )
        except (OSError, RuntimeError, ValueError) as error:
            what = "cannot be taken" if is_leader else "has no rank 0"
            raise ConfigurationError(f"the address of the ranks, {self.host}:{self.port}, {what}: {_first_line(error)}") from error
        restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        return PrefixStore(f"penstock/{restart}", whole), whole.port


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _versions() -> dict[str, str]:
    return {"penstock": __version__} | {name: importlib.metadata.version(name) for name in ("torch", "transformers")}


def device_of(device_type: str, local_rank: int) -> str:
    """Raises `ConfigurationError` where there are too few."""
    if device_type != "cuda":
        return device_type
    if local_rank >= torch.cuda.device_count():
        raise ConfigurationError(f"rank {local_rank} of this machine has no GPU: torch sees {torch.cuda.device_count()}")
    return f"cuda:{local_rank}"


def own_config(config: EngineConfig, device_type: str, local_rank: int, num_local: int) -> EngineConfig:
    """The options of one rank of those on this machine, which share its CPUs."""
    return replace(
        config,
        device=device_of(device_type, local_rank),
        num_threads=config.num_threads or max(1, num_model_threads(config) // num_local),
        pin_threads="off" if config.pin_threads == "auto" else config.pin_threads,  # each rank would choose the same CPUs
    )


def lead(config: EngineConfig, device_type: str) -> tuple[Ranks, EngineConfig]:
    """Makes this process rank 0, and waits until all others have joined. Returns its own options as well.

    It starts them itself, unless torchrun has, or the options say where others join. Raises `ConfigurationError`, which names the ranks
    that are missing after the time for that.
    """
    size, launch = config.num_ranks, Launch.of_environment()
    if device_type == "cpu" and torch.cuda.is_available():
        raise ConfigurationError("--device cpu: transformers shares a model among a machine's GPUs; hide them with CUDA_VISIBLE_DEVICES=''")
    if dist.is_initialized():
        raise ConfigurationError("this process has ranks already, of another model")
    starts_all = launch.rank is None and config.distributed_address is None
    if launch.rank is None:
        host, port = address_of(config.distributed_address) if config.distributed_address else (LOCAL, 0)
        launch = Launch(rank=0, size=size, num_local=size if starts_all else 1, host=host, port=port)
    if launch.host in (LOCAL, "localhost"):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # else gloo goes by the machine's name, which may lead elsewhere
    own = own_config(config, device_type, launch.local_rank, launch.num_local)
    if starts_all:
        device_of(device_type, size - 1)
    with contextlib.ExitStack() as on_failure:
        listener = on_failure.enter_context(_listener(launch.host))
        store, port = launch.store(is_leader=True, seconds=config.distributed_timeout)
        meeting = Meeting(listener.getsockname()[1], size, device_type, _versions(), config)
        store.set(MEETING, msgspec.json.encode(meeting).decode())
        processes: dict[int, subprocess.Popen[bytes]] = {}
        on_failure.callback(_end_all, processes)
        if starts_all:
            address = f"{LOCAL}:{port}"
            for rank in range(1, size):
                processes[rank] = _start(address, rank, size)
        channels = _joined(listener, size, processes, config.distributed_timeout)
        listener.close()
        _unite(store, 0, size, device_type)
        on_failure.pop_all()
    return Ranks(0, size, channels, processes), own


def _listener(host: str, port: int = 0) -> socket.socket:
    return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)


def _start(address: str, rank: int, size: int) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-P", "-m", "penstock.server", "worker", "--join", address, "--rank", str(rank)]
    environment = os.environ | {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(size)}  # as torchrun has them
    return subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)


def _end_all(processes: dict[int, "subprocess.Popen[bytes]"]) -> None:
    for process in processes.values():
        process.kill()
    for process in processes.values():
        end(process)


def _joined(listener: socket.socket, size: int, processes: dict[int, "subprocess.Popen[bytes]"], seconds: float) -> dict[int, Channel]:
    """Raises `ConfigurationError` for ranks that have not joined by then, or have ended."""
    channels: dict[int, Channel] = {}
    deadline = time.monotonic() + seconds
    while missing := [rank for rank in range(1, size) if rank not in channels]:
        for rank in missing:
            if rank in processes and processes[rank].poll() is not None:
                raise ConfigurationError(f"rank {rank} has ended before it joined, with exit code {processes[rank].returncode}")
        if time.monotonic() > deadline:
            named = f"rank {missing[0]} has" if len(missing) == 1 else f"ranks {', '.join(map(str, missing))} have"
            raise ConfigurationError(f"{named} not joined within {seconds:g} s (--distributed-timeout)")
        if select.select([listener], [], [], 0.1)[0]:
            _welcome(listener.accept()[0], missing, channels)
    return channels


def _welcome(connection: socket.socket, missing: list[int], channels: dict[int, Channel]) -> None:
    """Takes a rank that is missing; anything else that connects gets the reason why not."""
    channel = Channel(connection)
    connection.settimeout(HELLO_SECONDS)
    try:
        hello = channel.receive(MAX_HELLO).decode()
        rank = int(hello)
        answer = "" if rank in missing else f"rank {rank} is not missing: it has joined, or there is no such rank"
        channel.send(answer.encode())
    except (EOFError, OSError, ValueError):
        channel.close()
        return
    if answer:
        channel.close()
    else:
        connection.setblocking(True)
        channels[rank] = channel


def _unite(store: Store, rank: int, size: int, device_type: str) -> None:
    """Makes torch.distributed's default group of all ranks."""
    timeout = timedelta(seconds=COLLECTIVE_SECONDS)
    group = PrefixStore("group", store)
    dist.init_process_group(BACKEND[device_type], store=group, rank=rank, world_size=size, timeout=timeout)


@contextlib.contextmanager
def leading(config: EngineConfig, model_config: Callable[[], "PretrainedConfig"]) -> Iterator[tuple[Group, EngineConfig]]:
    """The ranks of the model and this one's options; within the context the model is loaded, and an error ends the others.

    Raises `ConfigurationError` for options, or models, that several ranks cannot share, before any is started.
    """
    check_options(config)
    launch = Launch.of_environment()
    if launch.rank:
        raise ConfigurationError(f"this process is rank {launch.rank} of torchrun's, and only rank 0 answers: run server.py in all of them")
    if launch.size not in (1, config.num_ranks):
        raise ConfigurationError(f"torchrun has started {launch.size} processes, and the model is for {config.num_ranks} ranks")
    if config.num_ranks == 1:
        yield ALONE, config
        return
    check_model(model_config(), config)
    ranks, own = lead(config, resolve_device_type(config.device))
    try:
        yield ranks, own
    except RankFailed as error:
        ranks.close()
        raise ConfigurationError(f"{error}") from error
    except BaseException:
        ranks.close()
        raise


def resolve_device_type(device: str) -> str:
    return "cuda" if device.startswith("cuda") or (device == "auto" and torch.cuda.is_available()) else "cpu"


@contextlib.contextmanager
def joined(launch: Launch, rank: int, seconds: float) -> Iterator[tuple[Ranks, EngineConfig]]:
    """This process as another rank than 0, with its options. Raises `ConfigurationError` where it cannot join."""
    if launch.host in (LOCAL, "localhost"):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store, _ = launch.store(is_leader=False, seconds=seconds)
    try:
        store.wait([MEETING], timedelta(seconds=seconds))
    except RuntimeError as error:
        raise ConfigurationError(
            f"rank 0 has not said at {launch.host}:{launch.port} within {seconds:g} s what is to be computed"
        ) from error
    meeting = msgspec.json.decode(store.get(MEETING), type=Meeting)
    if meeting.versions != _versions():
        raise ConfigurationError(f"rank 0 has {_listed(meeting.versions)}, and this process {_listed(_versions())}")
    try:
        channel = Channel(socket.create_connection((launch.host, meeting.port), HELLO_SECONDS))
        channel.send(str(rank).encode())
        answer = channel.receive().decode()
    except (OSError, EOFError) as error:
        raise ConfigurationError(f"rank 0 cannot be reached at {launch.host}:{meeting.port}: {error}") from error
    if answer:
        raise ConfigurationError(answer)
    own = own_config(meeting.config, meeting.device_type, launch.local_rank, launch.num_local)
    os.environ["LOCAL_RANK"] = str(launch.local_rank)  # by which transformers goes
    _unite(store, rank, meeting.size, meeting.device_type)
    ranks = Ranks(rank, meeting.size, {0: channel}, {})
    try:
        yield ranks, own
    finally:
        ranks.close()


def _listed(versions: dict[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items())
