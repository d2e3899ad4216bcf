"""Overload is answered before any work is done, and long requests never stand in the way of short ones."""

import asyncio
import io
import json
import threading
from typing import Any

import pytest

from penstock.engine.errors import EngineUnavailable, PenstockError, QueueFull
from penstock.serving.context import NUM_THREADS, JobQueue, Workers, rendering_queue
from penstock.serving.templates.rendering import ChatTemplate
from tests.api.running_server import CHAT, Running, serve

USER = {"role": "user", "content": "Hello"}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize(("refusal", "status"), [(QueueFull("full", 7), 429), (EngineUnavailable("stopping", 7), 503)])
def test_a_full_server_refuses_before_it_reads_the_body(path: str, refusal: PenstockError, status: int) -> None:
    async def scenario(server: Running) -> None:
        server.engine.refusal = refusal
        async with server.http.post(path, data=b"this is no JSON") as response:
            assert response.status == status
            assert response.headers["Retry-After"] == "7"

    serve(scenario)


def test_a_short_conversation_is_rendered_while_all_long_jobs_wait() -> None:
    async def scenario() -> None:
        release = threading.Event()
        with Workers() as workers:
            held = [asyncio.create_task(workers.run(JobQueue.LONG, release.wait)) for _ in range(2 * NUM_THREADS[JobQueue.LONG])]
            await asyncio.sleep(0)
            template = ChatTemplate("{{ messages[0].content }}")
            prompt = await workers.run(rendering_queue(100, None), lambda: template.render([USER]))
            assert prompt.text == "Hello"
            assert not any(task.done() for task in held)
            release.set()
            await asyncio.gather(*held)

    asyncio.run(scenario())


def test_waiting_for_a_thread_does_not_count_as_rendering() -> None:
    async def scenario() -> None:
        release = threading.Event()
        with Workers() as workers:
            held = [asyncio.create_task(workers.run(JobQueue.SHORT, release.wait)) for _ in range(NUM_THREADS[JobQueue.SHORT])]
            await asyncio.sleep(0)
            template = ChatTemplate("fine", time_limit=0.05)
            rendering = asyncio.create_task(workers.run(JobQueue.SHORT, lambda: template.render([USER])))
            await asyncio.sleep(0.15)
            release.set()
            assert (await rendering).text == "fine"
            await asyncio.gather(*held)

    asyncio.run(scenario())


def test_a_full_queue_is_a_503_and_takes_jobs_again_once_some_are_done() -> None:
    async def scenario() -> None:
        release = threading.Event()
        with Workers({JobQueue.LONG: 1}) as workers:
            held = [asyncio.create_task(workers.run(JobQueue.LONG, release.wait)) for _ in range(NUM_THREADS[JobQueue.LONG] + 1)]
            await asyncio.sleep(0)
            with pytest.raises(EngineUnavailable, match="too many long requests"):
                await workers.run(JobQueue.LONG, release.wait)
            assert await workers.run(JobQueue.SHORT, lambda: 3) == 3
            release.set()
            await asyncio.gather(*held)
            assert await workers.run(JobQueue.LONG, lambda: 4) == 4

    asyncio.run(scenario())


def test_a_job_that_no_request_waits_for_any_more_still_counts_until_it_ends() -> None:
    async def scenario() -> None:
        release, begun = threading.Event(), threading.Event()

        def job() -> None:
            begun.set()
            release.wait()

        with Workers({JobQueue.HUGE: 0}) as workers:
            left = asyncio.create_task(workers.run(JobQueue.HUGE, job))
            await asyncio.to_thread(begun.wait)
            left.cancel()
            await asyncio.wait([left])
            with pytest.raises(EngineUnavailable):
                await workers.run(JobQueue.HUGE, job)
            release.set()
            while True:
                try:
                    assert await workers.run(JobQueue.HUGE, lambda: 5) == 5
                    break
                except EngineUnavailable:
                    await asyncio.sleep(0.001)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {"prompt": "x" * (2**21 + 1)}, "prompt"),
        ("/tokenize", {"prompt": "\u4e00" * (2**21 // 3 + 1)}, "prompt"),
        ("/detokenize", {"tokens": [0] * (2**16 + 1)}, "tokens"),
        ("/v1/chat/completions", CHAT | {"messages": [USER] * (2**14 + 1)}, "messages"),
    ],
)
def test_lengths_are_bounded(path: str, body: dict[str, Any], param: str) -> None:
    async def scenario(server: Running) -> None:
        headers = {"Content-Type": "application/json"}
        async with server.http.post(path, data=io.BytesIO(json.dumps(body).encode()), headers=headers) as response:
            answer = await response.json()
        assert (response.status, answer["error"]["param"]) == (400, param)

    serve(scenario)
