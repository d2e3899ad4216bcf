"""Sends thousands of mixed requests to a server and measures what it keeps of them: memory, requests, KV cache, descriptors, threads.

    python benchmarks/soak.py
    python benchmarks/soak.py --requests 2000 --concurrency 8 --json soak.json
    python benchmarks/soak.py --launch 'python server.py --model minilm --port {port}'

Chats, completions, streams, tools, schemas out of a small set and schemas that no request had before, wrong requests, clients that go; or
embeddings of many lengths, where the server does not generate. Every 500 requests the memory of its processes is printed, pages of files
left out; in the end its slope over the second half. The first half fills what is bounded: KV cache, prompt and grammar caches.

The exit status is 1 where an answer had another status than its kind of request may get, or where requests are left running.
"""

import argparse
import asyncio
import json
import random
import signal
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import aiohttp

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # of a file run by its path, only the folder is there

from benchmarks import hostile_server, report
from benchmarks.attacker import CHAT, COMPLETIONS, Attacker, Fields
from benchmarks.client import BadAnswer
from benchmarks.hostile_server import Server, serving
from benchmarks.target import TargetError

SAMPLE_REQUESTS = 500
NUM_SCHEMAS = 8
WORDS = ("wind", "over", "the", "harbour", "of", "Oslo", "is", "light", "today", "boats", "lie", "still")
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}}


@dataclass(frozen=True, slots=True)
class Kind:
    """A request that `fields(random)` make; one in `weight` of the sum of all weights is of this kind. Expected is its status."""

    name: str
    weight: int
    path: str
    fields: Callable[[random.Random], Fields]
    expected: str = "200"
    is_cut: bool = False  # its client goes before the end


def said(rng: random.Random) -> Fields:
    """A question of any length, mostly short."""
    num_words = rng.choice((3, 10, 30, 30, 100, 400))
    content = " ".join(rng.choices(WORDS, k=num_words))
    return {"messages": [{"role": "user", "content": content}], "max_tokens": rng.randint(4, 16)}


def named(number: int) -> Fields:
    """A schema of which each number has another."""
    return {"guided_json": {"type": "object", "properties": {f"p{number}": {"type": "integer"}}, "required": [f"p{number}"]}}


KINDS = [
    Kind("chat", 20, CHAT, said),
    Kind("sampled", 10, CHAT, lambda rng: said(rng) | {"temperature": 1.0, "seed": rng.randrange(99), "n": rng.randint(1, 3)}),
    Kind("stream", 20, CHAT, lambda rng: said(rng) | {"stream": True}),
    Kind("cut stream", 8, CHAT, lambda rng: said(rng) | {"stream": True, "max_tokens": 200, "ignore_eos": True}, is_cut=True),
    Kind("log probabilities", 4, CHAT, lambda rng: said(rng) | {"logprobs": True, "top_logprobs": 5}),
    Kind("completion", 8, COMPLETIONS, lambda rng: {"prompt": " ".join(rng.choices(WORDS, k=20)), "max_tokens": rng.randint(4, 16)}),
    Kind("tools", 6, CHAT, lambda rng: said(rng) | {"tools": [TOOL], "tool_choice": rng.choice(("auto", "required"))}),
    Kind("schema of a few", 8, CHAT, lambda rng: said(rng) | named(rng.randrange(NUM_SCHEMAS))),
    Kind("schema of its own", 4, CHAT, lambda rng: said(rng) | named(rng.randrange(10**9))),
    Kind("regex of its own", 2, CHAT, lambda rng: said(rng) | {"guided_regex": f"[a-z]{{1,9}}{rng.randrange(10**9)}"}),
    Kind("tokenize", 4, "/tokenize", lambda rng: {"prompt": " ".join(rng.choices(WORDS, k=200))}),
    Kind("wrong field", 4, CHAT, lambda rng: said(rng) | {"n": -rng.randrange(1, 9)}, "400"),
    Kind("unknown model", 2, CHAT, lambda rng: said(rng) | {"model": f"m{rng.randrange(10**9)}"}, "404"),
]
EMBEDDING_KINDS = [
    Kind("embedding", 8, "/v1/embeddings", lambda rng: {"input": " ".join(rng.choices(WORDS, k=rng.choice((3, 30, 200))))}),
    Kind("embeddings", 2, "/v1/embeddings", lambda rng: {"input": [" ".join(rng.choices(WORDS, k=9)) for _ in range(rng.randint(2, 16))]}),
    Kind("wrong field", 1, "/v1/embeddings", lambda rng: {"input": rng.randrange(9), "dimensions": -1}, "400"),
]


@dataclass(frozen=True, slots=True)
class Sample:
    """What the server holds after so many requests."""

    num_requests: int
    seconds: float
    memory: int
    kv_cache_usage: float
    num_under_way: int
    num_descriptors: int
    num_threads: int


def slope(samples: Sequence[Sample]) -> float:
    """Bytes per request over the second half of them, by least squares; 0 where there is no half to look at."""
    later = [sample for sample in samples if sample.num_requests * 2 >= samples[-1].num_requests]
    if len(later) < 2:
        return 0.0
    return statistics.linear_regression([sample.num_requests for sample in later], [sample.memory for sample in later]).slope


async def take(server: Server, num_requests: int, started: float) -> Sample:
    memory = server.anonymous()
    usage, under_way = await server.gauge("kv_cache_usage_perc"), await server.num_requests()
    return Sample(num_requests, time.perf_counter() - started, memory, usage, under_way, *server.num_descriptors_and_threads())


async def send(server: Server, kind: Kind, rng: random.Random) -> str:
    """The status of its answer, or `cut`."""
    attacker = Attacker(server.access, server.client.session, 0)
    body = attacker.body(kind.path, kind.fields(rng))
    if not kind.is_cut:
        return (await attacker.request("POST", kind.path, body))[0]
    headers = server.access.authorization() | {"Content-Type": "application/json"}
    async with server.client.session.post(server.access.url + kind.path, data=body, headers=headers) as response:
        if response.status == 200:
            await response.content.readany()
    return str(response.status)


async def soak(server: Server, num_requests: int, concurrency: int, seed: int) -> tuple[list[Sample], Counter[str]]:
    """Samples, and what was unexpected: `kind: status` of requests that got another than they may."""
    generates = await server.client.session.post(
        server.access.url + CHAT, json={"model": server.access.model, "messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
    )
    kinds = KINDS if generates.status == 200 else EMBEDDING_KINDS
    plan = random.Random(seed)
    order = iter([plan.choices(kinds, [kind.weight for kind in kinds])[0] for _ in range(num_requests)])
    started, num_sent, unexpected = time.perf_counter(), 0, Counter[str]()
    samples = [await take(server, 0, started)]

    async def client(number: int) -> None:
        nonlocal num_sent
        rng = random.Random(f"{seed}-{number}")
        for kind in order:
            status = await send(server, kind, rng)
            num_sent += 1
            if status != kind.expected:
                unexpected[f"{kind.name}: {status}"] += 1
            if num_sent % SAMPLE_REQUESTS == 0:
                samples.append(await take(server, num_sent, started))
                print(line(samples[-1]), flush=True)

    print(line(samples[0]), flush=True)
    await asyncio.gather(*(client(number) for number in range(concurrency)))
    unexpected.update([] if await server.is_idle() else ["requests left running"])
    samples.append(await take(server, num_sent, started))
    return samples, unexpected


def line(sample: Sample) -> str:
    return (
        f"{sample.num_requests:8,} requests {sample.seconds:7,.0f} s {sample.memory / 1e6:8,.1f} MB, KV cache {sample.kv_cache_usage:.1%}, "
        f"{sample.num_under_way} under way, {sample.num_descriptors} descriptors, {sample.num_threads} threads"
    )


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    hostile_server.add_arguments(parser)
    parser.add_argument("--requests", type=int, default=20_000, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--concurrency", type=int, default=16, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="(default: %(default)s)")
    return parser


async def run(options: argparse.Namespace) -> tuple[list[Sample], Counter[str]]:
    async with serving(options) as server:
        return await soak(server, options.requests, options.concurrency, options.seed)


def main(argv: list[str] | None = None) -> int:
    options = build_parser().parse_args(argv)
    whole: dict[str, Any] = report.surroundings(options.api_key)
    try:
        samples, unexpected = asyncio.run(run(options))
    except (BadAnswer, TargetError, aiohttp.ClientError) as error:
        print(f"benchmarks/soak.py: error: {str(error) or type(error).__name__}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    print(f"before: {line(samples[0])}\nafter:  {line(samples[-1])}\nsecond half: {slope(samples) / 1e3:+,.2f} MB per 1,000 requests")
    for what, count in unexpected.most_common():
        print(f"unexpected: {what}, {count} times")
    if options.json is not None:
        whole |= {"slope_bytes_per_request": slope(samples), "unexpected": unexpected, "samples": [asdict(sample) for sample in samples]}
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(whole, indent=2) + "\n")
    return 1 if unexpected else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the server started here is stopped then, too
    sys.exit(main())
