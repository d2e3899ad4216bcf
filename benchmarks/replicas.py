"""Replicas on a Ray of this machine: two with one thread each beside one, and what the routers find in their caches.

    python benchmarks/replicas.py --json benchmarks/results/replicas.json [--rounds 3] [-- FLAGS OF THE SERVER]
    python benchmarks/replicas.py --page                             # writes the table of docs/scale.md from the results

Several applications, each with a long system prompt, have conversations of several turns: a prompt begins with its application's system
prompt and with the turns before it. So many clients at a time have one conversation after another, without pauses. Every run starts a Ray
of its own with `examples/ray_serve/local.py`, with empty caches.
"""

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import aiohttp

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # of a file run by its path, only the folder is there

from benchmarks import report
from benchmarks.client import GREEDY, Client, Message, Recording, read_answer
from benchmarks.measurement import percentile
from benchmarks.natural import Conversation
from benchmarks.scenarios import words
from benchmarks.simulation_page import rendered, table
from benchmarks.target import Launched, TargetError, free_port, launched
from penstock.integrations.routing import RoutingName

ROOT = Path(__file__).resolve().parent.parent
RESULT = ROOT / "benchmarks" / "results" / "replicas.json"
PAGE = ROOT / "docs" / "scale.md"
EXAMPLE = ROOT / "examples" / "ray_serve" / "local.py"
START_SECONDS, ANSWER_SECONDS, POLL_SECONDS = 600.0, 600.0, 0.2
FLAGS = [
    "--model",
    "SmolLM2-135M-Instruct",
    "--threads",
    "1",
    "--speculation",
    "none",
    "--kv-cache-memory",
    "192MiB",
    "--max-model-len",
    "2048",
]
RUNS: tuple[tuple[int, RoutingName], ...] = ((1, "prefix"), (2, "prefix"), (2, "least-loaded"), (2, "round-robin"), (2, "random"))


@dataclass(frozen=True, slots=True)
class Load:
    """The shape of the requests. A conversation is of an application that is chosen at random."""

    num_apps: int = 12
    num_conversations: int = 24
    num_turns: int = 4
    num_clients: int = 8
    app_words: int = 400
    turn_words: int = 120
    output_tokens: int = 32

    def conversations(self, seed: str) -> list[Conversation]:
        rng = random.Random(seed)
        return [
            Conversation(
                tuple(" ".join(words(self.turn_words, f"{seed} {number} {turn}")) for turn in range(self.num_turns)),
                system=" ".join(words(self.app_words, f"{seed} application {rng.randrange(self.num_apps)}")),
            )
            for number in range(self.num_conversations)
        ]


@dataclass(frozen=True, slots=True)
class Result:
    """Of one run. `cached_share` is that of the prompt tokens, and `processor_seconds` are those of Ray, its proxy and the replicas."""

    num_replicas: int
    routing: RoutingName
    num_requests: int
    seconds: float
    processor_seconds: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    ttft_median_s: float
    ttft_p99_s: float
    load_average: float

    @property
    def cached_share(self) -> float:
        return self.cached_tokens / self.prompt_tokens

    @property
    def output_tokens_per_s(self) -> float:
        return self.output_tokens / self.seconds

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "cached_share": self.cached_share, "output_tokens_per_s": self.output_tokens_per_s}


async def converse(client: Client, conversation: Conversation, load: Load) -> list[Recording]:
    """One turn after the other, each with all that was said before."""
    messages: list[Message] = [{"role": "system", "content": conversation.system or ""}]
    recordings = []
    for turn in conversation.turns:
        messages.append({"role": "user", "content": turn})
        recordings.append(await client.stream(client.body(messages, load.output_tokens, GREEDY)))
        messages.append({"role": "assistant", "content": recordings[-1].text})
    return recordings


async def have_all(client: Client, load: Load, seed: str) -> list[Recording]:
    """The conversations in their order, as many at a time as there are clients."""
    left: Iterator[Conversation] = iter(load.conversations(seed))

    async def one_client() -> list[Recording]:
        return [recording for conversation in left for recording in await converse(client, conversation, load)]

    return [recording for recordings in await asyncio.gather(*(one_client() for _ in range(load.num_clients))) for recording in recordings]


async def replicas_answer(server: Launched) -> None:
    """Returns when all replicas have loaded the model. Raises `TargetError` where they do not."""
    deadline = time.perf_counter() + START_SECONDS
    while "answer at http://" not in server.tail():
        server.check(deadline, TargetError("not all replicas have loaded the model"))
        await asyncio.sleep(POLL_SECONDS)


async def measure(num_replicas: int, routing: RoutingName, load: Load, seed: str, flags: list[str]) -> Result:
    port = free_port()
    options = ["--port", str(port), "--replicas", str(num_replicas), "--routing", routing]
    with launched("replicas", [sys.executable, str(EXAMPLE), *options, "--", *flags], ROOT) as server:
        await replicas_answer(server)
        timeout = aiohttp.ClientTimeout(total=ANSWER_SECONDS)
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
            client = Client(session, f"http://127.0.0.1:{port}/v1")
            client.model = await client.first_model()
            await have_all(client, Load(num_apps=1, num_conversations=2 * num_replicas, num_turns=1), f"{seed} warm-up")
            server.processes.look_for_children()
            load_average, before, started = (
                report.surroundings([])["load_average_before"],
                server.processes.processor_seconds(),
                time.perf_counter(),
            )
            recordings = await have_all(client, load, seed)
            seconds, processor_seconds = time.perf_counter() - started, server.processes.processor_seconds() - before
    return result_of(num_replicas, routing, recordings, seconds, processor_seconds, load_average)


def result_of(
    num_replicas: int, routing: RoutingName, recordings: list[Recording], seconds: float, processor_seconds: float, load_average: float
) -> Result:
    """Raises `BadAnswer` where an answer is not whole."""
    answers = [read_answer(recording) for recording in recordings]
    usages = [next(event["usage"] for _, event in recording.events() if event.get("usage")) for recording in recordings]
    waits = [answer.time_to_first_token for answer in answers]
    return Result(
        num_replicas,
        routing,
        len(answers),
        seconds,
        processor_seconds,
        sum(usage["prompt_tokens"] for usage in usages),
        sum((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0 for usage in usages),
        sum(answer.output_tokens for answer in answers),
        statistics.median(waits),
        percentile(waits, 99),
        load_average,
    )


def line(result: Result) -> str:
    return (
        f"{result.num_replicas:>8} {result.routing:<14} {result.num_requests:>8} {result.seconds:>7.1f} {result.processor_seconds:>11.1f}"
        f" {result.output_tokens_per_s:>9.1f} {result.cached_share:>7.1%} {result.ttft_median_s:>7.2f} / {result.ttft_p99_s:.2f}"
    )


HEAD = (
    f"{'replicas':>8} {'router':<14} {'requests':>8} {'seconds':>7} {'processor s':>11} {'tokens/s':>9} {'cached':>7} {'TTFT s':>7} / p99"
)


def rows() -> list[list[str]]:
    """Medians over the rounds of each run."""
    found: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for run in json.loads(RESULT.read_text(encoding="utf-8"))["runs"]:
        found.setdefault((run["num_replicas"], run["routing"]), []).append(run)

    def median(runs: list[dict[str, Any]], name: str) -> float:
        return statistics.median([float(run[name]) for run in runs])

    return [
        [
            str(num_replicas),
            routing,
            f"{median(runs, 'output_tokens_per_s'):.0f}",
            f"{median(runs, 'cached_share'):.0%}",
            f"{median(runs, 'ttft_median_s'):.2f} / {median(runs, 'ttft_p99_s'):.2f} s",
            f"{median(runs, 'processor_seconds'):.0f}",
        ]
        for (num_replicas, routing), runs in found.items()
    ]


HEADS = ("replicas", "router", "tokens/s", "cached", "TTFT, median / p99", "processor seconds")
TABLES = {"replicas": lambda: table(HEADS, rows())}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="each with prompts of its own (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there")
    parser.add_argument("flags", nargs="*", default=FLAGS, help=f"of each replica (default: {' '.join(FLAGS)})")
    parser.add_argument("--page", action="store_true", help="measure nothing, and write the table of docs/scale.md")
    options = parser.parse_args(argv)
    if options.page:
        PAGE.write_text(rendered(PAGE.read_text(encoding="utf-8"), TABLES), encoding="utf-8")
        return
    whole: dict[str, Any] = {**report.surroundings([]), "flags": options.flags, "load": asdict(Load()), "runs": []}
    print(HEAD, flush=True)
    for number in range(options.rounds):
        for num_replicas, routing in RUNS:
            result = asyncio.run(measure(num_replicas, routing, Load(), f"round {number}", options.flags))
            print(line(result), flush=True)
            whole["runs"].append({"round": number, **result.as_json()})
            if options.json is not None:
                options.json.write_text(json.dumps(whole, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
