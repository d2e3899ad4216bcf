"""Models of many families, whole and quantized, say over two processes what they say in one."""

import contextlib
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from penstock.engine.build import build_core, load
from penstock.engine.config import EngineConfig
from penstock.engine.core import EngineCore
from penstock.engine.model.native import NativeDecoder
from penstock.engine.native.library import native_library
from penstock.engine.parallel.group import Order, Ranks
from penstock.engine.parallel.rendezvous import lead
from penstock.engine.weights.packed import SUPER_BLOCK, pack, quantized
from penstock.engine.weights.quantization import StoredWeight, write_quantized
from tests.checkpoints import FORMATS, write_checkpoint
from tests.engines import Run, run
from tests.fakes import byte_tokenizer
from tests.tiny_models import tiny_model
from tests.weights import random_weight

OTHER_RANK = Path(__file__).with_name("other_rank.py")
PROMPTS = [list(range(40, 90)), [5, 6, 7], list(range(40, 70)), [11]]
WIDE: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 192, "head_dim": 64}
# Each with the settings of the model, and of the engine.
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    name: (name, {}, {})
    for name in ("llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3_text", "granite", "smollm3", "cohere2", "glm4", "phi3", "olmo2")
} | {
    "qwen3_moe": ("qwen3_moe", {}, {}),
    "mixtral": ("mixtral", {}, {}),
    "tied": ("llama", {"tie_word_embeddings": True}, {}),
    "uneven_vocabulary": ("llama", {"vocab_size": 321}, {}),
    "biases": ("llama", {"attention_bias": True, "mlp_bias": True}, {}),
    "ahead": ("llama", {}, {"async_scheduling": True}),
}
# Of these, kernels round what goes into a layer, or what comes out, so that the parts of a sum differ from the whole.
BFLOAT16 = {"dtype": "bfloat16"}
ROUNDED: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "int8": ("llama", WIDE, {"quantization": "int8"}),
    "int4": ("qwen2", {**WIDE, "tie_word_embeddings": True}, {"quantization": "int4"}),
    "int8_experts": ("qwen3_moe", {"moe_intermediate_size": 64}, {"quantization": "int8"}),
    "native": ("llama", WIDE, BFLOAT16),
    "native_int8": ("qwen3", WIDE, {**BFLOAT16, "quantization": "int8"}),
    "gptq": ("llama", {**WIDE, "intermediate_size": 256}, BFLOAT16),
    "gguf": ("llama", {**WIDE, "tie_word_embeddings": True}, BFLOAT16),
    "gguf_blocks": ("llama", {**WIDE, "intermediate_size": 3 * SUPER_BLOCK}, BFLOAT16),  # one rank has two of a row's blocks
    "native_int8_cache": ("llama", WIDE, {**BFLOAT16, "kv_cache_dtype": "int8"}),
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


@pytest.fixture(scope="module")
def configs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, EngineConfig]:
    directory = tmp_path_factory.mktemp("models")
    common: dict[str, Any] = {
        "dtype": "float32",
        "compile": "off",
        "kv_cache_memory": 2**22,
        "max_model_len": 128,
        "max_num_batched_tokens": 32,
        "num_threads": 1,
        "tensor_parallel_size": 2,
    }
    configs = {}
    for case, (name, settings, options) in (CASES | ROUNDED).items():
        WRITERS.get(case, write_plain)(directory / case, tiny_model(name, **settings))
        configs[case] = EngineConfig(model=str(directory / case), **common | options)
    return configs


@pytest.fixture(scope="module")
def ranks(configs: dict[str, EngineConfig], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Rank 0, beside one that loads the models of all cases in turn."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    directory = tmp_path_factory.mktemp("options")
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


def core_of(config: EngineConfig, ranks: Ranks | None = None) -> EngineCore:
    loaded = load(Path(str(config.model)), config) if ranks is None else load(Path(str(config.model)), config, ranks)
    return build_core(loaded, byte_tokenizer(), config)


def runs_of(core: EngineCore) -> list[Run]:
    try:
        return run(core, PROMPTS, max_tokens=12, temperature=0.0)
    finally:
        core.close()
        core.runner.shutdown()
        core.runner.group.send(Order.STOP)  # of this model


def runs_of_both(config: EngineConfig, ranks: Ranks) -> list[tuple[Run, Run]]:
    """Over two processes and in one. The cases come in the order in which the other rank has them."""
    core = core_of(config, ranks)
    is_native = config.dtype == "bfloat16" and native_library() is not None
    assert isinstance(core.runner.loaded.model.forward, NativeDecoder) == is_native
    return list(zip(runs_of(core), runs_of(core_of(config)), strict=True))


@pytest.mark.thorough
def test_all_families_say_what_they_say_in_one_process(configs: dict[str, EngineConfig], ranks: Ranks) -> None:
    for case in CASES:
        for mine, theirs in runs_of_both(configs[case], ranks):
            assert mine.token_ids == theirs.token_ids, case
            assert (mine.logits_TV - theirs.logits_TV).abs().max() < 1e-3, case
    for case in ROUNDED:
        firsts = [(mine.logits_TV[0], theirs.logits_TV[0]) for mine, theirs in runs_of_both(configs[case], ranks)]
        difference = torch.stack([(mine - theirs).abs().mean() for mine, theirs in firsts]).mean()
        assert difference < LARGEST * torch.stack([theirs for _, theirs in firsts]).std(), case
