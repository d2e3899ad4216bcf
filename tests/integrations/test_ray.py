"""A real Ray on this machine: two replicas behind Serve's proxy, which is all that clients know."""

import asyncio
import importlib.util
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import pytest
from openai import OpenAI
from prometheus_client.parser import text_string_to_metric_families

from tests.integrations.local_ray import LocalRay, local_ray

pytestmark = [
    pytest.mark.ray,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed: pip install 'penstock[ray]'"),
]

NUM_REQUESTS, NUM_TOKENS, DELAY_MS = 50, 24, 20
TEXT = "one two three four five six seven "
ANSWER = (TEXT * 9)[:NUM_TOKENS]
SCRIPT = [{"model": {"name": "demo"}}, {"content": TEXT, "finish": "length", "delay_ms": DELAY_MS}]
FLAGS = ("--kv-cache-memory", "64MiB", "--device", "cpu", "--max-num-seqs", "8", "--speculation", "none")


@pytest.fixture(scope="module")
def ray_of_two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalRay]:
    directory = tmp_path_factory.mktemp("ray")
    script = directory / "answers.jsonl"
    script.write_text("".join(json.dumps(line) + "\n" for line in SCRIPT), encoding="utf-8")
    with local_ray(directory / "ray.log", "--replicas", "2", "--", "--model", f"scripted:{script}", *FLAGS) as served:
        yield served


@dataclass
class Outcome:
    """What a client has seen. A body that is not streamed has no beginning before its end."""

    status: int = 0
    replica: str = ""
    num_attempts: int = 1
    text: str = ""
    error: str = ""
    events: list[dict[str, Any]] = field(default_factory=list)

    @property
    def has_begun(self) -> bool:
        return bool(self.text)


async def ask(http: aiohttp.ClientSession, number: int, outcome: Outcome) -> None:
    """One of four kinds of requests, by its number."""
    is_chat, is_stream = number % 2 == 0, number % 4 < 2
    prompt = f"request {number}"
    body: dict[str, Any] = {"model": "demo", "max_tokens": NUM_TOKENS, "stream": is_stream}
    body |= {"messages": [{"role": "user", "content": prompt}]} if is_chat else {"prompt": prompt}
    async with http.post("chat/completions" if is_chat else "completions", json=body) as response:
        outcome.status, outcome.replica = response.status, response.headers.get("x-replica", "")
        outcome.num_attempts = int(response.headers.get("x-attempts", "1"))
        if not is_stream:
            choice = (await response.json())["choices"][0]
            outcome.text = choice["message"]["content"] if is_chat else choice["text"]
            return
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line.removeprefix(b"data: "))
            if "error" in event:
                outcome.error = event["error"]["code"]
                continue
            choice = event["choices"][0]
            outcome.text += (choice["delta"].get("content") or "") if is_chat else choice["text"]


async def outlive(served: LocalRay) -> list[Outcome]:
    outcomes = [Outcome() for _ in range(NUM_REQUESTS)]
    async with aiohttp.ClientSession(served.url + "/", timeout=aiohttp.ClientTimeout(120)) as http:
        tasks = [asyncio.create_task(ask(http, number, outcome)) for number, outcome in enumerate(outcomes)]
        while sum(outcome.has_begun for outcome in outcomes) < 6:  # noqa: ASYNC110 - what is waited for knows no events
            await asyncio.sleep(0.005)
        served.replicas()[0].kill()
        await asyncio.gather(*tasks)
    return outcomes


def test_a_lost_replica_costs_no_request_that_had_not_begun_to_stream(ray_of_two: LocalRay) -> None:
    outcomes = asyncio.run(outlive(ray_of_two))
    assert {outcome.status for outcome in outcomes} == {200}
    whole = [outcome for outcome in outcomes if outcome.text == ANSWER and not outcome.error]
    cut = [outcome for outcome in outcomes if outcome not in whole]
    assert all(outcome.error == "replica_lost" and outcome.has_begun and ANSWER.startswith(outcome.text) for outcome in cut)
    assert len(whole) >= NUM_REQUESTS - 8  # no more than --max-num-seqs run on the replica that is lost
    assert any(outcome.num_attempts > 1 for outcome in whole), "the replica that is lost had requests that had not begun"


def test_a_lost_replica_is_replaced(ray_of_two: LocalRay) -> None:
    deadline = time.monotonic() + 120
    while len(ray_of_two.replicas()) != 2:
        assert time.monotonic() < deadline
        time.sleep(0.2)


def test_openais_client_streams_through_the_proxy(ray_of_two: LocalRay) -> None:
    client = OpenAI(base_url=ray_of_two.url, api_key="none", max_retries=0)
    assert [model.id for model in client.models.list()] == ["demo"]
    chunks = list(
        client.chat.completions.create(
            model="demo",
            messages=[{"role": "user", "content": "Hi"}],
            max_tokens=NUM_TOKENS,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == ANSWER
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == NUM_TOKENS
    assert len(chunks) > NUM_TOKENS / 2, "the answer came in pieces"


def test_a_conversation_stays_with_the_replica_that_has_it_in_its_cache(ray_of_two: LocalRay) -> None:
    client = OpenAI(base_url=ray_of_two.url, api_key="none", max_retries=0)
    for conversation in range(4):
        messages: list[Any] = [{"role": "user", "content": f"conversation {conversation} " * 40}]
        replicas = set()
        for turn in range(3):
            raw = client.chat.completions.with_raw_response.create(model="demo", messages=messages, max_tokens=4)
            answer = raw.parse()
            replicas.add(raw.headers["x-replica"])
            messages += [{"role": "assistant", "content": answer.choices[0].message.content}, {"role": "user", "content": "more"}]
            assert answer.usage is not None
            details = answer.usage.prompt_tokens_details
            assert details is not None
            assert ((details.cached_tokens or 0) > 600) == (turn > 0)
        assert len(replicas) == 1


def test_a_client_that_goes_away_frees_its_place(ray_of_two: LocalRay) -> None:
    client = OpenAI(base_url=ray_of_two.url, api_key="none", max_retries=0)
    for _ in range(20):  # more than both replicas can run at a time
        stream = client.chat.completions.create(model="demo", messages=[{"role": "user", "content": "Hi"}], max_tokens=100_000, stream=True)
        next(iter(stream))
        stream.close()
    answer = client.chat.completions.create(model="demo", messages=[{"role": "user", "content": "Hi"}], max_tokens=NUM_TOKENS)
    assert answer.choices[0].message.content == ANSWER


def test_an_error_is_the_servers_own(ray_of_two: LocalRay) -> None:
    async def refused() -> tuple[int, Any]:
        async with (
            aiohttp.ClientSession(ray_of_two.url + "/") as http,
            http.post("completions", json={"model": "demo", "promt": ""}) as answer,
        ):
            return answer.status, await answer.json()

    status, body = asyncio.run(refused())
    assert status == 400
    assert "did you mean `prompt`" in body["error"]["message"]


def test_metrics_have_all_replicas(ray_of_two: LocalRay) -> None:
    async def text() -> str:
        async with aiohttp.ClientSession(ray_of_two.url.removesuffix("/v1")) as http, http.get("/metrics") as answer:
            assert answer.status == 200
            return await answer.text()

    replicas: set[str] = set()
    deadline = time.monotonic() + 120
    while len(replicas) != 2:  # the one that replaces the lost one may still be loading
        assert time.monotonic() < deadline
        families = {family.name: family for family in text_string_to_metric_families(asyncio.run(text()))}
        samples = families["penstock:generation_tokens"].samples
        assert {sample.labels["model_name"] for sample in samples} == {"demo"}
        replicas = {sample.labels["replica"] for sample in samples}


async def upgrade(served: LocalRay) -> list[Outcome]:
    """Requests come all the time while the replicas are replaced."""
    outcomes: list[Outcome] = []
    async with aiohttp.ClientSession(served.url + "/", timeout=aiohttp.ClientTimeout(120)) as http:
        replacing = asyncio.create_task(asyncio.to_thread(served.replace_all))
        while not replacing.done():
            outcomes += (batch := [Outcome() for _ in range(8)])
            await asyncio.gather(*(ask(http, number, outcome) for number, outcome in enumerate(batch)))
        await replacing
    return outcomes


def test_prompts_find_the_replica_that_has_their_beginning(ray_of_two: LocalRay) -> None:
    """Through the router as Serve has it, which is pickled by value. By load alone, or by chance, idle replicas would take turns."""

    async def replicas_of(prompt: str) -> set[str]:
        found = set[str]()
        async with aiohttp.ClientSession(ray_of_two.url + "/") as http:
            for _ in range(8):
                async with http.post("completions", json={"model": "demo", "prompt": prompt, "max_tokens": 1}) as response:
                    assert response.status == 200
                    found.add(response.headers["x-replica"])
        return found

    found = [asyncio.run(replicas_of(f"{letter} " * 200)) for letter in "abcd"]
    assert [len(replicas) for replicas in found] == [1] * 4


def test_an_upgrade_costs_no_request(ray_of_two: LocalRay) -> None:
    before = {replica.pid for replica in ray_of_two.replicas()}
    outcomes = asyncio.run(upgrade(ray_of_two))
    assert [outcome for outcome in outcomes if outcome.text != ANSWER or outcome.error] == []
    assert before.isdisjoint(replica.pid for replica in ray_of_two.replicas())


def test_sigterm_ends_it_all_after_the_requests_that_run(ray_of_two: LocalRay) -> None:
    client = OpenAI(base_url=ray_of_two.url, api_key="none", max_retries=0)
    chunks = iter(client.completions.create(model="demo", prompt="Hi", max_tokens=100, stream=True))
    text = next(chunks).choices[0].text
    ray_of_two.process.terminate()
    text += "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)
    assert text == (TEXT * 9)[:100]
    assert ray_of_two.process.wait(60) == 0
