"""Layers in stages: which rank has which, and models of many families that say over two processes what they say in one."""

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
from transformers import AutoConfig, GPT2Config

from penstock.engine.build import build_core, load
from penstock.engine.config import EngineConfig
from penstock.engine.core import EngineCore
from penstock.engine.errors import ConfigurationError
from penstock.engine.kv_cache.cache import LayerGroup, LayerKV, block_layers
from penstock.engine.parallel.group import Order, Ranks
from penstock.engine.parallel.rendezvous import lead
from penstock.engine.parallel.sharding import check_model, check_options
from penstock.engine.parallel.stages import Stage, check_stages, check_stream
from tests.engine.parallel.test_families import LARGEST, OTHER_RANK, PROMPTS, ROUNDED, WIDE, WRITERS, write_plain
from tests.engines import Run, run
from tests.fakes import byte_tokenizer
from tests.tiny_models import tiny_config, tiny_model

# Each with the settings of the model, and of the engine.
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    name: (name, {}, {})
    for name in ("llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3_text", "granite", "smollm3", "cohere2", "glm4", "phi3", "olmo2")
} | {
    "qwen3_moe": ("qwen3_moe", {}, {}),
    "mixtral": ("mixtral", {}, {}),
    "deepseek_v3": ("deepseek_v3", {}, {}),
    "gpt_oss": ("gpt_oss", {}, {}),
    "tied": ("llama", {"tie_word_embeddings": True}, {}),
    "drafts": ("llama", {}, {"speculation": "ngram"}),
}
IN_FEW_BITS = {case: ROUNDED[case] for case in ("int8", "int4", "int8_experts", "gptq", "gguf")} | {
    "bfloat16": ("llama", WIDE, {"dtype": "bfloat16"})
}


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
        "pipeline_parallel_size": 2,
    }
    configs = {}
    for case, (name, settings, options) in (CASES | IN_FEW_BITS).items():
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
    if ranks is None:
        config = replace(config, pipeline_parallel_size=1)
        return build_core(load(Path(str(config.model)), config), byte_tokenizer(), config)
    return build_core(load(Path(str(config.model)), config, ranks), byte_tokenizer(), config)


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
    here = {name.split(".")[2] for name, _ in core.runner.loaded.model.named_parameters() if name.startswith("model.layers.")}
    assert here == {"0"}  # of three layers, the other rank has two
    return list(zip(runs_of(core), runs_of(core_of(config)), strict=True))


@pytest.mark.thorough
def test_all_families_say_what_they_say_in_one_process(configs: dict[str, EngineConfig], ranks: Ranks) -> None:
    for case in CASES:
        for mine, theirs in runs_of_both(configs[case], ranks):
            assert mine.token_ids == theirs.token_ids, case
            assert (mine.logits_TV - theirs.logits_TV).abs().max() < 1e-3, case
    for case in IN_FEW_BITS:
        firsts = [(mine.logits_TV[0], theirs.logits_TV[0]) for mine, theirs in runs_of_both(configs[case], ranks)]
        difference = torch.stack([(mine - theirs).abs().mean() for mine, theirs in firsts]).mean()
        assert difference < LARGEST * torch.stack([theirs for _, theirs in firsts]).std(), case


@pytest.mark.parametrize(("num_layers", "size"), [(2, 2), (3, 2), (7, 3), (80, 8), (5, 5)])
def test_every_layer_has_one_stage_and_the_first_has_the_fewest(num_layers: int, size: int) -> None:
    stages = [Stage(rank, size, num_layers) for rank in range(size)]
    assert [layer for stage in stages for layer in stage.layers] == list(range(num_layers))
    sizes = [len(stage.layers) for stage in stages]
    assert min(sizes) == sizes[0] >= max(sizes) - 1


def test_blocks_have_room_for_the_layers_of_the_stage_alone() -> None:
    layout = [LayerKV(2, 16, 16, window) for window in (8, None, 8, None, 8, None)]
    groups = [LayerGroup((1, 3, 5)), LayerGroup((0, 2, 4), 8)]
    for rank, expected in ((0, 1), (1, 2)):
        stage = Stage(rank, 2, 3 * 2) if rank else Stage(0, 3, 6)
        own, ordered = stage.layout(layout), stage.groups(groups)
        assert [group.sliding_window for group in ordered] == [None, 8]
        assert [sorted(group.layers) for group in ordered] == [sorted(group.layers) for group in groups]
        room = [layer for layer in block_layers(own, ordered) if layer.num_kv_heads]
        assert len(room) == expected


def test_models_that_cannot_be_cut_are_refused_by_name() -> None:
    for name, reason in (("qwen3_next", "recurrent layers"), ("qwen3", "it has 3 layers")):
        with pytest.raises(ConfigurationError, match=f"--pipeline-parallel-size 4: .* cannot be cut into stages: .*{reason}"):
            check_stages(tiny_config(name), 4)
    with pytest.raises(ConfigurationError, match=r"--pipeline-parallel-size 2: .*a layer"):
        check_stream(AutoConfig.for_model("gemma3n_text", num_hidden_layers=2, num_kv_shared_layers=0), 2)
    check_stream(GPT2Config(n_layer=2, n_embd=32, n_head=2), 2)


@pytest.mark.parametrize(
    ("options", "flag"),
    [
        ({"tensor_parallel_size": 2}, "--tensor-parallel-size"),
        ({"enable_lora": True}, "--adapter"),
        ({"speculation": "draft"}, "--speculation draft"),
        ({"speculation": "mtp"}, "--speculation mtp"),
        ({"async_scheduling": True}, "--async-scheduling"),
        ({"kv_cache_dtype": "int8"}, "--kv-cache-dtype int8"),
        ({"kv_cache_dir": "kv"}, "--kv-cache-dir"),
        ({"compile": "on"}, "--compile on"),
        ({"trust_remote_code": True}, "--trust-remote-code"),
    ],
)
def test_options_that_do_not_go_with_stages_are_refused_by_name(options: dict[str, Any], flag: str) -> None:
    with pytest.raises(ConfigurationError, match=f"{flag} cannot be combined with --pipeline-parallel-size 2"):
        check_options(EngineConfig(pipeline_parallel_size=2, **options))


def test_a_model_of_stages_is_not_held_to_what_divides_layers() -> None:
    config = tiny_config("qwen3")
    config.num_attention_heads, config.num_key_value_heads = 3, 1
    check_model(config, EngineConfig(pipeline_parallel_size=2))
