"""Three ways to continue many prompts in one process: `LLM`, and transformers' `generate` and `generate_batch`.

Each runs in a process of its own, where it takes one JSON object per line: prompts, how many tokens each answer is to have, and a size.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # of a file run by its path, only the folder is there

Prompts = list[list[int]]
Generate = Callable[[Prompts, int, int], Prompts]
"""(prompts, tokens of each answer, size) to answers. What the size is, each engine says."""

PEER_PAGE_SIZE = 32
PEER_STEP_TOKENS = 1024  # as ours on the CPU


@contextmanager
def penstock(options: argparse.Namespace) -> Iterator[Generate]:
    """Greedy, whatever the size: it decides by itself how many run at once."""
    from penstock import LLM, SamplingParams

    settings = {name: getattr(options, name) for name in ("dtype", "quantization", "speculation", "threads")}
    with LLM(options.model, **settings) as llm:

        def generate(prompts: Prompts, num_tokens: int, size: int) -> Prompts:
            params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
            llm.reset_prefix_cache()
            return [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]

        yield generate


@contextmanager
def transformers_generate(options: argparse.Namespace) -> Iterator[Generate]:
    """Batches of `size` prompts, padded on the left; prompts of like length are in one batch."""
    import torch
    from transformers import GenerationConfig

    model = peer_model(options)

    @torch.inference_mode()
    def generate(prompts: Prompts, num_tokens: int, size: int) -> Prompts:
        config = GenerationConfig(  # type: ignore[no-untyped-call]
            max_new_tokens=num_tokens, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
        answers: dict[int, list[int]] = {}
        for start in range(0, len(order), size):
            batch = order[start : start + size]
            width = max(len(prompts[index]) for index in batch)
            pads = [width - len(prompts[index]) for index in batch]
            ids = torch.tensor([[0] * pad + prompts[index] for index, pad in zip(batch, pads, strict=True)])
            mask = torch.tensor([[0] * pad + [1] * (width - pad) for pad in pads])
            output = model.generate(ids, attention_mask=mask, generation_config=config)
            answers |= dict(zip(batch, output[:, width:].tolist(), strict=True))
        return [answers[index] for index in range(len(prompts))]

    yield generate


@contextmanager
def transformers_generate_batch(options: argparse.Namespace) -> Iterator[Generate]:
    """Continuous batching, with a cache for `size` sequences: its dense masks are as wide as the cache, so more is not always better."""
    from transformers import ContinuousBatchingConfig, GenerationConfig
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    model = peer_model(options)
    model.set_attn_implementation("paged|sdpa" if "paged|sdpa" in ALL_ATTENTION_FUNCTIONS.valid_keys() else "sdpa")

    def generate(prompts: Prompts, num_tokens: int, size: int) -> Prompts:
        longest = max(map(len, prompts)) + num_tokens
        outputs = model.generate_batch(
            inputs=prompts,
            generation_config=GenerationConfig(  # type: ignore[no-untyped-call]
                max_new_tokens=num_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
            ),
            continuous_batching_config=ContinuousBatchingConfig(
                page_size=PEER_PAGE_SIZE, num_blocks=size * -(-longest // PEER_PAGE_SIZE), max_batch_tokens=PEER_STEP_TOKENS
            ),
            progress_bar=False,
        )
        # By the order in which they were given, which is that of the numbers in their names.
        names = sorted(outputs, key=lambda name: int(name.rpartition("_")[2]))
        return [list(outputs[name].generated_tokens) for name in names]

    yield generate


def peer_model(options: argparse.Namespace) -> Any:
    """The same weights, all of them in one type: transformers multiplies nothing in few bits on the CPU."""
    import torch

    from penstock.engine.model.loader import load_model
    from penstock.engine.model.store import resolve_model

    if options.threads is not None:
        torch.set_num_threads(options.threads)
    return load_model(resolve_model(options.model), options.dtype, "cpu", quantization="none", attn_implementation="sdpa").model


ENGINES = {"penstock": penstock, "generate": transformers_generate, "generate_batch": transformers_generate_batch}


def add_options(parser: argparse.ArgumentParser) -> None:
    """A worker's further arguments."""
    parser.add_argument("--model", metavar="ID|DIR|GGUF", help="(default: the default model)")
    parser.add_argument("--dtype", default="auto", help="of all three (default: auto, what serving chooses)")
    parser.add_argument("--quantization", default="auto", help="of penstock's weights: auto, none, int8, int4 (default: auto)")
    parser.add_argument("--speculation", default="suffix", help="of penstock (default: %(default)s)")
    parser.add_argument("--threads", type=int, help="of each (default: as many as it takes by itself)")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="A worker of benchmarks/offline.py.")
    parser.add_argument("engine", choices=ENGINES)
    add_options(parser)
    options = parser.parse_args(argv)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print
    with ENGINES[options.engine](options) as generate:
        print(json.dumps({"ready": True}), file=answers, flush=True)
        for line in sys.stdin:
            asked = json.loads(line)
            started = time.perf_counter()
            found = generate(asked["prompts"], asked["num_tokens"], asked["size"])
            print(json.dumps({"seconds": time.perf_counter() - started, "answers": found}), file=answers, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
