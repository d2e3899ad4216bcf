"""Plans for more replicas than this machine has: goodput, cache hits by router and the cost of a drain, on a simulated clock.

    python benchmarks/simulate.py                        # all parts, about half an hour of one processor
    python benchmarks/simulate.py --only rates drain     # some of them
    python benchmarks/simulation_page.py                 # writes docs/planning.md's tables and plots from the results

Each part writes `benchmarks/results/simulation-PART.json`. See docs/planning.md for what is simulated, and what is not.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.report import surroundings
from benchmarks.simulation import SHAPE, STEP_TIMES, Drain, Measured, Simulation, StepTime, Summary
from benchmarks.simulation_traffic import PUBLISHED, Shape, statistics_of
from penstock.integrations.routing import CAPACITY, ROUTING_NAMES, RoutingName

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
TTFT_BOUND, TPOT_BOUND = 2.0, 0.05  # seconds
RATE = 2.0  # requests a second and replica
DEVICE = "h100-8b"
SECONDS = 100.0  # of the clock
MAIN: tuple[RoutingName, ...] = ("prefix", "least-loaded")
CPU_SHAPE = replace(SHAPE, mean_app_tokens=250, mean_first_tokens=1100, mean_next_tokens=600, mean_output_tokens=91, max_tokens=8000)
CPU_RATE, CPU_TTFT_BOUND = 0.25, 10.0


def simulate(
    step_time: StepTime,
    num_replicas: int,
    routing: RoutingName,
    rate: float,
    seconds: float,
    *,
    shape: Shape = SHAPE,
    drain: Drain | None = None,
    router_capacity: int = CAPACITY,
    ttft_bound: float = TTFT_BOUND,
) -> dict[str, Any]:
    """So many seconds of the clock, by the number of requests that come in them."""
    started = time.process_time()
    simulation = Simulation(step_time, num_replicas, routing, rate, shape=shape, drain=drain, router_capacity=router_capacity)
    outcome = simulation.run(int(rate * num_replicas * seconds))
    summary = Summary.of(outcome, num_replicas, ttft_bound=ttft_bound, tpot_bound=TPOT_BOUND)
    found = {
        "replicas": num_replicas,
        "routing": routing,
        "rate": rate,
        "router_capacity": router_capacity,
        **asdict(summary),
        "simulated_seconds": outcome.seconds,
        "tokens_computed": outcome.num_tokens,
        "processor_seconds": time.process_time() - started,
        "drain_seconds": outcome.drain_seconds,
    }
    print({name: round(value, 3) if isinstance(value, float) else value for name, value in found.items()}, flush=True)
    return found


def replicas() -> Iterator[dict[str, Any]]:
    """Routers by the number of replicas, each with the same load."""
    for num_replicas in (1, 4, 16, 64, 256, 1024):
        for routing in ROUTING_NAMES:
            yield simulate(STEP_TIMES[DEVICE], num_replicas, routing, RATE, SECONDS)


def capacity() -> Iterator[dict[str, Any]]:
    """1,024 replicas by the number of prefixes that the router remembers."""
    for router_capacity in (50_000, CAPACITY, 800_000):
        yield simulate(STEP_TIMES[DEVICE], 1024, "prefix", RATE, SECONDS, router_capacity=router_capacity)


def million() -> Iterator[dict[str, Any]]:
    """A million requests."""
    yield simulate(STEP_TIMES[DEVICE], 1024, "prefix", RATE, 1_000_000 / 1024 / RATE)


def rates() -> Iterator[dict[str, Any]]:
    """Routers by the load of 8 replicas."""
    for rate in (1.0, 2.0, 3.0, 4.0):
        for routing in ROUTING_NAMES:
            yield simulate(STEP_TIMES[DEVICE], 8, routing, rate, SECONDS)


def drain() -> Iterator[dict[str, Any]]:
    """8 replicas that are replaced one after the other, and the same without."""
    seconds = 100.0 + 8 * 30.0
    for routing in MAIN:
        yield simulate(STEP_TIMES[DEVICE], 8, routing, RATE, seconds)
        found = simulate(STEP_TIMES[DEVICE], 8, routing, RATE, seconds, drain=Drain(start=100.0, restart_seconds=20.0))
        yield found | {"restart_seconds": 20.0}


def cpu() -> Iterator[dict[str, Any]]:
    """One core of the measured CPU for each replica, with prompts and answers of a quarter and a half of the length."""
    for num_replicas in (1, 2, 4):
        for routing in ROUTING_NAMES:
            yield simulate(Measured.read(), num_replicas, routing, CPU_RATE, 8 * SECONDS, shape=CPU_SHAPE, ttft_bound=CPU_TTFT_BOUND)


def devices() -> Iterator[dict[str, Any]]:
    """The older GPU by load."""
    for routing in MAIN:
        for rate in (0.5, 1.0, 1.5, 2.0):
            yield simulate(STEP_TIMES["a100-8b"], 8, routing, rate, SECONDS)


def traffic() -> Iterator[dict[str, Any]]:
    """The generated traffic beside the published figures."""
    for seed in range(3):
        yield {"seed": seed, **asdict(statistics_of(SHAPE, seed=seed))}
    yield {"seed": "published", **asdict(PUBLISHED)}


PARTS: dict[str, Callable[[], Iterator[dict[str, Any]]]] = {
    part.__name__: part for part in (traffic, rates, drain, devices, cpu, replicas, capacity, million)
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART", help=", ".join(PARTS))
    options = parser.parse_args()
    for name in options.only:
        head, started, rows = surroundings([]), time.process_time(), []
        for found in PARTS[name]():
            rows.append(found)
            result = {**head, "processor_seconds": time.process_time() - started, "rows": rows}
            (RESULTS / f"simulation-{name}.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
