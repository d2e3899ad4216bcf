# mypy: disable-error-code="import-untyped"
"""The server under attack: started here, or one that runs; whether it is well, and what it holds."""

import argparse
import asyncio
import itertools
import re
import shlex
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import psutil

from benchmarks.attacker import Access
from benchmarks.client import BadAnswer, Client
from benchmarks.target import ProcessTree, launched, split_command

IDLE_SECONDS = 15.0
HEALTH_SECONDS = 10.0
SAMPLE_SECONDS = 0.05
KEYS = ("key-of-the-attacker", "key-of-a-neighbour")


@dataclass(frozen=True, slots=True)
class Server:
    """`client` has the key of the attacker's neighbours. Memory is known where the process is, the log where it was started here."""

    access: Access
    client: Client
    processes: ProcessTree | None
    log: Path | None

    async def is_healthy(self) -> bool:
        try:
            timeout = aiohttp.ClientTimeout(total=HEALTH_SECONDS)
            async with self.client.session.get(f"{self.access.url}/health", timeout=timeout) as response:
                return response.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False

    async def gauge(self, pattern: str) -> float:
        """The sum of the metrics whose names match."""
        async with self.client.session.get(f"{self.access.url}/metrics") as response:
            values = re.findall(rf"^penstock:(?:{pattern})(?:{{[^}}]*}})? (\S+)", await response.text(), re.MULTILINE)
        return sum(map(float, values))

    async def num_requests(self) -> int:
        """Running and waiting."""
        return int(await self.gauge("num_requests_running|num_requests_waiting"))

    async def is_idle(self) -> bool:
        """Waits for that, within bounds."""
        deadline = time.perf_counter() + IDLE_SECONDS
        while await self.num_requests():
            if time.perf_counter() > deadline:
                return False
            await asyncio.sleep(0.1)
        return True

    def anonymous(self) -> int:
        """Memory of all its processes without pages of files, in bytes; 0 where it is not known."""
        if self.processes is None:
            return 0
        self.processes.look_for_children()
        return self.processes.anonymous()

    async def watch(self, peaks: list[int]) -> None:
        """Samples memory until cancelled. Looking for children reads all of /proc, so that is done once a second."""
        for number in itertools.count():
            if self.processes is not None:
                peaks.append(self.anonymous() if number % 20 == 0 else self.processes.anonymous())
            await asyncio.sleep(SAMPLE_SECONDS)

    def num_descriptors_and_threads(self) -> tuple[int, int]:
        descriptors = threads = 0
        for process in self.processes.tree if self.processes else ():
            with suppress(psutil.Error):
                descriptors += process.num_fds()
                threads += process.num_threads()
        return descriptors, threads


def add_arguments(parser: argparse.ArgumentParser) -> None:
    here = Path(__file__).resolve().parent.parent
    parser.add_argument(
        "--launch",
        metavar="COMMAND",
        default=f"{sys.executable} {here / 'server.py'} --generation-config vllm --port {{port}}",
        help="the server; API keys are added",
    )
    parser.add_argument("--url", "--base-url", metavar="URL", help="one that is running already")
    parser.add_argument("--pid", type=int, help="with --url: whose memory to look at")
    parser.add_argument(
        "--api-key", action="append", default=[], metavar="KEY", help="the attacker's, and given again that of the other requests"
    )
    parser.add_argument("--start-timeout", type=float, default=600, metavar="SECONDS", help="(default: %(default)s)")
    parser.add_argument("--json", "--output", type=Path, metavar="FILE", help="write all numbers, and where and when they were measured")


@asynccontextmanager
async def serving(options: argparse.Namespace, flags: str = "") -> AsyncIterator[Server]:
    """The server of the command line, with these flags where it is started here. Raises TargetError where it does not start."""
    keys = tuple(options.api_key) or (() if options.url else KEYS)
    headers = {"Authorization": f"Bearer {keys[-1]}"} if keys else {}
    # Connections are not kept: a server may close one that it finds idle just as the next request goes out.
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(headers=headers, connector=connector, timeout=aiohttp.ClientTimeout(total=None)) as session:
        if options.url is not None:
            url = options.url.rstrip("/").removesuffix("/v1")
            client = Client(session, f"{url}/v1", extensions={"ignore_eos": True})
            client.model = await client.first_model()
            processes = ProcessTree(psutil.Process(options.pid)) if options.pid else None
            yield Server(Access(url, client.model, keys), client, processes, None)
            return
        arguments, port = split_command(f"{options.launch} {flags} --api-key {shlex.join(keys)}")
        client = Client(session, f"http://127.0.0.1:{port}/v1", extensions={"ignore_eos": True})
        with launched("penstock", arguments) as process:
            while not client.model:
                try:
                    client.model = await client.first_model()
                except (aiohttp.ClientError, BadAnswer) as error:
                    process.check(process.started + options.start_timeout, error)
                    await asyncio.sleep(0.1)
            yield Server(Access(f"http://127.0.0.1:{port}", client.model, keys), client, process.processes, process.log)
