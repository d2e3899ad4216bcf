"""Attacks a server, and measures how it answers, what the streams of others suffer meanwhile, and what memory it takes and keeps.

    python benchmarks/hostile.py
    python benchmarks/hostile.py --only '8 times tokenize 15 MB' --only constraints --repeats 3 --json results.json
    python benchmarks/hostile.py --url http://127.0.0.1:8000 --pid 4711 --api-key ONE --api-key OTHER

A server is started, a few ordinary answers stream, one after another, and an attack comes. Printed are the statuses of its answers; in
milliseconds, how long it took, the largest gap between two tokens of the streams while it lasted, and how much more that is than in
a quiet period as long (for constraints: one in which the same request comes without); in MB, the largest memory of the server's
processes and what they had more of afterwards, pages of files left out. Medians over the repeats. Some attacks have servers of their own,
started with other flags; those whose flags the server does not know are not run.

The exit status is 1 where an attack got another status than it may, an error of the server (5xx) that is not a 503 with Retry-After, showed
internals, changed or broke another answer, left requests running, or where /health does not answer any more.
"""

import argparse
import asyncio
import itertools
import json
import multiprocessing
import re
import shlex
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # of a file run by its path, only the folder is there

from benchmarks import hostile_attacks, hostile_server, report
from benchmarks.attacker import CHAT, Attack, Attacker, Outcome
from benchmarks.client import BadAnswer
from benchmarks.hostile_attacks import ATTACKS, POOLING
from benchmarks.hostile_server import Server, serving
from benchmarks.neighbours import largest_gap, streams
from benchmarks.target import TargetError

WINDOW_SECONDS = 1.0  # at least
MAX_QUIET_SECONDS = 10.0
MAX_LOG_BYTES = 2**20
WARM_UP = ATTACKS["path traversal in model names"]  # what is loaded with the first requests is not kept for an attack
GROUPS = {
    "bodies": hostile_attacks.BODIES,
    "constraints": hostile_attacks.CONSTRAINTS,
    "prompts": hostile_attacks.PROMPTS,
    "clients": hostile_attacks.CLIENTS,
    "embeddings": hostile_attacks.EMBEDDINGS,
}


@dataclass(frozen=True, slots=True)
class Trial:
    """One attack. `gap` and `quiet_gap` are the largest between two tokens of any ordinary stream, in ms; memory is in bytes."""

    statuses: dict[str, int]
    answer_ms: float  # until the last of its requests was answered
    gap: float
    quiet_gap: float
    peak: int
    kept: int
    error: str

    @property
    def excess(self) -> float:
        return self.gap - self.quiet_gap


def faults(log: bytes, keys: Sequence[str]) -> list[str]:
    """What must not be in a log that an attack has written."""
    found = {
        "traceback-logged": b"Traceback (most recent call last)" in log,
        "key-logged": any(key.encode() in log for key in keys),
        "control-characters-logged": b"\x1b" in log or b"\x00" in log,
        "log-flooded": len(log) > MAX_LOG_BYTES,
    }
    return [fault for fault, is_there in found.items() if is_there]


async def try_attack(server: Server, attackers: Executor, attack: Attack, number: int) -> Trial:
    """Raises TargetError where the server is gone."""
    statuses: Counter[str] = Counter()
    error, outcome = "", None
    log_start = server.log.stat().st_size if server.log else 0
    before, peaks = server.anonymous(), [server.anonymous()]
    watching = asyncio.create_task(server.watch(peaks))
    gap = quiet_gap = 0.0
    try:
        async with streams(server.client, number, attack.flags == POOLING) as under_way:
            outcome = await asyncio.get_running_loop().run_in_executor(attackers, hostile_attacks.run, attack.name, server.access, number)
            statuses += Counter(outcome.statuses)
            window, quiet_window = await both_windows(server, attack, outcome)
            now = time.perf_counter()
            gap, quiet_gap = largest_gap(under_way, *window, now), largest_gap(under_way, *quiet_window, now)
    except (BadAnswer, aiohttp.ClientError, OSError) as failure:
        statuses["stream-failed"] += 1
        error = str(failure) or type(failure).__name__
    finally:
        watching.cancel()
    if not await server.is_healthy():
        raise TargetError(f"{attack.name}: /health does not answer; {error}")
    statuses.update([] if await server.is_idle() else ["still-running"])
    if server.log:
        statuses.update(faults(server.log.read_bytes()[log_start:], server.access.keys))
    took = (outcome.ended - outcome.started) * 1000 if outcome else 0.0
    error = error or (outcome.error if outcome else "")
    return Trial(dict(statuses), took, gap, quiet_gap, max(peaks), server.anonymous() - before, error)


async def both_windows(server: Server, attack: Attack, outcome: Outcome) -> tuple[tuple[float, float], tuple[float, float]]:
    """When the attack was on, and a quiet period after it, once both are over and what came in them has arrived."""
    seconds = max(WINDOW_SECONDS, outcome.ended - outcome.started)
    await asyncio.sleep(seconds - (outcome.ended - outcome.started))
    stop = time.perf_counter()
    await asyncio.sleep(0.1)
    quiet_start = time.perf_counter()
    if attack.control is not None:
        attacker = Attacker(server.access, server.client.session, 0)
        body = attacker.body(CHAT, attack.control)
        await asyncio.gather(*(attacker.request("POST", CHAT, body) for _ in range(outcome.statuses.get("200", 0))))
    await asyncio.sleep(max(0.0, min(seconds, MAX_QUIET_SECONDS) - (time.perf_counter() - quiet_start)))
    quiet_stop = time.perf_counter()
    await asyncio.sleep(0.1)
    return (outcome.started, stop), (quiet_start, quiet_stop)


COLUMNS = {"answer": "answer_ms", "gap": "gap", "excess": "excess"}
MEMORY_COLUMNS = {"peak": "peak", "kept": "kept"}


def header() -> str:
    return f"{'attack':38} {'':4} " + " ".join(f"{heading:>8}" for heading in (*COLUMNS, *MEMORY_COLUMNS)) + "  statuses"


def median(trials: Sequence[Trial], key: str) -> float:
    return float(statistics.median(getattr(trial, key) for trial in trials))


def all_statuses(trials: Sequence[Trial]) -> Counter[str]:
    return sum((Counter(trial.statuses) for trial in trials), Counter())


def line(attack: Attack, trials: Sequence[Trial]) -> str:
    statuses = all_statuses(trials)
    unexpected = attack.unexpected(statuses)
    summary = " ".join(f"{status}x{count}" if count > 1 else status for status, count in sorted(statuses.items()))
    values = [*(median(trials, key) for key in COLUMNS.values()), *(median(trials, key) / 1e6 for key in MEMORY_COLUMNS.values())]
    verdict = f", not {' '.join(unexpected)}" if unexpected else ""
    error = f": {trials[-1].error[:80]}" if trials[-1].error else ""
    return (
        f"{attack.name:38} {'FAIL' if unexpected else 'ok':4} "
        + " ".join(f"{value:8,.0f}" for value in values)
        + f"  {summary}{verdict}{error}"
    )


def as_json(attack: Attack, trials: Sequence[Trial]) -> dict[str, Any]:
    keys = ("answer_ms", "gap", "quiet_gap", "excess", "peak", "kept")
    return {
        "expected": attack.expected.split(),
        "unexpected": attack.unexpected(all_statuses(trials)),
        "medians": {key: median(trials, key) for key in keys} if trials else {},
        "trials": [asdict(trial) for trial in trials],
    }


def known_flags(options: argparse.Namespace) -> set[str]:
    """Those that the command's --help shows; of a server that runs, only whether it has keys is known."""
    if options.url is not None:
        return {"--api-key"} if len(options.api_key) > 1 else set()
    command = [*shlex.split(options.launch.replace("{port}", "0")), "--help"]
    return set(re.findall(r"--[a-z][a-z0-9-]+", subprocess.run(command, capture_output=True, text=True, check=True).stdout))


async def run(options: argparse.Namespace, attacks: Sequence[Attack]) -> dict[str, list[Trial]]:
    """The trials of each attack that was run, as far as its server held out."""
    results: dict[str, list[Trial]] = {attack.name: [] for attack in attacks}
    numbers = itertools.count(int(time.time()) % 100_000)
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as attackers:
        for flags, with_flags in itertools.groupby(sorted(attacks, key=lambda attack: attack.flags), lambda attack: attack.flags):
            group = list(with_flags)
            async with serving(options, flags) as server:
                await try_attack(server, attackers, replace(WARM_UP, flags=flags), next(numbers))
                for _, attack in itertools.product(range(options.repeats), group):
                    try:
                        results[attack.name].append(await try_attack(server, attackers, attack, next(numbers)))
                    except (TargetError, aiohttp.ClientError, TimeoutError) as error:
                        print(f"{attack.name}: the server is gone: {error}", file=sys.stderr, flush=True)
                        break
                    print(line(attack, results[attack.name][-1:]), file=sys.stderr, flush=True)
    return results


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    hostile_server.add_arguments(parser)
    parser.add_argument("--only", action="append", choices=[*GROUPS, *ATTACKS], metavar="NAME", help="an attack or a group; repeatable")
    parser.add_argument("--list", action="store_true", help="print the names of all attacks, by group")
    parser.add_argument("--repeats", type=int, default=1, metavar="N", help="(default: %(default)s)")
    return parser


def chosen(names: Sequence[str] | None) -> list[Attack]:
    """Attacks by their names and groups, each once; all without names."""
    groups = names or list(GROUPS)
    return list({attack.name: attack for name in groups for attack in GROUPS.get(name) or [ATTACKS[name]]}.values())


def main(argv: list[str] | None = None) -> int:
    options = build_parser().parse_args(argv)
    if options.list:
        for group, attacks in GROUPS.items():
            print("\n".join([group, *(f"    {attack.name}" for attack in attacks)]))
        return 0
    surroundings = report.surroundings(options.api_key)
    try:
        flags = known_flags(options)
        attacks = [attack for attack in chosen(options.only) if flags.issuperset(attack.needed)]
        results = asyncio.run(run(options, attacks))
    except (BadAnswer, TargetError, aiohttp.ClientError, subprocess.CalledProcessError) as error:
        print(f"benchmarks/hostile.py: error: {str(error) or type(error).__name__}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    print(header())
    for attack in chosen(options.only):
        if attack not in attacks:
            print(f"{attack.name:38} not run: needs {' '.join(flag for flag in attack.needed if flag not in flags)}")
        else:
            print(line(attack, results[attack.name]) if results[attack.name] else f"{attack.name:38} FAIL: the server was gone")
    if options.json is not None:
        whole = surroundings | {"attacks": {attack.name: as_json(attack, results[attack.name]) for attack in attacks}}
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(whole, indent=2) + "\n")
    has_held = all(results[attack.name] and not attack.unexpected(all_statuses(results[attack.name])) for attack in attacks)
    return 0 if has_held else 1


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the server started here is stopped then, too
    sys.exit(main())
