"""Measures servers that speak OpenAI's chat completions: one, or several in turn.

    python benchmarks/serve.py --url http://127.0.0.1:8000/v1 --pid 1234
    python benchmarks/serve.py --launch penstock='python server.py --generation-config vllm --port {port}'
    python benchmarks/serve.py --launch penstock='python server.py --port {port}' --against other=http://127.0.0.1:9000 --rounds 5

Every prompt differs from every other, in all rounds, so no server finds one in its prefix cache; only those of shared-prefix have words
in common, others in every round. All servers get the same prompts. Their lengths are in tokens of the default model; the numbers printed
are from the usage that the server reports. Sampling is greedy (`--generation-config vllm`: without the default
model's repetition penalty), and answers run to their full length (ignore_eos) where the server takes
that; elsewhere the prompt asks for a long answer, and only tokens really produced are counted. Of prose, agent, rag and code-edit, which
are like what people and programs ask, answers end where the model ends them; prose is sampled at temperature 0.8.

TTFT is the time to the first token, TPOT the time per output token after it. A ratio above 1 says that the first server is better.
"""

import argparse
import asyncio
import json
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # of a file run by its path, only the folder is there

from benchmarks import report
from benchmarks.client import BadAnswer
from benchmarks.measurement import Measurement, measure
from benchmarks.scenarios import SCENARIOS, Scenario
from benchmarks.target import Running, Target, TargetError, running


class Bench:
    """The rounds of one invocation, and what they gave so far."""

    def __init__(self, targets: list[Target], scenarios: list[Scenario], options: argparse.Namespace) -> None:
        self.targets = targets
        self.scenarios = scenarios
        self.options = options
        self.results: dict[str, dict[str, list[Measurement]]] = {
            scenario.name: {target.name: [] for target in targets} for scenario in scenarios
        }
        self.servers: dict[str, dict[str, Any]] = {target.name: {} for target in targets}

    async def run(self) -> None:
        """All servers stay up, idle while another is driven; with --restart, each is up for its turn only."""
        async with AsyncExitStack() as stack:
            standing: dict[str, Running] = {}
            for number in range(1, self.options.rounds + 1):
                for target in self.targets:
                    if self.options.restart:
                        async with self.start(target) as server:
                            await self.turn(self.meet(server), number)
                        continue
                    for other in self.targets:  # in the first round: a server that starts later would disturb the one being driven
                        if other.name not in standing:
                            standing[other.name] = self.meet(await stack.enter_async_context(self.start(other)))
                    await self.turn(standing[target.name], number)

    def start(self, target: Target) -> AbstractAsyncContextManager[Running]:
        return running(target, self.options.ignore_eos, self.options.start_timeout, self.options.timeout)

    def meet(self, server: Running) -> Running:
        target = server.target
        entry = self.servers[target.name]
        entry["started_by"] = report.without_paths(target.command or target.url or "")
        if target.checkout is not None:
            entry["commit"] = report.commit_of(target.checkout)
        entry["version"] = server.version
        entry["model"] = report.without_paths(server.client.model)
        entry["refused_fields"] = server.refused
        entry.setdefault("startup_s", []).extend([] if server.startup is None else [server.startup])
        startup = "" if server.startup is None else f", first answer after {server.startup:.2f} s"
        refused = f", refuses {', '.join(server.refused)}" if server.refused else ""
        say(f"{target.name} {server.version or ''} at {server.client.url}{startup}{refused}")
        return server

    async def turn(self, server: Running, number: int) -> None:
        say(f"round {number} of {self.options.rounds}: {server.target.name}")
        for scenario in self.scenarios:
            seed = f"{self.options.seed} {number} {scenario.name}"
            measurement = await measure(server, scenario, seed, self.options.warmup)
            self.results[scenario.name][server.target.name].append(measurement)
            say(report.line(scenario.name, server.target.name, [measurement]))

    def compared(self) -> dict[str, dict[str, list[Measurement]]]:
        """The scenarios that every server has been through at least once: all of them, unless something went wrong."""
        return {scenario: servers for scenario, servers in self.results.items() if all(servers.values())}

    def as_json(self) -> dict[str, Any]:
        return {"servers": self.servers, "scenarios": report.results_as_json(self.compared())}


def say(line: str) -> None:
    """Progress, which is not the result."""
    print(line, file=sys.stderr, flush=True)


def named(text: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not separator or not name.isidentifier() or not value:
        raise argparse.ArgumentTypeError(f"expected NAME=..., got {text!r}")
    return name, value


def maybe_named(text: str) -> tuple[str | None, str]:
    """`NAME=VALUE` or `VALUE`; what precedes a `=` is a name only if it reads like one."""
    name, separator, value = text.partition("=")
    return (name, value) if separator and name.isidentifier() else (None, text)


def target_from(name: str, place: str, options: argparse.Namespace) -> Target:
    """Takes the options that name this server, or that name none."""

    def option(values: list[tuple[str | None, str]]) -> str | None:
        return next((value for owner, value in values if owner in (None, name)), None)

    is_url = place.startswith(("http://", "https://"))
    checkout = Path(place) if Path(place).is_dir() else None
    if checkout is not None and not options.launch:
        raise ValueError("a checkout is started by the command of --launch")
    pid = option(options.pid)
    extra_body = json.loads(option(options.extra_body) or "{}")
    if not isinstance(extra_body, dict):
        raise ValueError("--extra-body needs a JSON object")
    return Target(
        name,
        url=place if is_url else None,
        command=None if is_url else options.launch[1] if checkout is not None else place,
        checkout=checkout,
        pid=int(pid) if pid is not None else None,
        model=option(options.model),
        api_key=option(options.api_key),
        extra_body=extra_body,
    )


def targets_from(options: argparse.Namespace) -> list[Target]:
    """Raises ValueError, with a message for people, where the options do not fit together."""
    places = [options.launch] if options.launch else []
    if options.url:
        name, url = maybe_named(options.url)
        places.append((name or "server", url))
    if len(places) != 1:
        raise ValueError("say which server: either --url or --launch")
    targets = [target_from(name, place, options) for name, place in [*places, *options.against]]
    names = [target.name for target in targets]
    if len(set(names)) < len(names):
        raise ValueError(f"two servers have the same name: {', '.join(names)}")
    if options.restart and any(target.command is None for target in targets):
        raise ValueError("--restart needs commands, not URLs: only what this script started can it start again")
    return targets


def read_options(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> tuple[argparse.Namespace, list[Target]]:
    """Options with a seed, the servers that they name, and a place for the results."""
    options = parser.parse_args(argv)
    if options.seed is None:
        options.seed = int(time.time())
    try:
        targets = targets_from(options)
    except ValueError as error:
        parser.error(str(error))
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)  # not to find out afterwards
    return options, targets


def scenarios_from(options: argparse.Namespace) -> list[Scenario]:
    chosen = [scenario for scenario in SCENARIOS if (scenario.name in options.scenario if options.scenario else scenario.by_default)]
    return [scenario.small() for scenario in chosen] if options.quick else chosen


def add_servers(parser: argparse.ArgumentParser) -> None:
    """The flags that say which servers to drive."""
    servers = parser.add_argument_group("servers")
    servers.add_argument("--url", metavar="[NAME=]URL", help="drive the server that runs there")
    servers.add_argument(
        "--launch",
        metavar="NAME=COMMAND",
        type=named,
        help="start this server and drive it; {port} becomes a free port, otherwise the command must have --port N; "
        "environment variables go before it by env(1): NAME='env A=1 command'. Its start-up time is from there to the first answer",
    )
    servers.add_argument(
        "--against",
        metavar="NAME=URL|COMMAND|CHECKOUT",
        type=named,
        action="append",
        default=[],
        help="another server to compare with, or another checkout of Penstock, started by the command of --launch; repeatable",
    )
    servers.add_argument("--restart", action="store_true", help="start servers for each turn of theirs, so that only one is up at a time")
    servers.add_argument("--start-timeout", type=float, default=600, metavar="SECONDS", help="(default: %(default)s)")
    per_server = parser.add_argument_group("of one server, or without NAME of all; repeatable")
    for flag, value, text in [
        ("--pid", "PID", "measure the memory of this process and all under it (known for servers started here)"),
        ("--model", "ID", "what to ask for (default: the first of /v1/models)"),
        ("--api-key", "KEY", "sent as a bearer token"),
        ("--extra-body", "JSON", "an object whose fields go into every request"),
    ]:
        per_server.add_argument(flag, metavar=f"[NAME=]{value}", type=maybe_named, action="append", default=[], help=text)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_servers(parser)
    load = parser.add_argument_group("load")
    load.add_argument(
        "--scenario",
        action="append",
        choices=[scenario.name for scenario in SCENARIOS],
        help="only this one; repeatable (default: all but "
        f"{' and '.join(scenario.name for scenario in SCENARIOS if not scenario.by_default)}, for which a server has to be started with "
        "flags of its own)",
    )
    load.add_argument("--rounds", type=int, default=3, metavar="N", help="turns of each server; medians are printed (default: %(default)s)")
    load.add_argument("--warmup", type=int, metavar="N", help="requests before each scenario (default: as many as it has at a time)")
    load.add_argument("--no-ignore-eos", dest="ignore_eos", action="store_false", help="let answers end early, on every server")
    load.add_argument("--timeout", type=float, default=600, metavar="SECONDS", help="for one request to end (default: %(default)s)")
    load.add_argument("--seed", type=int, metavar="N", help="of the prompts (default: the time, so that none was cached by an earlier run)")
    load.add_argument("--quick", action="store_true", help="a few requests and tokens of each scenario, only to see that it works")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every round's numbers, and where and when they were measured")
    return parser


def main(argv: list[str] | None = None) -> int:
    options, targets = read_options(build_parser(), argv)
    surroundings = report.surroundings([target.api_key for target in targets if target.api_key])
    bench = Bench(targets, scenarios_from(options), options)
    status = run(bench)
    if bench.compared():
        print(report.introduction(surroundings, options.seed, bench.servers))
        print("\n".join(report.table(bench.compared())))
    if options.json is not None:
        whole = surroundings | {"seed": options.seed, "rounds": options.rounds, "is_complete": status == 0} | bench.as_json()
        options.json.write_text(json.dumps(whole, indent=2) + "\n")
    return status


def run(bench: Bench) -> int:
    """The exit status: what has been measured by then is reported in any case."""
    try:
        asyncio.run(bench.run())
    except (BadAnswer, TargetError, aiohttp.ClientError, TimeoutError) as error:
        say(f"benchmarks/serve.py: error: {str(error) or type(error).__name__}")
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that servers started here are stopped then, too
    sys.exit(main())
