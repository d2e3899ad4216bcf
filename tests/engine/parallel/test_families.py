"""Models of many families, whole and quantized, say over two processes what they say in one."""

from collections.abc import Iterator

import pytest

from penstock.engine.config import EngineConfig
from penstock.engine.model.native import NativeDecoder
from penstock.engine.native.runtime import native_library
from penstock.engine.parallel.group import Ranks
from penstock.engine.weights.packed import SUPER_BLOCK
from tests.engine.parallel.families import (
    BFLOAT16,
    FAMILIES,
    IN_FEW_BITS,
    WIDE,
    Cases,
    check_families,
    core_of,
    ranks_of,
    runs_of,
    write_models,
)
from tests.engines import Run

CASES: Cases = {
    **FAMILIES,
    "uneven_vocabulary": ("llama", {"vocab_size": 321}, {}),
    "biases": ("llama", {"attention_bias": True, "mlp_bias": True}, {}),
    "ahead": ("llama", {}, {"async_scheduling": True}),
}
ROUNDED: Cases = {
    **IN_FEW_BITS,
    "native": ("llama", WIDE, BFLOAT16),
    "native_experts": ("qwen3_moe", {**WIDE, "moe_intermediate_size": 64}, BFLOAT16),
    "native_int8": ("qwen3", WIDE, {**BFLOAT16, "quantization": "int8"}),
    "gguf_blocks": ("llama", {**WIDE, "intermediate_size": 3 * SUPER_BLOCK}, BFLOAT16),  # one rank has two of a row's blocks
    "native_int8_cache": ("llama", WIDE, {**BFLOAT16, "kv_cache_dtype": "int8"}),
}


@pytest.fixture(scope="module")
def configs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, EngineConfig]:
    return write_models(tmp_path_factory.mktemp("models"), {**CASES, **ROUNDED}, tensor_parallel_size=2)


@pytest.fixture(scope="module")
def ranks(configs: dict[str, EngineConfig], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    with ranks_of(configs, tmp_path_factory.mktemp("options")) as ranks:
        yield ranks


@pytest.mark.thorough
def test_all_families_say_what_they_say_in_one_process(configs: dict[str, EngineConfig], ranks: Ranks) -> None:
    def runs_of_both(config: EngineConfig) -> list[tuple[Run, Run]]:
        core = core_of(config, ranks)
        is_native = config.dtype == "bfloat16" and native_library() is not None
        assert isinstance(core.runner.loaded.model.forward, NativeDecoder) == is_native
        return list(zip(runs_of(core), runs_of(core_of(config)), strict=True))

    check_families(configs, CASES, ROUNDED, runs_of_both)
