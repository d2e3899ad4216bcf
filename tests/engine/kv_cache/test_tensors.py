import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from transformers import AutoConfig

from penstock.engine.errors import ConfigurationError
from penstock.engine.kv_cache.tensors import KVCache, LayerKV, block_bytes, cache_dtype, kv_layout
from tests.engines import core_over, loaded_model
from tests.tiny_models import ARCHITECTURES, WINDOW, tiny_config, tiny_model

LAYOUT = [LayerKV(2, 4, 3), LayerKV(1, 8, 8)]
CPU = torch.device("cpu")


def make_cache(num_blocks: int = 5) -> KVCache:
    cache = KVCache(LAYOUT, num_blocks, 2, torch.float32, CPU)
    for tensor in (*cache.keys, *cache.values):
        tensor.copy_(torch.arange(tensor.numel()).view_as(tensor))
    return cache


def test_every_layer_has_the_shape_of_its_heads() -> None:
    cache = make_cache()
    assert [tuple(keys.shape) for keys in cache.keys] == [(5, 2, 2, 4), (5, 2, 1, 8)]
    assert [tuple(values.shape) for values in cache.values] == [(5, 2, 2, 3), (5, 2, 1, 8)]


def test_block_bytes_are_what_a_block_takes() -> None:
    cache = make_cache()
    total = sum(tensor.numel() * tensor.element_size() for tensor in (*cache.keys, *cache.values))
    assert block_bytes(LAYOUT, 2, torch.float32) * 5 == total
    assert block_bytes(LAYOUT, 2, torch.bfloat16) * 10 == total


@given(sources=st.lists(st.integers(0, 4), max_size=5), targets=st.permutations(range(5)))
def test_blocks_are_copied_as_they_were_before_any_copy(sources: list[int], targets: list[int]) -> None:
    cache, before = make_cache(), make_cache()
    copies = list(zip(sources, targets, strict=False))
    cache.copy_blocks(copies)
    origin = {block: block for block in range(5)} | {target: source for source, target in copies}
    for tensor, old in zip((*cache.keys, *cache.values), (*before.keys, *before.values), strict=True):
        for block, source in origin.items():
            assert torch.equal(tensor[block], old[source])


def test_keys_and_values_have_the_type_of_the_model_or_8_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    assert cache_dtype("auto", torch.bfloat16, CPU) is torch.bfloat16
    assert cache_dtype("auto", torch.float16, cuda) is torch.float16
    assert cache_dtype("fp8", torch.bfloat16, cuda) is torch.float8_e4m3fn
    assert 2 * block_bytes(LAYOUT, 16, torch.float8_e4m3fn) == block_bytes(LAYOUT, 16, torch.bfloat16)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    with pytest.raises(ConfigurationError, match=r"--kv-cache-dtype fp8: it takes compute capability 8.9, and this GPU has 8.6"):
        cache_dtype("fp8", torch.bfloat16, cuda)


def test_without_kernels_for_8_bits_the_engine_is_not_built() -> None:
    loaded = loaded_model(tiny_model("llama"))
    with pytest.raises(ConfigurationError, match=r"--kv-cache-dtype fp8: only on a CUDA GPU, and the model runs on cpu"):
        core_over(loaded, kv_cache_dtype="fp8")


def test_blocks_of_8_bits_are_copied_as_well() -> None:
    cache = KVCache(LAYOUT, 5, 2, torch.float8_e4m3fn, CPU)
    for tensor in (*cache.keys, *cache.values):
        tensor.copy_(torch.arange(tensor.numel()).view_as(tensor) % 16)
    before = [tensor.float() for tensor in cache.keys]
    cache.copy_blocks([(0, 3), (4, 1)])
    for tensor, old in zip(cache.keys, before, strict=True):
        assert torch.equal(tensor.float(), old[[0, 4, 2, 0, 4]])


class Layer(nn.Module):
    def __init__(self, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx = layer_idx


def test_each_layer_of_a_model_finds_its_own_tensors() -> None:
    model = nn.Sequential(Layer(1), nn.Identity(), Layer(0))
    cache = make_cache()
    cache.attach(model)
    assert model[0].key_cache is cache.keys[1]
    assert model[0].value_cache is cache.values[1]
    assert model[2].key_cache is cache.keys[0]
    assert not hasattr(model[1], "key_cache")
    assert not model.state_dict(), "the cache is no weight"


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_layout_equals_what_the_models_own_cache_holds(name: str) -> None:
    model = tiny_model(name)
    num_tokens = 5
    with torch.inference_mode():
        cache = model(input_ids=torch.arange(3, 3 + num_tokens)[None], use_cache=True).past_key_values
    layout = kv_layout(model.config)
    assert len(layout) == len(cache.layers)
    for entry, layer in zip(layout, cache.layers, strict=True):
        # transformers keeps the two parts of latents in tensors of their own.
        sizes = (entry.value_size, entry.key_size - entry.value_size) if entry.is_latent else entry.row_sizes
        assert layer.keys.shape == (1, entry.num_kv_heads, num_tokens, sizes[0])
        assert layer.values.shape == (1, entry.num_kv_heads, num_tokens, sizes[1])


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
    assert kv_layout(config, has_latents=False) == [LayerKV(num_kv_heads=4, key_size=12, value_size=6)] * 2


def test_elements_per_token_count_keys_and_values() -> None:
    assert LayerKV(num_kv_heads=2, key_size=12, value_size=6).num_bytes(torch.float16) == 72


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
    size = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = AutoConfig.for_model("jamba", **size, attn_layer_period=2, attn_layer_offset=1)
    config.architectures = ["JambaForCausalLM"]
    with pytest.raises(ConfigurationError, match=r"JambaForCausalLM .*layers \[0\]"):
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
