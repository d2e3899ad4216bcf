"""Drives servers beyond their capacity, and measures what is left of their throughput and of the time to the first token.

    python benchmarks/overload.py --launch penstock='python server.py --generation-config vllm --max-queue-time 1 --port {port}'
    python benchmarks/overload.py --launch ... --against vllm='...' --against llama='...' --json benchmarks/results/overload.json

The capacity of each server is measured first, with as many requests under way as --concurrency says, each followed by the next. Then
requests arrive at random moments (a Poisson process), at 1, 2, 5 and 10 times the capacity, whether others have been answered or not, and
no refused request is sent again. Prompts have 118 tokens of the default model, answers from 64 to 192: were all as long, they would go on
ending together.

Goodput is the output tokens of whole answers per second. The time to the first token counts from the moment a request is due, of all
requests that were not refused; one that is still without a token when the load ends counts with the time it has waited by then. Both leave
out the first seconds of each load (--ramp). Servers run one after another.
"""

import argparse
import asyncio
import json
import random
import resource
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import aiohttp

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # of a file run by its path, only the folder is there

from benchmarks import report
from benchmarks.client import BadAnswer, Client, Recording, has_text, read_answer
from benchmarks.measurement import percentile
from benchmarks.scenarios import WordScenario
from benchmarks.serve import add_servers, read_options, say
from benchmarks.target import Running, Target, TargetError, running

LOADS = (1.0, 2.0, 5.0, 10.0)  # times the capacity
SCENARIO = WordScenario(name="overload", concurrency=64, num_conversations=1, prompt_tokens=118, output_tokens=128)
OUTPUT_TOKENS = (64, 192)
SETTLE_SECONDS = 2.0  # for a server to end what its clients have left, between two loads
REFUSED = (429, 503)


@dataclass(slots=True)
class Attempt:
    """One request. Times are those of `time.perf_counter()`; `status` is None before the headers are there, `ended` before the end."""

    recording: Recording
    status: int | None = None
    ended: float | None = None
    retry_after: float | None = None

    @property
    def due(self) -> float:
        return self.recording.started

    @property
    def is_accepted(self) -> bool:
        return self.status in (200, None)

    def waited(self, end: float) -> float:
        """Until its first token, or until `end` without one."""
        texts = (at for at, event in self.recording.events() for choice in event.get("choices", ()) if has_text(choice))
        return next(texts, end) - self.due


@dataclass(slots=True)
class Driver:
    """Sends requests to one server, on connections that are used again, as those of clients' libraries are."""

    client: Client
    seed: str
    attempts: list[Attempt] = field(default_factory=list)
    started: float = 0.0  # the last load
    _num_made: int = 0

    def body(self) -> bytes:
        """Of the next request, which differs from all before."""
        self._num_made += 1
        seed = f"{self.seed} {self._num_made}"
        (prompt,) = SCENARIO.prompts(seed, 1)
        return self.client.body(prompt, random.Random(seed).randint(*OUTPUT_TOKENS))

    async def send(self, due: float, body: bytes) -> None:
        attempt, headers = Attempt(Recording(due)), {"Content-Type": "application/json"}
        self.attempts.append(attempt)
        async with self.client.session.post(f"{self.client.url}/chat/completions", data=body, headers=headers) as response:
            attempt.status = response.status
            retry_after = response.headers.get("Retry-After", "")
            attempt.retry_after = float(retry_after) if retry_after.isdigit() else None
            async for piece in response.content.iter_any():
                attempt.recording.pieces.append((time.perf_counter(), piece))
        attempt.ended = time.perf_counter()

    async def keep_busy(self, concurrency: int, seconds: float) -> list[Attempt]:
        """So many requests at any time."""

        async def follow() -> None:
            while (now := time.perf_counter()) < end:
                await self.send(now, self.body())

        self.started = time.perf_counter()
        end = self.started + seconds
        return await self._until(end, [asyncio.create_task(follow()) for _ in range(concurrency)])

    async def arrive(self, rate: float, seconds: float, chance: random.Random) -> list[Attempt]:
        """So many requests per second, at random moments. They are made beforehand: the client takes processor time from the server."""
        moments = [chance.expovariate(rate)]
        while moments[-1] < seconds:
            moments.append(moments[-1] + chance.expovariate(rate))
        requests = [(moment, self.body()) for moment in moments[:-1]]
        self.started, tasks = time.perf_counter(), list[asyncio.Task[None]]()
        for moment, body in requests:
            await asyncio.sleep(max(0.0, self.started + moment - time.perf_counter()))
            tasks.append(asyncio.create_task(self.send(self.started + moment, body)))
        return await self._until(self.started + seconds, tasks)

    async def _until(self, end: float, tasks: Sequence[asyncio.Task[None]]) -> list[Attempt]:
        """Leaves what is under way then. Raises what a request has raised before."""
        await asyncio.sleep(max(0.0, end - time.perf_counter()))
        for task in tasks:
            task.cancel()
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(outcome, Exception):
                raise outcome
        attempts, self.attempts = self.attempts, []
        return attempts


@dataclass(frozen=True, slots=True)
class LoadResult:
    """What one load has led to, after its ramp. Rates are per second; times are in seconds, and None where there is nothing to measure."""

    offered_per_s: float
    answered_per_s: float
    num_refused: int
    goodput: float
    ttft_median_s: float | None
    ttft_p99_s: float | None
    refusal_p99_s: float | None
    retry_after_median_s: float | None


def result_of(attempts: Sequence[Attempt], start: float, end: float) -> LoadResult:
    """Of the time from `start` to `end`. Raises `BadAnswer` for what is neither an answer nor a refusal."""
    answers = [read_answer(attempt.recording) for attempt in attempts if attempt.status == 200 and attempt.ended is not None]
    ended = [answer for answer in answers if start <= answer.ended <= end]
    counted = [attempt for attempt in attempts if attempt.due >= start]
    accepted = [attempt for attempt in counted if attempt.is_accepted]
    refused = [attempt for attempt in counted if attempt.status in REFUSED]
    for attempt in counted:
        if attempt.status not in (200, None, *REFUSED):
            raise BadAnswer(attempt.status or 0, b"".join(piece for _, piece in attempt.recording.pieces).decode(errors="replace"))
    times = [attempt.waited(end) for attempt in accepted]
    return LoadResult(
        offered_per_s=len(counted) / (end - start),
        answered_per_s=len(ended) / (end - start),
        num_refused=len(refused),
        goodput=sum(answer.output_tokens for answer in ended) / (end - start),
        ttft_median_s=percentile_of(times, 50),
        ttft_p99_s=percentile_of(times, 99),
        refusal_p99_s=percentile_of([(attempt.ended or end) - attempt.due for attempt in refused], 99),
        retry_after_median_s=percentile_of([attempt.retry_after for attempt in refused if attempt.retry_after is not None], 50),
    )


def percentile_of(values: Sequence[float], percent: float) -> float | None:
    return percentile(values, percent) if values else None


@dataclass(frozen=True, slots=True)
class ServerResult:
    """One server: what it answers at its capacity, with so many requests at any time, and by load, as a multiple of the capacity."""

    started_by: str
    version: str | None
    capacity: LoadResult
    loads: dict[float, LoadResult]

    @property
    def peak(self) -> float:
        return max(result.goodput for result in (self.capacity, *self.loads.values()))

    def goodput_kept(self, load: float) -> float:
        """As a share of the peak."""
        return self.loads[load].goodput / self.peak

    def ttft_grown(self, load: float) -> float | None:
        """As a multiple of the 99th percentile at the lowest load."""
        lowest, here = self.loads[min(self.loads)].ttft_p99_s, self.loads[load].ttft_p99_s
        return here / lowest if here is not None and lowest else None

    def as_json(self) -> dict[str, Any]:
        loads = {
            f"{load:g}": asdict(result) | {"goodput_kept": self.goodput_kept(load), "ttft_p99_grown": self.ttft_grown(load)}
            for load, result in self.loads.items()
        }
        return {"started_by": self.started_by, "version": self.version, "capacity": asdict(self.capacity), "loads": loads}


async def drive(target: Target, options: argparse.Namespace) -> ServerResult:
    async with running(target, options.ignore_eos, options.start_timeout, options.timeout) as server:
        say(f"{target.name} {server.version or ''} at {server.client.url}")
        async with driver_of(server, f"{options.seed} {target.name}") as driver:
            await driver.keep_busy(options.concurrency, options.ramp)
            capacity = await measured(driver, driver.keep_busy(options.concurrency, options.ramp + options.seconds), options)
            say(line("capacity", capacity, None, None))
            loads: dict[float, LoadResult] = {}
            for load in options.load:
                await asyncio.sleep(SETTLE_SECONDS)
                rate = load * capacity.answered_per_s
                arriving = driver.arrive(rate, options.ramp + options.seconds, random.Random(f"{options.seed} {load}"))
                loads[load] = await measured(driver, arriving, options)
                say(line(f"{load:g} times", loads[load], None, None))
    return ServerResult(report.without_paths(target.command or target.url or ""), server.version, capacity, loads)


async def measured(driver: Driver, loading: Awaitable[list[Attempt]], options: argparse.Namespace) -> LoadResult:
    attempts = await loading
    start = driver.started + options.ramp
    return result_of(attempts, start, start + options.seconds)


@asynccontextmanager
async def driver_of(server: Running, seed: str) -> AsyncIterator[Driver]:
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(
        headers=server.client.session.headers, connector=aiohttp.TCPConnector(limit=0), timeout=timeout
    ) as session:
        yield Driver(replace(server.client, session=session), seed)


HEADINGS = (
    "load",
    "offered/s",
    "answered/s",
    "refused",
    "goodput tok/s",
    "of the peak",
    "TTFT ms",
    "TTFT p99",
    "grown",
    "refused within ms",
    "Retry-After s",
)


def line(name: str, result: LoadResult, kept: float | None, grown: float | None) -> str:
    def shown(value: float | None, scale: float = 1.0, digits: int = 1) -> str:
        return "" if value is None else f"{value * scale:.{digits}f}"

    cells = (
        name,
        shown(result.offered_per_s),
        shown(result.answered_per_s),
        str(result.num_refused),
        shown(result.goodput),
        shown(kept, digits=3),
        shown(result.ttft_median_s, 1e3),
        shown(result.ttft_p99_s, 1e3),
        shown(grown, digits=2),
        shown(result.refusal_p99_s, 1e3),
        shown(result.retry_after_median_s, digits=0),
    )
    return f"| {' | '.join(cells)} |"


def table(name: str, result: ServerResult) -> Iterator[str]:
    yield f"\n{name} {result.version or ''}\n"
    yield f"| {' | '.join(HEADINGS)} |"
    yield f"|{'---|' * len(HEADINGS)}"
    yield line("capacity", result.capacity, result.capacity.goodput / result.peak, None)
    for load, each in result.loads.items():
        yield line(f"{load:g} times", each, result.goodput_kept(load), result.ttft_grown(load))


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_servers(parser)
    load = parser.add_argument_group("load")
    load.add_argument("--load", type=float, nargs="+", default=LOADS, metavar="N", help="times the capacity (default: 1 2 5 10)")
    load.add_argument("--concurrency", type=int, default=64, metavar="N", help="requests at a time for the capacity (default: %(default)s)")
    load.add_argument("--ramp", type=float, default=15, metavar="SECONDS", help="left out of each load (default: %(default)s)")
    load.add_argument("--seconds", type=float, default=60, metavar="SECONDS", help="measured of each load (default: %(default)s)")
    load.add_argument("--timeout", type=float, default=600, metavar="SECONDS", help="for one request to end (default: %(default)s)")
    load.add_argument("--no-ignore-eos", dest="ignore_eos", action="store_false", help="let answers end early, on every server")
    load.add_argument("--seed", type=int, metavar="N", help="of the prompts and the moments (default: the time)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers, and where and when they were measured")
    return parser


def main(argv: list[str] | None = None) -> int:
    options, targets = read_options(build_parser(), argv)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a server that refuses nothing keeps thousands of connections
    surroundings = report.surroundings([target.api_key for target in targets if target.api_key])
    results: dict[str, ServerResult] = {}
    try:
        for target in targets:
            results[target.name] = asyncio.run(drive(target, options))
            print("\n".join(table(target.name, results[target.name])), flush=True)
    except (BadAnswer, TargetError, aiohttp.ClientError, TimeoutError) as error:
        say(f"benchmarks/overload.py: error: {str(error) or type(error).__name__}")
        return 1
    finally:
        if options.json is not None and results:
            whole = surroundings | {"seed": options.seed, "servers": {name: result.as_json() for name, result in results.items()}}
            options.json.write_text(json.dumps(whole, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that servers started here are stopped then, too
    sys.exit(main())
