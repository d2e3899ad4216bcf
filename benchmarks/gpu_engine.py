"""The engine over a model of random weights, driven in this process without HTTP."""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, PreTrainedModel

from benchmarks.gpu_clock import Clock
from benchmarks.gpu_shapes import Shape
from penstock.engine.batch import Batch
from penstock.engine.build import build_core, fuse
from penstock.engine.config import EngineConfig
from penstock.engine.core import DeltasByRequest, EngineCore
from penstock.engine.model.cuda_graphs import Kind
from penstock.engine.model.loader import in_memory
from penstock.engine.request import Request
from penstock.engine.runner import StepHandle
from penstock.engine.sampling.params import SamplingParams
from penstock.engine.scheduling.step import Step
from penstock.engine.text.answer import Answer
from penstock.engine.text.streaming import Detokenizer
from penstock.engine.text.tokenizer import Tokenizer

MAX_LEN = 4096
NUM_BYTES = 256
WARMUP_STEPS = 8
PROFILED_RUNS = 4
NUM_KERNELS = 12
SPARE_PROMPTS = 4  # that wait, so that no place is free for a step


def random_model(shape: Shape, device: torch.device) -> PreTrainedModel:
    """In bfloat16, its weights drawn on the device."""
    torch.manual_seed(0)
    with device:
        model: PreTrainedModel = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            shape.config(MAX_LEN), attn_implementation="sdpa", dtype=torch.bfloat16
        )
    model.train(False).requires_grad_(False)
    return model


def wide_tokenizer(vocab_size: int) -> Tokenizer:
    """One token per byte, and words for all the other ids."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {character: index for index, character in enumerate(alphabet)}
    vocab |= {f"w{index}": index for index in range(NUM_BYTES, vocab_size)}
    backend = Backend(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend, {}, {})


def random_prompts(count: int, length: int, vocab_size: int, seed: int) -> list[list[int]]:
    """No two begin alike, so no prefix cache helps."""
    chance = Random(seed)
    return [chance.choices(range(NUM_BYTES, vocab_size), k=length) for _ in range(count)]


def make_core(model: PreTrainedModel, shape: Shape, device: torch.device, **settings: Any) -> EngineCore:
    """The engine as a user's, over a model that is in memory already. Its graphs are captured."""
    loaded = in_memory(model, MAX_LEN)
    fuse(loaded)
    core = build_core(loaded, wide_tokenizer(shape.vocab_size), EngineConfig(device=device.type, seed=0, speculation="none", **settings))
    core.runner.optimize()
    return core


@dataclass(frozen=True, slots=True)
class DecodeTimes:
    """Medians. A whole step is scheduling, sampling and detokenization as well: from one step's tokens being known to the next one's."""

    step_s: float
    forward_s: float
    context_len: float
    kernels: list[tuple[str, float, float]]
    """Of one forward pass, those that take the most time: name, launches, seconds."""


def costliest_kernels(run: Callable[[], Any], device: torch.device) -> list[tuple[str, float, float]]:
    """What a run spends its time on, by torch's profiler: name, launches and seconds of each, per run; operators where there is no GPU."""
    is_gpu = device.type == "cuda"
    activity = ProfilerActivity.CUDA if is_gpu else ProfilerActivity.CPU
    with profile(activities=[activity]) as profiler:
        for _ in range(PROFILED_RUNS):
            run()
        if is_gpu:
            torch.cuda.synchronize()
    found = [
        (
            event.key,
            event.count / PROFILED_RUNS,
            (event.self_device_time_total if is_gpu else event.self_cpu_time_total) / 1e6 / PROFILED_RUNS,
        )
        for event in profiler.key_averages()
    ]
    return sorted(found, key=lambda kernel: -kernel[2])[:NUM_KERNELS]


@dataclass(frozen=True, slots=True)
class Flight:
    """A step that is under way."""

    step: Step
    batch: Batch
    handle: StepHandle


@dataclass(slots=True)
class MixedTimes:
    """Steps of a full server, in which answers end and prompts come in their places. `mixed_s` are the seconds of those with a prompt."""

    mixed_s: list[float] = field(default_factory=list)
    seconds: float = 0.0
    num_tokens: int = 0
    steps: Counter[tuple[Kind, bool]] = field(default_factory=Counter)
    """Those that were launched, by kind and by whether they ran as a CUDA graph."""


@dataclass(slots=True)
class Driver:
    """Sends requests to a core and steps it as the server does. Every request has a name and a prompt of its own."""

    core: EngineCore
    vocab_size: int
    _num_requests: int = 0
    _ahead: Flight | None = None
    _landed: Flight | None = None

    def add(self, count: int, prompt_len: int, output_len: int) -> list[str]:
        """Greedy requests, which never end before their length."""
        names = []
        for prompt in random_prompts(count, prompt_len, self.vocab_size, seed=self._num_requests):
            self._num_requests += 1
            names.append(str(self._num_requests))
            self.core.add(
                Request(
                    request_id=names[-1],
                    prompt_token_ids=prompt,
                    params=SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True),
                    make_answer=lambda prompt=prompt: Answer(  # type: ignore[misc]
                        Detokenizer(self.core.tokenizer, prompt), None, None, (), False, True
                    ),
                )
            )
        return names

    def step(self) -> DeltasByRequest:
        """What a step brings. The next one is under way by then, where the engine schedules ahead."""
        flight = self._landed = self._ahead or self._launch(self.core.schedule())
        assert flight is not None, "there is nothing to do"
        self._ahead = self._launch(self.core.schedule_ahead(flight.step, flight.batch))
        return self.core.update(flight.step, flight.batch, flight.handle.collect())

    def finish(self) -> int:
        """Steps until nothing is left to do; returns how many tokens came."""
        num_tokens = 0
        while self.core.has_work or self._ahead is not None:
            num_tokens += sum(len(delta.token_ids) for deltas in self.step().values() for delta in deltas)
        return num_tokens

    def land(self) -> None:
        """Ends the step that is under way, if one is, and begins none."""
        if self._ahead is not None:
            flight, self._ahead = self._ahead, None
            self.core.update(flight.step, flight.batch, flight.handle.collect())

    def _launch(self, step: Step | None) -> Flight | None:
        if step is None:
            return None
        batch = self.core.build(step)
        return Flight(step, batch, self.core.runner.launch(batch))

    def generate_s(self, count: int, prompt_len: int, output_len: int) -> float:
        """Wall time of whole requests that come at once."""
        self.add(count, prompt_len, output_len)
        start = time.perf_counter()
        num_tokens = self.finish()
        elapsed = time.perf_counter() - start
        assert num_tokens == count * output_len, "a request ended early"
        return elapsed

    def mix(self, count: int, prompt_len: int, mean_output_len: int, num_steps: int) -> MixedTimes:
        """Steps with `count` places taken, by answers of exponentially distributed lengths."""
        chance = Random(0)
        names: list[str] = []

        def step() -> DeltasByRequest:
            while len(self.core.scheduler.waiting) < SPARE_PROMPTS:
                names.extend(self.add(1, prompt_len, 1 + int(chance.expovariate(1 / mean_output_len))))
            return self.step()

        self.core.scheduler.max_num_seqs = count
        for _ in range(mean_output_len):
            step()
        times, graphs = MixedTimes(), self.core.runner.graphs
        before = Counter() if graphs is None else graphs.num_steps.copy()
        for _ in range(num_steps):
            start = time.perf_counter()
            deltas = step()
            elapsed = time.perf_counter() - start
            times.seconds += elapsed
            times.num_tokens += sum(len(delta.token_ids) for own in deltas.values() for delta in own)
            assert self._landed is not None
            is_mixed = self._landed.batch.inputs.attention.max_query_len > 1
            if is_mixed:
                times.mixed_s.append(elapsed)
            if graphs is None:
                times.steps["mixed" if is_mixed else "decode", False] += 1
        self.land()
        if graphs is not None:
            times.steps = graphs.num_steps - before
        for name in names:
            self.core.abort(name)
        return times

    def decode(self, count: int, prompt_len: int, num_steps: int, clock: Clock) -> DecodeTimes:
        """Steps in which `count` sequences get one token each."""
        assert count <= self.core.scheduler.max_num_seqs, "they would never all run at once"
        names = self.add(count, prompt_len, MAX_LEN - prompt_len)
        while len(self.step()) < count:
            pass
        for _ in range(WARMUP_STEPS):
            self.step()
        step_s = Clock(torch.device("cpu")).median_s(self.step, repeats=num_steps, warmup=0)
        self.land()
        step = self.core.schedule()
        assert step is not None
        batch = self.core.build(step)
        runner = self.core.runner
        # Once and again over the same tokens: their keys and values are written where they are already.
        forward_s = runner.thread.submit(clock.median_s, lambda: runner.forward(batch), num_steps).result()
        kernels = runner.thread.submit(costliest_kernels, lambda: runner.forward(batch), clock.device).result()
        context_len = float(batch.inputs.attention.context_lens_B.float().mean())
        self.core.update(step, batch, runner.launch(batch).collect())
        for name in names:
            self.core.abort(name)
        return DecodeTimes(step_s, forward_s, context_len, kernels)
