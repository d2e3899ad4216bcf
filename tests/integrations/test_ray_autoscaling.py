"""As many replicas as the sequences take that run and wait, on a real Ray: a second one comes with the load, and goes with it."""

import asyncio
import importlib.util
import json
import time
from collections.abc import Iterator

import aiohttp
import pytest

from tests.integrations.local_ray import LocalRay, local_ray

pytestmark = [
    pytest.mark.ray,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed: pip install 'penstock[ray]'"),
]

NUM_TOKENS, DELAY_MS = 120, 10
NUM_REQUESTS, NUM_ANSWERS = 2, 4  # for Serve, these are two requests, which one replica would do for
SCRIPT = [{"model": {"name": "demo"}}, {"content": "one two three four ", "finish": "length", "delay_ms": DELAY_MS}]
# Three are a replica's share, and it runs one request's at a time: those of the other wait in its engine.
FLAGS = ("--kv-cache-memory", "64MiB", "--device", "cpu", "--max-num-seqs", "4", "--speculation", "none")
AUTOSCALING = {
    "min_replicas": 1,
    "max_replicas": 2,
    "target_ongoing_requests": 3,
    "upscale_delay_s": 0.2,
    "downscale_delay_s": 1,
    "metrics_interval_s": 0.2,
    "look_back_period_s": 0.5,
}


@pytest.fixture(scope="module")
def scaled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalRay]:
    directory = tmp_path_factory.mktemp("autoscaling")
    script = directory / "answers.jsonl"
    script.write_text("".join(json.dumps(line) + "\n" for line in SCRIPT), encoding="utf-8")
    with local_ray(
        directory / "ray.log", "--autoscaling", json.dumps(AUTOSCALING), "--", "--model", f"scripted:{script}", *FLAGS
    ) as served:
        yield served


async def ask(http: aiohttp.ClientSession, number: int, replicas: set[str]) -> None:
    """One answer after the other until two replicas have answered."""
    while len(replicas) < 2:
        body = {"model": "demo", "prompt": f"{number}", "max_tokens": NUM_TOKENS, "stream": True, "n": NUM_ANSWERS, "temperature": 1}
        async with http.post("completions", json=body) as response:
            assert response.status == 200
            content = await response.read()
            assert content.endswith(b"data: [DONE]\n\n")
            assert b"error" not in content
            replicas.add(response.headers["x-replica"])


async def under_load(served: LocalRay) -> None:
    replicas: set[str] = set()
    async with aiohttp.ClientSession(served.url + "/") as http, asyncio.timeout(120):
        await asyncio.gather(*(ask(http, number, replicas) for number in range(NUM_REQUESTS)))


def wait_for(served: LocalRay, number: int) -> None:
    deadline = time.monotonic() + 120
    while len(served.replicas()) != number:
        assert time.monotonic() < deadline
        time.sleep(0.2)


def test_a_second_replica_comes_with_the_load_and_goes_with_it(scaled: LocalRay) -> None:
    assert len(scaled.replicas()) == 1
    asyncio.run(under_load(scaled))
    wait_for(scaled, 1)
