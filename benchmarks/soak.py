# mypy: disable-error-code="import-untyped"
"""Sends mixed traffic to servers for half an hour, with faults among it, and measures whether anything stays behind.

    python benchmarks/soak.py --json benchmarks/results/soak.json
    python benchmarks/soak.py --minutes 10 --concurrency 6
    python benchmarks/soak.py --url http://127.0.0.1:8000 --pid PID

Two servers, of the default model with an adapter and of one for embeddings. Chats, completions, responses, messages, streams, tools,
schemas, reasoning, batches, embeddings; beside them mistakes, hostile constraints, prompts that fill the KV cache so that sequences are
preempted, clients that go, break off or read slowly; and the servers' helper processes are killed. `soak_traffic.py` has the kinds.

The time is cut into rounds. Between two of them the servers are idle, and memory, descriptors, threads, tasks and the blocks in use are
measured. The first half fills what is bounded: pages of the KV cache, caches of prompts, grammars and templates; the second half is to be
flat. Answers to some of the requests are compared with those of an idle server, as `soak_probes.py` says.

The exit status is 1 where anything is not as it has to be: a status, an answer, or what stays behind.
"""

import argparse
import asyncio
import json
import random
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # of a file run by its path, only the folder is there

from benchmarks import hostile_server, report
from benchmarks.attacker import CHAT, Attacker
from benchmarks.client import BadAnswer
from benchmarks.hostile_server import Server, serving
from benchmarks.soak_probes import Probes, chat_probes, embedding_probes
from benchmarks.soak_traffic import GENERATION, POOLING, Client, Kind
from benchmarks.target import TargetError

ROOT = Path(__file__).resolve().parent.parent
ADAPTER = ROOT / "examples" / "penstock-adapter-thinking" / "penstock_adapter_thinking"
# A small cache, so that sequences are preempted, and short deadlines, so that they pass.
FLAGS = (
    f"--plugin deepseek_r1 --adapter thinking={ADAPTER} --kv-cache-memory 36MiB --max-model-len 1536 --trust-request-chat-template "
    "--write-timeout 5 --read-timeout 5 --no-access-log --files-dir {directory}/files --response-store {directory}/responses.sqlite "
    "--kv-cache-dir {directory}/kv --kv-cache-dir-size 128MiB"
)
POOLING_FLAGS = "--model minilm --no-access-log"
WARM_UP_REQUESTS = 30
KILL_SECONDS = 20.0  # between two helper processes that are killed
SETTLE_SECONDS = 3.0  # after the last request of a round: connections close, and what was killed is reaped
MAX_GROWTH = 0.03  # of the memory, over the second half
MAX_MORE = {"num_descriptors": 4, "num_threads": 4, "num_tasks": 4}  # such as a pool that grows on demand


@dataclass(frozen=True, slots=True)
class Sample:
    """What an idle server holds, after so many requests to all servers. `grammar_cache` is a part of the memory that takes hours to reach
    its bound, and is counted by the server."""

    num_requests: int
    seconds: float
    memory: int
    grammar_cache: int
    kv_cache_usage: float
    num_requests_left: int
    num_descriptors: int
    num_threads: int
    num_tasks: int
    num_preemptions: int

    @property
    def other_memory(self) -> int:
        return self.memory - self.grammar_cache


@dataclass(slots=True)
class Soaked:
    """One server with its kinds of requests, and what was measured of it. `unexpected` are statuses as `kind: status`."""

    name: str
    server: Server
    kinds: list[Kind]
    probes: Probes
    samples: list[Sample] = field(default_factory=list)
    unexpected: Counter[str] = field(default_factory=Counter)
    sent: Counter[str] = field(default_factory=Counter)
    num_killed: int = 0

    async def client(self, seed: str, until: float) -> None:
        """Sends one request after another."""
        client = Client(self.server, random.Random(seed), self.probes)
        while time.perf_counter() < until:
            (kind,) = client.rng.choices(self.kinds, [kind.weight for kind in self.kinds])
            await self.send(kind, client)

    async def send(self, kind: Kind, client: Client) -> None:
        try:
            status = await kind.send(client)
        except (OSError, aiohttp.ClientError, TimeoutError, asyncio.IncompleteReadError) as error:
            status = type(error).__name__
        self.sent[kind.name] += 1
        if not kind.is_expected(status):
            self.unexpected[f"{kind.name}: {status}"] += 1

    async def kill_helpers(self, rng: random.Random) -> None:
        """Kills one of the server's own child processes now and then: sandboxes, xgrammar's process."""
        while self.server.processes is not None:
            await asyncio.sleep(KILL_SECONDS)
            self.server.processes.look_for_children()
            children = [child for child in self.server.processes.tree[1:] if child.ppid() == self.server.processes.root.pid]
            if children:
                with suppress(psutil.Error):
                    rng.choice(children).kill()
                    self.num_killed += 1

    async def measure(self, num_requests: int, started: float) -> None:
        if not await self.server.is_idle():
            self.unexpected["requests left running"] += 1
        await self.probes.score(Attacker(self.server.access, self.server.client.session, 0).request)
        await asyncio.sleep(SETTLE_SECONDS)
        descriptors, threads = self.own_descriptors_and_threads()
        self.samples.append(
            Sample(
                num_requests=num_requests,
                seconds=time.perf_counter() - started,
                memory=self.server.anonymous(),
                grammar_cache=int(await self.server.gauge("grammar_cache_bytes")),
                kv_cache_usage=await self.server.gauge("kv_cache_usage_perc"),
                num_requests_left=await self.server.num_requests(),
                num_descriptors=descriptors,
                num_threads=threads,
                num_tasks=int(await self.server.gauge("event_loop_tasks")),
                num_preemptions=int(await self.server.gauge("num_preemptions_total")),
            )
        )
        print(f"{self.name:10} {line(self.samples[-1])}", flush=True)

    def own_descriptors_and_threads(self) -> tuple[int, int]:
        """Without those of helper processes, which come and go."""
        if self.server.processes is None:
            return 0, 0
        root = self.server.processes.root
        return root.num_fds(), root.num_threads()

    def faults(self) -> list[str]:
        """What is not as it has to be, in words."""
        found = [f"{what}, {count} times" for what, count in self.unexpected.items()]
        if mismatches := self.probes.mismatches:
            found.append(f"{len(mismatches)} answers differ from those alone, such as {mismatches[0]}")
        if len(self.samples) < 2:
            return found
        last, middle = self.samples[-1], self.samples[len(self.samples) // 2]
        if last.kv_cache_usage or last.num_requests_left:
            found.append(f"{last.num_requests_left} requests and {last.kv_cache_usage:.2%} of the KV cache are held")
        for name, most in MAX_MORE.items():
            if (more := getattr(last, name) - getattr(middle, name)) > most:
                found.append(f"{name.removeprefix('num_')}: {more} more than after the first half")
        if (growth := slope(self.samples) * (last.seconds - middle.seconds)) > MAX_GROWTH * middle.other_memory:
            found.append(f"memory grows by {growth / 1e6:.1f} MB in the second half")
        return found


def slope(samples: Sequence[Sample]) -> float:
    """Bytes per second over the second half, without the cache of grammars, by least squares; 0 where there is no half to look at."""
    later = samples[len(samples) // 2 :]
    if len(later) < 2:
        return 0.0
    return statistics.linear_regression([sample.seconds for sample in later], [sample.other_memory for sample in later]).slope


def line(sample: Sample) -> str:
    return (
        f"{sample.seconds:6,.0f} s {sample.num_requests:8,} requests {sample.memory / 1e6:8,.1f} MB, of which "
        f"{sample.grammar_cache / 1e6:.1f} MB are grammars, KV cache {sample.kv_cache_usage:.1%}, "
        f"{sample.num_descriptors} descriptors, {sample.num_threads} threads, {sample.num_tasks} tasks"
    )


async def prepare(name: str, server: Server) -> Soaked:
    """Finds out what the server has, and asks it the probes, alone."""
    session, url = server.client.session, server.access.url
    async with session.get(f"{url}/v1/models") as response:
        models = [model["id"] for model in (await response.json())["data"]]
    has = {}
    for path in {kind.needs for kind in (*GENERATION, *POOLING)}:
        async with session.get(url + path if path.startswith("/") else url + "/health") as response:
            has[path] = path in models or (path.startswith("/") and response.status != 404)
    attacker = Attacker(server.access, session, 0)
    generates = (await attacker.request("POST", CHAT, attacker.body(CHAT, {"max_tokens": 1})))[0] == "200"
    adapters = [model for model in models if model == "thinking"]
    probes = Probes(chat_probes(server.access.model, adapters) if generates else embedding_probes(server.access.model))
    await probes.ask(attacker.request)
    kinds = GENERATION if generates else POOLING
    return Soaked(name, server, [kind for kind in kinds if not kind.needs or has[kind.needs]], probes)


async def soak(soaked: Sequence[Soaked], options: argparse.Namespace) -> None:
    """Rounds of traffic to all servers at once, with a sample of each between them."""
    started = time.perf_counter()
    seconds = options.minutes * 60 / options.rounds
    warm_up = [Client(each.server, random.Random(options.seed), each.probes) for each in soaked]
    for each, client in zip(soaked, warm_up, strict=True):
        for number in range(WARM_UP_REQUESTS):
            await each.send(each.kinds[number % len(each.kinds)], client)
        await each.measure(0, started)
    for number in range(options.rounds):
        until = time.perf_counter() + seconds
        killers = [asyncio.create_task(each.kill_helpers(random.Random(f"{options.seed}-{number}"))) for each in soaked]
        clients = [(each, client) for each in soaked for client in range(options.concurrency if each is soaked[0] else 2)]
        await asyncio.gather(*(each.client(f"{options.seed}-{number}-{client}", until) for each, client in clients))
        for killer in killers:
            killer.cancel()
        num_requests = sum(each.sent.total() for each in soaked)
        for each in soaked:
            await each.measure(num_requests, started)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    hostile_server.add_arguments(parser)
    parser.add_argument("--minutes", type=float, default=30, help="(default: %(default)s)")
    parser.add_argument(
        "--rounds", type=int, default=12, metavar="N", help="each followed by a sample of the idle servers (default: %(default)s)"
    )
    parser.add_argument("--concurrency", type=int, default=12, metavar="N", help="clients of the first server (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="(default: %(default)s)")
    parser.add_argument("--only-first", action="store_true", help="start no server for embeddings")
    return parser


async def run(options: argparse.Namespace, directory: Path) -> list[Soaked]:
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(serving(options, FLAGS.format(directory=directory)))
        soaked = [await prepare("model", first)]
        if options.url is None and not options.only_first:
            second = await stack.enter_async_context(serving(options, POOLING_FLAGS))
            soaked.append(await prepare("embeddings", second))
        await soak(soaked, options)
        for each in soaked:
            if each.server.log is not None and "Traceback" in (log := each.server.log.read_text(errors="replace")):
                each.unexpected["tracebacks in the log"] += log.count("Traceback")
                print(log[log.index("Traceback") :][:3000], file=sys.stderr)
        return soaked


def result(each: Soaked) -> dict[str, Any]:
    return {
        "server": each.name,
        "slope_bytes_per_minute": slope(each.samples) * 60,
        "num_killed_processes": each.num_killed,
        "unexpected": each.unexpected,
        "num_compared": each.probes.num_compared,
        "num_scored": each.probes.num_scored,
        "max_rounding_nats": each.probes.max_rounding,
        "mismatches": each.probes.mismatches,
        "faults": each.faults(),
        "sent": each.sent,
        "samples": [asdict(sample) for sample in each.samples],
    }


def main(argv: list[str] | None = None) -> int:
    options = build_parser().parse_args(argv)
    whole: dict[str, Any] = report.surroundings(options.api_key)
    try:
        with tempfile.TemporaryDirectory(prefix="soak-") as directory:
            soaked = asyncio.run(run(options, Path(directory)))
    except (BadAnswer, TargetError, aiohttp.ClientError) as error:
        print(f"benchmarks/soak.py: error: {str(error) or type(error).__name__}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    faults = [f"{each.name}: {fault}" for each in soaked for fault in each.faults()]
    for each in soaked:
        print(f"{each.name}: {each.sent.total():,} requests, second half {slope(each.samples) * 60 / 1e6:+.2f} MB per minute, ", end="")
        print(f"{len(each.probes.mismatches)} mismatches, {each.num_killed} helper processes killed")
    for fault in faults:
        print(f"fault: {fault}")
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(whole | {"faults": faults, "servers": [result(each) for each in soaked]}, indent=2) + "\n")
    return 1 if faults else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the servers started here are stopped then, too
    sys.exit(main())
