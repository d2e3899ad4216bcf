"""What the event loop has to do while the model computes, and how long what comes in has to wait for it.

    python benchmarks/loop_lag.py [--streams 1 8 32 64] [--tokens 100] [-- FLAGS OF THE SERVER]

The server runs in this process, its clients in another. For each number of streams it tells, of a time in which all streams generate: the
time of a step, how late the loop calls what is due (`lag`, looked at every millisecond), and for each step the time that the loop's thread
and the model's thread compute. The clients take time of the same cores.
"""

import argparse
import asyncio
import json
import sys
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import aiohttp
from aiohttp import web

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # of a file run by its path, only the folder is there

from benchmarks import report
from benchmarks.client import Client
from benchmarks.measurement import percentile
from benchmarks.scenarios import WordScenario
from penstock.api.app import build_app, build_runner
from penstock.assembly import assemble
from penstock.cli.flags import parse_arguments
from penstock.engine.loop import Engine
from penstock.plugins.manager import Plugins

PROMPT_TOKENS = 118
LOOK_SECONDS = 0.001


@dataclass(frozen=True, slots=True)
class Load:
    """Of one number of streams; times in microseconds."""

    streams: int
    num_steps: int
    step_us: float
    tokens_per_s: float
    lag_median_us: float
    lag_p99_us: float
    lag_worst_us: float
    loop_us: float
    model_us: float


class Window:
    """From the first step in which all streams generate to the last before one of them ends."""

    def __init__(self, engine: Engine, streams: int) -> None:
        self._engine = engine
        self._streams = streams
        self.lags: list[float] = []

    async def measure(self, num_steps: int) -> Load:
        while not self._all_generate():  # noqa: ASYNC110 - the engine has no such event
            await asyncio.sleep(LOOK_SECONDS)
        began, before = time.perf_counter(), self._engine.stats()
        loop_began, model_began = time.thread_time(), self._model_time()
        last = before.num_steps + num_steps
        while (now := self._engine.stats()).num_steps < last and self._all_generate():
            due = time.perf_counter() + LOOK_SECONDS
            await asyncio.sleep(LOOK_SECONDS)
            self.lags.append(time.perf_counter() - due)
        seconds, steps = time.perf_counter() - began, now.num_steps - before.num_steps
        loop, model = time.thread_time() - loop_began, self._model_time() - model_began
        return Load(
            streams=self._streams,
            num_steps=steps,
            step_us=seconds / steps * 1e6,
            tokens_per_s=(now.num_generation_tokens - before.num_generation_tokens) / seconds,
            lag_median_us=percentile(self.lags, 50) * 1e6,
            lag_p99_us=percentile(self.lags, 99) * 1e6,
            lag_worst_us=max(self.lags) * 1e6,
            loop_us=loop / steps * 1e6,
            model_us=model / steps * 1e6,
        )

    def _all_generate(self) -> bool:
        stats = self._engine.stats()
        return stats.num_running == self._streams and stats.num_waiting == 0

    def _model_time(self) -> float:
        """What the model's thread has computed so far; threads that help it with a product are not counted."""
        identifier = next(thread.ident for thread in threading.enumerate() if thread.name.startswith("model"))
        assert identifier is not None
        return time.clock_gettime(time.pthread_getcpuclockid(identifier))


async def measure(flags: list[str], all_streams: list[int], tokens: int) -> list[Load]:
    arguments = parse_arguments(flags)
    parsers = {"reasoning_parser": arguments.reasoning_parser, "tool_parser": arguments.tool_parser}
    context = assemble(arguments, Plugins.start(arguments.plugins, arguments.without, **parsers)).context
    assert isinstance(context.engine, Engine)
    await context.engine.start()
    runner = build_runner(build_app(context), 1.0)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    loads = []
    for streams in all_streams:
        command = [sys.executable, __file__, "--client", f"http://127.0.0.1:{port}/v1", "--streams", str(streams), "--tokens", str(tokens)]
        client = await asyncio.create_subprocess_exec(*command)
        loads.append(await Window(context.engine, streams).measure(tokens // 2))
        await client.wait()
    await runner.cleanup()
    await context.engine.stop()
    return loads


async def drive(url: str, streams: int, tokens: int) -> None:
    scenario = WordScenario(
        name="loop-lag", concurrency=streams, num_conversations=streams, prompt_tokens=PROMPT_TOKENS, output_tokens=tokens
    )
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600), connector=aiohttp.TCPConnector(limit=0)) as session:
        client = Client(session, url)
        client.model = await client.first_model()
        await asyncio.gather(*(client.stream(client.body(prompt, tokens)) for prompt in scenario.prompts(str(time.time()), streams)))


def table(loads: list[Load]) -> str:
    head = (
        f"{'streams':>7} {'steps':>6} {'step us':>8} {'tok/s':>7} {'lag p50':>8} {'lag p99':>8} {'worst':>8} {'loop us':>8} {'model us':>9}"
    )
    rows = [
        f"{load.streams:>7} {load.num_steps:>6} {load.step_us:>8.0f} {load.tokens_per_s:>7.0f} {load.lag_median_us:>8.0f}"
        f" {load.lag_p99_us:>8.0f} {load.lag_worst_us:>8.0f} {load.loop_us:>8.0f} {load.model_us:>9.0f}"
        for load in loads
    ]
    return "\n".join([head, *rows])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32, 64], metavar="N", help="at a time (default: 1 8 32 64)")
    parser.add_argument("--tokens", type=int, default=100, help="of each answer (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there")
    parser.add_argument("--client", metavar="URL", help=argparse.SUPPRESS)
    parser.add_argument("flags", nargs="*", help="of the server")
    options = parser.parse_args()
    if options.client is not None:
        asyncio.run(drive(options.client, options.streams[0], options.tokens))
        return
    loads = asyncio.run(measure(options.flags, options.streams, options.tokens))
    print(table(loads))
    if options.json is not None:
        whole = {**report.surroundings([]), "loads": [asdict(load) for load in loads]}
        options.json.write_text(json.dumps(whole, indent=2) + "\n")


if __name__ == "__main__":
    main()
