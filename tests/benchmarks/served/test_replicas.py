"""The benchmark of replicas: what its clients say, what is counted, and the tables of the pages about replicas."""

import asyncio
from typing import Any

import aiohttp
import pytest

from benchmarks import replicas, simulation_page
from benchmarks.client import Client, Recording
from benchmarks.replicas import Load, have_all, result_of
from tests.benchmarks.served.fake_server import FINISH, ROLE, TEXT, FakeServer, sse

LOAD = Load(num_apps=2, num_conversations=4, num_turns=3, num_clients=2, app_words=5, turn_words=3, output_tokens=2)


def test_prompts_begin_with_their_application_and_the_turns_before() -> None:
    server = FakeServer()

    async def drive(url: str) -> None:
        async with aiohttp.ClientSession() as session:
            assert len(await have_all(Client(session, f"{url}/v1"), LOAD, "seed")) == 12

    asyncio.run(server.while_up(drive))
    prompts = [body["messages"] for body in server.bodies]
    assert sorted(len(messages) for messages in prompts) == [2] * 4 + [4] * 4 + [6] * 4
    assert 1 < len({messages[0]["content"] for messages in prompts}) <= LOAD.num_apps
    for messages in prompts:
        assert [message["role"] for message in messages] == ["system", *["user", "assistant"] * 3][: len(messages)]
        if len(messages) > 2:
            assert messages[:-2] in prompts
    assert server.most_running <= LOAD.num_clients


def recording(prompt_tokens: int, cached_tokens: int | None, first: float) -> Recording:
    details = None if cached_tokens is None else {"cached_tokens": cached_tokens}
    usage: dict[str, Any] = {"prompt_tokens": prompt_tokens, "completion_tokens": 5, "prompt_tokens_details": details}
    return Recording(10.0, [(10.0 + first, sse(ROLE, TEXT)), (12.0, sse(FINISH, {"choices": [], "usage": usage}))])


def test_cached_tokens_are_a_share_of_all_prompts() -> None:
    result = result_of(2, "random", [recording(100, 60, 0.5), recording(300, None, 1.0), recording(100, 40, 0.25)], 2.0, 3.0, 0.0)
    assert (result.prompt_tokens, result.cached_tokens, result.cached_share) == (500, 100, 0.2)
    assert (result.output_tokens, result.output_tokens_per_s, result.num_requests) == (15, 7.5, 3)
    assert result.ttft_median_s == pytest.approx(0.5)


@pytest.mark.parametrize(("page", "tables"), [(replicas.PAGE, replicas.TABLES), (simulation_page.PAGE, simulation_page.TABLES)])
def test_the_tables_of_the_pages_are_those_of_the_results(page: Any, tables: Any) -> None:
    written = page.read_text(encoding="utf-8")
    assert written == simulation_page.rendered(written, tables), "run: benchmarks/replicas.py --page, benchmarks/simulation_page.py"
