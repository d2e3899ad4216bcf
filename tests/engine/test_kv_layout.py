import pytest
import torch
from transformers import AutoConfig

from penstock.engine.errors import ConfigurationError
from penstock.engine.kv_cache import LayerKV, kv_layout
from tests.tiny_models import ARCHITECTURES, WINDOW, tiny_config, tiny_model


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_layout_equals_what_the_models_own_cache_holds(name: str) -> None:
    model = tiny_model(name)
    num_tokens = 5
    with torch.inference_mode():
        cache = model(input_ids=torch.arange(3, 3 + num_tokens)[None], use_cache=True).past_key_values
    layout = kv_layout(model.config)
    assert len(layout) == len(cache.layers)
    for entry, layer in zip(layout, cache.layers, strict=True):
        assert layer.keys.shape == (1, entry.num_kv_heads, num_tokens, entry.key_size)
        assert layer.values.shape == (1, entry.num_kv_heads, num_tokens, entry.value_size)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_sliding_windows_follow_the_layer_types(name: str) -> None:
    config = tiny_config(name)
    windows = [entry.sliding_window for entry in kv_layout(config)]
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        kinds = ["sliding_attention" if getattr(config, "sliding_window", None) else "full_attention"] * len(windows)
    assert windows == [WINDOW if kind == "sliding_attention" else None for kind in kinds]


def test_some_tiny_models_mix_windows_and_full_attention() -> None:
    assert {entry.sliding_window for entry in kv_layout(tiny_config("gemma3_text"))} == {WINDOW, None}


def test_key_and_value_sizes_may_differ() -> None:
    config = AutoConfig.for_model(
        "deepseek_v3",
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        intermediate_size=32,
        moe_intermediate_size=16,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        q_lora_rank=8,
        kv_lora_rank=8,
        qk_nope_head_dim=8,
        qk_rope_head_dim=4,
        v_head_dim=6,
    )
    assert kv_layout(config) == [LayerKV(num_kv_heads=4, key_size=12, value_size=6)] * 2


def test_elements_per_token_count_keys_and_values() -> None:
    assert LayerKV(num_kv_heads=2, key_size=12, value_size=6).num_elements == 36


def test_the_config_is_left_as_it_was() -> None:
    config = tiny_config("qwen3_moe")
    before = config.to_dict(), config._attn_implementation
    kv_layout(config)
    assert (config.to_dict(), config._attn_implementation) == before


def test_layout_and_model_use_no_memory_however_large_the_model() -> None:
    config = AutoConfig.for_model("llama", hidden_size=16384, intermediate_size=53248, num_hidden_layers=126, num_attention_heads=128)
    config.num_key_value_heads = 8
    assert kv_layout(config) == [LayerKV(num_kv_heads=8, key_size=128, value_size=128)] * 126


def test_layers_without_attention_are_refused_by_name() -> None:
    config = AutoConfig.for_model("lfm2", vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
    config.layer_types = ["conv", "full_attention"]
    config.architectures = ["Lfm2ForCausalLM"]
    with pytest.raises(ConfigurationError, match=r"Lfm2ForCausalLM .*layers \[0\]"):
        kv_layout(config)


def test_an_attention_that_is_not_causal_is_refused() -> None:
    config = AutoConfig.for_model("bert", hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
    with pytest.raises(ConfigurationError, match=r"bert model cannot be served .*not causal"):
        kv_layout(config)


def test_tiny_models_depend_on_the_whole_context() -> None:
    for name in ARCHITECTURES:
        model = tiny_model(name)
        tokens = torch.randint(3, 300, (1, 10), generator=torch.Generator().manual_seed(1))
        other = tokens.clone()
        other[0, 0] += 1
        with torch.inference_mode():
            difference = (model(tokens).logits[0, -1] - model(other).logits[0, -1]).abs().max()
        assert difference > 1e-3, name
