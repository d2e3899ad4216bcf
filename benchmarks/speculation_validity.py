# mypy: disable-error-code="import-untyped"
"""How many answers fulfil a strict JSON Schema with and without speculative decoding, 8 to 32 at a time.

    python benchmarks/speculation_validity.py --json benchmarks/results/speculation-validity.json
    python benchmarks/speculation_validity.py --against vllm='VENV/bin/vllm serve MODEL --port {port}'

The experiment of https://github.com/vllm-project/vllm/issues/44993, where 12.75 to 14.12 of 24 answers were valid with speculation and
23.25 without. Each request has a schema of its own, and a prompt with records to be copied, which are what draft tokens come from; some of
their names and values are not what the schema allows, so that drafts go wrong. Every answer that the schema permits is shorter than the
limit, as long as it has no more white space than is usual.

An answer is valid where it has ended by itself, is JSON, and fulfils the schema. Apart from those are answers that were cut off at the
limit, which a grammar that allows endless white space leads to, and requests that failed. Nothing is timed: the machine may be busy.
"""

import argparse
import asyncio
import json
import random
import re
import shlex
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import jsonschema

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # of a file run by its path, only the folder is there

from benchmarks import report
from benchmarks.client import GREEDY, BadAnswer, Client, Recording
from benchmarks.serve import say
from benchmarks.target import Running, Target, TargetError, running

ROOT = Path(__file__).resolve().parent.parent
SERVER = shlex.join([sys.executable, str(ROOT / "server.py"), "--generation-config", "vllm", "--no-access-log", "--port"]) + " {port}"
OWN = {f"penstock-{name}": f"{SERVER} --speculation {name}" for name in ("none", "ngram", "suffix")}
CONCURRENCY = (8, 16, 32)
NUM_REQUESTS = 24
MAX_TOKENS = 400
NAMES = ("name", "city", "kind", "count", "rank", "note", "size", "tags", "open", "code")
VALUES = ("apple", "river", "stone", "cloud", "lamp", "paper", "glass", "table", "garden", "bridge")


def make_request(rng: random.Random) -> tuple[str, dict[str, Any]]:
    """A prompt, and a strict schema for its answer."""
    names = rng.sample(NAMES, 5)
    properties = {name: _property(rng) for name in names}
    record = {"type": "object", "properties": properties, "required": names, "additionalProperties": False}
    number = rng.randint(1, 3)
    items = {"type": "array", "items": record, "minItems": number, "maxItems": number}
    schema = {"type": "object", "properties": {"records": items}, "required": ["records"], "additionalProperties": False}
    shown = [{name: rng.choice([*VALUES, rng.randint(0, 5000)]) for name in (*names, rng.choice(NAMES))} for _ in range(number)]
    return f"Copy these records as JSON:\n{json.dumps({'records': shown}, indent=rng.choice([None, 1]))}", schema


def _property(rng: random.Random) -> dict[str, Any]:
    match rng.randrange(5):
        case 0:
            return {"type": "string", "maxLength": 10}
        case 1:
            return {"type": "integer", "minimum": 0, "maximum": 999}
        case 2:
            return {"enum": rng.sample(VALUES, 3)}
        case 3:
            return {"type": "boolean"}
        case _:
            return {"type": "array", "items": {"enum": list(VALUES[:4])}, "maxItems": 2}


@dataclass(slots=True)
class Counts:
    """Of the answers of one server at one concurrency."""

    valid: int = 0
    invalid: int = 0
    cut_off: int = 0
    failed: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    examples: list[str] = field(default_factory=list)

    @property
    def total(self) -> int:
        return self.valid + self.invalid + self.cut_off + self.failed

    def add(self, text: str, finish_reason: str | None, schema: dict[str, Any]) -> None:
        if finish_reason == "length":
            self.cut_off += 1
        elif fault := fault_of(text, schema):
            self.invalid += 1
            self.examples.append(f"{fault}: {text}")
        else:
            self.valid += 1


def fault_of(text: str, schema: dict[str, Any]) -> str:
    """Why it is not what the schema describes; empty where it is."""
    try:
        jsonschema.validate(json.loads(text), schema)
    except (ValueError, jsonschema.ValidationError) as error:
        return str(error).partition("\n")[0]
    return ""


def finish_reason(recording: Recording) -> str | None:
    reasons = (choice.get("finish_reason") for _, event in recording.events() for choice in event.get("choices", ()))
    return next(filter(None, reasons), None)


async def drive(client: Client, concurrency: int, requests: Sequence[tuple[str, dict[str, Any]]]) -> Counts:
    """So many at a time."""
    counts, waiting = Counts(), iter(requests)
    before = await draft_tokens(client)

    async def send() -> None:
        for prompt, schema in waiting:
            form = {"type": "json_schema", "json_schema": {"name": "records", "schema": schema, "strict": True}}
            try:
                recording = await client.stream(client.body(prompt, MAX_TOKENS, {**GREEDY, "response_format": form}))
                counts.add(recording.text, finish_reason(recording), schema)
            except (BadAnswer, aiohttp.ClientError, TimeoutError) as error:
                counts.failed += 1
                counts.examples.append(f"{type(error).__name__}: {error}")

    await asyncio.gather(*(send() for _ in range(concurrency)))
    counts.draft_tokens, counts.accepted_tokens = (after - number for after, number in zip(await draft_tokens(client), before, strict=True))
    return counts


async def draft_tokens(client: Client) -> tuple[int, int]:
    """Proposed and accepted since the server's start, by its metrics."""
    async with client.session.get(client.url.removesuffix("/v1") + "/metrics") as response:
        text = await response.text()
    found = (
        re.findall(rf"^(?:penstock|vllm):spec_decode_num_{name}_tokens_total(?:{{[^}}]*}})? (\S+)", text, re.M)
        for name in ("draft", "accepted")
    )
    drafted, accepted = (int(sum(map(float, values))) for values in found)
    return drafted, accepted


async def test(target: Target, options: argparse.Namespace) -> tuple[Running, dict[int, Counts]]:
    """One server at every concurrency. All servers get the same requests."""
    results: dict[int, Counts] = {}
    async with running(target, False, options.start_timeout, options.timeout) as server:
        for concurrency in options.concurrency:
            rng = random.Random(f"{options.seed} {concurrency}")
            requests = [make_request(rng) for _ in range(options.rounds * max(NUM_REQUESTS, concurrency))]
            results[concurrency] = await drive(server.client, concurrency, requests)
            say(line(target.name, concurrency, results[concurrency]))
    return server, results


def line(name: str, concurrency: int, counts: Counts) -> str:
    share = f"{counts.valid} of {counts.total}"
    drafts = f"{counts.accepted_tokens:,} of {counts.draft_tokens:,}"
    return f"{name:20} {concurrency:>4} {share:>12} {counts.invalid:>8} {counts.cut_off:>8} {counts.failed:>8} {drafts:>18}"


def table(results: dict[str, dict[int, Counts]]) -> Iterator[str]:
    yield f"{'server':20} {'at':>4} {'valid':>12} {'invalid':>8} {'cut off':>8} {'failed':>8} {'drafts accepted':>18}"
    for name, by_concurrency in results.items():
        for concurrency, counts in by_concurrency.items():
            yield line(name, concurrency, counts)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--launch",
        action="append",
        metavar="NAME=COMMAND",
        help="a server, in place of this checkout's without speculation, with n-grams and with suffixes; {port} becomes a free port",
    )
    parser.add_argument("--against", action="append", default=[], metavar="NAME=COMMAND", help="another server; repeatable")
    parser.add_argument("--concurrency", type=int, nargs="+", default=CONCURRENCY, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=2, metavar="N", help="of 24 requests, or of as many as run at once (default: 2)")
    parser.add_argument("--seed", type=int, default=0, help="of prompts and schemas (default: %(default)s)")
    parser.add_argument("--start-timeout", type=float, default=600, metavar="SECONDS", help="(default: %(default)s)")
    parser.add_argument("--timeout", type=float, default=600, metavar="SECONDS", help="for one request to end (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the counts, and where they are from")
    return parser


def main(argv: list[str] | None = None) -> int:
    options = build_parser().parse_args(argv)
    whole: dict[str, Any] = report.surroundings([]) | {"seed": options.seed, "max_tokens": MAX_TOKENS, "servers": {}}
    commands = dict(entry.split("=", 1) for entry in options.launch) if options.launch else OWN
    commands |= dict(entry.split("=", 1) for entry in options.against)
    results: dict[str, dict[int, Counts]] = {}
    status = 0
    for name, command in commands.items():
        try:
            server, results[name] = asyncio.run(test(Target(name, command=command), options))
        except (BadAnswer, TargetError, aiohttp.ClientError, TimeoutError) as error:
            say(f"benchmarks/speculation_validity.py: error: {name}: {error}")
            status = 1
            continue
        whole["servers"][name] = {
            "started_by": report.without_paths(command),
            "version": server.version,
            "model": Path(server.client.model).name,
            "at": {concurrency: asdict(counts) for concurrency, counts in results[name].items()},
        }
        if options.json is not None:
            options.json.parent.mkdir(parents=True, exist_ok=True)
            options.json.write_text(json.dumps(whole, indent=2, ensure_ascii=False) + "\n")
    print("\n".join(table(results)))
    return status


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that a server started here is stopped then, too
    sys.exit(main())
