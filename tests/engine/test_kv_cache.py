import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from torch import nn
from transformers import AutoConfig

from penstock.engine.errors import ConfigurationError
from penstock.engine.kv_cache.blocks import BlockPool, PrefixKey, Retention, RetentionRule, chain_hashes
from penstock.engine.kv_cache.cache import KVCache, LayerKV, block_bytes, cache_dtype, kv_layout
from tests.engines import core_over, loaded_model
from tests.fakes import generate, make_core, make_request
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


NUM_BLOCKS = 6


def hashes(token_ids: list[int], block_size: int = 2, salt: str = "") -> list[bytes]:
    known: list[bytes] = []
    chain_hashes(token_ids, block_size, known, PrefixKey(salt))
    return known


@given(token_ids=st.lists(st.integers(0, 3), max_size=20), cut=st.integers(0, 20), block_size=st.integers(1, 5))
def test_hashes_extended_bit_by_bit_are_those_of_the_whole(token_ids: list[int], cut: int, block_size: int) -> None:
    known: list[bytes] = []
    chain_hashes(token_ids[:cut], block_size, known)
    chain_hashes(token_ids, block_size, known)
    assert known == hashes(token_ids, block_size)
    assert len(known) == len(token_ids) // block_size


@given(one=st.lists(st.integers(0, 1), max_size=8), other=st.lists(st.integers(0, 1), max_size=8))
def test_hashes_agree_exactly_as_far_as_the_tokens_do(one: list[int], other: list[int]) -> None:
    for position, (mine, yours) in enumerate(zip(hashes(one), hashes(other), strict=False)):
        stop = (position + 1) * 2
        assert (mine == yours) == (one[:stop] == other[:stop])


@pytest.mark.parametrize("salt", ["mine", "\ud800"])
def test_the_salt_changes_every_hash(salt: str) -> None:
    assert not set(hashes([1] * 8)) & set(hashes([1] * 8, salt=salt))


class Pool(RuleBasedStateMachine):
    """Tables are allocated, shared and freed as sequences do; contents are remembered under numbers that stand for hashes."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.tables: list[list[int]] = []
        self.contents: dict[int, bytes] = {}  # what each block was last remembered to hold

    @precondition(lambda self: self.pool.num_free)
    @rule(data=st.data())
    def allocate(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(1, self.pool.num_free))
        is_findable = {block for block_hash in self.contents.values() for block in self.pool.find([block_hash])}
        table = [self.pool.allocate() for _ in range(count)]
        held = {block for other in self.tables for block in other}
        assert not held & set(table)
        if count <= NUM_BLOCKS - len(held | is_findable):
            assert not is_findable & set(table), "what can be found was thrown away while other blocks were free"
        for block in table:
            self.contents.pop(block, None)
        self.tables.append(table)

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), number=st.integers(0, 3))
    def remember(self, data: st.DataObject, number: int) -> None:
        table = data.draw(st.sampled_from(self.tables))
        block_hash = bytes([number])
        is_known = bool(self.pool.find([block_hash])) or table[-1] in self.contents
        self.pool.publish(table[-1], block_hash)
        if not is_known:
            self.contents[table[-1]] = block_hash

    @precondition(lambda self: self.contents)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        block, block_hash = data.draw(st.sampled_from(sorted(self.contents.items())))
        assert self.pool.find([block_hash, b"unknown", block_hash]) == [block]
        num_free, num_unreferenced = self.pool.num_free, self.pool.num_unreferenced([block])
        self.pool.share([block])
        assert self.pool.num_free == num_free - num_unreferenced
        self.tables.append([block])

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        self.pool.free(table)

    @invariant()
    def counts_add_up_and_contents_are_found(self) -> None:
        self.pool.check_integrity(self.tables)
        held = {block for table in self.tables for block in table}
        assert self.pool.num_free == NUM_BLOCKS - len(held)
        assert self.pool.usage == pytest.approx(len(held) / NUM_BLOCKS)
        for block in held:
            assert self.pool.is_shared(block) == (sum(block in table for table in self.tables) > 1)
        for block, block_hash in self.contents.items():
            assert self.pool.find([block_hash]) == [block]


TestPool = Pool.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=25)


def test_the_least_recently_freed_goes_first_and_of_one_table_the_last_block() -> None:
    pool = BlockPool(4)
    tables = [[pool.allocate(), pool.allocate()] for _ in range(2)]
    for number, block in enumerate(tables[0] + tables[1]):
        pool.publish(block, bytes([number]))
    pool.free(tables[1])
    pool.free(tables[0])
    assert [pool.allocate() for _ in range(4)] == [*reversed(tables[1]), *reversed(tables[0])]


def test_without_prefix_caching_nothing_is_found() -> None:
    pool = BlockPool(2, enable_prefix_caching=False)
    pool.publish(pool.allocate(), b"hash")
    assert pool.find([b"hash"]) == []


def test_integrity_names_what_is_wrong() -> None:
    pool = BlockPool(2)
    block = pool.allocate()
    pool.check_integrity([[block]])
    with pytest.raises(AssertionError, match="1 blocks are lost"):
        pool.check_integrity([])
    with pytest.raises(AssertionError, match="1 references, 2 holders"):
        pool.check_integrity([[block], [block]])
    pool.free([block])
    with pytest.raises(AssertionError, match="free and in use"):
        pool.check_integrity([[block]])


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


HIGH, LOW = RetentionRule(90), RetentionRule(10)


def remembered(pool: BlockPool, count: int) -> list[int]:
    """Blocks that are in use and can be found."""
    blocks = [pool.allocate() for _ in range(count)]
    for block in blocks:
        assert pool.publish(block, bytes([block]))
    return blocks


def evicted(pool: BlockPool) -> list[int]:
    """All blocks in the order in which they are evicted."""
    order = [pool.allocate() for _ in range(pool.num_free)]
    pool.check_integrity([order])
    return order


def test_lower_priorities_go_first_and_equal_ones_by_when_they_were_freed() -> None:
    pool = BlockPool(4)
    first, second, third, fourth = remembered(pool, 4)
    pool.retain(first, HIGH)
    pool.retain(fourth, LOW)
    for block in (first, second, third, fourth):
        pool.free([block])
    pool.check_integrity([])
    assert evicted(pool) == [fourth, second, third, first]


def test_a_free_block_moves_when_its_rule_changes() -> None:
    pool = BlockPool(3)
    blocks = remembered(pool, 3)
    for block in blocks:
        pool.free([block])
    pool.retain(blocks[0], HIGH)
    pool.check_integrity([])
    pool.retain(blocks[1], LOW)
    pool.check_integrity([])
    pool.share([blocks[0]])
    pool.check_integrity([[blocks[0]]])
    pool.free([blocks[0]])
    assert evicted(pool) == [blocks[1], blocks[2], blocks[0]]


def test_a_rule_ends_with_its_time_or_with_the_blocks_contents() -> None:
    pool = BlockPool(2)
    first, second = remembered(pool, 2)
    pool.retain(first, RetentionRule(95, seconds=0.0))
    pool.retain(second, HIGH)
    pool.free([first])
    pool.free([second])
    time.sleep(0.001)
    assert pool.allocate() == first
    pool.unpublish([second])
    pool.check_integrity([[first]])
    pool.free([first])
    pool.check_integrity([])


def test_a_rule_given_anew_starts_anew() -> None:
    pool = BlockPool(2)
    first, second = remembered(pool, 2)
    pool.retain(first, RetentionRule(90, seconds=0.0))
    pool.retain(first, RetentionRule(90, seconds=1000.0))
    for _ in range(10):
        pool.retain(second, RetentionRule(80, seconds=1000.0))
    time.sleep(0.001)
    pool.free([first])
    pool.free([second])
    assert evicted(pool) == [second, first]


def test_the_first_range_that_touches_a_block_is_for_it() -> None:
    retention = Retention(((0, 17, HIGH), (0, 40, LOW)), output=RetentionRule(1))
    rules = [retention.rule_of(block, 16, 50) for block in range(5)]
    assert rules == [HIGH, HIGH, LOW, None, RetentionRule(1)]
    assert Retention(((8, None, LOW),)).rule_of(9, 16, 1000) is LOW


def test_a_retained_prompt_is_found_after_others_have_filled_the_cache() -> None:
    def cached_after_others(retention: Retention | None) -> int:
        core = make_core(num_blocks=16, max_model_len=60)
        system = list(range(97, 113))
        generate(core, make_request("first", system, max_tokens=1, retention=retention))
        for number in range(8):
            generate(core, make_request(f"other {number}", [65 + number] * 30, max_tokens=2))
        info = generate(core, make_request("again", [*system, 97], max_tokens=1))[0].prompt
        assert info is not None
        return info.num_cached_tokens

    assert cached_after_others(None) == 0
    assert cached_after_others(Retention(((0, None, HIGH),))) == 16
    assert cached_after_others(Retention(((0, 8, HIGH),))) == 8
