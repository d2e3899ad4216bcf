from collections.abc import Callable
from typing import Any

import pytest
import torch

from penstock.engine.kernels import references
from penstock.engine.kernels.launch import kv_write

Launch = Callable[..., Any]

NUM_BLOCKS = 5
BLOCK_SIZE = 16


def make_arguments(
    num_tokens: int,
    num_kv_heads: int = 2,
    key_size: int = 64,
    value_size: int = 64,
    dtype: torch.dtype = torch.float32,
    cache_dtype: torch.dtype | None = None,
) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(num_tokens)
    slots = torch.randperm(NUM_BLOCKS * BLOCK_SIZE, generator=generator)[:num_tokens]
    return {
        "key_THD": torch.randn(num_tokens, num_kv_heads, key_size, generator=generator).to(dtype),
        "value_THD": torch.randn(num_tokens, num_kv_heads, value_size, generator=generator).to(dtype),
        "key_cache": torch.full((NUM_BLOCKS, BLOCK_SIZE, num_kv_heads, key_size), 7.0, dtype=cache_dtype or dtype),
        "value_cache": torch.full((NUM_BLOCKS, BLOCK_SIZE, num_kv_heads, value_size), 7.0, dtype=cache_dtype or dtype),
        "slot_mapping_T": slots,
    }


def check(launch: Launch, arguments: dict[str, Any]) -> None:
    after = launch(kv_write, **arguments).arguments
    references.kv_write(**arguments)
    assert torch.equal(after["key_cache"], arguments["key_cache"])
    assert torch.equal(after["value_cache"], arguments["value_cache"])


@pytest.mark.parametrize("num_tokens", [0, 1, 7, NUM_BLOCKS * BLOCK_SIZE])
def test_tokens_go_to_their_slots_and_nothing_else_changes(launch: Launch, num_tokens: int) -> None:
    check(launch, make_arguments(num_tokens))


@pytest.mark.parametrize(("num_kv_heads", "key_size", "value_size"), [(1, 64, 64), (3, 80, 80), (8, 128, 128), (2, 192, 128), (3, 64, 96)])
def test_any_heads_and_sizes_give_the_reference(launch: Launch, num_kv_heads: int, key_size: int, value_size: int) -> None:
    check(launch, make_arguments(5, num_kv_heads, key_size, value_size))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_values_are_converted_to_the_type_of_the_cache(launch: Launch, dtype: torch.dtype, cache_dtype: torch.dtype) -> None:
    arguments = make_arguments(5, dtype=dtype, cache_dtype=cache_dtype)
    after = launch(kv_write, **arguments).arguments
    references.kv_write(**arguments)
    # The interpreter truncates where a GPU and torch round to the nearest.
    one_step = torch.finfo(cache_dtype).eps if dtype != cache_dtype else 0.0
    torch.testing.assert_close(after["key_cache"], arguments["key_cache"], atol=0, rtol=one_step)
    torch.testing.assert_close(after["value_cache"], arguments["value_cache"], atol=0, rtol=one_step)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_8_bits_cannot_hold_is_cut_off_at_the_largest(launch: Launch, dtype: torch.dtype) -> None:
    arguments = make_arguments(5, dtype=dtype, cache_dtype=torch.float8_e4m3fn)
    for name in ("key_THD", "value_THD"):
        arguments[name] = arguments[name].to(torch.float8_e4m3fn).to(dtype)  # the interpreter cannot round to 8 bits
    arguments["key_THD"][0, 0, :5] = torch.tensor([449.0, 470.0, 1e6, -1e6, float("inf")])
    after = launch(kv_write, **arguments).arguments
    references.kv_write(**arguments)
    for name in ("key_cache", "value_cache"):
        torch.testing.assert_close(after[name].float(), arguments[name].float(), atol=2.0**-6, rtol=0)  # nor take what is below 2**-6
    slot = int(arguments["slot_mapping_T"][0])
    written = after["key_cache"].float()[slot // BLOCK_SIZE, slot % BLOCK_SIZE, 0, :5]
    assert written.tolist() == [448.0, 448.0, 448.0, -448.0, 448.0]


def test_negative_slots_are_skipped(launch: Launch) -> None:
    arguments = make_arguments(9)
    arguments["slot_mapping_T"][[0, 3, 8]] = torch.tensor([-1, -1, -16])
    check(launch, arguments)


def test_keys_may_be_strided_views_and_caches_may_share_a_tensor(launch: Launch) -> None:
    arguments = make_arguments(9)
    expected = {name: tensor.clone() for name, tensor in arguments.items()}
    references.kv_write(**expected)
    fused_THD = torch.cat([arguments["key_THD"], arguments["value_THD"]], dim=1)  # as one fused projection gives them
    both = torch.full((NUM_BLOCKS, BLOCK_SIZE, 2, 2, 64), 7.0)
    arguments |= {"key_THD": fused_THD[:, :2], "value_THD": fused_THD[:, 2:], "key_cache": both[:, :, 0], "value_cache": both[:, :, 1]}
    after = launch(kv_write, **arguments).arguments
    assert torch.equal(after["key_cache"], expected["key_cache"])
    assert torch.equal(after["value_cache"], expected["value_cache"])
