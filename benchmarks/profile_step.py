"""Where the time of one step goes on the CPU, part by part, against what the machine could do.

    python benchmarks/profile_step.py [--model DIR] [--quantization auto] [--streams 1 8 32] [--context 200] [--prompt 1490] [--threads 2]

The engine runs in this process as it runs in the server, without HTTP: `benchmarks/loop_lag.py` measures that. Each line is one part, in
microseconds: the least of all steps, which is what the part takes when nothing else disturbs it, and the median. `limit` is what reading
its weights, keys and values takes at --gigabytes, or its multiplications at --teraflops, whichever is more. Linear layers and attention
are timed by themselves, with the weights and the cache of the engine, and what remains of the decoder beside them is norms, positions,
activations and additions.

On a machine that does other things as well, two threads wait for each other most of the time. --processor-time takes one thread and counts
what it computes; the limits are then those of one of the --threads.
"""

import argparse
import json
import random
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # of a file run by its path, only the folder is there

from benchmarks import report
from penstock.engine.attention.cpu import head_size
from penstock.engine.attention.interface import AttentionMetadata
from penstock.engine.batch import Batch
from penstock.engine.build import build_core, load
from penstock.engine.config import EngineConfig, QuantizationMode
from penstock.engine.core import EngineCore
from penstock.engine.model.form import LinearForm, read_linear
from penstock.engine.model.native import NativeDecoder
from penstock.engine.model.store import resolve_model
from penstock.engine.native.runtime import native_library
from penstock.engine.request import Request
from penstock.engine.runner import StepOutput, sample_rows
from penstock.engine.sampling.greedy_head import MAX_ROWS, GreedyHead
from penstock.engine.sampling.params import SamplingParams
from penstock.engine.sampling.sampler import SamplerOutput
from penstock.engine.system.cpus import default_num_threads
from penstock.engine.text.answer import Answer
from penstock.engine.text.streaming import Detokenizer
from penstock.engine.text.tokenizer import Tokenizer

P = ParamSpec("P")
R = TypeVar("R")
ALONE_ROUNDS = 20  # of linear layers and attention by themselves


@dataclass(frozen=True, slots=True)
class Machine:
    """What it reads from memory and multiplies at most."""

    bytes_per_s: float
    flops_per_s: float

    def seconds(self, num_bytes: float, num_flops: float) -> float:
        return max(num_bytes / self.bytes_per_s, num_flops / self.flops_per_s)


class Profile:
    """Seconds by part, over many steps."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self.limits: dict[str, float] = {}

    def add(self, part: str, seconds: float) -> None:
        self.seconds[part].append(seconds)

    def least(self, part: str) -> float:
        return min(self.seconds[part])

    def median(self, part: str) -> float:
        return statistics.median(self.seconds[part])

    def as_json(self) -> dict[str, Any]:
        return {
            part: {"min_us": self.least(part) * 1e6, "median_us": self.median(part) * 1e6, "limit_us": self.limits.get(part, 0.0) * 1e6}
            for part in self.seconds
        }


class Bench:
    """One engine, driven step by step."""

    def __init__(self, core: EngineCore, machine: Machine, clock: Callable[[], float]) -> None:
        self.core = core
        self.clock = clock
        self.machine = machine
        decoder = core.runner.loaded.model.forward
        if not isinstance(decoder, NativeDecoder):
            raise SystemExit("this model's layers do not run in one call of native code, which is what is profiled here")
        if any(layer.mixture is not None for layer in decoder.form.layers):
            raise SystemExit("this model has experts, of which each step reads others")
        self.decoder = decoder
        self.random = random.Random(0)

    def add_requests(self, count: int, num_prompt: int, max_tokens: int) -> None:
        for _ in range(count):
            prompt = [self.random.randrange(self.core.vocab_size // 2) for _ in range(num_prompt)]
            answer = Answer(Detokenizer(self.core.tokenizer, prompt), None, None, (), False, True)
            params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
            name = str(self.random.random())
            self.core.add(Request(request_id=name, prompt_token_ids=prompt, params=params, make_answer=lambda answer=answer: answer))  # type: ignore[misc]

    def decode(self, streams: int, context: int, steps: int) -> Profile:
        """Steps in which each of the streams gets its next token, around a context of that length."""
        self.add_requests(streams, max(1, context - steps // 2), steps + streams + 2)
        while any(sequence.num_uncomputed_tokens > 1 for sequence in (*self.core.scheduler.running, *self.core.scheduler.waiting)):
            self.core.step()
        profile = Profile()
        batches = [self.step(profile) for _ in range(steps)]
        self.take_apart(profile, batches[steps // 2])
        self.end()
        return profile

    def prefill(self, num_prompt: int, count: int) -> Profile:
        """Whole prompts, one after the other, each in as many steps as the token budget makes of it; a part's time is a prompt's."""
        profile = Profile()
        for _ in range(count):
            self.add_requests(1, num_prompt, 1)
            one, batch = Profile(), None
            while self.core.has_work:
                batch = self.step(one)
            for part, seconds in one.seconds.items():
                profile.add(part, sum(seconds))
        assert batch is not None
        return profile

    def end(self) -> None:
        for request_id in {sequence.request.request_id for sequence in self.core.scheduler.running}:
            self.core.abort(request_id)

    def step(self, profile: Profile) -> Batch:
        clock = self.clock
        runner = self.core.runner
        times: dict[str, float] = {}

        @torch.inference_mode()
        def run(batch: Batch) -> StepOutput:
            times["start"] = clock()
            runner.cache.write_tables(batch.inputs.table_updates_3U)
            runner.cache.copy_blocks(batch.copies)
            x_TH = self.decoder.embed(batch.inputs.input_ids_1T)
            times["embedding"] = clock()
            hidden_KH = self.decoder.run(x_TH, batch.inputs.positions_1T, batch.inputs.attention, batch.inputs.kept_T)
            times["layers"] = clock()
            if (greedy_head := self.greedy_head(len(hidden_KH))) is not None:
                token_ids = greedy_head.tokens(hidden_KH[batch.logits_rows])
                assert token_ids is not None, "the logits are not finite"
                times["head"] = clock()
                output = StepOutput(SamplerOutput(token_ids, [None] * len(token_ids)), list(range(len(token_ids))))
            else:
                logits_KV = self.decoder.head(hidden_KH)
                times["head"] = clock()
                output = sample_rows(batch, logits_KV, runner.sampler)
            times["sampling"] = clock()
            return output

        began = clock()
        step = self.core.schedule()
        assert step is not None
        scheduled = clock()
        batch = self.core.build(step)
        built = clock()
        output = runner.thread.submit(run, batch).result()
        collected = clock()
        self.core.update(step, batch, output)
        ended = clock()
        profile.add("schedule", scheduled - began)
        profile.add("build batch", built - scheduled)
        waited = times["start"] - built + collected - times["sampling"] if clock is time.perf_counter else 0.0
        profile.add("hand over and back", waited)
        profile.add("embedding", times["embedding"] - times["start"])
        profile.add("decoder", times["layers"] - times["embedding"])
        profile.add("head", times["head"] - times["layers"])
        profile.add("sampling", times["sampling"] - times["head"])
        profile.add("update, detokenize, parse", ended - collected)
        profile.add("step", ended - collected + built - began + times["sampling"] - times["start"] + waited)
        return batch

    def take_apart(self, profile: Profile, batch: Batch) -> None:
        """Times the decoder's linear layers and its attention alone, in the model's thread, and says what each could take at best."""
        form, num_rows = self.decoder.form, batch.inputs.input_ids_1T.shape[1] - int((batch.inputs.attention.slot_mapping_T < 0).sum())
        layers = form.layers
        linears = [linear for layer in layers for linear in layer.linears]
        operands = Operands(linears, num_rows)
        for _ in range(ALONE_ROUNDS):
            for part, run in (
                ("linear layers", lambda: run_linears(linears, operands)),
                ("attention", lambda: self.attend(batch.inputs.attention)),
            ):
                profile.add(f"  {part}", self.in_thread(timed, run, self.clock))
        # The context grows from step to step: the median is that of the step taken apart.
        rest = profile.median("decoder") - profile.median("  linear layers") - profile.median("  attention")
        profile.add("  norms, positions, activations", rest)
        keys = self.core.runner.cache.keys
        num_keys = int(batch.inputs.attention.context_lens_B.sum())
        num_heads = layers[0].output.inputs // keys[0].shape[3]
        kv_bytes = 2 * num_keys * keys[0][0, 0].nbytes * len(keys)
        profile.limits["  linear layers"] = self.machine.seconds(
            sum(linear.weight_bytes for linear in linears), 2 * num_rows * sum(linear.inputs * linear.outputs for linear in linears)
        )
        profile.limits["  attention"] = self.machine.seconds(kv_bytes, 4 * num_keys * num_heads * keys[0].shape[3] * len(keys))
        profile.limits["decoder"] = profile.limits["  linear layers"] + profile.limits["  attention"]
        head, greedy_head = read_linear(self.decoder.head), self.greedy_head(len(batch.inputs.kept_T))
        head_bytes = head.weight_bytes if greedy_head is None else greedy_head.num_bytes
        profile.limits["head"] = self.machine.seconds(head_bytes, 2 * num_rows * head.inputs * head.outputs)
        profile.limits["step"] = profile.limits["decoder"] + profile.limits["head"]

    def greedy_head(self, num_rows: int) -> GreedyHead | None:
        """What so many rows of the output layer's input give their tokens by; None where that is their logits."""
        return self.core.runner.greedy_head if num_rows <= MAX_ROWS else None

    def in_thread(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Calls a function in the model's thread, whose loops have the model's number of threads."""
        return self.core.runner.thread.submit(function, *args, **kwargs).result()

    def attend(self, metadata: AttentionMetadata) -> None:
        """Decoding's attention of all layers, with queries that are all zeros."""
        cache, layers, library = self.core.runner.cache, self.decoder.form.layers, native_library()
        assert library is not None
        _, block_size, num_kv_heads, _ = cache.keys[0].shape
        size = head_size(cache.keys[0])
        num_heads, width = layers[0].output.inputs // size, metadata.block_tables_PN.shape[1]
        query_BHD = torch.zeros(metadata.num_decodes, num_heads, size, dtype=torch.bfloat16)
        out_BHD = torch.empty_like(query_BHD)
        tables = (metadata.block_tables_PN.data_ptr(), metadata.table_rows_B.data_ptr())
        places = (*tables, metadata.context_lens_B.data_ptr(), metadata.num_decodes)
        shape = (num_heads, num_kv_heads, size, size, block_size, width, True, cache.dtype == torch.int8)
        for layer, keys, values in zip(layers, cache.keys, cache.values, strict=True):
            library.penstock_paged_decode(
                out_BHD.data_ptr(), query_BHD.data_ptr(), keys.data_ptr(), values.data_ptr(), *places, *shape, layer.scaling, 0, 0.0, None
            )


def start_bench(model: str | None, quantization: QuantizationMode, num_threads: int, machine: Machine, clock: Callable[[], float]) -> Bench:
    """With an engine that computes every token, and one a step."""
    directory = resolve_model(model, False)
    config = EngineConfig(model=model, quantization=quantization, num_threads=num_threads, speculation="none", enable_prefix_caching=False)
    core = build_core(load(directory, config), Tokenizer.load(directory, False), config)
    core.runner.prepare_greedy_head()
    return Bench(core, machine, clock)


class Operands:
    """So many rows for any of these layers, and room for their results, as the decoder keeps it: new memory would cost each call time."""

    def __init__(self, linears: Sequence[LinearForm], num_rows: int) -> None:
        self.num_rows = num_rows
        self.x = torch.ones(num_rows * max(linear.inputs for linear in linears), dtype=torch.bfloat16)
        self.out = torch.empty(num_rows * max(linear.outputs for linear in linears), dtype=torch.bfloat16)


def run_linears(linears: Sequence[LinearForm], operands: Operands) -> None:
    library = native_library()
    assert library is not None
    x, out, num_rows = operands.x, operands.out, operands.num_rows
    for linear in linears:
        bias = None if linear.bias is None else linear.bias.data_ptr()
        if linear.parts is None:
            sizes = (num_rows, linear.inputs, linear.outputs)
            library.penstock_panel_linear(out.data_ptr(), x.data_ptr(), linear.address, bias, *sizes)
        else:
            parts = (linear.address, linear.num_parts)
            library.penstock_quantized_linear(out.data_ptr(), x.data_ptr(), *parts, bias, num_rows, linear.inputs, True)


def timed(run: Callable[[], None], clock: Callable[[], float]) -> float:
    with torch.inference_mode():
        began = clock()
        run()
        return clock() - began


ORDER = (
    *("schedule", "build batch", "hand over and back", "embedding", "decoder", "  linear layers", "  attention"),
    *("  norms, positions, activations", "head", "sampling", "update, detokenize, parse", "step"),
)


def table(profile: Profile) -> Iterator[str]:
    yield f"  {'':34} {'min us':>9} {'median':>9} {'limit':>9}  share of step"
    for part in ORDER:
        if part in profile.seconds:
            limit = f"{profile.limits[part] * 1e6:9.0f}" if part in profile.limits else " " * 9
            share = profile.least(part) / profile.least("step")
            yield f"  {part:34} {profile.least(part) * 1e6:9.0f} {profile.median(part) * 1e6:9.0f} {limit}  {share:6.1%}"


def next_thing(profile: Profile) -> str:
    """The part with the most time above its limit; what only its parts have limits for counts by those."""
    parts = [part for part in ORDER if part in profile.seconds and part not in ("step", "decoder")]
    excess = {part: profile.least(part) - profile.limits.get(part, 0.0) for part in parts}
    worst = max(parts, key=lambda part: excess[part])
    share = excess[worst] / profile.least("step")
    return f"furthest from its limit: {worst.strip()}, by {excess[worst] * 1e6:.0f} us, {share:.0%} of the step"


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a directory, GGUF file or Hugging Face id (default: the default model)")
    parser.add_argument("--quantization", default="auto", choices=("auto", "none", "int4", "int8"), help="as the server's (default: auto)")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32], metavar="N", help="at a time (default: 1 8 32)")
    parser.add_argument("--context", type=int, default=200, metavar="TOKENS", help="of each stream (default: %(default)s)")
    parser.add_argument("--prompt", type=int, default=1490, metavar="TOKENS", help="of a prompt (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=60, help="timed at each number of streams (default: %(default)s)")
    parser.add_argument("--threads", type=int, help="of the model (default: one per core)")
    parser.add_argument("--gigabytes", type=float, default=70.0, help="that the machine reads in a second (default: %(default)s)")
    parser.add_argument("--teraflops", type=float, default=1.0, help="that it multiplies in a second (default: %(default)s)")
    parser.add_argument("--processor-time", action="store_true", help="of one thread, rather than what goes by")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers there")
    return parser


def main() -> None:
    options = build_parser().parse_args()
    num_threads = options.threads or default_num_threads()
    share = num_threads if options.processor_time else 1
    clock = time.thread_time if options.processor_time else time.perf_counter
    machine = Machine(options.gigabytes * 1e9 / share, options.teraflops * 1e12 / share)
    bench = start_bench(options.model, options.quantization, 1 if options.processor_time else num_threads, machine, clock)
    numbers: dict[str, Any] = {}
    for streams in options.streams:
        profile = bench.decode(streams, options.context, options.steps)
        print(f"decoding {streams} stream(s) around {options.context} tokens: {streams / profile.least('step'):.0f} tokens/s at best")
        print("\n".join(table(profile)))
        print(f"  {next_thing(profile)}\n", flush=True)
        numbers[f"decode-{streams}"] = profile.as_json()
    profile = bench.prefill(options.prompt, 4)
    print(f"a prompt of {options.prompt} tokens: {options.prompt / profile.least('step'):.0f} tokens/s at best")
    print("\n".join(table(profile)))
    numbers["prefill"] = profile.as_json()
    bench.core.runner.shutdown()
    if options.json is not None:
        whole = {**report.surroundings([]), "threads": bench.core.runner.num_threads, **numbers}
        options.json.write_text(json.dumps(whole, indent=2) + "\n")


if __name__ == "__main__":
    main()
