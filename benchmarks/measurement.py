"""One scenario, once, against one server: what it took."""

import asyncio
import statistics
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

from benchmarks.client import Answer, BadAnswer, Client, Message, Recording, read_answer
from benchmarks.natural import Conversation
from benchmarks.scenarios import Scenario, long_prompt
from benchmarks.target import Running

WARMUP_OUTPUT_TOKENS = 16
LONG_OUTPUT_TOKENS = 600  # of the request that is not measured: more than the others take, and with its prompt within 32,768


@dataclass(frozen=True, slots=True)
class Metric:
    """A number of a measurement: how it is headed and scaled for people, and which way is better."""

    key: str
    heading: str
    scale: float
    digits: int
    is_higher_better: bool


METRICS = [
    Metric("output_tokens_per_s", "output tok/s", 1, 1, True),
    Metric("prompt_tokens_per_s", "prompt tok/s", 1, 1, True),
    Metric("ttft_median_s", "TTFT ms", 1e3, 1, False),
    Metric("ttft_p99_s", "TTFT p99", 1e3, 1, False),
    Metric("tpot_median_s", "TPOT ms", 1e3, 2, False),
    Metric("tpot_p99_s", "TPOT p99", 1e3, 2, False),
    Metric("wall_s", "wall s", 1, 2, False),
    Metric("rss_bytes", "RSS GB", 1e-9, 2, False),
    Metric("rss_peak_bytes", "RSS peak", 1e-9, 2, False),
    Metric("processor_s_per_1000_tokens", "CPU s/1k tok", 1, 2, False),
]


@dataclass(frozen=True, slots=True)
class Measurement:
    """Times per output token are per request: from its first token to its last, by one token less than it has.

    `rss_peak_bytes` is the highest since the server started, where this script started it, or since it was first driven. Processor
    seconds are those of all cores, in user and in system mode, for 1,000 tokens of prompts and answers together.
    """

    num_requests: int
    prompt_tokens: int | None
    output_tokens: int
    is_counted_by_server: bool
    wall_s: float
    output_tokens_per_s: float
    prompt_tokens_per_s: float | None
    ttft_median_s: float
    ttft_p99_s: float
    tpot_median_s: float | None
    tpot_p99_s: float | None
    rss_bytes: int | None
    rss_peak_bytes: int | None
    processor_s_per_1000_tokens: float | None

    @property
    def lengths(self) -> str:
        """Prompt and output tokens of a request, on average; `~` before what was counted as chunks."""
        prompt = "?" if self.prompt_tokens is None else f"{self.prompt_tokens / self.num_requests:.0f}"
        return f"{prompt}+{'' if self.is_counted_by_server else '~'}{self.output_tokens / self.num_requests:.0f}"

    def value(self, metric: Metric) -> float | None:
        value = asdict(self)[metric.key]
        return None if value is None else float(value)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def percentile(values: Sequence[float], percent: float) -> float:
    """Interpolates linearly between the two nearest values."""
    ordered = sorted(values)
    position = (len(ordered) - 1) * percent / 100
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def summarize(
    answers: Sequence[Answer], rss_bytes: int | None = None, rss_peak_bytes: int | None = None, processor_s: float | None = None
) -> Measurement:
    wall = max(answer.ended for answer in answers) - min(answer.started for answer in answers)
    output_tokens = sum(answer.output_tokens for answer in answers)
    counts = [answer.prompt_tokens for answer in answers if answer.prompt_tokens is not None]
    prompt_tokens = sum(counts) if len(counts) == len(answers) else None
    first = [answer.time_to_first_token for answer in answers]
    each = [answer.time_per_output_token for answer in answers if answer.time_per_output_token is not None]
    return Measurement(
        num_requests=len(answers),
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        is_counted_by_server=all(answer.is_counted_by_server for answer in answers),
        wall_s=wall,
        output_tokens_per_s=output_tokens / wall,
        prompt_tokens_per_s=None if prompt_tokens is None else prompt_tokens / wall,
        ttft_median_s=statistics.median(first),
        ttft_p99_s=percentile(first, 99),
        tpot_median_s=statistics.median(each) if each else None,
        tpot_p99_s=percentile(each, 99) if each else None,
        rss_bytes=rss_bytes,
        rss_peak_bytes=rss_peak_bytes,
        processor_s_per_1000_tokens=None if processor_s is None else 1000 * processor_s / (output_tokens + (prompt_tokens or 0)),
    )


async def send(client: Client, scenario: Scenario, conversations: Sequence[Conversation], output_tokens: int) -> list[Recording]:
    """Begins them in order, as many under way at any time as the scenario has."""
    if not scenario.runs_to_full_length:
        client = replace(client, extensions={name: value for name, value in client.extensions.items() if name != "ignore_eos"})
    waiting = enumerate(conversations)

    async def worker() -> list[Recording]:
        recordings: list[Recording] = []
        for number, conversation in waiting:
            recordings += await converse(client, scenario, conversation, number, output_tokens)
        return recordings

    return [recording for done in await asyncio.gather(*(worker() for _ in range(scenario.concurrency))) for recording in done]


async def converse(client: Client, scenario: Scenario, conversation: Conversation, number: int, output_tokens: int) -> list[Recording]:
    """Sends its turns, each once the one before is answered; one with a `seed` has a seed of its own."""
    messages: list[Message] = [] if conversation.system is None else [{"role": "system", "content": conversation.system}]
    fields = {name: number if name == "seed" else value for name, value in scenario.fields.items()}
    fields |= scenario.model_of(number)
    recordings: list[Recording] = []
    for turn in conversation.turns:
        messages.append({"role": "user", "content": turn})
        recordings.append(await client.stream(client.body(messages, output_tokens, fields)))
        if len(recordings) < len(conversation.turns):
            messages.append({"role": "assistant", "content": recordings[-1].text})
    return recordings


@asynccontextmanager
async def long_request(client: Client, scenario: Scenario, seed: str) -> AsyncIterator[None]:
    """The scenario's long request, if it has one, is being answered from the beginning of the block to its end, where it is aborted.

    Raises BadAnswer where it is not.
    """
    if not scenario.long_tokens:
        yield
        return
    has_begun = asyncio.Event()
    stream = asyncio.create_task(client.stream(client.body(long_prompt(scenario.long_tokens, seed), LONG_OUTPUT_TOKENS), has_begun))
    waiting = asyncio.create_task(has_begun.wait())
    try:
        await asyncio.wait([waiting, stream], return_when=asyncio.FIRST_COMPLETED)
        check_unfinished(stream)
        yield
        check_unfinished(stream)
    finally:
        waiting.cancel()
        stream.cancel()
        await asyncio.gather(waiting, stream, return_exceptions=True)


def check_unfinished(stream: "asyncio.Task[Recording]") -> None:
    """Raises BadAnswer, or what the request has failed with."""
    if stream.done():
        stream.result()
        raise BadAnswer(200, "the long answer ended before the others")


async def measure(running: Running, scenario: Scenario, seed: str, num_warmup: int | None) -> Measurement:
    """Warms up with prompts of the same length, as many as run at a time unless `num_warmup` says otherwise, then measures."""
    client, processes = running.client, running.processes
    num_warmup = scenario.concurrency if num_warmup is None else num_warmup
    warmup = [Conversation(one.turns[:1], one.system) for one in scenario.conversations(f"{seed} warm-up", num_warmup)]
    conversations = scenario.conversations(seed, scenario.num_conversations)
    await send(client, scenario, warmup, min(WARMUP_OUTPUT_TOKENS, scenario.output_tokens))
    async with long_request(client, scenario, seed):
        if processes is None:
            recordings = await send(client, scenario, conversations, scenario.output_tokens)
            return summarize([read_answer(recording) for recording in recordings])
        processes.look_for_children()
        busy = processes.processor_seconds()
        watching = asyncio.create_task(processes.watch())
        try:
            recordings = await send(client, scenario, conversations, scenario.output_tokens)
        finally:
            watching.cancel()
        busy = processes.processor_seconds() - busy
        current = processes.sample()
    return summarize([read_answer(recording) for recording in recordings], current, processes.peak, busy)
