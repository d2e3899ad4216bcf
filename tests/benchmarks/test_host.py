"""The benchmark of the host's work: what it counts, and what it prints."""

import gc
import json
from pathlib import Path

import pytest

from benchmarks import host
from penstock.engine.core import EngineCore


@pytest.fixture(autouse=True)
def unsettled(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is measured is settled first, as in a server; of the heap of all tests that takes a second, and the times do not matter here."""
    monkeypatch.setattr(host, "settle", lambda: None)
    monkeypatch.setattr(gc, "freeze", lambda: None)


def test_requests_that_fit_are_computed_once() -> None:
    assert host.recomputed(4, 100, 20, 4 * 8, caches=True) == {"computed_ratio": 1.0, "preemptions": 0, "steps": 20}


def test_each_part_of_a_step_is_timed() -> None:
    cost = host.step_cost([20, 40], 2)
    assert cost.keys() == {"schedule", "build", "update", "total"}
    assert cost["total"] > max(cost["schedule"], cost["build"], cost["update"]) > 0


def test_steps_are_counted_that_would_run_as_cuda_graphs() -> None:
    shares = host.graph_share(8, 30, 10, 40)
    assert 0 < shares["decodes_alone"] < shares["in_graphs"] == 1
    assert 0 < shares["padding"] < 1


@pytest.mark.parametrize("is_async", [True, False])
def test_steps_that_were_scheduled_ahead_are_counted(is_async: bool) -> None:
    core: EngineCore = host.make_core(40, max_num_seqs=2, budget=100)
    core.is_async = is_async
    core.add(host.make_request("one", host.words(20), max_tokens=10))
    parts = list(host.steps(core))
    assert len(parts) == 10
    assert sum(part["is_ahead"] for part in parts) == (9 if is_async else 0)


def test_streams_are_timed_over_http() -> None:
    cost = host.http_cost(2, 1)
    assert cost["step"] > cost["token"] > 0


def test_results_are_printed_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    written = tmp_path / "host.json"
    monkeypatch.setattr(host, "measure_in_process", lambda name, checkout: {"schedule_ms": 1.5})
    monkeypatch.setattr("sys.argv", ["host.py", "--only", "rows-1", "--json", str(written)])
    host.main()
    assert "schedule_ms 1.5" in capsys.readouterr().out
    assert json.loads(written.read_text())["results"] == {"rows-1": {"here": {"schedule_ms": 1.5}}}
