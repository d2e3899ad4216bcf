"""Models outside native code on a CPU, with their decoder layers compiled (`--compile on`) and as they are (`off`).

    python benchmarks/compiled_layers.py --json benchmarks/results/compiled-layers.json
    python benchmarks/compiled_layers.py --families cohere2 --rounds 1

No registry of packages has weights of these families, so each is a model of a few layers with random weights. Prompts are random tokens,
answers greedy and of full length. Both engines run in this process, in turn; the medians of the rounds are printed. Times include those
of the prompts.
"""

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # of a file run by its path, only the folder is there

from benchmarks.recurrent import COMMON, VOCAB_SIZE, copy_tokenizer
from benchmarks.report import surroundings
from penstock import LLM, SamplingParams, TokensPrompt

_COMMON: dict[str, Any] = {**COMMON, "hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 16}
WAYS = {"compiled": "on", "uncompiled": "off"}  # with what --compile is
FAMILIES: dict[str, dict[str, Any]] = {
    "cohere2": _COMMON,
}


def write_model(name: str, num_layers: int, directory: Path) -> None:
    """Random weights of a family in bfloat16, the same each time, with the default model's tokenizer."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **FAMILIES[name], num_hidden_layers=num_layers)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(directory)  # type: ignore[no-untyped-call]
    copy_tokenizer(directory)


def measure(llm: LLM, num_streams: int, options: argparse.Namespace, seed: int) -> tuple[float, float]:
    """Output tokens a second, and processor seconds for 1,000 of them."""
    numbers = random.Random(seed)
    prompts = [TokensPrompt(prompt_token_ids=numbers.choices(range(100, VOCAB_SIZE), k=options.prompt)) for _ in range(num_streams)]
    params = SamplingParams(temperature=0, max_tokens=options.answer, ignore_eos=True)
    begun, busy = time.perf_counter(), time.process_time()
    llm.generate(prompts, params, use_tqdm=False)
    count = num_streams * options.answer
    return count / (time.perf_counter() - begun), 1000 * (time.process_time() - busy) / count


def compared(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """For each number of streams, the medians of both ways, and how many times faster compiled layers are."""
    with tempfile.TemporaryDirectory() as place:
        directory = Path(place) / name
        write_model(name, options.layers, directory)
        engines = {
            way: LLM(model=str(directory), compile=mode, speculation="none", enable_prefix_caching=False, kv_cache_memory=2**28)
            for way, mode in WAYS.items()
        }
        found: dict[str, Any] = {}
        for num_streams in options.streams:
            rounds: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
            for seed in range(options.rounds + 1):
                for way, llm in engines.items():
                    rounds[way].append(measure(llm, num_streams, options, seed))
            medians = {
                way: {
                    "output_tokens_per_s": statistics.median(speed for speed, _ in taken[1:]),  # the first is a warm-up
                    "processor_s_per_1000_tokens": statistics.median(busy for _, busy in taken[1:]),
                }
                for way, taken in rounds.items()
            }
            ratio = medians["compiled"]["output_tokens_per_s"] / medians["uncompiled"]["output_tokens_per_s"]
            found[str(num_streams)] = {**medians, "ratio": ratio}
            speeds = " and ".join(f"{medians[way]['output_tokens_per_s']:.1f} {way}" for way in WAYS)
            print(f"{name}, {num_streams} streams: {speeds} tokens/s, ratio {ratio:.2f}", flush=True)
        for llm in engines.values():
            llm.close()
    return found


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", choices=list(FAMILIES), default=list(FAMILIES))
    parser.add_argument("--streams", nargs="+", type=int, default=[1, 8], metavar="N")
    parser.add_argument("--layers", type=int, default=8, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--prompt", type=int, default=64, metavar="TOKENS", help="(default: %(default)s)")
    parser.add_argument("--answer", type=int, default=64, metavar="TOKENS", help="(default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(argv)
    settings = {name: getattr(options, name) for name in ("layers", "prompt", "answer", "rounds")}
    result = surroundings([]) | settings | {"families": {name: compared(name, options) for name in options.families}}
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
