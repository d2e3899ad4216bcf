"""Layers in stages: which rank has which, and models of many families that say over two processes what they say in one."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from transformers import AutoConfig, GPT2Config

from penstock.engine.config import EngineConfig
from penstock.engine.errors import ConfigurationError
from penstock.engine.kv_cache.tensors import LayerGroup, LayerKV, block_layers
from penstock.engine.parallel.group import Ranks
from penstock.engine.parallel.sharding import check_model, check_options
from penstock.engine.parallel.stages import Stage, check_stages, check_stream
from tests.engine.parallel.families import FAMILIES, IN_FEW_BITS, WIDE, Cases, check_families, core_of, ranks_of, runs_of, write_models
from tests.engines import Run
from tests.tiny_models import tiny_config

CASES: Cases = {
    **FAMILIES,
    "deepseek_v3": ("deepseek_v3", {}, {}),
    "gpt_oss": ("gpt_oss", {}, {}),
    "drafts": ("llama", {}, {"speculation": "ngram"}),
}
ROUNDED: Cases = {**IN_FEW_BITS, "bfloat16": ("llama", WIDE, {"dtype": "bfloat16"})}


@pytest.fixture(scope="module")
def configs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, EngineConfig]:
    return write_models(tmp_path_factory.mktemp("models"), {**CASES, **ROUNDED}, pipeline_parallel_size=2)


@pytest.fixture(scope="module")
def ranks(configs: dict[str, EngineConfig], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    with ranks_of(configs, tmp_path_factory.mktemp("options")) as ranks:
        yield ranks


@pytest.mark.thorough
def test_all_families_say_what_they_say_in_one_process(configs: dict[str, EngineConfig], ranks: Ranks) -> None:
    def runs_of_both(config: EngineConfig) -> list[tuple[Run, Run]]:
        core = core_of(config, ranks)
        here = {name.split(".")[2] for name, _ in core.runner.loaded.model.named_parameters() if name.startswith("model.layers.")}
        assert here == {"0"}  # of three layers, the other rank has two
        return list(zip(runs_of(core), runs_of(core_of(replace(config, pipeline_parallel_size=1))), strict=True))

    check_families(configs, CASES, ROUNDED, runs_of_both)


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
