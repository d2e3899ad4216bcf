"""Ordinary answers that stream while a server is attacked, and the largest gap between two of their tokens."""

import asyncio
import itertools
import json
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from benchmarks.client import BadAnswer, Client, Recording

NUM_STREAMS = 3
STREAM_TOKENS = 2000
WARM_TOKENS = 8
RETRY_SECONDS = 0.2
SHED = (429, 503)
JSON = {"Content-Type": "application/json"}


@dataclass(slots=True)
class Stream:
    """One answer after another, so that there is one to be delayed however long an attack takes."""

    answers: list[Recording] = field(default_factory=list)
    is_between: bool = True  # two answers: what comes next is the next one's beginning, which is not a gap

    async def listen(self, client: Client, prompt: str) -> None:
        for turn in itertools.count():
            body = client.body(f"{prompt} Part {turn}.", STREAM_TOKENS)
            async with client.session.post(f"{client.url}/chat/completions", data=body, headers=JSON) as response:
                if response.status in SHED:
                    await asyncio.sleep(RETRY_SECONDS)
                    continue
                if response.status != 200:
                    raise BadAnswer(response.status, await response.text())
                recording = Recording(time.perf_counter())
                self.answers.append(recording)
                async for piece in response.content.iter_any():
                    recording.pieces.append((time.perf_counter(), piece))
                    self.is_between = False
            self.is_between = True
            if not recording.pieces:
                raise BadAnswer(200, "a stream without an answer")

    async def embed(self, client: Client, prompt: str) -> None:
        """For a server that does not generate: small embeddings, each as one token of a stream without end."""
        self.answers.append(Recording(time.perf_counter()))
        for turn in itertools.count():
            body = json.dumps({"model": client.model, "input": f"{prompt} Part {turn}."}).encode()
            async with client.session.post(f"{client.url}/embeddings", data=body, headers=JSON) as response:
                answer = await response.read()
            if response.status not in (200, *SHED):
                raise BadAnswer(response.status, answer.decode(errors="replace"))
            if response.status == 200:
                self.answers[-1].pieces.append((time.perf_counter(), b""))
                self.is_between = False

    def gaps(self, now: float) -> Iterator[tuple[float, float]]:
        """Between which two times nothing came, within each answer; silence that lasts until now is one, too."""
        for recording in self.answers:
            yield from itertools.pairwise(arrived for arrived, _ in recording.pieces)
        if not self.is_between:
            yield self.answers[-1].pieces[-1][0], now


@asynccontextmanager
async def streams(client: Client, number: int, is_pooling: bool = False) -> AsyncIterator[list[Stream]]:
    """Ordinary answers under way; the last ones are broken off in the end. An error of theirs is raised."""
    under_way = [Stream() for _ in range(NUM_STREAMS)]
    prompts = [f"Tell me story {number}-{i}." for i in range(NUM_STREAMS)]
    listeners = [
        stream.embed(client, prompt) if is_pooling else stream.listen(client, prompt)
        for stream, prompt in zip(under_way, prompts, strict=True)
    ]
    tasks = [asyncio.create_task(listener) for listener in listeners]
    try:
        while min(sum(len(answer.pieces) for answer in stream.answers) for stream in under_way) < WARM_TOKENS:
            raise_errors(tasks)
            await asyncio.sleep(0.02)
        yield under_way
        raise_errors(tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def raise_errors(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        if task.done():
            task.result()


def largest_gap(under_way: list[Stream], start: float, stop: float, now: float) -> float:
    """In ms, of those gaps that reach into the time from `start` to `stop`. Where no answer was under way, all of it is one."""
    gaps = [later - earlier for stream in under_way for earlier, later in stream.gaps(now) if later > start and earlier < stop]
    return max(gaps, default=stop - start) * 1000
