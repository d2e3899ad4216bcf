"""Many clients on all routes while the model falls asleep and wakes: nothing crashes, no answer is another one, nothing is lost."""

import asyncio
import itertools
import random
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from penstock.engine.control import sleep
from tests.api.admin.test_admin import Served, served

PROMPTS = ["Once upon a time", "a" * 60, "The quick brown fox", "1, 2, 3, 4, "]
SCHEMA = {"type": "json_schema", "json_schema": {"name": "city", "schema": {"enum": ["Paris", "Rome"]}}}
ANSWERED = (200, 503)  # 503: refused, or aborted, since the model was put to sleep
Body = dict[str, Any]


def requests_of(number: int) -> tuple[str, Body | None]:
    """What a client asks: the path, and the body of a POST."""
    prompt = PROMPTS[number % len(PROMPTS)]
    given: Body = {"temperature": 0, "max_tokens": 5 + number % 40, "ignore_eos": True}
    messages = [{"role": "user", "content": prompt}]
    kinds: list[tuple[str, Body | None]] = [
        ("/v1/completions", {"prompt": prompt, **given}),
        ("/v1/completions", {"prompt": prompt, **given, "n": 2}),
        ("/v1/chat/completions", {"model": "fake", "messages": messages, **given}),
        ("/v1/chat/completions", {"model": "fake", "messages": messages, "temperature": 0, "max_tokens": 40, "response_format": SCHEMA}),
        ("/tokenize", {"prompt": prompt}),
        ("/v1/models", None),
        ("/health", None),
        ("/metrics", None),
    ]
    return kinds[number % len(kinds)]


async def ask(http: aiohttp.ClientSession, path: str, body: Body | None) -> tuple[int, Any]:
    """The status, and what must be the same whenever it is asked."""
    async with http.request("GET" if body is None else "POST", path, json=body) as response:
        if body is None:
            return response.status, None
        answer = await response.json()
    if "choices" in answer:
        return response.status, [choice.get("text", choice.get("message", {}).get("content")) for choice in answer["choices"]]
    return response.status, answer.get("tokens")


async def change(server: Served, generator: random.Random, num_changes: int) -> int:
    """Puts the model to sleep and wakes it, in every way that leaves requests alone or refuses them; returns how often it slept."""
    num_slept = 0
    for _ in range(num_changes):
        options = {
            "level": generator.choice((1, 2)),
            "mode": generator.choice(("keep", "wait", "abort")),
            "timeout": generator.choice((0, 0.05)),
            "wake_on_request": generator.random() < 0.5,
        }
        status, _ = await server.post("/sleep", options)
        assert status in (200, 409)
        num_slept += status == 200
        if generator.random() < 0.3:
            await server.post("/prefix-cache/reset")
        await asyncio.sleep(generator.random() * 0.01)
        assert (await server.post("/wake"))[0] == 200
        await asyncio.sleep(generator.random() * 0.02)
    return num_slept


async def storm(num_clients: int, num_changes: int) -> None:
    generator = random.Random(7)
    async with served(max_num_seqs=16, max_waiting=10_000) as server:
        kinds = {number: requests_of(number) for number in range(num_clients)}
        expected = {number: await ask(server.api, *kind) for number, kind in kinds.items()}
        assert {status for status, _ in expected.values()} == {200}
        is_over, counts = asyncio.Event(), {200: 0, 503: 0}

        async def client(number: int) -> None:
            for _ in itertools.count():
                status, answer = await ask(server.api, *kinds[number])
                assert status in ANSWERED
                counts[status] += 1
                if status == 200:
                    assert (status, answer) == expected[number]
                if is_over.is_set():
                    return
                await asyncio.sleep(generator.random() * 0.01)

        clients = asyncio.gather(*(client(number) for number in range(num_clients)))
        num_slept = await change(server, generator, num_changes)
        is_over.set()
        await clients
        assert num_slept > num_changes / 3
        assert counts[200] > 2 * num_clients
        assert server.context.engine.num_requests == 0
        server.core.check_integrity()
        assert server.core.scheduler.pool.num_free == server.core.scheduler.pool.num_blocks
        for number, kind in kinds.items():
            assert await ask(server.api, *kind) == expected[number]


@pytest.mark.parametrize(("num_clients", "num_changes"), [(16, 8), pytest.param(100, 70, marks=pytest.mark.thorough)])
def test_no_answer_is_wrong_or_lost_while_the_model_sleeps_and_wakes(
    num_clients: int, num_changes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sleep, "spill_directory", lambda: tmp_path)
    asyncio.run(asyncio.wait_for(storm(num_clients, num_changes), 300))
