"""What constraints cost: throughput with a JSON schema on every request, and compilation and masks on a file of schemas.

    python benchmarks/structured.py serve --rounds 6 --json benchmarks/results/structured.json
    python benchmarks/structured.py grammars schemas.jsonl --backend auto --backend outlines_core

`serve` starts the server and gives it the same prompts in turns: without a constraint (`free`), with one schema on every request (`schema`,
compiled before anything is measured), and with a schema of its own on every request (`distinct`, compiled while the others generate).
Every answer has the same number of tokens: without a constraint `ignore_eos` sees to that; with one, the schema asks for a list of more
items than the tokens that an answer may have, so no answer can end before it is cut off. An answer of another length is an error.
Prompts are repeated in every variant, so the server must not cache prefixes: it is started with --no-prefix-caching.

The order of the variants changes from round to round. A ratio is that of output tokens per second, a variant's over `free`'s of the same
round; their median is what counts on a machine that drifts. Items have parts that the schema fixes (`--schema records`: names of fields,
which a server may append without asking the model) or hardly any (`--schema strings`, the default: nothing is gained, only paid for).

`grammars` is `penstock grammar test` for one backend after the other: see `penstock grammar test --help` for the file and what is counted.
"""

import argparse
import asyncio
import itertools
import json
import shlex
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import aiohttp

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # of a file run by its path, only the folder is there

from benchmarks import report
from benchmarks.client import GREEDY, BadAnswer, Client, Message
from benchmarks.measurement import Measurement, measure
from benchmarks.scenarios import SCENARIOS, Scenario
from benchmarks.serve import say
from benchmarks.target import Running, Target, TargetError, running
from penstock.cli.flags import opened
from penstock.cli.grammar.arguments import parse_grammar_arguments
from penstock.cli.grammar.command import grammar_bench, trial_as_json
from penstock.cli.grammar.trial import Trial, run_trial
from penstock.engine.errors import ConfigurationError
from penstock.plugins.manager import Plugins

ROOT = Path(__file__).resolve().parent.parent
LOAD = next(scenario for scenario in SCENARIOS if scenario.name == "concurrency-8")
COMMAND = shlex.join([sys.executable, str(ROOT / "server.py"), "--generation-config", "vllm", "--no-prefix-caching", "--port"]) + " {port}"
VARIANTS = ("free", "schema", "distinct")
Fields = dict[str, Any]


def schema(items: str, min_items: int, number: int = 0) -> dict[str, Any]:
    """One that no answer of fewer than `min_items` tokens fulfils; other numbers give other schemas of the same form."""
    item: dict[str, Any] = {"type": "string", "minLength": 1}
    if items == "records":
        kinds = {"enum": ["person", "place", "thing"]}
        properties = {"name": {"type": "string", "maxLength": 30}, f"count_{number}": {"type": "integer"}, "kind": kinds}
        item = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    name = f"words_{number}"
    properties = {name: {"type": "array", "items": item, "minItems": min_items}}
    return {"type": "object", "properties": properties, "required": [name], "additionalProperties": False}


@dataclass(slots=True)
class ConstrainedClient(Client):
    """Puts what `make_fields` gives next into each request."""

    make_fields: Callable[[], Fields] = dict

    def body(self, prompt: str | Sequence[Message], output_tokens: int, fields: Mapping[str, Any] = GREEDY) -> bytes:
        body: Fields = json.loads(Client.body(self, prompt, output_tokens, fields))
        return json.dumps(body | self.make_fields()).encode()


def response_format(content: dict[str, Any]) -> Fields:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": content, "strict": True}}}


def constrained(server: Running, make_fields: Callable[[], Fields]) -> Running:
    client = server.client
    return replace(
        server, client=ConstrainedClient(client.session, client.url, client.model, client.extra_body, client.extensions, make_fields)
    )


@dataclass(slots=True)
class Load:
    """One server, its variants in turn, and what they gave: a list of rounds for each."""

    options: argparse.Namespace
    results: dict[str, list[Measurement]] = field(default_factory=lambda: {variant: [] for variant in VARIANTS})
    server: dict[str, Any] = field(default_factory=dict)
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    @property
    def scenario(self) -> Scenario:
        return (
            LOAD.small()
            if self.options.quick
            else replace(LOAD, num_conversations=self.options.requests, output_tokens=self.options.tokens)
        )

    def fields_of(self, variant: str) -> Callable[[], Fields]:
        """Every round's `distinct` schemas are new ones as well."""
        items, min_items = self.options.schema, self.scenario.output_tokens
        if variant == "free":
            return dict
        if variant == "schema":
            return lambda: response_format(schema(items, min_items))
        return lambda: response_format(schema(items, min_items, next(self._numbers)))

    async def run(self) -> None:
        target = Target("penstock", command=self.options.launch)
        async with running(target, True, self.options.start_timeout, self.options.timeout) as server:
            self.server = {"started_by": report.without_paths(self.options.launch), "version": server.version, "model": server.client.model}
            for number in range(self.options.rounds):
                for place in range(len(VARIANTS)):
                    await self.turn(server, VARIANTS[(number + place) % len(VARIANTS)], number)

    async def turn(self, server: Running, variant: str, number: int) -> None:
        driven = constrained(server, self.fields_of(variant))
        measurement = await measure(driven, self.scenario, f"{self.options.seed} {number}", None)
        expected = self.scenario.num_conversations * self.scenario.output_tokens
        if measurement.output_tokens != expected:
            raise BadAnswer(200, f"{variant}: {measurement.output_tokens} tokens instead of {expected}: not the same load")
        self.results[variant].append(measurement)
        say(report.line(f"round {number + 1}", variant, [measurement]))

    def ratios(self, variant: str) -> list[float]:
        """Output tokens per second over those of `free` in the same round."""
        pairs = zip(self.results[variant], self.results["free"], strict=False)
        return [ours.output_tokens_per_s / free.output_tokens_per_s for ours, free in pairs]

    def compared(self) -> dict[str, dict[str, list[Measurement]]]:
        free = self.results["free"]
        return {
            variant: {variant: rounds, "free": free} for variant, rounds in self.results.items() if variant != "free" and rounds and free
        }

    def as_json(self) -> dict[str, Any]:
        ratios = {
            variant: {"median": statistics.median(self.ratios(variant)), "rounds": self.ratios(variant)} for variant in self.compared()
        }
        return {"server": self.server, "ratios_to_free": ratios, "scenarios": report.results_as_json(self.compared())}


def serve(options: argparse.Namespace) -> tuple[int, dict[str, Any]]:
    """The exit status, and what has been measured by then."""
    load = Load(options)
    status = 0
    try:
        asyncio.run(load.run())
    except (BadAnswer, TargetError, aiohttp.ClientError, TimeoutError) as error:
        say(f"benchmarks/structured.py: error: {str(error) or type(error).__name__}")
        status = 1
    except KeyboardInterrupt:
        status = 130
    if load.compared():
        print("\n".join(report.table(load.compared())))
    for variant in load.compared():
        print(f"{variant}: {statistics.median(load.ratios(variant)):.3f} of the throughput without a constraint (median of the rounds)")
    return status, {"seed": options.seed, "schema": options.schema, "is_complete": status == 0} | load.as_json()


def grammars(options: argparse.Namespace) -> tuple[int, dict[str, Any]]:
    reports = []
    for backend in options.backend or ["auto"]:
        words = ["test", str(options.file), "--backend", backend, *(["--model", options.model] if options.model else [])]
        arguments = parse_grammar_arguments([*words, *(["--limit", str(options.limit)] if options.limit else [])])
        trial = Trial()
        with opened(arguments.path) as file, grammar_bench(arguments, Plugins.start()) as bench:
            name, reading = bench.backend_named(arguments.backend), arguments.additional_properties
            asyncio.run(run_trial(trial, bench, file, name, reading, is_strict=False, limit=arguments.limit))
        reports.append(trial_as_json(trial, {"file": options.file.name, "model": options.model or "default", "backend": backend}))
        say(f"{backend} done")
    print("\n".join(grammar_table(reports)))
    return 0, {"grammars": reports}


def grammar_table(reports: Sequence[dict[str, Any]]) -> Iterator[str]:
    """A line for each backend. `wrong` counts instances that an exact grammar accepts or refuses by mistake."""
    headings = ["backend", "exact", "lenient", "refused", "right", "+lenient", "wrong"]
    yield "".join(f"{heading:>14}" for heading in headings) + f"  {'compile, ms: p50 p95 p99 max':>40}  {'mask, us: p50 p99 max':>32}"
    for entry in reports:
        compiled, exact = entry["compiled"], entry["instances"]["exact"]
        wrong = exact["valid"] - exact["valid_accepted"] + exact["invalid"] - exact["invalid_refused"]
        shares = [f"{entry['right'][key]['share'] or 0:.1%}" for key in ("strictly", "with_lenient_fallback")]
        cells = [entry["backend"], *(compiled[mode] for mode in ("exact", "lenient", "refused")), *shares, wrong]
        compile_ms = times(entry["compile_ms"], ("p50", "p95", "p99", "max"))
        yield "".join(f"{cell:>14}" for cell in cells) + f"  {compile_ms:>40}  {times(entry['mask_us'], ('p50', 'p99', 'max')):>32}"


def times(entry: dict[str, float] | None, keys: Sequence[str]) -> str:
    return "-" if entry is None else " ".join(f"{entry[key]:9,.2f}" for key in keys)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    actions = parser.add_subparsers(dest="action", required=True)
    load = actions.add_parser("serve", help="throughput with and without schemas")
    load.add_argument(
        "--launch", default=COMMAND, metavar="COMMAND", help="the server; {port} becomes a free port (default: this checkout's)"
    )
    load.add_argument("--schema", choices=("strings", "records"), default="strings", help="the items of the list (default: %(default)s)")
    load.add_argument(
        "--rounds",
        type=int,
        default=6,
        metavar="N",
        help="turns of each variant; multiples of 3 let each be first as often (default: %(default)s)",
    )
    load.add_argument(
        "--requests", type=int, default=LOAD.num_conversations, metavar="N", help="per turn, 8 at a time (default: %(default)s)"
    )
    load.add_argument("--tokens", type=int, default=LOAD.output_tokens, metavar="N", help="per answer (default: %(default)s)")
    load.add_argument("--seed", type=int, metavar="N", help="of the prompts (default: the time)")
    load.add_argument("--start-timeout", type=float, default=600, metavar="SECONDS", help="(default: %(default)s)")
    load.add_argument("--timeout", type=float, default=600, metavar="SECONDS", help="for one request to end (default: %(default)s)")
    load.add_argument("--quick", action="store_true", help="a few requests and tokens, only to see that it works")
    files = actions.add_parser("grammars", help="compilation and masks on a file of schemas with instances")
    files.add_argument("file", type=Path, metavar="FILE.jsonl")
    files.add_argument("--backend", action="append", metavar="NAME", help="repeatable (default: auto)")
    files.add_argument("--model", metavar="ID|DIR|GGUF", help="whose tokenizer (default: the server's default model)")
    files.add_argument("--limit", type=int, metavar="N", help="only the first N schemas")
    for action in (load, files):
        action.add_argument("--json", type=Path, metavar="FILE", help="write every number, and where and when it was measured")
    return parser


def main(argv: list[str] | None = None) -> int:
    options = build_parser().parse_args(argv)
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)  # not to find out afterwards
    surroundings = report.surroundings([])
    try:
        if options.action == "serve":
            options.seed = int(time.time()) if options.seed is None else options.seed
            status, whole = serve(options)
        else:
            status, whole = grammars(options)
    except ConfigurationError as error:
        say(f"benchmarks/structured.py: error: {error}")
        return 2
    if options.json is not None:
        options.json.write_text(json.dumps(surroundings | whole, indent=2, ensure_ascii=False) + "\n")
    return status


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that a server started here is stopped then, too
    sys.exit(main())
