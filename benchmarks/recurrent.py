# mypy: disable-error-code="no-untyped-call"
"""Models with recurrent layers: tokens per second and processor seconds against transformers' `generate`, states, and prefix caching.

    python benchmarks/recurrent.py --json benchmarks/results/recurrent.json
    python benchmarks/recurrent.py --families mamba2 --rounds 1 --layers 2

No registry of packages has weights of these families, so each is a model of a few layers with random weights, as wide as a small one,
and the default model's tokenizer. Prompts are random tokens, answers greedy and of full length, in float32, where both say the same. Both
run in this process, in turn, with as many threads. Processor seconds are those of all threads, per 1,000 output tokens, prompts included.

Prefix caching is shown by conversations in which each turn's prompt is the one before, its answer, and more. The tokens that are computed
are counted with snapshots of the states and without.
"""

import argparse
import json
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # of a file run by its path, only the folder is there

from benchmarks.report import surroundings
from penstock import LLM, SamplingParams
from penstock.engine.kv_cache.tensors import block_bytes
from penstock.engine.model.store import resolve_model
from penstock.engine.recurrent.layout import slot_bytes

VOCAB_SIZE = 49_152  # of the default model's tokenizer
MAX_MODEL_LEN = 4096
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
NUM_TURNS, FIRST_TURN, NEXT_TURN, TURN_ANSWER = 4, 600, 60, 32  # tokens of a conversation
NUM_CONVERSATIONS = 2
Prompts = list[list[int]]

COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": MAX_MODEL_LEN,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 384, "shared_expert_intermediate_size": 384}
FAMILIES: dict[str, dict[str, Any]] = {
    "mamba2": {
        **{
            name: value
            for name, value in COMMON.items()
            if "head" not in name and name not in ("intermediate_size", "max_position_embeddings")
        },
        "num_heads": 16,
        "head_dim": 64,
        "state_size": 128,
        "n_groups": 1,
    },
    "granitemoehybrid": {
        **COMMON,
        "mamba_n_heads": 16,
        "mamba_d_state": 128,
        "mamba_n_groups": 1,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "intermediate_size": 384,
        "shared_intermediate_size": 384,
    },
    "qwen3_next": {
        **COMMON,
        **_EXPERTS,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
    },
    "lfm2": {**COMMON, "conv_L_cache": 3},
}
RECURRENT_NAME = {"lfm2": "conv"}  # elsewhere "linear_attention"
EVERY = 4  # one layer in so many has attention


def write_model(name: str, num_layers: int, directory: Path) -> int:
    """Random weights of a family in float32, the same each time; returns how many there are."""
    settings = FAMILIES[name] | {"num_hidden_layers": num_layers}
    if name != "mamba2":
        recurrent = RECURRENT_NAME.get(name, "linear_attention")
        settings["layer_types"] = ["full_attention" if place % EVERY == EVERY - 1 else recurrent for place in range(num_layers)]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **settings), dtype=torch.float32)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 2:
                weight.normal_(0.0, weight.shape[-1] ** -0.5)  # so that the next token depends on those before
    model.save_pretrained(directory)
    copy_tokenizer(directory)
    return sum(weight.numel() for weight in model.parameters())


def copy_tokenizer(directory: Path) -> None:
    """The default model's."""
    source = resolve_model(None)
    for file in TOKENIZER_FILES:
        if (source / file).exists():
            shutil.copy(source / file, directory)


@dataclass(frozen=True, slots=True)
class Turn:
    """The answers to some prompts, and what they took."""

    answers: Prompts
    seconds: float
    processor_s: float

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.answers))

    @classmethod
    def of(cls, generate: Callable[[Prompts, int], Prompts], prompts: Prompts, num_tokens: int) -> "Turn":
        begun, busy = time.perf_counter(), time.process_time()
        answers = generate(prompts, num_tokens)
        return cls(answers, time.perf_counter() - begun, time.process_time() - busy)


def ours(llm: LLM) -> Callable[[Prompts, int], Prompts]:
    def generate(prompts: Prompts, num_tokens: int) -> Prompts:
        params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        asked: list[Any] = [{"prompt_token_ids": prompt} for prompt in prompts]
        return [list(output.outputs[0].token_ids) for output in llm.generate(asked, params, use_tqdm=False)]

    return generate


def transformers_own(directory: Path) -> Callable[[Prompts, int], Prompts]:
    """One batch of prompts of equal lengths, which needs no padding."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()

    @torch.inference_mode()
    def generate(prompts: Prompts, num_tokens: int) -> Prompts:
        config = GenerationConfig(max_new_tokens=num_tokens, do_sample=False, eos_token_id=None, pad_token_id=0)
        ids = torch.tensor(prompts)
        output = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
        answers: Prompts = output[:, ids.shape[1] :].tolist()
        return answers

    return generate


def compare(directory: Path, options: argparse.Namespace) -> dict[str, Any]:
    """What states take, and for each number of streams what both took: the least of the rounds."""
    loads = []
    settings = {"dtype": "float32", "quantization": "none", "threads": options.threads, "max_model_len": MAX_MODEL_LEN}
    with LLM(directory, enable_prefix_caching=False, **settings) as llm:
        torch.set_num_threads(options.threads)
        engines = {"penstock": ours(llm), "transformers": transformers_own(directory)}
        for streams in options.streams:
            turns: dict[str, list[Turn]] = {name: [] for name in engines}
            for number in range(options.rounds + 1):
                prompts = random_prompts(f"{streams} {number}", streams, options.prompt)
                for name in list(engines)[:: 1 if number % 2 else -1]:
                    turn = Turn.of(engines[name], prompts, options.answer)
                    if number:  # the first one warms up
                        turns[name].append(turn)
            pairs = list(zip(*(each.answers for each in map(_joined, turns.values())), strict=True))
            found: dict[str, Any] = {
                name: {"output_tokens_per_s": max(one.num_tokens / one.seconds for one in own)} for name, own in turns.items()
            }
            for name, own in turns.items():
                found[name]["processor_s_per_1000_tokens"] = min(1000 * one.processor_s / one.num_tokens for one in own)
            loads.append({"streams": streams, **found, "answers": len(pairs), "equal_answers": sum(left == right for left, right in pairs)})
        return {"bytes": state_bytes(llm), "loads": loads}


def _joined(turns: Sequence[Turn]) -> Turn:
    return Turn([answer for turn in turns for answer in turn.answers], 0.0, 0.0)


def random_prompts(seed: str, count: int, length: int) -> Prompts:
    rng = random.Random(seed)
    return [[rng.randrange(10, VOCAB_SIZE) for _ in range(length)] for _ in range(count)]


def converse(directory: Path, threads: int, *, is_cached: bool) -> dict[str, float]:
    """Conversations of several turns, one after the other."""
    settings: dict[str, Any] = {"dtype": "float32", "quantization": "none", "threads": threads, "max_model_len": MAX_MODEL_LEN}
    params = SamplingParams(temperature=0, max_tokens=TURN_ANSWER, ignore_eos=True)
    num_prompt = num_cached = 0
    with LLM(directory, enable_prefix_caching=is_cached, **settings) as llm:
        ours(llm)(random_prompts("warm-up", 1, FIRST_TURN), TURN_ANSWER)
        busy = time.process_time()
        for conversation in range(NUM_CONVERSATIONS):
            history = random_prompts(f"first {conversation}", 1, FIRST_TURN)[0]
            for turn in range(NUM_TURNS):
                asked: Any = {"prompt_token_ids": history}
                (output,) = llm.generate(asked, params, use_tqdm=False)
                num_prompt += len(history)
                num_cached += output.num_cached_tokens or 0
                history = [*history, *output.outputs[0].token_ids, *random_prompts(f"{conversation} {turn}", 1, NEXT_TURN)[0]]
        return {"prompt_tokens": num_prompt, "computed_tokens": num_prompt - num_cached, "processor_s": time.process_time() - busy}


def state_bytes(llm: LLM) -> dict[str, int]:
    """Of one sequence: its states, whatever its length, and the keys and values of each token in layers with attention."""
    loaded = llm._model.rest.awake().runner.loaded
    return {"states": slot_bytes(loaded.recurrent_layers, loaded.dtype), "token": block_bytes(loaded.kv_layout, 1, loaded.dtype)}


def measure(name: str, options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        found: dict[str, Any] = {"parameters": write_model(name, options.layers, directory)}
        found |= compare(directory, options)
        found["conversations"] = {
            kind: converse(directory, options.threads, is_cached=is_cached) for kind, is_cached in (("snapshots", True), ("without", False))
        }
        return found


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES), help="(default: %(default)s)")
    parser.add_argument("--layers", type=int, default=8, help="of each model (default: %(default)s)")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8], help="prompts at a time (default: %(default)s)")
    parser.add_argument("--prompt", type=int, default=200, help="tokens (default: %(default)s)")
    parser.add_argument("--answer", type=int, default=48, help="tokens (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="of which the least time counts (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="of both (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="write everything to this file")
    options = parser.parse_args(argv)
    found: dict[str, Any] = surroundings([]) | {
        name: getattr(options, name) for name in ("layers", "prompt", "answer", "rounds", "threads")
    }
    found["families"] = {}
    for name in options.families:
        found["families"][name] = one = measure(name, options)
        states, token = one["bytes"]["states"], one["bytes"]["token"]
        print(f"{name}: {one['parameters'] / 1e6:.0f}M parameters, {states / 1e3:.0f} kB of states, {token} B per token")
        for load in one["loads"]:
            for engine in ("penstock", "transformers"):
                speed, busy = (load[engine][key] for key in ("output_tokens_per_s", "processor_s_per_1000_tokens"))
                print(f"  {load['streams']:3} streams, {engine:12} {speed:8.1f} tokens/s {busy:8.2f} CPU s/1k")
            print(f"      {load['equal_answers']} of {load['answers']} answers are equal")
        for kind, each in one["conversations"].items():
            print(
                f"  {kind:10} {each['computed_tokens']} of {each['prompt_tokens']} prompt tokens computed, {each['processor_s']:.2f} CPU s",
                flush=True,
            )
        if options.json is not None:
            options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
