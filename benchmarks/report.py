# mypy: disable-error-code="import-untyped"
"""What is printed for people and written for machines."""

import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

from benchmarks.measurement import METRICS, Measurement, Metric

ROOT = Path(__file__).resolve().parent.parent
NAME_WIDTH = 22


def median_value(measurements: Sequence[Measurement], metric: Metric) -> float | None:
    values = [value for measurement in measurements if (value := measurement.value(metric)) is not None]
    return statistics.median(values) if values else None


def ratio(ours: float | None, theirs: float | None, metric: Metric) -> float | None:
    """Above 1 where `ours` is better, whichever way this metric is better."""
    if not ours or not theirs:
        return None
    return ours / theirs if metric.is_higher_better else theirs / ours


def row(scenario: str, server: str, lengths: str, cells: Iterable[str]) -> str:
    return f"{scenario:{NAME_WIDTH}} {server:{NAME_WIDTH}} {lengths:>9} " + " ".join(f"{cell:>12}" for cell in cells)


def header() -> str:
    return row("scenario", "server", "tokens", (metric.heading for metric in METRICS))


def line(scenario: str, name: str, measurements: Sequence[Measurement]) -> str:
    """Medians of these rounds."""
    values = [(metric, median_value(measurements, metric)) for metric in METRICS]
    cells = ("-" if value is None else f"{value * metric.scale:,.{metric.digits}f}" for metric, value in values)
    return row(scenario, name, measurements[-1].lengths, cells)


def ratio_line(scenario: str, name: str, ratios: Mapping[str, float | None]) -> str:
    return row(scenario, name, "", ("-" if value is None else f"{value:.2f}x" for value in ratios.values()))


def all_ratios(ours: Sequence[Measurement], theirs: Sequence[Measurement]) -> dict[str, float | None]:
    return {metric.key: ratio(median_value(ours, metric), median_value(theirs, metric), metric) for metric in METRICS}


Results = Mapping[str, Mapping[str, Sequence[Measurement]]]  # scenario, then server, then rounds


def table(results: Results) -> Iterator[str]:
    """Medians per scenario and server, and under them how the first server compares with each other one."""
    yield header()
    for scenario, servers in results.items():
        (first, ours), *others = servers.items()
        for name, measurements in servers.items():
            yield line(scenario, name, measurements)
        for name, theirs in others:
            yield ratio_line(scenario, f"{first}/{name}", all_ratios(ours, theirs))


# Of a processor's flags, those that kernels are chosen by; on arm64 the kernel calls them features.
FEATURES = {
    "avx2",
    "fma",
    "avx512f",
    "avx512bw",
    "avx512_vnni",
    "avx512_bf16",
    "avx_vnni",
    "amx_tile",
    "amx_int8",
    "amx_bf16",
    "bf16",
    "i8mm",
    "sve",
}


def cpu_entries() -> dict[str, str]:
    """Of the first processor, as Linux lists them; elsewhere none."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().partition("\n\n")[0].splitlines() if path.exists() else []
    return {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}


def hardware() -> dict[str, Any]:
    """`cpu_family` and `cpu_model` tell generations apart whose names are the same, such as those of virtual machines."""
    entries = cpu_entries()
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "cpu": entries.get("model name") or platform.processor() or platform.machine(),
        "cpu_family": entries.get("cpu family"),
        "cpu_model": entries.get("model") or entries.get("CPU part"),
        "cpu_features": sorted(FEATURES & set((entries.get("flags") or entries.get("Features") or "").split())),
        "cores": usable,
        "memory_bytes": psutil.virtual_memory().total,
    }


def versions() -> dict[str, str]:
    """Of this checkout and of what is installed beside the script; what a server says of itself is with the server."""
    found = {"python": platform.python_version(), "system": platform.platform()}
    for package in ("penstock", "aiohttp", "torch", "transformers"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    if commit := commit_of(ROOT):
        found["commit"] = commit
    return found


def commit_of(checkout: Path) -> str:
    """Empty where the folder is no checkout of a repository."""
    return subprocess.run(["git", "rev-parse", "HEAD"], cwd=checkout, capture_output=True, text=True, check=False).stdout.strip()


def without_paths(text: str) -> str:
    """Without this machine's paths: those in the checkout relative to it, the home directory as `~`."""
    return text.replace(f"{ROOT}{os.sep}", "").replace(str(Path.home()), "~")


def surroundings(secrets: Sequence[str]) -> dict[str, Any]:
    """When, where and how this was run. Paths are written as `without_paths` does, arguments that hold a secret without it."""
    command_line = [without_paths(argument) for argument in sys.argv]
    for secret in secrets:
        command_line = [argument.replace(secret, "***") for argument in command_line]
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command_line": command_line,
        "hardware": hardware(),
        "versions": versions(),
        "load_average_before": os.getloadavg()[0],
    }


def introduction(surroundings: Mapping[str, Any], seed: int, servers: Mapping[str, Mapping[str, Any]]) -> str:
    machine = surroundings["hardware"]
    lines = [f"{surroundings['date']}, {machine['cpu']}, {machine['cores']} cores, {machine['memory_bytes'] / 1e9:.1f} GB, seed {seed}"]
    for name, server in servers.items():
        startups = server["startup_s"]
        startup = f", first answer after {statistics.median(startups):.2f} s" if startups else ""
        lines.append(f"{name} {server['version'] or ''}{startup}: {server['started_by']}")
    return "\n".join(lines)


def medians(measurements: Sequence[Measurement]) -> dict[str, float | None]:
    return {metric.key: median_value(measurements, metric) for metric in METRICS}


def results_as_json(results: Results) -> dict[str, Any]:
    whole: dict[str, Any] = {}
    for scenario, servers in results.items():
        (first, ours), *others = servers.items()
        whole[scenario] = {
            "servers": {
                name: {"medians": medians(rounds), "rounds": [measurement.as_json() for measurement in rounds]}
                for name, rounds in servers.items()
            },
            "ratios": {f"{first}/{name}": all_ratios(ours, theirs) for name, theirs in others},
        }
    return whole
