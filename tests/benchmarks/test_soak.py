import asyncio
import json
from pathlib import Path
from typing import Any, cast

import pytest

from benchmarks import soak
from benchmarks.soak import Sample, Soaked, slope
from benchmarks.soak_traffic import GENERATION, POOLING, Client, Kind, differs
from tests.api.served_script import served_script, write_script


def sample(seconds: float, memory: int, **more: Any) -> Sample:
    others: dict[str, Any] = dict.fromkeys(("num_requests_left", "num_descriptors", "num_threads", "num_tasks", "num_preemptions"), 0)
    return Sample(**{"num_requests": 0, "grammar_cache": 0, "seconds": seconds, "memory": memory, "kv_cache_usage": 0.0} | others | more)


def soaked(*samples: Sample) -> Soaked:
    return Soaked("model", cast(Any, None), [], {}, list(samples))


def test_the_slope_is_that_of_the_second_half() -> None:
    filling = [sample(0, 0), sample(100, 9_000), sample(200, 10_000), sample(300, 10_500), sample(400, 11_000)]
    assert slope(filling) == pytest.approx(5)
    assert slope(filling[:1]) == 0


@pytest.mark.parametrize(
    ("last", "fault"),
    [
        ({}, None),
        ({"memory": 1_020_000}, None),
        ({"memory": 1_200_000, "grammar_cache": 190_000}, None),
        ({"memory": 1_200_000}, "memory grows by 0.2 MB in the second half"),
        ({"num_tasks": 4}, None),
        ({"num_tasks": 5}, "tasks: 5 more than after the first half"),
        ({"num_descriptors": 9}, "descriptors: 9 more than after the first half"),
        ({"num_threads": 6}, "threads: 6 more than after the first half"),
        ({"kv_cache_usage": 0.5, "num_requests_left": 1}, "1 requests and 50.00% of the KV cache are held"),
    ],
)
def test_what_stays_behind_is_a_fault(last: dict[str, Any], fault: str | None) -> None:
    samples = [sample(0, 10), sample(100, 1_000_000), sample(200, **{"memory": 1_000_000} | last)]
    assert soaked(*samples).faults() == ([] if fault is None else [fault])


def test_a_status_that_a_kind_may_not_get_is_counted_and_one_that_asks_to_wait_is_not() -> None:
    statuses = iter(["200", "429", "500"])

    async def send(client: Client) -> str:
        if (status := next(statuses, None)) is None:
            raise TimeoutError
        return status

    each = soaked()
    for _ in range(4):
        asyncio.run(each.send(Kind("chat", 1, send), cast(Any, None)))
    assert each.unexpected == {"chat: 500": 1, "chat: TimeoutError": 1}
    assert each.sent == {"chat": 4}
    assert each.faults() == ["chat: 500, 1 times", "chat: TimeoutError, 1 times"]


def test_vectors_and_tokens_differ_by_more_than_rounding() -> None:
    assert not differs([0.6, 0.8], [0.6000001, 0.7999999])
    assert differs([0.6, 0.8], [0.8, 0.6])
    assert not differs([("a", 0.1), ("b", 3.0)], [("x", 0.1), ("y", 3.0)])
    assert differs([("a", 0.1), ("b", 3.0)], [("a", 0.1), ("c", 3.0)])


def test_names_of_kinds_are_unique_and_need_what_a_server_may_lack() -> None:
    for kinds in (GENERATION, POOLING):
        assert len({kind.name for kind in kinds}) == len(kinds)
        assert kinds[0].name == "probe"
    assert {kind.needs for kind in GENERATION if kind.needs} == {"/v1/files", "/v1/responses", "/v1/messages", "thinking"}


@pytest.mark.thorough  # seconds of traffic
def test_a_server_is_soaked_and_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A scripted model says the same whatever runs beside it; another memory than the tests' own process is not looked at."""
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(soak, "SETTLE_SECONDS", 0.1)
    lines: list[dict[str, Any]] = [{"model": {"name": "scripted", "context_length": 8192}}, {"content": '{"p1": 5} and more words ' * 20}]
    with served_script(write_script(tmp_path / "answers.jsonl", lines), "--files-dir", str(tmp_path / "files")) as served:
        url = served.url.removesuffix("/v1")
        flags = ["--url", url, "--minutes", "0.1", "--rounds", "2", "--concurrency", "4", "--json", str(tmp_path / "soak.json")]
        assert soak.main(flags) == 0
    (server,) = json.loads((tmp_path / "soak.json").read_text())["servers"]
    assert (server["unexpected"], server["mismatches"], server["faults"]) == ({}, [], [])
    assert len(server["samples"]) == 3
    assert server["sent"]["probe"] > 5
