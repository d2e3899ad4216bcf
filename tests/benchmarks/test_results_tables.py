"""The tables of the benchmarks' page are those of the committed results."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import results_tables
from benchmarks.results_tables import README, TABLES, rendered


def test_every_table_says_what_was_measured() -> None:
    written = README.read_text(encoding="utf-8")
    assert written == rendered(written), "run: python benchmarks/results_tables.py"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(results_tables, "RESULTS", tmp_path)
    return tmp_path


def measured(peers: dict[str, float], date: str) -> dict[str, Any]:
    def medians(name: str, speed: float) -> dict[str, Any]:
        busy = 0.5 if name == "penstock" else 1.5
        return {"medians": {"output_tokens_per_s": speed, "ttft_median_s": 0.1234, "rss_bytes": None, "processor_s_per_1000_tokens": busy}}

    speeds = {"penstock": 100.0, **peers}
    return {
        "date": date,
        "command_line": ["benchmarks/serve.py", "--launch", "penstock=python server.py"],
        "hardware": {"cpu": "a processor", "cores": 2, "memory_bytes": 8e9},
        "rounds": 3,
        "servers": {
            name: {"version": "0.1.0" if name == "penstock" else "1.0", "startup_s": [2.0, 4.0, 3.0] if name == "penstock" else [6.0]}
            for name in speeds
        },
        "scenarios": {"concurrency-32": {"servers": {name: medians(name, speed) for name, speed in speeds.items()}}},
    }


def test_each_run_has_a_table_with_the_ratio_to_the_best_peer(folder: Path) -> None:
    (folder / "first.json").write_text(json.dumps(measured({"a": 50.0, "b": 80.0}, "2026-01-01T10:00:00+00:00")))
    (folder / "second.json").write_text(json.dumps(measured({"a": 40.0}, "2026-01-02T10:00:00+00:00")))
    (folder / "alone.json").write_text(json.dumps({"date": "2026-01-03", "loads": []}))
    page = "\n".join(TABLES["serving"]())
    assert [line for line in page.splitlines() if line.startswith("####")] == ["#### penstock and a 1.0", "#### penstock and a 1.0, b 1.0"]
    assert "| 32 streams, tokens/s | 100.0 | 40.0 | 2.50 |" in page
    assert "| 32 streams, tokens/s | 100.0 | 50.0 | 80.0 | 1.25 |" in page
    assert "| memory at 32 streams, GB | - | - | - |" in page
    assert "| start to first answer, s | 3.0 | 6.0 | 2.00 |" in page
    assert "| 32 streams | 0.50 | 1.50 | 3.00 |" in page
    assert "2026-01-02 10:00, a processor, 2 cores, 8 GB; `results/second.json`, medians of 3 rounds:" in page
    assert "python benchmarks/serve.py --launch 'penstock=python server.py'" in page


def test_a_variant_of_the_same_server_is_no_peer_of_it(folder: Path) -> None:
    result = measured({"bf16": 90.0, "a": 50.0}, "2026-01-01T10:00:00+00:00")
    result["servers"]["bf16"]["version"] = result["servers"]["penstock"]["version"] = "0.1.0"
    (folder / "first.json").write_text(json.dumps(result))
    assert "| 32 streams, tokens/s | 100.0 | 90.0 | 50.0 | 2.00 |" in "\n".join(TABLES["serving"]())


def test_a_page_without_a_place_for_a_table_is_an_error() -> None:
    with pytest.raises(ValueError, match="no place for 'serving'"):
        rendered("# Benchmarks\n")


def test_checking_says_whether_the_page_is_right_and_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "README.md"
    page.write_text("\n".join(f"<!-- {name} --><!-- end of {name} -->" for name in TABLES))
    monkeypatch.setattr(results_tables, "README", page)
    before = page.read_text()
    assert results_tables.main(["--check"]) == 1
    assert page.read_text() == before
    assert results_tables.main([]) == 0
    assert results_tables.main(["--check"]) == 0


def test_parts_of_steps_are_told_beside_their_bounds(folder: Path) -> None:
    def line(name: str, seconds: float, bound: float) -> dict[str, Any]:
        return {"name": name, "seconds": seconds, "bound": bound, "bound_by": "bytes"}

    origin = {
        "date": "2026-11-23T10:00",
        "hardware": {"cpu": "a CPU", "cores": 2, "memory_bytes": 1e9},
        "command_line": ["roofline.py", "steps"],
    }
    limits = {"threads": 2, "read_bytes": 4e10, "byte_products": 9e11, "bfloat16_products": 2e11}
    tables = {"1 row": [line("down", 2e-3, 1e-3), line("step", 3e-3, 1e-3)], "8 rows": [line("rest", 5e-4, 0.0), line("step", 9e-3, 6e-3)]}
    for name in ("roofline.json", "roofline-large.json"):
        (folder / name).write_text(json.dumps({**origin, "limits": limits, "tables": tables}))
    said = "\n".join(TABLES["roofline"]())
    assert said.count("python roofline.py steps") == 2
    assert "2 threads read 40 GB/s and multiply 900 G bytes or 200 G bfloat16 in a second" in said
    assert said.splitlines()[-3:] == ["| down | 2,000 (2.00) |  |", "| rest |  | 500 |", "| step | 3,000 (3.00) | 9,000 (1.50) |"]
    assert list(TABLES["contexts"]()) == [], "not measured"
