"""Writes the tables of docs/planning.md, and its plots, from the results of `simulate.py`."""

import json
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.plots import Plot, Series

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "planning.md"

Row = dict[str, Any]


def rows_of(part: str) -> list[Row]:
    """Without rows where the part has not been run."""
    path = RESULTS / f"simulation-{part}.json"
    rows: list[Row] = json.loads(path.read_text(encoding="utf-8"))["rows"] if path.exists() else []
    return rows


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|", *(f"| {' | '.join(row)} |" for row in rows)]


HEADS = ("requests", "goodput", "within both bounds", "cached", "TTFT, median / p99", "time per token, median / p99")


def cells(row: Row) -> tuple[str, ...]:
    return (
        f"{row['num_requests']:,}",
        f"{row['goodput']:.2f}",
        f"{row['met']:.1%}",
        f"{row['hit_rate']:.1%}",
        f"{row['ttft_p50']:.2f} / {row['ttft_p99']:.2f} s",
        f"{row['tpot_p50'] * 1e3:.0f} / {row['tpot_p99'] * 1e3:.0f} ms",
    )


def traffic_table() -> list[str]:
    shown = (
        (
            "published" if row["seed"] == "published" else f"generated, seed {row['seed']}",
            f"{row['mean_prompt']:,.0f}",
            f"{row['mean_output']:.0f}",
            f"{row['best_hit_rate']:.0%}",
        )
        for row in rows_of("traffic")
    )
    return table(("", "prompt tokens, mean", "output tokens, mean", "cached at best"), shown)


def rates_table() -> list[str]:
    return table(
        ("requests/s a replica", "router", *HEADS), ((f"{row['rate']:g}", row["routing"], *cells(row)) for row in rows_of("rates"))
    )


def replicas_table() -> list[str]:
    rows = [*rows_of("replicas"), *rows_of("more"), *rows_of("many"), *rows_of("million")]
    return table(("replicas", "router", *HEADS), ((f"{row['replicas']:,}", row["routing"], *cells(row)) for row in rows))


def devices_table() -> list[str]:
    return table(
        ("requests/s a replica", "router", *HEADS), ((f"{row['rate']:g}", row["routing"], *cells(row)) for row in rows_of("devices"))
    )


def cpu_table() -> list[str]:
    return table(("replicas", "router", *HEADS), ((f"{row['replicas']}", row["routing"], *cells(row)) for row in rows_of("cpu")))


def drain_table() -> list[str]:
    def drained(row: Row) -> str:
        seconds = row["drain_seconds"]
        return f"{len(seconds)} replicas, {sum(seconds) / len(seconds):.1f} s each, {max(seconds):.1f} s at most" if seconds else "none"

    return table(("router", "drained", *HEADS), ((row["routing"], drained(row), *cells(row)) for row in rows_of("drain")))


TABLES: dict[str, Callable[[], list[str]]] = {
    "traffic": traffic_table,
    "rates": rates_table,
    "replicas": replicas_table,
    "drain": drain_table,
    "devices": devices_table,
    "cpu": cpu_table,
}


def lines_by(rows: Sequence[Row], x: str, y: str, scale: float = 1.0) -> list[Series]:
    names = dict.fromkeys(row["routing"] for row in rows)
    return [Series(name, [(row[x], row[y] * scale) for row in rows if row["routing"] == name]) for name in names]


def plots() -> dict[str, Plot]:
    """By the names of their files."""
    by_rate, by_number = rows_of("rates"), [*rows_of("replicas"), *rows_of("more"), *rows_of("many")]
    rate, number = "requests a second and replica", "replicas"
    return {
        "simulation-goodput": Plot(
            "Goodput of 8 replicas", rate, "within both bounds, a second and replica", lines_by(by_rate, "rate", "goodput")
        ),
        "simulation-hits": Plot(
            "Cache hits by router", number, "% of prompt tokens", lines_by(by_number, "replicas", "hit_rate", 100), is_log=True
        ),
    }


def rendered(page: str) -> str:
    """The page with its tables written anew."""
    for name, make in TABLES.items():
        before, found, rest = page.partition(f"<!-- table: {name} -->\n")
        _, end, after = rest.partition("<!-- end -->")
        assert end, f"the page has no place for the table {name!r}"
        page = "\n".join([f"{before}{found}", *make(), "", f"{end}{after}"])
    return page


def write() -> None:
    PAGE.write_text(rendered(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    for name, plot in plots().items():
        (RESULTS / f"{name}.svg").write_text(plot.svg(), encoding="utf-8")


if __name__ == "__main__":
    write()
