"""Models of many families in two processes: how they are written, which ranks load them, and how their answers are compared."""

import contextlib
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from penstock.engine.build import build_core, load
from penstock.engine.config import EngineConfig
from penstock.engine.core import EngineCore
from penstock.engine.parallel.group import Order, Ranks
from penstock.engine.parallel.rendezvous import lead
from penstock.engine.weights.packed import SUPER_BLOCK, pack, quantized
from penstock.engine.weights.quantization import StoredWeight, write_quantized
from tests.engine.weights.checkpoints import FORMATS, write_checkpoint
from tests.engine.weights.sample_weights import random_weight
from tests.engines import Run, run
from tests.fakes import byte_tokenizer
from tests.tiny_models import tiny_model

# By their names, each with the model, its settings, and those of the engine.
Cases: TypeAlias = Mapping[str, tuple[str, dict[str, Any], dict[str, Any]]]
RunsOfBoth: TypeAlias = Callable[[EngineConfig], list[tuple[Run, Run]]]
OTHER_RANK = Path(__file__).with_name("other_rank.py")
PROMPTS = [list(range(40, 90)), [5, 6, 7], list(range(40, 70)), [11]]
WIDE: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 192, "head_dim": 64}
FAMILIES: Cases = {
    name: (name, {}, {})
    for name in ("llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3_text", "granite", "smollm3", "cohere2", "glm4", "phi3", "olmo2")
} | {
    "qwen3_moe": ("qwen3_moe", {}, {}),
    "mixtral": ("mixtral", {}, {}),
    "tied": ("llama", {"tie_word_embeddings": True}, {}),
}
BFLOAT16 = {"dtype": "bfloat16"}
# Kernels round what goes into a layer, or what comes out.
IN_FEW_BITS: Cases = {
    "int8": ("llama", WIDE, {"quantization": "int8"}),
    "int4": ("qwen2", {**WIDE, "tie_word_embeddings": True}, {"quantization": "int4"}),
    "int8_experts": ("qwen3_moe", {"moe_intermediate_size": 64}, {"quantization": "int8"}),
    "gptq": ("llama", {**WIDE, "intermediate_size": 256}, BFLOAT16),
    "gguf": ("llama", {**WIDE, "tie_word_embeddings": True}, BFLOAT16),
}
LARGEST = 0.05  # difference of logits that rounding makes, relative to how far they are spread


def write_plain(directory: Path, model: PreTrainedModel) -> None:
    model.save_pretrained(directory)


def write_gptq(directory: Path, model: PreTrainedModel) -> None:
    write_checkpoint(directory, model.bfloat16(), FORMATS["gptq"])


def write_converted(directory: Path, model: PreTrainedModel) -> None:
    """As GGUF files are converted: matrices in 8 bits, the vocabulary among them."""
    weights = {name: weight for name, weight in model.state_dict().items() if weight.dim() == 2 and name != "lm_head.weight"}
    model.save_pretrained(directory)
    rest = {name: weight for name, weight in load_file(directory / "model.safetensors").items() if name not in weights}
    save_file(rest, directory / "model.safetensors", {"format": "pt"})
    few_bits = {name: StoredWeight(pack(quantized(weight, 8)), "Q8_0") for name, weight in weights.items()}
    for name, weight in weights.items():
        if name.endswith("down_proj.weight") and weight.shape[1] % SUPER_BLOCK == 0:
            few_bits[name] = StoredWeight(pack(random_weight("Q4_K", *weight.shape)), "Q4_K")
    write_quantized(directory, few_bits)


WRITERS = {"gptq": write_gptq, "gguf": write_converted, "gguf_blocks": write_converted}


def write_models(directory: Path, cases: Cases, **options: int) -> dict[str, EngineConfig]:
    """A directory for each case, with what an engine of several ranks is to be built from."""
    common: dict[str, Any] = {
        "dtype": "float32",
        "compile": "off",
        "kv_cache_memory": 2**22,
        "max_model_len": 128,
        "max_num_batched_tokens": 32,
        "num_threads": 1,
    }
    configs = {}
    for case, (name, settings, own) in cases.items():
        WRITERS.get(case, write_plain)(directory / case, tiny_model(name, **settings))
        configs[case] = EngineConfig(model=str(directory / case), **common | options | own)
    return configs


@contextlib.contextmanager
def ranks_of(configs: Mapping[str, EngineConfig], directory: Path) -> Iterator[Ranks]:
    """Rank 0, beside one that loads the models of all cases in turn."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    for case, config in configs.items():
        (directory / f"{case}.json").write_bytes(msgspec.json.encode(config))
    paths = [str(directory / f"{case}.json") for case in configs]
    process = subprocess.Popen([sys.executable, str(OTHER_RANK), address, *paths])
    try:
        ranks, _ = lead(replace(configs["llama"], distributed_address=address, distributed_timeout=60.0), "cpu")
        with contextlib.closing(ranks):
            yield ranks
    finally:
        process.kill()
        process.wait()


def core_of(config: EngineConfig, *ranks: Ranks) -> EngineCore:
    return build_core(load(Path(str(config.model)), config, *ranks), byte_tokenizer(), config)


def runs_of(core: EngineCore) -> list[Run]:
    try:
        return run(core, PROMPTS, max_tokens=12, temperature=0.0)
    finally:
        core.close()
        core.runner.shutdown()
        core.runner.group.send(Order.STOP)  # of this model


def check_families(configs: Mapping[str, EngineConfig], exact: Cases, rounded: Cases, runs_of_both: RunsOfBoth) -> None:
    """The cases come in the order in which the other rank has them. Where kernels round, the parts of a sum differ from the whole."""
    for case in exact:
        for mine, theirs in runs_of_both(configs[case]):
            assert mine.token_ids == theirs.token_ids, case
            assert (mine.logits_TV - theirs.logits_TV).abs().max() < 1e-3, case
    for case in rounded:
        firsts = [(mine.logits_TV[0], theirs.logits_TV[0]) for mine, theirs in runs_of_both(configs[case])]
        difference = torch.stack([(mine - theirs).abs().mean() for mine, theirs in firsts]).mean()
        assert difference < LARGEST * torch.stack([theirs for _, theirs in firsts]).std(), case
