"""Drives servers beyond their capacity, and measures what is left of their throughput and of the time to the first token.

On a quiet machine, Penstock beside what is there of llama.cpp and vLLM (about 7 minutes for each server):

    python benchmarks/overload.py --restart --json benchmarks/results/overload.json \\
        --launch penstock='.venv/bin/python server.py --generation-config vllm --max-queue-time 1 --port {port}' \\
        --against llama='llama-server -m SmolLM2-135M-Instruct.Q4_1.gguf -np 32 -t 2 -c 65536 --host 127.0.0.1 --port {port}' \\
        --against vllm='env VLLM_CPU_OMP_THREADS_BIND=0-1 VLLM_CPU_KVCACHE_SPACE=4 VENV/bin/python -m vllm.entrypoints.openai.api_server \\
            --model MODEL --dtype bfloat16 --port {port}'

A server whose program is not there is left out, with a line that says so; the others are measured.

The capacity of each server is measured first, with as many requests under way as --concurrency says, each followed by the next. Then
requests arrive at random moments (a Poisson process), at 1, 2, 5 and 10 times the capacity, whether others have been answered or not, and
no refused request is sent again. Prompts have 118 tokens of the default model, answers from 64 to 192: were all as long, they would go on
ending together.

Goodput is the output tokens of whole answers per second. The time to the first token counts from the moment a request is due, of all
requests that were not refused; one that is still without a token when the load ends counts with the time it has waited by then. Requests
whose connection breaks, or whose answer is neither whole nor a refusal, have failed: they are counted apart, with the first reason, and the
run goes on. All numbers leave out the first seconds of each load (--ramp). Servers run one after another.

The load generator runs on the same cores as the server, at the same priority (nice) unless it was started at another one, and is not
pinned. The processor time that it and the server take is given apart, in seconds of one core per second.
"""

import argparse
import asyncio
import json
import os
import random
import resource
import shlex
import shutil
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import aiohttp

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # of a file run by its path, only the folder is there

from benchmarks import report
from benchmarks.client import Answer, BadAnswer, Client, has_text, read_answer
from benchmarks.load_generator import Attempt, LoadGenerator, collector_off
from benchmarks.measurement import percentile
from benchmarks.scenarios import WordScenario
from benchmarks.serve import add_servers, read_options, say
from benchmarks.target import ProcessTree, Running, Target, TargetError, running

LOADS = (1.0, 2.0, 5.0, 10.0)  # times the capacity
SCENARIO = WordScenario(name="overload", concurrency=64, num_conversations=1, prompt_tokens=118, output_tokens=128)
OUTPUT_TOKENS = (64, 192)
SETTLE_SECONDS = 2.0  # for a server to end what its clients have left, between two loads
REFUSED = (429, 503)


def is_refused(attempt: Attempt) -> bool:
    return attempt.status in REFUSED and attempt.ended is not None


def answer_of(attempt: Attempt) -> Answer | None:
    """None where it has not ended. Raises `BadAnswer` where it has, without an answer."""
    if attempt.failure is not None:
        raise BadAnswer(attempt.status or 0, attempt.failure)
    if attempt.ended is None:
        return None
    if attempt.status != 200:
        raise BadAnswer(attempt.status or 0, b"".join(piece for _, piece in attempt.recording.pieces).decode(errors="replace"))
    return read_answer(attempt.recording)


def seconds_waited(attempt: Attempt, end: float) -> float:
    """Until its first token, or until `end` without one."""
    texts = (at for at, event in attempt.recording.events() for choice in event.get("choices", ()) if has_text(choice))
    return next(texts, end) - attempt.due


@dataclass(frozen=True, slots=True)
class Window:
    """The part of a load that is measured: its attempts, those before it too, and the processor seconds that were taken meanwhile."""

    attempts: Sequence[Attempt]
    start: float
    end: float
    server_seconds: float | None
    generator_seconds: float

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(slots=True)
class Driver:
    """Sends requests to one server. Processor times are those of `processes` where the server's are known."""

    client: Client
    processes: ProcessTree | None
    seed: str
    _num_made: int = 0

    def body(self) -> bytes:
        """Of the next request, which differs from all before."""
        self._num_made += 1
        seed = f"{self.seed} {self._num_made}"
        (prompt,) = SCENARIO.prompts(seed, 1)
        return self.client.body(prompt, random.Random(seed).randint(*OUTPUT_TOKENS))

    def keep_busy(self, concurrency: int, ramp: float, seconds: float) -> Window:
        """So many requests at any time."""
        generator = self._generator()

        def requests() -> Iterator[bytes]:
            while True:
                yield generator.request(self.body())

        following = requests()
        return self._measured(generator, lambda end: generator.keep_busy(following, concurrency, end), ramp, seconds)

    def arrive(self, rate: float, ramp: float, seconds: float, chance: random.Random) -> Window:
        """So many requests per second, at random moments. They are made beforehand: the generator takes processor time from the server."""
        generator = self._generator()
        moments = [chance.expovariate(rate)]
        while moments[-1] < ramp + seconds:
            moments.append(moments[-1] + chance.expovariate(rate))
        bodies = [generator.request(self.body()) for _ in moments[:-1]]
        started = time.perf_counter()
        requests = deque((started + moment, body) for moment, body in zip(moments, bodies, strict=False))
        return self._measured(generator, lambda end: generator.arrive(requests, end), ramp, seconds)

    def _generator(self) -> LoadGenerator:
        session = self.client.session.headers
        headers = {name: session[name] for name in ("Authorization",) if name in session}
        return LoadGenerator(f"{self.client.url}/chat/completions", headers)

    def _measured(self, generator: LoadGenerator, run: Callable[[float], None], ramp: float, seconds: float) -> Window:
        """Leaves what is under way in the end."""
        if self.processes is not None:
            self.processes.look_for_children()
        start = time.perf_counter() + ramp
        try:
            with collector_off():
                run(start)
                server, own = self._processor_seconds(), time.process_time()
                run(start + seconds)
                own, server_end = time.process_time() - own, self._processor_seconds()
        finally:
            generator.close()
        taken = None if server is None or server_end is None else server_end - server
        return Window(generator.attempts, start, start + seconds, taken, own)

    def _processor_seconds(self) -> float | None:
        return None if self.processes is None else self.processes.processor_seconds()


@dataclass(frozen=True, slots=True)
class LoadResult:
    """What one load has led to, after its ramp. Rates are per second; times are in seconds, and None where there is nothing to measure.

    `failure` is the first reason why a request has failed. `server_cores` and `generator_cores` are processor seconds per second.
    """

    offered_per_s: float
    answered_per_s: float
    num_refused: int
    num_failed: int
    failure: str | None
    goodput: float
    ttft_median_s: float | None
    ttft_p99_s: float | None
    refusal_p99_s: float | None
    retry_after_median_s: float | None
    server_cores: float | None
    generator_cores: float


def result_of(window: Window) -> LoadResult:
    counted = [attempt for attempt in window.attempts if attempt.due >= window.start]
    ended: list[Answer] = []
    failed: dict[int, str] = {}
    for attempt in window.attempts:
        if is_refused(attempt):
            continue
        try:
            answer = answer_of(attempt)
        except BadAnswer as error:
            failed[id(attempt)] = str(error)
        else:
            if answer is not None and window.start <= answer.ended <= window.end:
                ended.append(answer)
    refused = [attempt for attempt in counted if is_refused(attempt)]
    accepted = [attempt for attempt in counted if not is_refused(attempt) and id(attempt) not in failed]
    times = [seconds_waited(attempt, window.end) for attempt in accepted]
    reasons = [failed[id(attempt)] for attempt in counted if id(attempt) in failed]
    return LoadResult(
        offered_per_s=len(counted) / window.seconds,
        answered_per_s=len(ended) / window.seconds,
        num_refused=len(refused),
        num_failed=len(reasons),
        failure=reasons[0] if reasons else None,
        goodput=sum(answer.output_tokens for answer in ended) / window.seconds,
        ttft_median_s=percentile_of(times, 50),
        ttft_p99_s=percentile_of(times, 99),
        refusal_p99_s=percentile_of([(attempt.ended or window.end) - attempt.due for attempt in refused], 99),
        retry_after_median_s=percentile_of([attempt.retry_after for attempt in refused if attempt.retry_after is not None], 50),
        server_cores=None if window.server_seconds is None else window.server_seconds / window.seconds,
        generator_cores=window.generator_seconds / window.seconds,
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
        return drive_running(server, options)


def drive_running(server: Running, options: argparse.Namespace) -> ServerResult:
    """Raises `BadAnswer` where it answers nothing even within its capacity."""
    target = server.target
    driver = Driver(server.client, server.processes, f"{options.seed} {target.name}")
    capacity = result_of(driver.keep_busy(options.concurrency, options.ramp, options.seconds))
    say(line("capacity", capacity, None, None))
    if not capacity.answered_per_s:
        raise BadAnswer(0, f"{target.name} answered nothing in {options.seconds:g} s; {capacity.failure or 'no answer has ended'}")
    loads: dict[float, LoadResult] = {}
    for load in options.load:
        time.sleep(SETTLE_SECONDS)
        chance = random.Random(f"{options.seed} {load}")
        loads[load] = result_of(driver.arrive(load * capacity.answered_per_s, options.ramp, options.seconds, chance))
        say(line(f"{load:g} times", loads[load], None, None))
    return ServerResult(report.without_paths(target.command or target.url or ""), server.version, capacity, loads)


HEADINGS = (
    "load",
    "offered/s",
    "answered/s",
    "refused",
    "failed",
    "goodput tok/s",
    "of the peak",
    "TTFT ms",
    "TTFT p99",
    "grown",
    "refused within ms",
    "Retry-After s",
    "server cores",
    "generator cores",
)


def line(name: str, result: LoadResult, kept: float | None, grown: float | None) -> str:
    def shown(value: float | None, scale: float = 1.0, digits: int = 1) -> str:
        return "" if value is None else f"{value * scale:.{digits}f}"

    cells = (
        name,
        shown(result.offered_per_s),
        shown(result.answered_per_s),
        str(result.num_refused),
        str(result.num_failed),
        shown(result.goodput),
        shown(kept, digits=3),
        shown(result.ttft_median_s, 1e3),
        shown(result.ttft_p99_s, 1e3),
        shown(grown, digits=2),
        shown(result.refusal_p99_s, 1e3),
        shown(result.retry_after_median_s, digits=0),
        shown(result.server_cores, digits=2),
        shown(result.generator_cores, digits=3),
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
    left_out: dict[str, str] = {}
    try:
        for target in targets:
            if (missing := missing_program(target)) is not None:
                left_out[target.name] = missing
                say(f"{target.name} is left out: {missing}")
                continue
            try:
                results[target.name] = asyncio.run(drive(target, options))
            except (BadAnswer, TargetError, aiohttp.ClientError, OSError, TimeoutError) as error:
                left_out[target.name] = str(error) or type(error).__name__
                say(f"benchmarks/overload.py: error: {left_out[target.name]}")
            else:
                print("\n".join(table(target.name, results[target.name])), flush=True)
    finally:
        if options.json is not None and results:
            whole: dict[str, Any] = surroundings | {"seed": options.seed, "generator_nice": os.nice(0), "left_out": left_out}
            whole["servers"] = {name: result.as_json() for name, result in results.items()}
            options.json.write_text(json.dumps(whole, indent=2) + "\n")
    return 0 if targets[0].name in results else 1


def missing_program(target: Target) -> str | None:
    """What is not there of the program that a server is started by; None where it is there, or the server runs already."""
    words = [] if target.command is None else shlex.split(target.command)
    if words and words[0] == "env":
        words = [word for word in words[1:] if "=" not in word]
    if not words or shutil.which(words[0], path=None) is not None:
        return None
    return f"there is no program {words[0]}"


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that servers started here are stopped then, too
    sys.exit(main())
