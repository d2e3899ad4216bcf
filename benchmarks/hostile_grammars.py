"""Measures what constraints that are meant to do harm do to the streams of others.

    python benchmarks/hostile_grammars.py
    python benchmarks/hostile_grammars.py --input 'depth 60' --repeats 5 --json results.json

A server is started, a few ordinary answers stream, one after another, and a hostile request comes. What counts is the largest gap between
two tokens of one of them while it is there, beside the largest in as long a time in which the same request comes without its constraint.
Each request is unlike all others before it, so that no cache helps. Medians over the repeats are printed; times are in milliseconds.
"""

import argparse
import asyncio
import itertools
import json
import signal
import statistics
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # of a file run by its path, only the folder is there

from benchmarks import report
from benchmarks.client import BadAnswer, Client, Recording
from benchmarks.hostile_inputs import INPUTS, HostileInput
from benchmarks.target import Target, TargetError, running

NUM_STREAMS = 3
STREAM_TOKENS = 2000
WARM_TOKENS = 8
WINDOW_SECONDS = 1.0  # at least
ANSWER_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Trial:
    """One hostile request, or several at once. `gap` and `quiet_gap` are the largest between two tokens of any ordinary stream, in ms."""

    statuses: dict[str, int]
    answer_ms: float  # until the last of them was answered
    gap: float
    quiet_gap: float
    error: str

    @property
    def excess(self) -> float:
        return self.gap - self.quiet_gap


@dataclass(slots=True)
class Stream:
    """One answer after another, so that there is one to be delayed however long the hostile request takes."""

    answers: list[Recording] = field(default_factory=list)
    is_between: bool = True  # two answers: what comes next is the next one's beginning, which is not a gap

    async def listen(self, client: Client, prompt: str) -> None:
        for turn in itertools.count():
            recording = Recording(time.perf_counter())
            self.answers.append(recording)
            body = client.body(f"{prompt} Part {turn}.", STREAM_TOKENS)
            async with client.session.post(f"{client.url}/chat/completions", data=body) as response:
                if response.status != 200:
                    raise BadAnswer(response.status, await response.text())
                async for piece in response.content.iter_any():
                    recording.pieces.append((time.perf_counter(), piece))
                    self.is_between = False
            self.is_between = True
            if not recording.pieces:
                raise BadAnswer(200, "a stream without an answer")

    def gaps(self, now: float) -> Iterator[tuple[float, float]]:
        """Between which two times nothing came, within each answer; silence that lasts until now is one, too."""
        for recording in self.answers:
            yield from itertools.pairwise(arrived for arrived, _ in recording.pieces)
        if not self.is_between:
            yield self.answers[-1].pieces[-1][0], now


@asynccontextmanager
async def streams(client: Client, number: int) -> AsyncIterator[list[Stream]]:
    """Ordinary answers under way; the last ones are broken off in the end. An error of theirs is raised."""
    under_way = [Stream() for _ in range(NUM_STREAMS)]
    tasks = [asyncio.create_task(stream.listen(client, f"Tell me story {number}-{i}.")) for i, stream in enumerate(under_way)]
    try:
        while min(sum(len(answer.pieces) for answer in stream.answers) for stream in under_way) < WARM_TOKENS:
            raise_errors(tasks)
            await asyncio.sleep(0.02)
        yield under_way
        raise_errors(tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def raise_errors(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        if task.done():
            task.result()


async def ask(client: Client, body: bytes) -> tuple[int, str]:
    async with client.session.post(f"{client.url}/chat/completions", data=body) as response:
        return response.status, await response.text()


def body(client: Client, fields: dict[str, Any]) -> bytes:
    message = {"role": "user", "content": "Say something."}
    return json.dumps({"model": client.model, "messages": [message], "max_tokens": ANSWER_TOKENS, "temperature": 0, **fields}).encode()


def largest_gap(under_way: list[Stream], start: float, stop: float, now: float) -> float:
    """In ms, of those gaps that reach into the time from `start` to `stop`. Where no answer was under way, all of it is one."""
    gaps = [later - earlier for stream in under_way for earlier, later in stream.gaps(now) if later > start and earlier < stop]
    return max(gaps, default=stop - start) * 1000


async def trial(client: Client, hostile: HostileInput, number: int) -> Trial:
    bodies = [body(client, hostile.fields(number * 1000 + i)) for i in range(hostile.num_at_once)]
    async with streams(client, number) as under_way:
        start = time.perf_counter()
        answers = await asyncio.gather(*(ask(client, one) for one in bodies))
        answered = time.perf_counter()
        await asyncio.sleep(max(0.0, WINDOW_SECONDS - (answered - start)))
        stop = time.perf_counter()
        num_served = sum(status == 200 for status, _ in answers)
        plain = body(client, {})
        await asyncio.sleep(0.1)
        quiet_start = time.perf_counter()
        await asyncio.gather(*(ask(client, plain) for _ in range(num_served)))
        await asyncio.sleep(max(0.0, stop - start - (time.perf_counter() - quiet_start)))
        quiet_stop = time.perf_counter()
        await asyncio.sleep(0.1)
        now = time.perf_counter()
    return Trial(
        statuses={str(status): count for status, count in Counter(status for status, _ in answers).items()},
        answer_ms=(answered - start) * 1000,
        gap=largest_gap(under_way, start, stop, now),
        quiet_gap=largest_gap(under_way, quiet_start, quiet_stop, now),
        error=next((message(text) for status, text in answers if status != 200), ""),
    )


def message(text: str) -> str:
    try:
        return str(json.loads(text)["error"]["message"])[:150]
    except (ValueError, KeyError, TypeError):
        return text[:150]


def line(name: str, trials: list[Trial]) -> str:
    statuses = " ".join(f"{status}x{count}" if count > 1 else status for status, count in trials[-1].statuses.items())
    columns = [statistics.median(values) for values in zip(*((t.answer_ms, t.gap, t.quiet_gap, t.excess) for t in trials), strict=True)]
    return f"{name:32} {statuses:12} " + " ".join(f"{value:9,.0f}" for value in columns) + f"  {trials[-1].error[:80]}"


def as_json(trials: list[Trial]) -> dict[str, Any]:
    medians = {key: statistics.median(getattr(one, key) for one in trials) for key in ("answer_ms", "gap", "quiet_gap", "excess")}
    return {"medians": medians, "trials": [asdict(one) for one in trials]}


async def run(options: argparse.Namespace) -> dict[str, list[Trial]]:
    inputs = [hostile for hostile in INPUTS if not options.input or hostile.name in options.input]
    results: dict[str, list[Trial]] = {hostile.name: [] for hostile in inputs}
    target = Target("penstock", command=options.launch)
    numbers = itertools.count(int(time.time()) % 100_000)
    async with running(target, True, options.start_timeout, options.timeout) as server:
        server.client.extensions.pop("stream_options", None)
        await trial(
            server.client, HostileInput("warm-up", lambda salt: {"guided_json": {"type": "object", "title": str(salt)}}), next(numbers)
        )
        for _ in range(options.repeats):
            for hostile in inputs:
                results[hostile.name].append(await trial(server.client, hostile, next(numbers)))
                print(line(hostile.name, results[hostile.name][-1:]), file=sys.stderr, flush=True)
    return results


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    here = Path(__file__).resolve().parent.parent
    parser.add_argument(
        "--launch",
        metavar="COMMAND",
        default=f"{sys.executable} {here / 'server.py'} --generation-config vllm --port {{port}}",
        help="the server",
    )
    parser.add_argument("--input", action="append", choices=[hostile.name for hostile in INPUTS], help="only this one; repeatable")
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--start-timeout", type=float, default=600, metavar="SECONDS", help="(default: %(default)s)")
    parser.add_argument("--timeout", type=float, default=60, metavar="SECONDS", help="for one request to end (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every trial's numbers, and where and when they were measured")
    return parser


def main(argv: list[str] | None = None) -> int:
    options = build_parser().parse_args(argv)
    surroundings = report.surroundings([])
    try:
        results = asyncio.run(run(options))
    except (BadAnswer, TargetError, aiohttp.ClientError, TimeoutError) as error:
        print(f"benchmarks/hostile_grammars.py: error: {str(error) or type(error).__name__}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    print(f"{'input':32} {'status':12} " + " ".join(f"{heading:>9}" for heading in ("answer", "gap", "quiet gap", "excess")))
    for name, trials in results.items():
        print(line(name, trials))
    if options.json is not None:
        whole = surroundings | {"num_streams": NUM_STREAMS, "inputs": {name: as_json(trials) for name, trials in results.items()}}
        options.json.write_text(json.dumps(whole, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the server started here is stopped then, too
    sys.exit(main())
