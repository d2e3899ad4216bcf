import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from penstock.engine.kv_cache import KVCache, block_bytes
from penstock.engine.kv_layout import LayerKV

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
@settings(deadline=None)
def test_blocks_are_copied_as_they_were_before_any_copy(sources: list[int], targets: list[int]) -> None:
    cache, before = make_cache(), make_cache()
    copies = list(zip(sources, targets, strict=False))
    cache.copy_blocks(copies)
    origin = {block: block for block in range(5)} | {target: source for source, target in copies}
    for tensor, old in zip((*cache.keys, *cache.values), (*before.keys, *before.values), strict=True):
        for block, source in origin.items():
            assert torch.equal(tensor[block], old[source])


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
