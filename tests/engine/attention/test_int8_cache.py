"""Keys and values of 8 bits, each token's head with a scale of its own, on the CPU."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.engine.attention.cpu import SCALE_BYTES, paged_attention_cpu, row_size, write_kv
from penstock.engine.attention.interface import AttentionMetadata, AttentionOptions
from penstock.engine.core import EngineCore
from penstock.engine.errors import ConfigurationError
from penstock.engine.kv_cache.tensors import block_bytes
from penstock.engine.model.loader import LoadedModel
from penstock.engine.model.native import NativeDecoder
from penstock.engine.native.runtime import native_library
from tests.engines import core_over, loaded_model, run
from tests.fakes import block_tables
from tests.tiny_models import tiny_model

NUM_HEADS, BLOCK_SIZE = 2, 16
EVERY_SETTING = {"sliding_window": 20, "softcap": 5.0, "sinks_H": torch.linspace(-1, 2, 32)}
PROMPTS = [[7, 8, 9], list(range(40, 90)), [5], list(range(100, 117))]
needs_kernels = pytest.mark.skipif(native_library() is None, reason="there is no C++ compiler here")


def empty_cache(num_blocks: int, size: int) -> Tensor:
    """Full of what is no number, as memory may be."""
    cache = torch.empty(num_blocks, BLOCK_SIZE, NUM_HEADS, row_size(size, torch.int8), dtype=torch.int8)
    return cache.fill_(-1)


def numbers_in(cache: Tensor, size: int) -> Tensor:
    """What the cache stands for, float32 [blocks, block size, heads, size]."""
    blocks = cache.flatten(1)
    codes_BHSD = blocks[:, : BLOCK_SIZE * NUM_HEADS * size].unflatten(1, (NUM_HEADS, BLOCK_SIZE, size))  # type: ignore[no-untyped-call]
    scales = blocks[:, BLOCK_SIZE * NUM_HEADS * size :].contiguous().view(torch.float32)
    numbers_BHSD: Tensor = codes_BHSD.float() * scales.view(-1, NUM_HEADS, BLOCK_SIZE, 1)
    return numbers_BHSD.transpose(1, 2)


@needs_kernels
@pytest.mark.parametrize("size", [64, 128])
def test_a_row_is_rounded_to_steps_of_its_own_largest_number(size: int) -> None:
    torch.manual_seed(0)
    rows_THD = torch.randn(40, NUM_HEADS, size, dtype=torch.bfloat16) * torch.logspace(-3, 4, 40)[:, None, None].bfloat16()
    rows_THD[5, 1] = 0
    cache, slots = empty_cache(4, size), torch.randperm(64)[:40]
    slots[3] = -1  # padding
    write_kv(cache, rows_THD.transpose(0, 1).contiguous().transpose(0, 1), slots)
    is_written = slots >= 0
    found_THD = numbers_in(cache, size).flatten(0, 1)[slots[is_written]]
    rows_THD = rows_THD[is_written].float()
    steps_TH1 = rows_THD.abs().amax(-1, keepdim=True) / 127
    assert ((found_THD - rows_THD).abs() <= 0.501 * steps_TH1).all()


@needs_kernels
def test_tiny_rows_are_zeros_and_what_is_no_number_shows() -> None:
    size, others = 64, [0.0] * 62
    first_SD = torch.tensor([[1e-37, -1e-37, *others], [torch.nan, 1.0, *others], [1.0, torch.nan, *others], [-torch.inf, 1.0, *others]])
    rows_SHD = torch.stack([first_SD, torch.ones(4, size)], dim=1).bfloat16()
    cache = empty_cache(1, size)
    write_kv(cache, rows_SHD, torch.arange(4))
    found_SHD = numbers_in(cache, size)[0, :4]
    assert not found_SHD[0, 0].any()
    assert not found_SHD[1:, 0, :2].isfinite().any()
    torch.testing.assert_close(found_SHD[:, 1], torch.ones(4, size))


@needs_kernels
@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("group", [1, 3, 16])
@pytest.mark.parametrize("settings", [{}, EVERY_SETTING], ids=["plain", "all"])
def test_attention_is_that_over_the_rounded_numbers(settings: dict[str, Any], group: int, size: int) -> None:
    torch.manual_seed(0)
    options = AttentionOptions(**{"scaling": size**-0.5, **settings})
    sinks_H = None if options.sinks_H is None else options.sinks_H[: NUM_HEADS * group]
    options = AttentionOptions(options.scaling, options.sliding_window, options.softcap, sinks_H)
    query_lens, context_lens, tables = [1, 1, 30], [50, 3, 70], [[3, 0, 8, 5], [1], [2, 9, 4, 6, 7]]
    slots = [16 * table[p // 16] + p % 16 for table, length in zip(tables, context_lens, strict=True) for p in range(length)]
    caches = []
    for _ in range(2):
        caches.append(empty_cache(10, size))
        write_kv(caches[-1], torch.randn(len(slots), NUM_HEADS, size, dtype=torch.bfloat16), torch.tensor(slots))
    query_THD = torch.randn(sum(query_lens), NUM_HEADS * group, size, dtype=torch.bfloat16)
    new = [slots[49], slots[52], *slots[-30:]]
    metadata = AttentionMetadata.pack(new, [0, 1, 2, 32], context_lens, [0, 1, 2], block_tables(tables), num_decodes=2)
    keys, values = (numbers_in(cache, size).bfloat16().contiguous() for cache in caches)
    expected = paged_attention_cpu(query_THD, keys, values, metadata, options)
    found = paged_attention_cpu(query_THD, caches[0], caches[1], metadata, options)
    torch.testing.assert_close(found, expected, rtol=3e-2, atol=3e-2)


@needs_kernels
@pytest.mark.usefixtures("no_tiles")
@pytest.mark.parametrize("settings", [{}, EVERY_SETTING], ids=["plain", "all"])
@pytest.mark.parametrize(("group", "size"), [(3, 64), (7, 64), (8, 128), (13, 64)])
def test_a_token_gets_the_same_bits_in_whatever_step_it_is_computed(settings: dict[str, Any], group: int, size: int) -> None:
    torch.manual_seed(0)
    length, options = 150, AttentionOptions(**{"scaling": 0.125, **settings})
    sinks_H = None if options.sinks_H is None else options.sinks_H[: group * NUM_HEADS]
    options = AttentionOptions(options.scaling, options.sliding_window, options.softcap, sinks_H)
    table = torch.randperm(10).tolist()
    slots = [16 * table[p // 16] + p % 16 for p in range(length)]
    keys, values = (torch.randn(length, NUM_HEADS, size, dtype=torch.bfloat16) for _ in range(2))
    query_THD = torch.randn(length, group * NUM_HEADS, size, dtype=torch.bfloat16)

    def in_chunks(cuts: list[int]) -> Tensor:
        caches, rows = [empty_cache(10, size), empty_cache(10, size)], []
        for start, stop in itertools.pairwise(cuts):
            tables = block_tables([table[: -(-stop // 16)]])
            metadata = AttentionMetadata.pack(slots[start:stop], [0, stop - start], [stop], [0], tables, num_decodes=int(stop == start + 1))
            for cache, new in zip(caches, (keys, values), strict=True):
                write_kv(cache, new[start:stop], metadata.slot_mapping_T)
            rows.append(paged_attention_cpu(query_THD[start:stop], caches[0], caches[1], metadata, options))
        return torch.cat(rows)

    expected = in_chunks([0, length])
    assert torch.equal(in_chunks(list(range(length + 1))), expected)
    assert torch.equal(in_chunks([0, 3, 64, 65, 100, 149, 150]), expected)


def model(name: str = "llama") -> LoadedModel:
    return loaded_model(tiny_model(name, head_dim=64, hidden_size=64).bfloat16())


def int8_core(loaded: LoadedModel, **settings: Any) -> EngineCore:
    return core_over(loaded, kv_cache_dtype="int8", **settings)


@needs_kernels
@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma2"])
def test_an_engine_says_nearly_the_same_with_half_the_memory(name: str) -> None:
    loaded = model(name)
    core = core_over(loaded)
    is_native = isinstance(loaded.model.forward, NativeDecoder)
    expected = run(core, PROMPTS, max_tokens=8, temperature=0.0)
    core.runner.shutdown()
    core = int8_core(loaded)
    assert isinstance(loaded.model.forward, NativeDecoder) is is_native
    for index, each in enumerate(expected):
        (result,) = run(core, [PROMPTS[index]], max_tokens=8, forced=each.token_ids)
        assert (result.logits_TV - each.logits_TV).norm() / each.logits_TV.norm() < 5e-2
    core.runner.shutdown()
    assert block_bytes(loaded.kv_layout, 16, torch.int8) / block_bytes(loaded.kv_layout, 16, torch.bfloat16) == (64 + SCALE_BYTES) / 128


@needs_kernels
def test_sequences_say_the_same_in_company_on_cached_prefixes_and_after_preemption() -> None:
    loaded = model()
    core = int8_core(loaded)
    alone = [run(core, [prompt], max_tokens=40, temperature=0.0)[0].token_ids for prompt in PROMPTS]
    again = run(core, PROMPTS, max_tokens=40, temperature=0.0)
    assert again[1].num_cached_tokens == 48
    assert [each.token_ids for each in again] == alone
    forks = run(core, [PROMPTS[1]], max_tokens=40, temperature=1.0, seed=3, n=3)
    core.runner.shutdown()
    core = int8_core(loaded, num_blocks=6, max_num_batched_tokens=40)
    assert [each.token_ids for each in run(core, PROMPTS, max_tokens=40, temperature=0.0)] == alone
    assert core.stats().num_preemptions > 0
    core.runner.shutdown()
    core = int8_core(loaded, enable_prefix_caching=False)
    assert [each.token_ids for each in run(core, [PROMPTS[1]], max_tokens=40, temperature=1.0, seed=3, n=3)] == [
        each.token_ids for each in forks
    ]
    core.runner.shutdown()


@needs_kernels
def test_blocks_are_kept_in_a_directory_for_caches_of_the_same_type(tmp_path: Path) -> None:
    loaded, prompt = model(), list(range(100))
    found = []
    for kv_cache_dtype in ("int8", "int8", "auto"):
        core = core_over(loaded, kv_cache_dtype=kv_cache_dtype, kv_cache_dir=str(tmp_path))
        (result,) = run(core, [prompt], max_tokens=4, temperature=0.0)
        found.append((result.token_ids, result.num_cached_tokens))
        core.close()
        core.runner.shutdown()
    assert [num_cached for _, num_cached in found] == [0, 96, 0]
    assert found[0][0] == found[1][0]


@needs_kernels
@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"hidden_size": 64, "head_dim": 32}, "it takes heads of 64 or 128 numbers, and those of the model have 32"),
        ({"dtype": torch.float32}, "it takes the native kernels and --dtype bfloat16"),
        ({"block_size": 32}, "it takes --block-size 16, not 32"),
    ],
)
def test_a_model_that_the_kernels_do_not_take_is_refused(change: dict[str, Any], complaint: str) -> None:
    sizes = {"head_dim": 64, "hidden_size": 64} | {key: size for key, size in change.items() if key in ("head_dim", "hidden_size")}
    loaded = loaded_model(tiny_model("llama", **sizes).to(change.get("dtype", torch.bfloat16)))
    with pytest.raises(ConfigurationError, match=f"--kv-cache-dtype int8: {complaint}"):
        int8_core(loaded, block_size=change.get("block_size", 16))
