"""`penstock selftest`: runs the matrix, prints it as a table and writes it as JSON."""

import json
import math
import os
import platform
import sys
import time
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

from penstock import __version__
from penstock.cli.selftest.arguments import SelftestArguments
from penstock.cli.selftest.cases import Feature
from penstock.cli.selftest.matrix import proposers_of, run_matrix
from penstock.cli.selftest.results import Answer, Cell, Difference, Results, Situation

MAX_SHOWN = 5
MAX_WRITTEN = 50


def run_selftest_command(arguments: SelftestArguments) -> int:
    """The exit code. After each round the file has what there is so far."""
    started, about = time.perf_counter(), surroundings(arguments)

    def write(results: Results) -> None:
        if arguments.json_path is not None:
            whole = {**about, "seconds": time.perf_counter() - started, "processor_seconds": time.process_time()}
            text = json.dumps(whole | as_json(arguments, results), indent=2, ensure_ascii=False)
            arguments.json_path.write_text(text + "\n", encoding="utf-8")

    results = run_matrix(arguments, write)
    print(*as_text(arguments, results), sep="\n")
    return 0 if results.is_passed else 1


def as_text(arguments: SelftestArguments, results: Results) -> Iterator[str]:
    """The answers of each cell, and how many of them differ from the reference."""
    yield f"{'':8} {'':12}" + "".join(f"{feature:>18}" for feature in Feature) + "   counted"
    for proposer in proposers_of(arguments):
        for situation in Situation:
            cells = (_shown(results, proposer, situation, feature) for feature in Feature)
            counts = results.evidence.get((proposer, situation), Counter())
            counted = ", ".join(f"{count:,} {name}" for name, count in counts.items() if count)
            yield f"{proposer:8} {situation:12}" + "".join(f"{cell:>18}" for cell in cells) + f"   {counted}"
    for what, why in results.untested.items():
        yield f"not tested: {_place(what)}: {why}"
    for where, why in results.missing():
        yield f"not tested: {_place(where)}: {why}"
    for difference in worst(results)[:MAX_SHOWN]:
        yield from _described(difference)
    for message, count in results.errors.items():
        yield f"failed: {count:,} requests: {message}"
    rounded = f", {results.num_rounded} of them by rounding of at most {arguments.max_margin:g} nats" if results.num_different else ""
    yield f"{results.num_runs:,} answers and {results.num_aborted:,} beginnings of aborted ones: {results.num_different} differ{rounded}"
    yield "passed" if results.is_passed else "NOT passed"


def worst(results: Results) -> list[Difference]:
    """The least explained ones first."""
    return sorted(results.differences, key=lambda one: -math.inf if one.margin is None else -one.margin)


def _shown(results: Results, proposer: str, situation: Situation, feature: Feature) -> str:
    cell = results.cells.get((proposer, situation, feature), Cell())
    counts = {"failed": cell.num_failed, "rounded": cell.num_rounded, "DIFFER": cell.num_different - cell.num_rounded}
    notes = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
    return (f"{cell.num_runs:,}" if cell.num_runs else "-") + (f" ({notes})" if notes else "")


def _place(what: Feature | tuple[str, Situation]) -> str:
    return what if isinstance(what, Feature) else f"{what[0]}, {what[1]}"


def _described(difference: Difference) -> Iterator[str]:
    case = difference.case
    yield f"{difference.proposer}, {difference.situation}, {case.name}: differs at token {difference.position}" + (
        "" if difference.margin is None else f", margin {difference.margin:.4g} nats"
    )
    yield f"  expected {_answer(difference.expected)}"
    yield f"  got      {_answer(difference.got)}"


def _answer(answer: Answer) -> dict[str, Any]:
    fields = {name: getattr(answer, name) for name in answer.__slots__}
    return {name: value for name, value in fields.items() if value not in (None, "", ())}


def as_json(arguments: SelftestArguments, results: Results) -> dict[str, Any]:
    return {
        "runs": results.num_runs,
        "aborted": results.num_aborted,
        "different": results.num_different,
        "within_margin": results.num_rounded,
        "failed": results.errors,
        "max_margin_nats": arguments.max_margin,
        "is_passed": results.is_passed,
        "cells": [
            {"speculation": proposer, "situation": situation, "feature": feature, **_counts(cell)}
            for (proposer, situation, feature), cell in results.cells.items()
        ],
        "counted": [
            {"speculation": proposer, "situation": situation, **counts} for (proposer, situation), counts in results.evidence.items()
        ],
        "not_tested": [{"what": _place(what), "why": why} for what, why in [*results.untested.items(), *results.missing()]],
        "differences": [_difference(difference) for difference in worst(results)[:MAX_WRITTEN]],
        "margins_nats": sorted(round(one.margin, 4) for one in results.differences if one.margin is not None),
    }


def _counts(cell: Cell) -> dict[str, int]:
    return {"runs": cell.num_runs, "different": cell.num_different, "within_margin": cell.num_rounded, "failed": cell.num_failed}


def _difference(difference: Difference) -> dict[str, Any]:
    case = difference.case
    return {
        "speculation": difference.proposer,
        "situation": difference.situation,
        "is_aborted": difference.is_aborted,
        "messages": list(case.messages),
        "params": {name: _plain(value) for name, value in case.sampling.items()},
        "chat": dict(case.options),
        "token": difference.position,
        "margin_nats": difference.margin,
        "expected": _answer(difference.expected),
        "got": _answer(difference.got),
    }


def _plain(value: Any) -> Any:
    """Constraints as a request's body has them."""
    fields = getattr(value, "__struct_fields__", None)
    return value if fields is None else {name: one for name in fields if (one := getattr(value, name)) is not None}


def surroundings(arguments: SelftestArguments) -> dict[str, Any]:
    """When, where and of what this was run."""
    import torch

    return {
        "load_average_before": os.getloadavg()[0],
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command_line": ["penstock", *sys.argv[1:]],
        "model": arguments.model or "the built-in script",
        "seed": arguments.seed,
        "hardware": {"processor": _processor(), "cores": os.cpu_count()},
        "versions": {"penstock": __version__, "torch": torch.__version__, "python": platform.python_version()},
    }


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return next(line.partition(":")[2].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
