"""One part of `gpu.py`, in a process of its own: what hangs or fails takes nothing with it, and its memory is free afterwards.

    python benchmarks/gpu_parts.py penstock --model qwen3-0.6b

Prints a line of JSON after the word RESULT for each measurement, as soon as it is there.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # of a file run by its path, only the folder is there

import torch
from transformers import GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from benchmarks import gpu_server
from benchmarks.gpu_clock import COPY_BYTES, MATMUL_SIZE, Clock, measure_ceilings
from benchmarks.gpu_engine import MAX_LEN, Driver, make_core, random_model, random_prompts
from benchmarks.gpu_shapes import SHAPES, Shape

MARK = "RESULT "
BATCHES = (1, 8, 64, 256)
DECODE_PROMPT_LEN = 512
DECODE_STEPS = 32
GENERATE_LENS = (128, 128)  # of prompt and output
PREFILLS = ((8, 2048),)  # prompts at a time, tokens of each
BUDGETS = (2048, 8192)  # tokens of a step; the first is what a server has by default
MIXED = (256, 512, 256, 200)  # places, tokens of prompts and, on average, of answers, and steps
SERVED_STREAMS = (1, 32, 256)
SERVED_LENS = (256, 128, 3500)  # of prompts, of answers, and of the longest prompt
REPEATS = 3
PEER_BLOCK_SIZE = 256  # tokens; transformers' own, as the next
PEER_STEP_TOKENS = 8192
SLOW_S = 12.0  # what takes longer is run once

Record = dict[str, Any]


def ceilings(options: argparse.Namespace) -> Iterator[Record]:
    """What the device can do at best."""
    is_small = options.model.startswith("tiny")
    found = measure_ceilings(Clock(options.device), 2**20 if is_small else COPY_BYTES, 64 if is_small else MATMUL_SIZE)
    yield {"kind": "ceilings", "bandwidth": found.bandwidth, "matmul": found.matmul}


def kernels(options: argparse.Namespace) -> Iterator[Record]:
    """Each kernel against its reference in plain torch."""
    from benchmarks.kernels import check, measure, measurements  # needs triton

    for measurement in measurements(options.device):
        check(measurement)
        kernel_s, reference_s = measure(measurement, repeat_ms=50)
        yield {
            "kind": "kernel",
            "name": measurement.name,
            "kernel_s": kernel_s,
            "reference_s": reference_s,
            "rate": measurement.work / kernel_s,
            "unit": measurement.unit,
        }


def penstock(options: argparse.Namespace) -> Iterator[Record]:
    """Decode steps, whole requests and prefill through this engine."""
    shape = SHAPES[options.model]
    clock = Clock(options.device)
    start = time.perf_counter()
    core = make_core(random_model(shape, options.device), shape, options.device, max_num_seqs=max(options.batches), **options.settings)
    yield {"kind": "built", "engine": "penstock", "seconds": time.perf_counter() - start}
    driver = Driver(core, shape.vocab_size)
    driver.generate_s(2, options.generate_lens[0], 4)  # the kernels of prefill are compiled at their first call
    for batch in options.batches:
        times = driver.decode(batch, options.decode_prompt_len, options.decode_steps, clock)
        yield {
            "kind": "decode",
            "batch": batch,
            "context_len": times.context_len,
            "step_s": times.step_s,
            "forward_s": times.forward_s,
        }
        yield {"kind": "profile", "batch": batch, "kernels": times.kernels}
    for batch in options.batches:
        yield from _generate_records("penstock", batch, options, lambda count, lens: driver.generate_s(count, *lens))
    for budget in options.budgets:
        core.scheduler.max_num_batched_tokens = budget
        for num_prompts, prompt_len in options.prefills:
            for number in range(1 + REPEATS):  # the first warms up
                seconds = driver.generate_s(num_prompts, prompt_len, 1)
                if number:
                    yield {"kind": "prefill", "prompts": num_prompts, "prompt_len": prompt_len, "budget": budget, "seconds": seconds}
    core.runner.shutdown()
    core.masks.close()


def mixed(options: argparse.Namespace) -> Iterator[Record]:
    """Steps of a full server, most of which compute prompts beside decodes, with CUDA graphs and without."""
    shape = SHAPES[options.model]
    places, prompt_len, output_len, num_steps = options.mixed
    model = random_model(shape, options.device)
    core = make_core(model, shape, options.device, max_num_seqs=places, max_waiting_tokens=None, **options.settings)
    driver = Driver(core, shape.vocab_size)
    graphs = core.runner.graphs
    for core.runner.graphs in [graphs] if graphs is None else [graphs, None]:
        times = driver.mix(places, prompt_len, output_len, num_steps)
        launched, num_mixed = times.steps.total(), times.steps["mixed", True] + times.steps["mixed", False]
        yield {
            "kind": "mixed",
            "batch": places,
            "prompt_len": prompt_len,
            "output_len": output_len,
            "has_graphs": core.runner.graphs is not None,
            "share_with_prompts": num_mixed / launched,
            "share_in_graphs": (times.steps["mixed", True] + times.steps["decode", True]) / launched,
            "share_with_prompts_in_graphs": times.steps["mixed", True] / max(1, num_mixed),
            "step_s": times.seconds / num_steps,
            "mixed_step_s": statistics.median(times.mixed_s),
            "tokens_per_s": times.num_tokens / times.seconds,
        }
    core.runner.shutdown()
    core.masks.close()


def server(options: argparse.Namespace) -> Iterator[Record]:
    """The server over HTTP."""
    chosen = gpu_server.variants(options.device.type == "cuda", *options.served)
    yield from gpu_server.measure(SHAPES[options.model], options.device, chosen, max_len=options.served_len, flags=options.served_flags)


def generate_batch(options: argparse.Namespace) -> Iterator[Record]:
    """The same whole requests through transformers' own continuous batching."""
    shape = SHAPES[options.model]
    start = time.perf_counter()
    model = random_model(shape, options.device)
    implementation = _paged_implementation()
    model.set_attn_implementation(implementation)
    # By default its cache takes all memory, and dense masks are as wide as the cache: here it holds twice what is asked of it.
    num_blocks = 2 * max(options.batches) * -(-sum(options.generate_lens) // PEER_BLOCK_SIZE)
    batching = ContinuousBatchingConfig(num_blocks=num_blocks, max_batch_tokens=PEER_STEP_TOKENS)

    def run(count: int, lens: tuple[int, int]) -> float:
        return _generate_batch_s(model, shape, count, lens, batching)

    yield {"kind": "built", "engine": f"transformers, {implementation}", "seconds": time.perf_counter() - start}
    for batch in options.batches:
        yield from _generate_records("transformers", batch, options, run)


def _paged_implementation() -> str:
    """Flash attention is a package apart; without it transformers has dense masks. Older versions name what is paged apart."""
    kind = "flash_attention_2" if find_spec("flash_attn") else "sdpa"
    paged = f"paged|{kind}"
    return paged if paged in ALL_ATTENTION_FUNCTIONS.valid_keys() else kind


def _generate_records(
    engine: str, batch: int, options: argparse.Namespace, generate_s: Callable[[int, tuple[int, int]], float]
) -> Iterator[Record]:
    """The first run of a size warms up, and is all there is where it takes long."""
    prompt_len, output_len = options.generate_lens
    for number in range(1 + REPEATS):
        start = time.perf_counter()
        seconds = generate_s(batch, options.generate_lens)
        is_slow = time.perf_counter() - start > SLOW_S
        if number or is_slow:
            yield {
                "kind": "generate",
                "engine": engine,
                "batch": batch,
                "prompt_len": prompt_len,
                "output_len": output_len,
                "seconds": seconds,
                "is_warm": bool(number),
            }
        if is_slow:
            return


def _generate_batch_s(model: Any, shape: Shape, count: int, lens: tuple[int, int], batching: ContinuousBatchingConfig) -> float:
    """From the first request's start to the last one's end: setting up its cache and graphs is not counted."""
    prompt_len, output_len = lens
    config = GenerationConfig(  # type: ignore[no-untyped-call]
        max_new_tokens=output_len, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    outputs = model.generate_batch(
        inputs=random_prompts(count, prompt_len, shape.vocab_size, seed=time.perf_counter_ns()),
        generation_config=config,
        continuous_batching_config=batching,
        progress_bar=False,
    )
    answers = list(outputs.values())
    if len(answers) != count or any(len(answer.generated_tokens) != output_len for answer in answers):
        raise RuntimeError(
            f"generate_batch gave {[len(answer.generated_tokens) for answer in answers]} tokens, not {count} times {output_len}"
        )
    return float(max(answer.lifespan[1] for answer in answers) - min(answer.lifespan[0] for answer in answers))


PARTS = {part.__name__: part for part in (ceilings, kernels, penstock, mixed, server, generate_batch)}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--model", choices=SHAPES, default="qwen3-0.6b")
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda"))
    options = parser.parse_args(argv)
    is_tiny = options.model.startswith("tiny")  # to try the script out, on any device
    options.batches = (1, 3) if is_tiny else BATCHES
    options.decode_prompt_len = 20 if is_tiny else DECODE_PROMPT_LEN
    options.decode_steps = 3 if is_tiny else DECODE_STEPS
    options.generate_lens = (20, 4) if is_tiny else GENERATE_LENS
    options.prefills = ((2, 40),) if is_tiny else PREFILLS
    options.budgets = (32,) if is_tiny else BUDGETS
    options.mixed = (3, 20, 4, 12) if is_tiny else MIXED
    options.settings = {"kv_cache_memory": 2**22} if is_tiny else {}
    if options.device.type == "cpu":
        options.settings["compile"] = "off"
    # Streams, tokens of prompt and answer, and of the longest prompt.
    options.served = ((1, 2, 3), 8, 4, 40) if is_tiny else (SERVED_STREAMS, *SERVED_LENS)
    options.served_len = 64 if is_tiny else MAX_LEN
    options.served_flags = ("--kv-cache-memory", "4MiB", "--threads", "1", "--compile", "off") if is_tiny else ()
    for record in PARTS[options.part](options):
        print(MARK + json.dumps({"model": options.model} | record), flush=True)


if __name__ == "__main__":
    main()
