# mypy: disable-error-code="import-untyped"
"""The benchmark of overload: what it counts, and what it writes of a server that answers at once."""

import asyncio
import json
from pathlib import Path

import pytest

from benchmarks import overload
from benchmarks.client import BadAnswer, Recording
from benchmarks.overload import Attempt, LoadResult, ServerResult, result_of
from tests.benchmarks.fake_server import FINISH, ROLE, TEXT, FakeServer, sse, usage


def answered(due: float, first: float, ended: float, tokens: int = 10) -> Attempt:
    pieces = [(due, sse(ROLE)), (first, sse(TEXT)), (ended, sse(FINISH, usage(100, tokens)))]
    return Attempt(Recording(due, pieces), 200, ended)


def refused(due: float, ended: float, retry_after: float | None = None) -> Attempt:
    return Attempt(Recording(due, [(ended, b"{}")]), 429, ended, retry_after)


def test_goodput_is_of_whole_answers_within_the_time_and_times_are_of_what_was_due_in_it() -> None:
    before, within, after = answered(8, 9, 11), answered(10, 10.5, 14, tokens=30), answered(12, 13, 21)
    result = result_of([before, within, after, refused(9, 9), refused(11, 11.25, 4), refused(12, 12.25, 6)], 10, 20)
    assert result == LoadResult(
        offered_per_s=0.4,
        answered_per_s=0.2,
        num_refused=2,
        goodput=4.0,
        ttft_median_s=0.75,
        ttft_p99_s=result.ttft_p99_s,
        refusal_p99_s=0.25,
        retry_after_median_s=5,
    )
    assert result.ttft_p99_s == pytest.approx(0.995)


def test_a_request_without_a_token_counts_with_the_time_that_it_has_waited() -> None:
    waiting, begun = Attempt(Recording(12)), Attempt(Recording(14, [(14, sse(ROLE))]), 200)
    result = result_of([waiting, begun], 10, 20)
    assert (result.ttft_median_s, result.goodput, result.num_refused) == (7, 0, 0)


def test_what_is_neither_an_answer_nor_a_refusal_is_an_error() -> None:
    with pytest.raises(BadAnswer, match="500: out of memory"):
        result_of([Attempt(Recording(10, [(11, b"out of memory")]), 500, 11)], 10, 20)


def test_a_server_is_judged_by_its_peak_and_by_its_lowest_load() -> None:
    def load(goodput: float, ttft: float | None) -> LoadResult:
        return LoadResult(1, 1, 0, goodput, ttft, ttft, None, None)

    result = ServerResult("", None, load(90, 9), {1: load(100, 0.5), 10: load(95, 0.9), 20: load(50, None)})
    assert (result.goodput_kept(10), result.ttft_grown(10), result.ttft_grown(20)) == (0.95, 1.8, None)


def test_a_run_measures_the_capacity_and_each_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(overload, "SETTLE_SECONDS", 0)
    written, server = tmp_path / "results.json", FakeServer()

    async def drive(url: str) -> None:
        flags = ["--url", f"fake={url}", "--load", "0.1", "0.2", "--ramp", "0.05", "--seconds", "0.3", "--concurrency", "2"]
        assert await asyncio.to_thread(overload.main, [*flags, "--seed", "1", "--json", str(written)]) == 0

    asyncio.run(server.while_up(drive))
    (result,) = json.loads(written.read_text())["servers"].values()
    assert result["capacity"]["goodput"] > 0
    assert list(result["loads"]) == ["0.1", "0.2"]
    assert all(load["ttft_p99_s"] > 0 for load in result["loads"].values() if load["offered_per_s"])
    lengths = {body["max_tokens"] for body in server.bodies[1:]}
    assert 64 <= min(lengths) < max(lengths) <= 192
    assert "| 0.2 times |" in capsys.readouterr().out
