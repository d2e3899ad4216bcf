# mypy: disable-error-code="import-untyped"
"""The server itself on a GPU, as a user starts it: over HTTP, with the kinds of requests and of steps that a deployment has.

Part `server` of `gpu.py`. The model has random weights and is written to a directory first, since that is where a server reads one.
"""

import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import torch

from benchmarks.client import Recording
from benchmarks.gpu_engine import NUM_BYTES, random_model, random_prompts, wide_tokenizer
from benchmarks.gpu_shapes import Shape
from benchmarks.target import Launched, free_port, launched

SERVER = Path(__file__).resolve().parent.parent / "server.py"
START_S = 150.0
POLL_S = 0.1

Record = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Load:
    """Requests at once, each with the tokens of its prompt. `apart_s` passes between one's start and the next one's."""

    name: str
    prompt_lens: Sequence[int]
    output_len: int
    fields: dict[str, Any] = field(default_factory=dict)
    apart_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Variant:
    """The server with these flags, and what is sent to it."""

    name: str
    flags: tuple[str, ...]
    loads: tuple[Load, ...]


@dataclass(frozen=True, slots=True)
class Streamed:
    """When the parts of one answer came, by `time.perf_counter()`, and the tokens that the server counted."""

    started: float
    first: float
    last: float
    output_tokens: int


def variants(is_gpu: bool, streams: Sequence[int], prompt_len: int, output_len: int, long_len: int) -> list[Variant]:
    """One server with default flags for most, and one each for what takes a flag."""
    few, some, many = streams
    usual = (prompt_len,) * some
    sampling = {"temperature": 0.7, "top_p": 0.9, "top_k": 20}
    loads = (
        Load("greedy, 1 stream", (prompt_len,) * few, output_len),
        Load(f"greedy, {some} streams", usual, output_len),
        Load(f"greedy, {many} streams", (prompt_len,) * many, output_len),
        Load(f"one context of {long_len} among {some - 1}", (long_len, *usual[1:]), output_len),
        Load("prompts beside decodes", (4 * prompt_len,) * some, output_len, apart_s=0.05),
        Load("temperature, top-p, top-k", usual, output_len, sampling),
        Load("repetition penalty", usual, output_len, {"repetition_penalty": 1.1}),
        Load("5 log probabilities", usual, output_len, {"logprobs": 5}),
        Load("regex", usual, output_len, {"structured_outputs": {"regex": f"[a-z]{{{4 * output_len}}}"}}),
        Load("drafts that are all accepted", usual, output_len, {"logit_bias": {str(NUM_BYTES): 100}}),
    )
    fast_cache = [Variant("--kv-cache-dtype fp8", ("--kv-cache-dtype", "fp8"), loads[1:3])] if is_gpu else []
    return [Variant("", (), loads), Variant("--speculation none", ("--speculation", "none"), loads[1:2]), *fast_cache]


def measure(shape: Shape, device: torch.device, chosen: Sequence[Variant], *, max_len: int, flags: Sequence[str]) -> Iterator[Record]:
    """A record for each start and each load, as soon as it is there. Raises `RuntimeError` at the end where a load failed."""
    failed = []
    with tempfile.TemporaryDirectory() as directory:
        write_model(shape, device, Path(directory))
        for variant in chosen:
            port = free_port()
            command = [sys.executable, str(SERVER), "--model", directory, "--served-model-name", "random", "--port", str(port)]
            command += ["--device", device.type, "--max-model-len", str(max_len), "--no-access-log", *flags, *variant.flags]
            with launched("penstock", command) as server, asyncio.Runner() as runner:
                records = drive(server, f"http://127.0.0.1:{port}", variant, shape.vocab_size, device)
                while (record := runner.run(next_of(records))) is not None:
                    yield record | {"kind": "server", "flags": variant.name}
                    failed += [record["load"]] * ("failed" in record)
    if failed:
        raise RuntimeError(f"these loads failed: {', '.join(failed)}")


async def next_of(records: AsyncIterator[Record]) -> Record | None:
    return await anext(records, None)


def write_model(shape: Shape, device: torch.device, directory: Path) -> None:
    """A directory as a model's publisher makes it."""
    model = random_model(shape, device)
    # Constrained answers need a token to end with; the others are asked not to.
    model.config.eos_token_id = model.generation_config.eos_token_id = shape.vocab_size - 1
    torch.nn.Module.to(model, "cpu").save_pretrained(directory)
    (directory / "tokenizer.json").write_text(wide_tokenizer(shape.vocab_size).serialized(), encoding="utf-8")
    (directory / "tokenizer_config.json").write_text("{}")
    if device.type == "cuda":
        torch.cuda.empty_cache()  # the server's process needs the memory


async def drive(server: Launched, url: str, variant: Variant, vocab_size: int, device: torch.device) -> AsyncIterator[Record]:
    """Waits until the server is ready, then sends one load after the other."""
    async with aiohttp.ClientSession(url, connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=120)) as http:
        yield {"load": "start", "seconds": await ready(http, server)}
        for number, load in enumerate(variant.loads):
            prompts = [
                random_prompts(1, length, vocab_size, seed=1000 * number + place)[0] for place, length in enumerate(load.prompt_lens)
            ]
            start = time.perf_counter()
            try:
                answers = await asyncio.gather(*(stream(http, load, prompt, place * load.apart_s) for place, prompt in enumerate(prompts)))
            except (aiohttp.ClientError, RuntimeError, TimeoutError) as error:  # the other loads count all the same
                yield {"load": load.name, "failed": f"{type(error).__name__}: {error}"}
            else:
                yield summary(load, answers, time.perf_counter() - start) | {"memory_bytes": float(memory(server, device))}


async def ready(http: aiohttp.ClientSession, server: Launched) -> float:
    """Seconds from the start of the process to a /health of 200."""
    deadline = server.started + START_S
    while True:
        try:
            async with http.get("/health") as response:
                if response.status == 200:
                    return time.perf_counter() - server.started
                problem: Exception = RuntimeError(f"/health answers {response.status}")
        except aiohttp.ClientError as error:
            problem = error
        server.check(deadline, problem)
        await asyncio.sleep(POLL_S)


async def stream(http: aiohttp.ClientSession, load: Load, prompt: list[int], delay_s: float) -> Streamed:
    await asyncio.sleep(delay_s)
    fields = {"max_tokens": load.output_len, "temperature": 0, "ignore_eos": True} | load.fields
    body = {"model": "random", "prompt": prompt, "stream": True, "stream_options": {"include_usage": True}} | fields
    recording = Recording(time.perf_counter())
    async with http.post("/v1/completions", json=body) as response:
        if response.status != 200:
            raise RuntimeError(f"{load.name}: HTTP {response.status}: {(await response.text())[:300]}")
        async for piece in response.content.iter_any():
            recording.pieces.append((time.perf_counter(), piece))
    times, num_tokens = [], 0
    for arrived, event in recording.events():
        if "error" in event:
            raise RuntimeError(f"{load.name}: {json.dumps(event)[:300]}")
        times += [arrived] * bool(event.get("choices"))
        num_tokens = (event.get("usage") or {}).get("completion_tokens", num_tokens)
    return Streamed(recording.started, times[0], times[-1], num_tokens)


def summary(load: Load, answers: Sequence[Streamed], seconds: float) -> Record:
    apart = [(answer.last - answer.first) / (answer.output_tokens - 1) for answer in answers if answer.output_tokens > 1]
    return {
        "load": load.name,
        "streams": len(answers),
        "output_len": load.output_len,
        "seconds": seconds,
        "tokens_per_s": sum(answer.output_tokens for answer in answers) / seconds,
        "first_token_s": statistics.median(answer.first - answer.started for answer in answers),
        "slowest_first_token_s": max(answer.first - answer.started for answer in answers),
        "token_s": statistics.median(apart) if apart else 0.0,
    }


def memory(server: Launched, device: torch.device) -> int:
    """What is in use on a GPU, by all processes; else the memory of the server's."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return total - free
    server.processes.look_for_children()
    return server.processes.sample()
