# mypy: disable-error-code="import-untyped"
"""A server to drive: one that is running already, or a command that starts it. Its memory and its start are measured here."""

import asyncio
import os
import re
import shlex
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from benchmarks.client import BadAnswer, Client

POLL_SECONDS = 0.05
MEMORY_SECONDS = 0.5
STOP_SECONDS = 60


class TargetError(Exception):
    """A server did not start, or ended before it was stopped. The message carries the end of what it printed."""


@dataclass(slots=True)
class ProcessTree:
    """A process and all under it: their resident memory in bytes, of which what they share is counted in each, and their processor time."""

    root: psutil.Process
    peak: int = 0
    tree: list[psutil.Process] = field(default_factory=list)

    def look_for_children(self) -> None:
        with suppress(psutil.NoSuchProcess):  # it may just have ended, which the code that waits for it finds out
            self.tree = [self.root, *self.root.children(recursive=True)]

    def sample(self) -> int:
        """What is resident now in the tree as last looked at."""
        total = 0
        for process in self.tree:
            with suppress(psutil.NoSuchProcess):
                total += process.memory_info().rss
        self.peak = max(self.peak, total)
        return total

    def processor_seconds(self) -> float:
        """What the tree as last looked at has taken of all cores so far, with those of its processes that have ended."""
        total = 0.0
        for process in self.tree:
            with suppress(psutil.NoSuchProcess):
                total += sum(process.cpu_times()[:4])
        return total

    def anonymous(self) -> int:
        """What is resident now without pages of files, on Linux."""
        total = 0
        for process in self.tree:
            with suppress(OSError):
                status = Path(f"/proc/{process.pid}/status").read_text()
                total += sum(int(kilobytes) for kilobytes in re.findall(r"^Rss(?:Anon|Shmem):\s+(\d+)", status, re.MULTILINE)) * 1024
        return total

    async def watch(self) -> None:
        """Samples until cancelled. Looking for children reads all of /proc, so that is left out while a server is driven."""
        while True:
            self.sample()
            await asyncio.sleep(MEMORY_SECONDS)


@dataclass(frozen=True, slots=True)
class Target:
    """What the command line says of a server. Exactly one of `url` and `command` is given; `{port}` in a command is a free port.

    With a `checkout`, the command starts the server of that checkout of Penstock.
    """

    name: str
    url: str | None = None
    command: str | None = None
    checkout: Path | None = None
    pid: int | None = None
    model: str | None = None
    api_key: str | None = None
    extra_body: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Running:
    """A server that answers. `startup` is in seconds, from its start to the end of the first answer; None where it ran before."""

    target: Target
    client: Client
    processes: ProcessTree | None
    startup: float | None
    refused: list[str]
    version: str | None


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def split_command(command: str) -> tuple[list[str], int]:
    """The arguments of a command, and the port that they name: put for `{port}`, or found after `--port`. Raises TargetError without."""
    port = free_port()
    arguments = [argument.replace("{port}", str(port)) for argument in shlex.split(command)]
    if "{port}" in command:
        return arguments, port
    for flag, value in zip(arguments, [*arguments[1:], ""], strict=True):
        if flag == "--port" and value.isdigit():
            return arguments, int(value)
        if flag.startswith("--port="):
            return arguments, int(flag.removeprefix("--port="))
    raise TargetError(f"no port in the command; write --port {{port}} where it goes: {command}")


@dataclass(slots=True)
class Launched:
    """A process of ours. What it prints goes to `log`."""

    name: str
    process: subprocess.Popen[bytes]
    processes: ProcessTree
    started: float
    log: Path

    def check(self, deadline: float, last: Exception) -> None:
        """Raises TargetError where it has ended, or where time is up and `last` is all it answered."""
        if self.process.poll() is not None:
            raise TargetError(f"{self.name} ended with status {self.process.returncode} at its start:\n{self.tail()}")
        if time.perf_counter() > deadline:
            raise TargetError(f"{self.name} did not answer in time; last: {last!r}\n{self.tail()}")

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-3000:]

    def stop(self) -> None:
        """Asks the server to end, then ends what is left of its tree: some servers leave workers behind."""
        if self.process.poll() is None:
            self.processes.look_for_children()
            self.process.terminate()
        try:
            self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        for child in self.processes.tree[1:]:
            if child.is_running():  # compares the start time, so a process that took over the number is left alone
                child.kill()


@contextmanager
def environment_of(checkout: Path | None) -> Iterator[dict[str, str]]:
    """Environment variables with which Python's `penstock` is the package in that checkout, whatever that folder is called."""
    if checkout is None:
        yield dict(os.environ)
        return
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "penstock").symlink_to(checkout.resolve())
        yield {**os.environ, "PYTHONPATH": folder}


@contextmanager
def launched(name: str, arguments: list[str], checkout: Path | None = None) -> Iterator[Launched]:
    """In the checkout's folder, but with the program that the command names here."""
    with tempfile.NamedTemporaryFile(prefix=f"{name}-", suffix=".log") as log, environment_of(checkout) as environment:
        program = shutil.which(arguments[0])
        arguments = arguments if program is None else [os.path.abspath(program), *arguments[1:]]
        started = time.perf_counter()
        process = subprocess.Popen(arguments, cwd=checkout, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        server = Launched(name, process, ProcessTree(psutil.Process(process.pid)), started, Path(log.name))
        try:
            yield server
        finally:
            server.stop()


@asynccontextmanager
async def running(target: Target, ignore_eos: bool, start_patience: float, patience: float) -> AsyncIterator[Running]:
    """Starts the server where it has a command, waits for its first answer, and stops it in the end. Times are in seconds."""
    headers = {"Authorization": f"Bearer {target.api_key}"} if target.api_key else {}
    # Connections are not kept: a server may close one that it finds idle just as the next request goes out.
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(headers=headers, connector=connector, timeout=aiohttp.ClientTimeout(total=patience)) as session:
        if target.command is None:
            assert target.url is not None
            client = Client(session, target.url.rstrip("/").removesuffix("/v1") + "/v1", target.model or "", target.extra_body)
            if target.pid is not None and not psutil.pid_exists(target.pid):
                raise TargetError(f"{target.name}: no process has the id {target.pid}")
            processes = ProcessTree(psutil.Process(target.pid)) if target.pid is not None else None
            yield await greet(client, target, ignore_eos, processes, startup=None)
            return
        arguments, port = split_command(target.command)
        client = Client(session, f"http://127.0.0.1:{port}/v1", target.model or "", target.extra_body)
        with launched(target.name, arguments, target.checkout) as server:
            startup = await first_answer(client, server, start_patience)
            yield await greet(client, target, ignore_eos, server.processes, startup)


async def first_answer(client: Client, server: Launched, patience: float) -> float:
    """Polls the chat endpoint with a plain request. Returns the seconds from the start of the process to the end of the first answer."""
    plain = replace(client, extensions={})
    while True:
        try:
            plain.model = plain.model or await plain.first_model()
            await plain.stream(plain.body("Say a word.", 1))
        except (aiohttp.ClientError, BadAnswer, TimeoutError) as error:
            if isinstance(error, BadAnswer) and error.status == 400:  # of a model without a chat template, for example: it stays so
                raise TargetError(f"{server.name} refuses a plain request: {error}") from error
            server.check(server.started + patience, error)
        else:
            return time.perf_counter() - server.started
        server.processes.look_for_children()
        server.processes.sample()
        await asyncio.sleep(POLL_SECONDS)


async def greet(client: Client, target: Target, ignore_eos: bool, processes: ProcessTree | None, startup: float | None) -> Running:
    """Finds out what the server calls its model, and which of our fields it takes."""
    client.model = client.model or await client.first_model()
    if not ignore_eos:
        del client.extensions["ignore_eos"]
    refused = await client.agree()
    return Running(target, client, processes, startup, refused, await client.version())
