"""What recurrent layers keep, and what models with such layers are not served with."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock import LLM, ConfigurationError, SamplingParams, StructuredOutputsParams
from penstock.engine.build import build_core
from penstock.engine.config import EngineConfig
from penstock.engine.kv_cache.tensors import NO_KV, LayerKV, kv_layout
from penstock.engine.model.loader import num_state_slots
from penstock.engine.recurrent.layout import RecurrentLayer, StateShape, slot_bytes
from tests.engines import loaded_model
from tests.fakes import byte_tokenizer
from tests.llm.model_directory import SETTINGS, write_model
from tests.tiny_models import tiny_config, tiny_model
from tests.tiny_multimodal import write_multimodal_model


def test_layers_keep_states_or_keys_and_values() -> None:
    layout = kv_layout(tiny_config("lfm2"))
    convolution = StateShape("convolution", 0, (64, 3))
    assert layout == [
        replace(NO_KV, recurrent=RecurrentLayer("model.layers.0.conv", (convolution,))),
        LayerKV(2, 16, 16),
        replace(NO_KV, recurrent=RecurrentLayer("model.layers.2.conv", (convolution,))),
    ]
    layers = [layer.recurrent for layer in layout if layer.recurrent is not None]
    assert slot_bytes(layers, torch.bfloat16) == 2 * 64 * 3 * 2


def test_recurrences_are_kept_in_float32() -> None:
    layer = kv_layout(tiny_config("mamba2"))[0].recurrent
    assert layer is not None
    assert layer.num_bytes(torch.bfloat16) == (128 + 2 * 2 * 16) * 4 * 2 + 8 * 16 * 16 * 4  # of 4 inputs, and of 8 heads


def test_a_hybrid_of_attention_alone_is_served_like_any_other_model() -> None:
    config = tiny_config("granitemoehybrid")
    config.layer_types = ["full_attention"] * 3
    assert kv_layout(config) == [LayerKV(2, 16, 16)] * 3


@pytest.mark.parametrize(("wanted", "has_attention", "expected"), [(2**20, False, 16), (2**20, True, 8), (2**30, True, 40)])
def test_states_get_a_part_of_the_cache(wanted: int, has_attention: bool, expected: int) -> None:
    cpu = torch.device("cpu")
    assert num_state_slots(wanted, slot_bytes=2**16, has_attention=has_attention, max_num_seqs=8, device=cpu) == expected
    with pytest.raises(ConfigurationError, match=r"states of one sequence take 2\.0 MiB, and .* raise --kv-cache-memory"):
        num_state_slots(wanted // 2**10, slot_bytes=2**21, has_attention=has_attention, max_num_seqs=8, device=cpu)


def test_no_more_sequences_run_than_states_fit_and_the_log_says_so(caplog: pytest.LogCaptureFixture) -> None:
    loaded = loaded_model(tiny_model("mamba2"))
    with caplog.at_level(logging.INFO):
        core = build_core(loaded, byte_tokenizer(), EngineConfig(kv_cache_memory=10 * 33_792))
    core.runner.shutdown()
    assert core.scheduler.max_num_seqs == 7
    assert "7 sequences' states of 0.03 MB each, and at least 3 snapshots" in caplog.text
    assert "No draft tokens" in caplog.text


@pytest.fixture(scope="module")
def hybrid_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("hybrid"), "lfm2")


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"speculation": "ngram"}, "--speculation ngram: they cannot undo a draft token"),
        ({"kv_cache_dir": "blocks"}, "--kv-cache-dir: their states are not kept in files"),
        ({"kv_cache_dtype": "int8"}, "--kv-cache-dtype int8: only auto"),
        ({"compile": "on"}, "--compile on: their layers are not compiled"),
    ],
)
def test_what_has_no_place_for_states_is_refused_before_weights_are_read(settings: dict[str, Any], reason: str, hybrid_dir: Path) -> None:
    if "kv_cache_dir" in settings:
        settings = {"kv_cache_dir": str(hybrid_dir / "blocks")}
    with pytest.raises(ConfigurationError, match=f"models with recurrent layers are not served with {reason}"):
        LLM(hybrid_dir, **SETTINGS | settings)


def test_what_the_language_model_of_a_multimodal_one_has_no_place_for_is_refused_as_early(tmp_path: Path) -> None:
    (write_multimodal_model(tmp_path, "qwen3_5") / "model.safetensors").unlink()
    with pytest.raises(ConfigurationError, match="models with recurrent layers are not served with --kv-cache-dtype int8"):
        LLM(tmp_path, **SETTINGS, kv_cache_dtype="int8")


def test_the_library_serves_a_hybrid(hybrid_dir: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    prompts = ["hello hello hello", "one two one two", "hello hello there"]

    def said(llm: LLM) -> list[list[int]]:
        return [list(output.outputs[0].token_ids) for output in llm.generate(prompts, params, use_tqdm=False)]

    def constrained(llm: LLM) -> list[str]:
        regex = StructuredOutputsParams(regex="(tea|coffee) for (one|two|three)[ab]{9}")
        rules = replace(params, max_tokens=60, ignore_eos=False, structured_outputs=regex)
        return [output.outputs[0].text for output in llm.generate(prompts, [rules, params, rules], use_tqdm=False)][::2]

    with LLM(hybrid_dir, **SETTINGS) as llm, LLM(hybrid_dir, async_scheduling=True, **SETTINGS) as other:
        assert constrained(other) == constrained(llm)
        alone = [list(llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids) for prompt in prompts]
        assert said(llm) == alone
        assert said(other) == alone
        llm.sleep(level=2)
        llm.wake_up()
        assert said(llm) == alone
