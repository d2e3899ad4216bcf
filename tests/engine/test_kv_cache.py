import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from penstock.engine.errors import ConfigurationError
from penstock.engine.kv_cache import KVCache, LayerKV, block_bytes, cache_dtype
from tests.engines import core_over, loaded_model
from tests.tiny_models import tiny_model

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
