from collections.abc import Callable
from typing import Any

import pytest
import torch

from penstock.engine.kernels import references
from penstock.engine.kernels.launch import paged_decode, plan_splits
from tests.engine.kernels.attention.split_case import decode_in_splits, planned
from tests.engine.kernels.thorough import thorough

Launch = Callable[..., Any]
MakeCase = Callable[..., Any]

# 1 to 200 keys: around the edges of blocks (16) and of the kernel's tiles (16 to 64), and a padding row without any.
CONTEXT_LENS = (1, 15, 16, 17, 64, 0, 130, 200)
BATCH = {"context_lens": CONTEXT_LENS, "query_lens": (1,) * len(CONTEXT_LENS)}

# By default whole sequences are those of the tests of plans, groups, windows and block sizes.
IN_SPLITS = pytest.mark.parametrize("num_wanted", [thorough(0), 12])


def check(launch: Launch, case: Any, num_wanted: int = 0) -> None:
    """In as many splits as a plan makes that wants `num_wanted`: with 12, each tile of `BATCH` is one of its own."""
    arguments = case.decode_arguments()
    function, bounds = (decode_in_splits, {"num_wanted": num_wanted}) if num_wanted else (paged_decode, {})
    result = launch(function, **arguments, **bounds).result
    expected = references.paged_decode(**arguments)
    assert result.dtype == expected.dtype
    torch.testing.assert_close(result, expected, atol=case.tolerance(), rtol=0)


@pytest.mark.parametrize("num_wanted", [1, 4, 12])
def test_any_plan_of_splits_gives_the_reference(launch: Launch, make_case: MakeCase, num_wanted: int) -> None:
    check(launch, make_case(**BATCH), num_wanted)


@pytest.mark.parametrize(
    "options",
    [
        {"group_size": 4},
        {"group_size": 16, "num_kv_heads": 1, "sliding_window": 1000},
        {"has_sinks": True, "softcap": 2.0, "cache_dtype": torch.float8_e4m3fn},
    ],
    ids=["plain", "window", "everything"],
)
def test_a_long_sequence_among_short_ones_gives_the_reference(launch: Launch, make_case: MakeCase, options: dict[str, Any]) -> None:
    lens = (17, 1, 2000, 0, 16, 15)
    case = make_case(context_lens=lens, query_lens=(1,) * len(lens), key_size=16, value_size=16, **options)
    check(launch, case, 8)


@pytest.mark.parametrize("group_size", [thorough(1), 3, thorough(4), 8, thorough(20)])
def test_any_group_of_query_heads_gives_the_reference(launch: Launch, make_case: MakeCase, group_size: int) -> None:
    check(launch, make_case(**BATCH, group_size=group_size, num_kv_heads=3 if group_size < 4 else 1))


@pytest.mark.parametrize(
    ("key_size", "value_size"), [(8, 8), thorough(80, 80), thorough(128, 128), thorough(256, 256), (96, 64), thorough(64, 128)]
)
@IN_SPLITS
def test_any_head_size_gives_the_reference(launch: Launch, make_case: MakeCase, key_size: int, value_size: int, num_wanted: int) -> None:
    check(launch, make_case(**BATCH, key_size=key_size, value_size=value_size, num_kv_heads=1), num_wanted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_size", [64, thorough(128)])
def test_half_precision_gives_the_reference_to_rounding(launch: Launch, make_case: MakeCase, dtype: torch.dtype, head_size: int) -> None:
    check(launch, make_case(**BATCH, dtype=dtype, key_size=head_size, value_size=head_size, num_kv_heads=1), 12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cache_of_8_bits_gives_what_its_numbers_give(launch: Launch, make_case: MakeCase, dtype: torch.dtype) -> None:
    check(launch, make_case(**BATCH, dtype=dtype, cache_dtype=torch.float8_e4m3fn, has_sinks=True, sliding_window=50, num_kv_heads=1), 12)


@pytest.mark.parametrize("sliding_window", [1, thorough(16), 33, thorough(1000)])
@pytest.mark.parametrize("num_wanted", [0, 4])
def test_a_sliding_window_gives_the_reference(launch: Launch, make_case: MakeCase, sliding_window: int, num_wanted: int) -> None:
    check(launch, make_case(**BATCH, sliding_window=sliding_window, num_kv_heads=1), num_wanted)


@pytest.mark.parametrize("sliding_window", [None, 20])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("has_sinks", [False, True])
@IN_SPLITS
def test_soft_caps_sinks_and_windows_combine(
    launch: Launch, make_case: MakeCase, sliding_window: int | None, softcap: float | None, has_sinks: bool, num_wanted: int
) -> None:
    case = make_case(**BATCH, sliding_window=sliding_window, softcap=softcap, has_sinks=has_sinks, num_kv_heads=1)
    check(launch, case, num_wanted)


@pytest.mark.parametrize(
    "context_len", [pytest.param(length, marks=[pytest.mark.thorough] * (length % 16 not in (0, 1, 7))) for length in range(1, 36)]
)
def test_every_context_length_gives_the_reference(launch: Launch, make_case: MakeCase, context_len: int) -> None:
    check(launch, make_case(context_lens=(context_len,), query_lens=(1,), num_kv_heads=1), 2)


@pytest.mark.parametrize("block_size", [8, 32])
def test_other_block_sizes_give_the_reference(launch: Launch, make_case: MakeCase, block_size: int) -> None:
    check(launch, make_case(**BATCH, block_size=block_size))


def test_tables_and_lengths_may_have_32_bits(launch: Launch, make_case: MakeCase) -> None:
    check(launch, make_case(**BATCH, index_dtype=torch.int32))


def test_a_sequence_without_keys_gets_zeros_even_with_a_sink(launch: Launch, make_case: MakeCase) -> None:
    case = make_case(context_lens=(0, 5), query_lens=(1, 1), has_sinks=True)
    for function, bounds in ((paged_decode, {}), (decode_in_splits, {"num_wanted": 2, "max_context_len": 100})):
        result = launch(function, **case.decode_arguments(), **bounds).result
        assert torch.equal(result[0], torch.zeros_like(result[0]))
        assert result[1].abs().max() > 0


def test_queries_and_caches_may_be_strided_views(launch: Launch, make_case: MakeCase) -> None:
    case = make_case(**BATCH)
    arguments = case.decode_arguments()
    expected = references.paged_decode(**arguments)
    query_BHD = arguments["query_BHD"]
    both = torch.stack([arguments["key_cache"], arguments["value_cache"]], dim=2)  # one tensor for both, as some layouts have it
    arguments |= {
        "query_BHD": query_BHD.transpose(0, 1).contiguous().transpose(0, 1),
        "key_cache": both[:, :, 0],
        "value_cache": both[:, :, 1],
    }
    torch.testing.assert_close(launch(paged_decode, **arguments).result, expected, atol=case.tolerance(), rtol=0)


def test_the_result_goes_where_it_is_told(launch: Launch, make_case: MakeCase) -> None:
    arguments = make_case(**BATCH).decode_arguments()
    out = torch.full((len(CONTEXT_LENS), 4, 64), 7.0)
    launched = launch(paged_decode, **arguments, out=out)
    torch.testing.assert_close(launched.arguments["out"], references.paged_decode(**arguments), atol=2e-5, rtol=0)


def test_an_empty_batch_launches_nothing(launch: Launch, make_case: MakeCase) -> None:
    arguments = make_case(context_lens=(), query_lens=()).decode_arguments()
    assert launch(paged_decode, **arguments).result.shape == (0, 4, 64)


@pytest.mark.parametrize("sliding_window", [None, 700])
@pytest.mark.parametrize(
    "context_lens",
    [[1000] * 31 + [100_000], [0, 5000, 15, 16, 17, 0], [3000 if index % 3 else 0 for index in range(600)]],
    ids=["mixed", "short", "many"],
)
def test_a_plan_is_that_of_the_rule(launch: Launch, context_lens: list[int], sliding_window: int | None) -> None:
    bounds: dict[str, Any] = {"num_wanted": 66, "min_tiles": 4, "tile_keys": 64, "sliding_window": sliding_window}
    lens_B = torch.tensor(context_lens)
    items, merges = launch(planned, context_lens_B=lens_B, max_context_len=131_072, **bounds).result
    expected_items, expected_merges = references.plan_splits(context_lens, **bounds)
    assert items == expected_items
    assert [merge[:3] for merge in merges] == [merge[:3] for merge in expected_merges]


def test_sequences_that_cannot_be_long_enough_have_no_plan() -> None:
    bounds = {"num_wanted": 66, "min_tiles": 4, "tile_keys": 64}
    lens_B = torch.tensor([5, 9])
    assert plan_splits(lens_B, **bounds, max_context_len=256) is None
    assert plan_splits(lens_B, **bounds, max_context_len=10_000, sliding_window=192) is None
