"""What a step costs the host: scheduling, building, updating and detokenizing around a model that computes nothing.

    python benchmarks/host.py [--json FILE] [--only NAME ...] [--against CHECKOUT]

`--against` measures another checkout as well, in turns with this one. Every measurement runs in a process of its own. Times are medians
of the processor time of the thread that runs the engine's loop.
"""

import argparse
import asyncio
import gc
import itertools
import json
import multiprocessing
import os
import random
import re
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # of a file run by its path, only the folder is there

import torch
from aiohttp import web
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from benchmarks import report
from penstock import server
from penstock.api.app import build_app, build_runner
from penstock.engine.batch import Batch
from penstock.engine.contracts.grammar import CompiledGrammar, GrammarMatcher
from penstock.engine.core import EngineCore
from penstock.engine.kv_cache.blocks import BlockPool, KVCacheManager
from penstock.engine.loop import Engine
from penstock.engine.parallel.group import ALONE
from penstock.engine.remote.messages import Add, Hello, WireRequest
from penstock.engine.remote.server import EngineServer, RequestReader
from penstock.engine.request import Request
from penstock.engine.runner import ModelRunner, StepHandle, StepOutput
from penstock.engine.sampling.params import SamplingParams
from penstock.engine.sampling.sampler import SamplerOutput
from penstock.engine.scheduling.admission import WaitingQueue
from penstock.engine.scheduling.scheduler import Scheduler
from penstock.engine.scheduling.step import Speculation, Step
from penstock.engine.sequence import SamplerRow
from penstock.engine.system import process
from penstock.engine.text.answer import Answer
from penstock.engine.text.streaming import Detokenizer
from penstock.engine.text.tokenizer import Tokenizer
from penstock.plugins.manager import Plugins
from penstock.serving.context import LocalContext, Workers
from penstock.serving.options import ServerOptions
from penstock.serving.templates.rendering import ChatTemplate

VOCAB_SIZE = 32_000
FIRST_WORD = 300  # the ids from here on are whole words
BLOCK_SIZE = 16
ROWS_FOR_WEIGHTS = 64.0
OUTPUT_TOKENS = 400
MAX_SECONDS = 150


def word_tokenizer() -> Tokenizer:
    """Bytes, and words for the rest of the vocabulary."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {character: index for index, character in enumerate(alphabet)} | {f"w{index}": index for index in range(256, VOCAB_SIZE)}
    backend = Backend(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend, {}, {})


TOKENIZER = word_tokenizer()
CHANCE = random.Random(0)


class NullRunner:
    """Computes nothing. `choose` gives the token of each row of the sampler."""

    min_tokens = 2
    group = ALONE

    def __init__(self, choose: Callable[[SamplerRow], int] = lambda row: CHANCE.randrange(FIRST_WORD, VOCAB_SIZE)) -> None:
        self.loaded = SimpleNamespace(device=torch.device("cpu"))
        self.drafter = None
        self.readers: list[threading.Thread] = []
        self.outputs = SimpleNamespace(check=lambda names: None)
        self.cache = SimpleNamespace(dtype=torch.bfloat16, block_tables_PN=torch.zeros(0, 0, dtype=torch.int32))
        self._choose = choose

    def optimize(self) -> None:
        """There is nothing to compile."""

    def shutdown(self) -> None:
        """There is no thread."""

    def launch(self, batch: Batch) -> StepHandle:
        future: Future[StepOutput] = Future()
        if batch.masks is None:
            future.set_result(self._sample(batch, list(range(len(batch.sampler_rows)))))
        else:  # which may depend on the step before
            threading.Thread(
                target=lambda masks: future.set_result(self._sample(batch, masks.rows_to_sample())), args=(batch.masks,)
            ).start()
        return StepHandle(future)

    def _sample(self, batch: Batch, rows: list[int]) -> StepOutput:
        return StepOutput(SamplerOutput([self._choose(batch.sampler_rows[row]) for row in rows], [None] * len(rows)), rows)


class AnyWord(GrammarMatcher):
    """A grammar that allows all tokens, and takes hardly any time for its masks."""

    def fill_bitmask(self, row: "torch.Tensor") -> None:
        row.fill_(-1)

    def advance(self, token_id: int) -> bool:
        return True

    def rollback(self, num_tokens: int) -> None:
        pass

    @property
    def finished(self) -> bool:
        return False


class AnyWords(CompiledGrammar):
    num_bytes = 0

    def matcher(self) -> GrammarMatcher:
        return AnyWord()


def make_core(
    num_blocks: int, *, max_num_seqs: int, budget: int, runner: NullRunner | None = None, speculates: bool = False, caches: bool = True
) -> EngineCore:
    scheduler = Scheduler(
        KVCacheManager(BlockPool(num_blocks, enable_prefix_caching=caches), BLOCK_SIZE),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        waiting=WaitingQueue(max_sequences=10**6),
        speculation=Speculation(ROWS_FOR_WEIGHTS) if speculates else None,
    )
    return EngineCore(
        runner=cast(ModelRunner, runner or NullRunner()),
        scheduler=scheduler,
        tokenizer=TOKENIZER,
        stop_token_ids=frozenset(),
        max_model_len=300_000,
        vocab_size=VOCAB_SIZE,
        is_async=True,
    )


def settle() -> None:
    """As in a server that has run for a while: every token has been said, and what lives as long as the process is no garbage."""
    detokenizer = Detokenizer(TOKENIZER, [FIRST_WORD])
    for token_id in range(FIRST_WORD, VOCAB_SIZE):
        detokenizer.feed(token_id)
    gc.collect()
    gc.freeze()
    gc.set_threshold(getattr(process, "YOUNG_OBJECTS", gc.get_threshold()[0]))  # another checkout may not have it


def words(count: int) -> list[int]:
    return [CHANCE.randrange(FIRST_WORD, VOCAB_SIZE) for _ in range(count)]


def make_request(name: object, prompt: list[int], *, max_tokens: int = 4000, **params: Any) -> Request:
    return Request(
        request_id=str(name),
        prompt_token_ids=prompt,
        params=SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **params),
        make_answer=lambda: Answer(Detokenizer(TOKENIZER, prompt), None, None, (), False, True),
    )


def steps(core: EngineCore, *, looks_ahead: bool = True) -> Iterator[dict[str, float]]:
    """Runs steps as the engine's loop does, each scheduled ahead where that is possible. Microseconds by part, and whether it was."""
    step = core.schedule()
    while step is not None:
        batch = core.build(step)
        handle = core.runner.launch(batch)
        while True:
            start = time.thread_time()
            follower = core.schedule_ahead(step, batch) if looks_ahead else None
            scheduled = time.thread_time()
            if follower is not None:
                next_batch = core.build(follower)
            built = time.thread_time()
            output = handle.collect()
            collected = time.thread_time()
            core.update(step, batch, output)
            parts = {"schedule": scheduled - start, "build": built - scheduled, "update": time.thread_time() - collected}
            if follower is None:
                start = time.thread_time()
                step = core.schedule()
                parts["schedule"] += time.thread_time() - start
                if step is not None:
                    start = time.thread_time()
                    next_batch = core.build(step)
                    parts["build"] += time.thread_time() - start
            else:
                step = follower
            yield {**parts, "total": sum(parts.values()), "is_ahead": float(follower is not None)}
            if step is None:
                return
            batch = next_batch
            handle = core.runner.launch(batch)


def step_cost(context_lens: Sequence[int], num_steps: int, **params: Any) -> dict[str, float]:
    """Microseconds of a step of decodes, by part."""
    num_blocks = sum(-(-(length + OUTPUT_TOKENS) // BLOCK_SIZE) for length in context_lens) + len(context_lens)
    core = make_core(num_blocks, max_num_seqs=len(context_lens), budget=10**9)
    for number, length in enumerate(context_lens):
        core.add(make_request(number, words(length), max_tokens=OUTPUT_TOKENS, **params))
    run = steps(core)
    for _ in range(4):
        next(run)
    settle()
    assert len(core.scheduler.running) == len(context_lens)
    parts = [next(run) for _ in range(num_steps)]
    return {name: round(statistics.median(part[name] for part in parts) * 1e6, 1) for name in ("schedule", "build", "update", "total")}


def waiting_cost(num_running: int, num_waiting: int, num_prompt: int) -> dict[str, float]:
    """Milliseconds of `schedule` while requests wait for a long prompt that is being computed, and of adding one of them."""
    core = make_core(600_000, max_num_seqs=num_running + num_waiting, budget=2048 + num_running + num_waiting)
    for number in range(num_running):
        core.add(make_request(f"running {number}", words(100)))
    for _ in range(num_running * 100 // 2048 + 3):
        core.step()
    common = words(num_prompt)
    added = []
    for number in range(num_waiting):
        request = make_request(f"waiting {number}", [*common, FIRST_WORD + number])
        start = time.thread_time()
        core.add(request)
        added.append(time.thread_time() - start)
    run = steps(core, looks_ahead=False)
    parts = [next(run)["schedule"] for _ in range(7)]
    return {"schedule_ms": round(statistics.median(parts) * 1e3, 2), "add_ms": round(statistics.median(added) * 1e3, 2)}


def recomputed(num: int, num_prompt: int, num_output: int, num_blocks: int, *, caches: bool) -> dict[str, float]:
    """How many tokens are computed for each that has to be, where more is asked for than the cache holds."""
    core = make_core(num_blocks, max_num_seqs=256, budget=2048, caches=caches)
    for number in range(num):
        core.add(make_request(number, words(num_prompt), max_tokens=num_output))
    num_steps = num_computed = 0
    while core.has_work:
        step = core.schedule()
        assert step is not None
        num_computed += sum(step.num_tokens.values())
        num_steps += 1
        batch = core.build(step)
        core.update(step, batch, core.runner.launch(batch).collect())
    ratio = num_computed / (num * (num_prompt + num_output - 1))
    return {"computed_ratio": round(ratio, 3), "preemptions": core.scheduler.num_preemptions, "steps": num_steps}


def graph_share(places: int, num_prompt: int, mean_output: int, num_steps: int = 300) -> dict[str, float]:
    """Which steps of a full server a GPU would run as CUDA graphs, and what padding adds to the tokens of those with prompts."""
    from penstock.engine.model.cuda_graphs import GraphShape, graph_sizes, mixed_sizes

    chance, names = random.Random(0), itertools.count()
    core = make_core(60_000, max_num_seqs=places, budget=2048)
    decodes = [GraphShape.of_decodes(size) for size in graph_sizes(places)]
    mixed = [GraphShape.of_mixed(size, places) for size in mixed_sizes(2048)]
    in_graphs: list[tuple[str, bool]] = []
    num_tokens = num_padding = 0
    for number in range(mean_output + num_steps):
        while len(core.scheduler.waiting) < 4:  # no place is ever free for a step
            length = 1 + int(chance.expovariate(1 / mean_output))
            core.add(make_request(next(names), words(num_prompt), max_tokens=length))
        step = core.schedule()
        assert step is not None
        batch = core.build(step)
        if number >= mean_output:  # by then answers end and prompts come at the same rate
            wanted = GraphShape.wanted_by(batch.inputs)
            shapes = mixed if wanted.num_prompts else decodes
            found = next((shape for shape in shapes if shape.has_room_for(wanted)), None)
            in_graphs.append((wanted.kind, found is not None))
            if found is not None and wanted.num_prompts:
                num_tokens += wanted.num_tokens
                num_padding += found.num_tokens - wanted.num_tokens
        core.update(step, batch, core.runner.launch(batch).collect())
    return {
        "decodes_alone": round(statistics.mean(kind == "decode" for kind, _ in in_graphs), 3),
        "in_graphs": round(statistics.mean(is_found for _, is_found in in_graphs), 3),
        "padding": round(num_padding / max(1, num_tokens), 3),
    }


def ahead_share(num_rows: int, num_steps: int = 200, *, num_constrained: int = 0) -> dict[str, float]:
    """The share of steps that are scheduled ahead where sequences say technical English, and speculation is on.

    A grammar decides on the tokens of `num_constrained` of them.
    """
    text = "\n".join(path.read_text() for path in sorted((report.ROOT / "docs").glob("*.md"))) + (report.ROOT / "LICENSE").read_text()
    ids: dict[str, int] = {}
    said: list[int] = [FIRST_WORD + ids.setdefault(word, len(ids)) % (VOCAB_SIZE - FIRST_WORD) for word in re.findall(r" ?\w+|\W", text)]
    starts = {str(number): CHANCE.randrange(len(said) - 300 - 20 * num_steps) for number in range(num_rows)}

    def choose(row: SamplerRow) -> int:
        sequence = row.sequence
        place = starts[sequence.request.request_id] + len(sequence.token_ids) + (sequence.pending_row is not None) + row.num_drafted
        return int(said[place])

    core = make_core(60_000, max_num_seqs=256, budget=10**7, runner=NullRunner(choose), speculates=True)
    for name, start in starts.items():
        request = make_request(name, said[start : start + 300], max_tokens=20 * num_steps)
        core.add(replace(request, grammar=AnyWords() if int(name) < num_constrained else None))
    core.masks.samples_first = False  # as on a GPU
    run = steps(core)
    next(run)
    before = core.stats().num_generation_tokens
    aheads = [next(run)["is_ahead"] for _ in range(num_steps)]
    tokens = core.stats().num_generation_tokens - before
    core.masks.close()
    return {"share_ahead": round(statistics.mean(aheads), 3), "tokens_a_step": round(tokens / num_steps / num_rows, 3)}


class SlowRunner(NullRunner):
    """Takes its time for each step, in a thread as a model does, and none of the processor."""

    def __init__(self, step_seconds: float) -> None:
        super().__init__()
        self._step_seconds = step_seconds
        self._thread = ThreadPoolExecutor(1)

    def launch(self, batch: Batch) -> StepHandle:
        return StepHandle(self._thread.submit(self._compute, super().launch(batch).collect()))

    def _compute(self, output: StepOutput) -> StepOutput:
        time.sleep(self._step_seconds)
        return output

    def optimize(self) -> None:
        pass

    def shutdown(self) -> None:
        self._thread.shutdown()


# Together more than the loop works for any step: none of its deltas waits for the next ones.
STEP_SECONDS = 0.001
STEP_SECONDS_A_STREAM = 0.0001
WINDOW = 10  # steps
CHAT = {"model": "none", "messages": [{"role": "user", "content": "w" * 40}], "max_tokens": 4000, "stream": True, "ignore_eos": True}


async def serve_streams(listener: socket.socket, num_streams: int, num_windows: int) -> dict[str, float]:
    """What the loop's thread computes while all streams generate, in microseconds: a step, and a token, and the kernel's part of that."""
    step_seconds = STEP_SECONDS + num_streams * STEP_SECONDS_A_STREAM
    core = make_core(60_000, max_num_seqs=num_streams, budget=10**6, runner=SlowRunner(step_seconds))
    engine, workers = Engine(core), Workers()
    context = LocalContext(
        engine=engine,
        tokenizer=TOKENIZER,
        chat_template=ChatTemplate("{{ messages[0].content }}"),
        model_names=("none",),
        max_model_len=300_000,
        vocab_size=VOCAB_SIZE,
        workers=workers,
        options=ServerOptions(),
        stop_token_ids=frozenset(),
        plugins=Plugins(),
        reasoning_parser=None,
        tool_parser=None,
        grammar_compiler=cast(Any, SimpleNamespace(stats=None)),
        default_thinking_budget=None,
        default_sampling={},
    )
    await engine.start()
    runner = build_runner(build_app(context))
    await runner.setup()
    await web.SockSite(runner, listener).start()
    while engine.stats().num_running < num_streams:  # noqa: ASYNC110 - the engine has no such event
        await asyncio.sleep(0.01)
    settle()
    loop_us, kernel_us = [], []
    for _ in range(num_windows):
        first, start, kernel = engine.stats().num_steps, time.thread_time(), resource.getrusage(resource.RUSAGE_THREAD).ru_stime
        await asyncio.sleep(WINDOW * step_seconds)
        micro = 1e6 / (engine.stats().num_steps - first)
        loop_us.append((time.thread_time() - start) * micro)
        kernel_us.append((resource.getrusage(resource.RUSAGE_THREAD).ru_stime - kernel) * micro)
    assert engine.stats().num_running == num_streams
    await engine.stop()
    await runner.cleanup()
    workers.shutdown()
    step_us, system_us = statistics.median(loop_us), statistics.median(kernel_us)
    return {"step": round(step_us, 1), "token": round(step_us / num_streams, 1), "kernel_a_token": round(system_us / num_streams, 1)}


def http_cost(num_streams: int, num_windows: int) -> dict[str, float]:
    """The server whole, HTTP included, around a model that computes nothing."""
    with socket.create_server(("127.0.0.1", 0), backlog=num_streams) as listener:
        command = [sys.executable, str(Path(__file__).parent / "stream_reader.py"), str(listener.getsockname()[1]), str(num_streams)]
        with subprocess.Popen(command, stdin=subprocess.PIPE) as client:
            assert client.stdin is not None
            client.stdin.write(json.dumps(CHAT).encode())
            client.stdin.close()
            try:
                with asyncio.Runner(loop_factory=getattr(server, "loop_factory", lambda: None)()) as runner:
                    return runner.run(serve_streams(listener, num_streams, num_windows))
            finally:
                client.kill()


def delivery_cost(num_streams: int, num_steps: int = 100) -> dict[str, float]:
    """Microseconds of the engine's thread for each token that it streams to an API server's process, the steps themselves included."""
    core = make_core(num_streams * 40, max_num_seqs=num_streams, budget=10**9, runner=NullRunner(lambda row: FIRST_WORD))
    core.observer = clock = StepClock(num_steps)
    ours, theirs = socket.socketpair()
    reader = multiprocessing.get_context("fork").Process(target=read_frames, args=(theirs,), daemon=True)
    reader.start()

    async def run() -> None:
        engine = Engine(core)
        await engine.start()
        requests = RequestReader(tokenizer=TOKENIZER, vocab_size=VOCAB_SIZE, processors={})
        server = EngineServer(engine, cast(Any, None), requests, b"".join, Hello("", 300_000, VOCAB_SIZE, frozenset()))
        connection = await server.connect(ours)
        for number in range(num_streams):
            params = {"temperature": 0.0, "max_tokens": OUTPUT_TOKENS, "ignore_eos": True}
            wire = WireRequest(str(number), words(200), params, None, None, [], 0, "", None, None, None, (), ())
            connection.take(Add(number, wire))
        gc.freeze()  # as the server does with what it has loaded
        await clock.is_over.wait()
        connection.close()
        await connection.ended.wait()
        await engine.stop()

    asyncio.run(run())
    reader.terminate()
    return {"us_a_token": round(clock.seconds / num_steps / num_streams * 1e6, 2)}


class StepClock:
    """How long the thread works for some steps, once as many have gone before."""

    def __init__(self, num_steps: int) -> None:
        self.is_over = asyncio.Event()
        self.seconds = 0.0
        self._num_steps = num_steps
        self._num_ended = 0

    def begin(self, step: Step) -> None:
        """Nothing is to be done."""

    def end(self, step: Step, deltas: object) -> None:
        self._num_ended += 1
        if self._num_ended == self._num_steps:
            self.seconds = -time.thread_time()
        if self._num_ended == 2 * self._num_steps:
            self.seconds += time.thread_time()
            self.is_over.set()


def read_frames(connected: socket.socket) -> None:
    """The other end: reads, and does nothing else."""
    while connected.recv(2**20):
        pass


MEASUREMENTS: dict[str, Callable[[], dict[str, float]]] = {
    "rows-1": lambda: step_cost([200], 300),
    "rows-32": lambda: step_cost([200] * 32, 100),
    "rows-256": lambda: step_cost([200] * 256, 40),
    "rows-1024": lambda: step_cost([200] * 1024, 15),
    "penalties-256": lambda: step_cost([200] * 256, 15, repetition_penalty=1.1),
    "mixed-31-long": lambda: step_cost([1000] * 31 + [100_000], 30),
    "mixed-255-long": lambda: step_cost([1000] * 255 + [100_000], 15),
    "mixed-1023-long": lambda: step_cost([1000] * 1023 + [100_000], 7),
    "equal-256-8k": lambda: step_cost([8192] * 256, 10),
    "waiting-128": lambda: waiting_cost(128, 128, 32_768),
    "waiting-500": lambda: waiting_cost(500, 500, 32_768),
    "thrash-64": lambda: recomputed(64, 1000, 1500, 2500, caches=True),
    "thrash-64-uncached": lambda: recomputed(64, 1000, 1500, 2500, caches=False),
    "thrash-256": lambda: recomputed(256, 500, 1000, 6000, caches=True),
    "thrash-256-uncached": lambda: recomputed(256, 500, 1000, 6000, caches=False),
    "thrash-4-long": lambda: recomputed(4, 16_000, 200, 2000, caches=True),
    "thrash-4-long-uncached": lambda: recomputed(4, 16_000, 200, 2000, caches=False),
    "graphs-256": lambda: graph_share(256, 512, 256),
    "graphs-64": lambda: graph_share(64, 512, 256),
    "graphs-short-256": lambda: graph_share(256, 40, 64),
    "ahead-1": lambda: ahead_share(1),
    "ahead-8": lambda: ahead_share(8),
    "ahead-32": lambda: ahead_share(32),
    "ahead-256": lambda: ahead_share(256),
    "ahead-32-grammar": lambda: ahead_share(32, num_constrained=1),
    "ahead-32-grammars": lambda: ahead_share(32, num_constrained=32),
    "http-1": lambda: http_cost(1, 50),
    "http-32": lambda: http_cost(32, 20),
    "http-256": lambda: http_cost(256, 12),
    "delivery-32": lambda: delivery_cost(32),
    "delivery-256": lambda: delivery_cost(256),
    "delivery-1024": lambda: delivery_cost(1024, 40),
}


def measure_in_process(name: str, checkout: Path) -> dict[str, float]:
    """Runs one measurement on the package in `checkout`, whatever that folder is called."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "penstock").symlink_to(checkout.resolve())
        environment = {**os.environ, "PYTHONPATH": folder, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, __file__, "--measure", name]
        run = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True, timeout=MAX_SECONDS)
    result: dict[str, float] = json.loads(run.stdout)
    return result


def line(name: str, which: str, result: dict[str, float]) -> str:
    return f"{name:24} {which:8} " + "  ".join(f"{key} {value:,}" for key, value in result.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=MEASUREMENTS, default=list(MEASUREMENTS), metavar="NAME", help=", ".join(MEASUREMENTS))
    parser.add_argument("--against", type=Path, metavar="CHECKOUT", help="another checkout, to be measured in turns with this one")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there")
    parser.add_argument("--measure", choices=MEASUREMENTS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure is not None:
        print(json.dumps(MEASUREMENTS[options.measure]()))
        return
    checkouts = {"here": report.ROOT} | ({"against": options.against} if options.against else {})
    results: dict[str, dict[str, dict[str, float]]] = {}
    for name in options.only:
        results[name] = {which: measure_in_process(name, checkout) for which, checkout in reversed(checkouts.items())}
        for which, result in results[name].items():
            print(line(name, which, result), flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps({**report.surroundings([]), "results": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
