import asyncio
import json
import random
from pathlib import Path

import pytest

from benchmarks import soak
from benchmarks.soak import EMBEDDING_KINDS, KINDS, Sample, slope
from tests.benchmarks.fake_server import FakeServer


def sample(num_requests: int, memory: int) -> Sample:
    return Sample(num_requests, 0.0, memory, 0.0, 0, 0, 0)


def test_the_slope_is_that_of_the_second_half() -> None:
    filling = [sample(0, 0), sample(100, 9_000), sample(200, 10_000), sample(300, 10_500), sample(400, 11_000)]
    assert slope(filling) == pytest.approx(5)
    assert slope(filling[:1]) == 0


def test_the_same_seed_makes_the_same_requests() -> None:
    for kind in (*KINDS, *EMBEDDING_KINDS):
        assert kind.fields(random.Random(1)) == kind.fields(random.Random(1))
    own = next(kind for kind in KINDS if kind.name == "schema of its own")
    rng = random.Random(1)
    assert own.fields(rng)["guided_json"] != own.fields(rng)["guided_json"]


def test_requests_that_get_another_status_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """This server answers every chat and knows no other route."""
    written = tmp_path / "soak.json"

    async def drive(url: str) -> None:
        flags = ["--url", url, "--requests", "60", "--concurrency", "4", "--json", str(written)]
        assert await asyncio.to_thread(soak.main, flags) == 1

    asyncio.run(FakeServer().while_up(drive))
    whole = json.loads(written.read_text())
    assert set(whole["unexpected"]) == {"completion: 404", "tokenize: 404", "wrong field: 200", "unknown model: 200"}
    assert [sample["num_requests"] for sample in whole["samples"]] == [0, 60]
    assert "MB per 1,000 requests" in capsys.readouterr().out
