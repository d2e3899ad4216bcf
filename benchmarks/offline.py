"""Batch work without a server: tokens per second of `LLM`, beside transformers' `generate` and `generate_batch`, in one run.

    python benchmarks/offline.py --json benchmarks/results/offline.json
    python benchmarks/offline.py --prompts 32 --rounds 1 --quick

256 prompts of 16 to 512 tokens of prose, new in every round, and greedy answers of 64 tokens each. Every engine has a process of its own
and they take turns. Prompts are token ids, and no two begin alike. The first round is not counted; in it `generate` tries its batch sizes,
and `generate_batch` how many sequences its cache is to hold, over some of the prompts, and each keeps its best. Padded batches are of
prompts of like length. Printed are medians of output tokens per second, and the median of each round's ratio to the better of the other
two: above 1, Penstock is faster. All three compute in the same type; Penstock's weights are in few bits where the model's file has them so
(`--quantization none`: they are not), and it uses n-gram speculative decoding (`--speculation none`: it does not).
"""

import argparse
import json
import random
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # of a file run by its path, only the folder is there

from benchmarks.offline_engines import ENGINES, Prompts, add_options
from benchmarks.report import surroundings

SIZES = (8, 16, 32, 64)
NUM_TRIED = 64  # prompts that sizes are tried with
OURS = "penstock"


@dataclass(frozen=True, slots=True)
class Workload:
    """So many prompts, each of a number of tokens drawn evenly between two bounds, and answers of one length."""

    num_prompts: int
    fewest_tokens: int
    most_tokens: int
    output_tokens: int

    def prompts(self, seed: int, prose: "Prose") -> Prompts:
        draw = random.Random(f"{self} {seed}")
        lengths = [draw.randint(self.fewest_tokens, self.most_tokens) for _ in range(self.num_prompts)]
        return [prose.text(f"{draw.getrandbits(32)}.", length, draw) for length in lengths]


class Prose:
    """Sentences as token ids, to be put together anew for each prompt: what a model makes of words at random repeats itself."""

    def __init__(self, encode: Callable[[str], list[int]], passages: Sequence[str]) -> None:
        self._encode = encode
        self._sentences = [encode(f" {sentence.strip()}.") for passage in passages for sentence in passage.split(".") if sentence.strip()]

    def text(self, opening: str, length: int, draw: random.Random) -> list[int]:
        """So many tokens, which begin with the `opening`."""
        token_ids = self._encode(opening)
        while len(token_ids) < length:
            token_ids = token_ids + draw.choice(self._sentences)
        return token_ids[:length]


class Worker:
    """A process with one engine and the model in it. `size` is the best of those that it has tried."""

    def __init__(self, name: str, options: argparse.Namespace) -> None:
        script = str(Path(__file__).with_name("offline_engines.py"))
        flags = {"--model": options.model, "--dtype": options.dtype, "--quantization": options.quantization, "--threads": options.threads}
        flags["--speculation"] = options.speculation
        command = [sys.executable, script, name, *(f"{flag}={value}" for flag, value in flags.items() if value is not None)]
        self.name = name
        self.size = SIZES[-1]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._read()

    def generate_s(self, prompts: Prompts, num_tokens: int, size: int | None = None) -> float:
        """Seconds. Every answer is checked to have as many tokens as it should."""
        assert self._process.stdin is not None
        asked = {"prompts": prompts, "num_tokens": num_tokens, "size": size or self.size}
        print(json.dumps(asked), file=self._process.stdin, flush=True)
        answer = self._read()
        lengths = {len(token_ids) for token_ids in answer["answers"]}
        if lengths != {num_tokens} or len(answer["answers"]) != len(prompts):
            raise SystemExit(f"{self.name} gave {len(answer['answers'])} answers of {sorted(lengths)} tokens, not {num_tokens}")
        return float(answer["seconds"])

    def try_sizes(self, prompts: Prompts, num_tokens: int) -> dict[int, float]:
        """Seconds by size; the best is kept."""
        tried = {size: self.generate_s(prompts, num_tokens, size) for size in SIZES}
        self.size = min(tried, key=lambda size: tried[size])
        return tried

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name} ended with status {self._process.wait()}; see its output above")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


def prose_for(model: str | None) -> Prose:
    """In the model's own tokens."""
    from benchmarks.passages import PASSAGES
    from penstock.engine.model.store import resolve_model
    from penstock.engine.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(resolve_model(model))
    return Prose(lambda text: tokenizer.encode(text, add_special_tokens=False), PASSAGES)


def measure(workers: Sequence[Worker], workload: Workload, prose: Prose, rounds: int) -> dict[str, Any]:
    """Every worker in turn, over prompts that are new in every round."""
    warm_up = workload.prompts(0, prose)[:NUM_TRIED]
    tried: dict[str, dict[int, float]] = {}
    for worker in workers:
        if worker.name == OURS:
            worker.generate_s(warm_up, workload.output_tokens)
        else:
            tried[worker.name] = worker.try_sizes(warm_up, workload.output_tokens)
            say(f"{worker.name}: {', '.join(f'{size}: {seconds:.1f} s' for size, seconds in tried[worker.name].items())}")
    seconds: dict[str, list[float]] = {worker.name: [] for worker in workers}
    counts = []
    for number in range(1, rounds + 1):
        prompts = workload.prompts(number, prose)
        counts.append(sum(map(len, prompts)))
        for worker in workers:
            seconds[worker.name].append(worker.generate_s(prompts, workload.output_tokens))
            say(f"round {number} of {rounds}: {worker.name} took {seconds[worker.name][-1]:.1f} s")
    return summary(workload, seconds, counts) | {
        "tried_s": tried,
        "sizes": {worker.name: worker.size for worker in workers if worker.name != OURS},
    }


def summary(workload: Workload, seconds: Mapping[str, Sequence[float]], prompt_tokens: Sequence[int]) -> dict[str, Any]:
    """Rates and ratios. `prompt_tokens` are those of each round."""
    num_output = workload.num_prompts * workload.output_tokens
    result: dict[str, Any] = {
        "seconds": dict(seconds),
        "output_tokens": num_output,
        "prompt_tokens": list(prompt_tokens),
        "output_tokens_per_s": {name: statistics.median(num_output / took for took in times) for name, times in seconds.items()},
        "prompt_tokens_per_s": {
            name: statistics.median(count / took for count, took in zip(prompt_tokens, times, strict=True))
            for name, times in seconds.items()
        },
    }
    others = [times for name, times in seconds.items() if name != OURS]
    if others and OURS in seconds:
        best = [min(took) for took in zip(*others, strict=True)]
        result["ratio"] = statistics.median(their / our for their, our in zip(best, seconds[OURS], strict=True))
        result["ratios"] = {
            name: statistics.median(their / our for their, our in zip(times, seconds[OURS], strict=True))
            for name, times in seconds.items()
            if name != OURS
        }
    return result


def table(result: Mapping[str, Any]) -> list[str]:
    lines = [f"{'engine':16} {'output tok/s':>12} {'prompt tok/s':>12} {'median s':>9}  ratio"]
    for name, rate in result["output_tokens_per_s"].items():
        ratio = result.get("ratios", {}).get(name)
        size = result["sizes"].get(name)
        known = "" if ratio is None else f"penstock is {ratio:.2f} times as fast (size {size})"
        took = statistics.median(result["seconds"][name])
        lines.append(f"{name:16} {rate:12.1f} {result['prompt_tokens_per_s'][name]:12.1f} {took:9.1f}  {known}")
    if "ratio" in result:
        lines.append(f"to the better of the other two: {result['ratio']:.2f}")
    return lines


def say(line: str) -> None:
    """Progress, which is not the result."""
    print(line, file=sys.stderr, flush=True)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    add_options(parser)
    parser.add_argument("--prompts", type=int, default=256, help="(default: %(default)s)")
    parser.add_argument("--prompt-tokens", type=int, nargs=2, default=(16, 512), metavar=("LOW", "HIGH"), help="(default: 16 512)")
    parser.add_argument("--output-tokens", type=int, default=64, help="of each answer (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="beside the first, which is not counted (default: %(default)s)")
    parser.add_argument("--engine", choices=ENGINES, action="append", help="only this one; repeatable (default: all)")
    parser.add_argument("--quick", action="store_true", help="a few short prompts, only to see that everything works")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every round's numbers, and where and when they were measured")
    options = parser.parse_args(argv)
    low, high = options.prompt_tokens
    workload = Workload(8, 4, 24, 4) if options.quick else Workload(options.prompts, low, high, options.output_tokens)
    before, prose, workers = surroundings([]), prose_for(options.model), list[Worker]()
    try:
        for name in options.engine or ENGINES:
            workers.append(Worker(name, options))
        result = measure(workers, workload, prose, options.rounds)
    finally:
        for worker in workers:
            worker.close()
    print("\n".join(table(result)))
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(before | {"rounds": options.rounds} | result, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
