# mypy: disable-error-code="import-untyped"
"""The benchmark of overload: what it counts, and what it writes of a server that answers at once."""

import asyncio
import json
from pathlib import Path

import pytest

from benchmarks import overload
from benchmarks.load_generator import Attempt
from benchmarks.overload import LoadResult, ServerResult, Window, result_of
from tests.benchmarks.served.fake_server import FINISH, ROLE, TEXT, FakeServer, sse, usage

HEAD = b"HTTP/1.1 200 OK\r\n\r\n"


def answered(due: float, first: float, ended: float, tokens: int = 10) -> Attempt:
    pieces = [(due, HEAD + sse(ROLE)), (first, sse(TEXT)), (ended, sse(FINISH, usage(100, tokens)))]
    return Attempt(due, pieces, 200, {}, ended)


def refused(due: float, ended: float, retry_after: float | None = None) -> Attempt:
    headers = {} if retry_after is None else {"retry-after": str(retry_after)}
    return Attempt(due, [(ended, HEAD + b"{}")], 429, headers, ended)


def window(*attempts: Attempt, server_seconds: float | None = None) -> Window:
    return Window(attempts, 10, 20, server_seconds, 0.5)


def test_goodput_is_of_whole_answers_within_the_time_and_times_are_of_what_was_due_in_it() -> None:
    before, within, after = answered(8, 9, 11), answered(10, 10.5, 14, tokens=30), answered(12, 13, 21)
    result = result_of(window(before, within, after, refused(9, 9), refused(11, 11.25, 4), refused(12, 12.25, 6), server_seconds=15))
    assert result == LoadResult(
        offered_per_s=0.4,
        answered_per_s=0.2,
        num_refused=2,
        num_failed=0,
        failure=None,
        goodput=4.0,
        ttft_median_s=0.75,
        ttft_p99_s=result.ttft_p99_s,
        refusal_p99_s=0.25,
        retry_after_median_s=5,
        server_cores=1.5,
        generator_cores=0.05,
    )
    assert result.ttft_p99_s == pytest.approx(0.995)


def test_a_request_without_a_token_counts_with_the_time_that_it_has_waited() -> None:
    waiting, begun = Attempt(12), Attempt(14, [(14, HEAD + sse(ROLE))], 200)
    result = result_of(window(waiting, begun))
    assert (result.ttft_median_s, result.goodput, result.num_refused) == (7, 0, 0)


def test_what_is_neither_an_answer_nor_a_refusal_has_failed_and_the_others_count() -> None:
    failed = Attempt(10, [(11, HEAD + b"out of memory")], 500, {}, 11)
    broken = Attempt(11, [], None, failure="the server closed the connection")
    halfway = Attempt(11, [(11, HEAD + sse(ROLE, TEXT))], 200, {}, 12)
    result = result_of(window(failed, broken, halfway, answered(10, 11, 12, tokens=20)))
    assert (result.num_failed, result.failure, result.goodput, result.ttft_median_s) == (3, "HTTP 500: out of memory", 2.0, 1.0)


def test_a_server_is_judged_by_its_peak_and_by_its_lowest_load() -> None:
    def load(goodput: float, ttft: float | None) -> LoadResult:
        return LoadResult(1, 1, 0, 0, None, goodput, ttft, ttft, None, None, None, 0)

    result = ServerResult("", None, load(90, 9), {1: load(100, 0.5), 10: load(95, 0.9), 20: load(50, None)})
    assert (result.goodput_kept(10), result.ttft_grown(10), result.ttft_grown(20)) == (0.95, 1.8, None)


def test_a_run_measures_the_capacity_and_each_load_and_leaves_out_what_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(overload, "SETTLE_SECONDS", 0)
    written, server = tmp_path / "results.json", FakeServer()

    async def drive(url: str) -> None:
        flags = ["--url", f"fake={url}", "--load", "0.1", "0.2", "--ramp", "0.05", "--seconds", "0.3", "--concurrency", "2"]
        absent = ["--against", "absent=env A=1 no-such-server --port {port}"]
        assert await asyncio.to_thread(overload.main, [*flags, *absent, "--seed", "1", "--json", str(written)]) == 0

    asyncio.run(server.while_up(drive))
    whole = json.loads(written.read_text())
    (result,) = whole["servers"].values()
    assert whole["left_out"] == {"absent": "there is no program no-such-server"}
    assert result["capacity"]["goodput"] > 0
    assert result["capacity"]["generator_cores"] > 0
    assert list(result["loads"]) == ["0.1", "0.2"]
    assert all(load["ttft_p99_s"] > 0 for load in result["loads"].values() if load["offered_per_s"])
    lengths = {body["max_tokens"] for body in server.bodies[1:]}
    assert 64 <= min(lengths) < max(lengths) <= 192
    assert "| 0.2 times |" in capsys.readouterr().out


def test_a_server_that_fails_is_left_out_and_the_run_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    server = FakeServer(fails_after=3)

    async def drive(url: str) -> None:
        flags = ["--url", f"fake={url}", "--ramp", "0.05", "--seconds", "0.1", "--concurrency", "2"]
        assert await asyncio.to_thread(overload.main, flags) == 1

    asyncio.run(server.while_up(drive))
    assert "answered nothing in 0.1 s; HTTP 500" in capsys.readouterr().err
