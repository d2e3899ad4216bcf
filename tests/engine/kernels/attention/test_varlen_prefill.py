from collections.abc import Callable
from typing import Any

import pytest
import torch

from penstock.engine.kernels import references
from penstock.engine.kernels.launch import varlen_prefill
from tests.engine.kernels.thorough import thorough

Launch = Callable[..., Any]
MakeCase = Callable[..., Any]

# Whole prompts, chunks of prompts after a prefix, a decode, a sequence with nothing to do, and lengths on the edges of blocks and tiles.
BATCH = {"context_lens": (1, 16, 40, 130, 70, 33), "query_lens": (1, 16, 24, 37, 1, 0)}


def check(launch: Launch, case: Any, **tuning: Any) -> None:
    arguments = case.prefill_arguments()
    max_query_len = max(case.query_lens)
    result = launch(varlen_prefill, **arguments, max_query_len=max_query_len, **tuning).result
    expected = references.varlen_prefill(**arguments)
    assert result.dtype == expected.dtype
    torch.testing.assert_close(result, expected, atol=case.tolerance(), rtol=0)


@pytest.mark.parametrize("group_size", [thorough(1), 3, thorough(4), 8, thorough(20)])
def test_any_group_of_query_heads_gives_the_reference(launch: Launch, make_case: MakeCase, group_size: int) -> None:
    check(launch, make_case(**BATCH, group_size=group_size, num_kv_heads=2 if group_size < 4 else 1))


@pytest.mark.parametrize(
    ("key_size", "value_size"), [(8, 8), thorough(80, 80), thorough(128, 128), thorough(256, 256), (96, 64), thorough(64, 128)]
)
def test_any_head_size_gives_the_reference(launch: Launch, make_case: MakeCase, key_size: int, value_size: int) -> None:
    check(launch, make_case(**BATCH, key_size=key_size, value_size=value_size, num_kv_heads=1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_size", [64, thorough(256)])
def test_half_precision_gives_the_reference_to_rounding(launch: Launch, make_case: MakeCase, dtype: torch.dtype, head_size: int) -> None:
    check(launch, make_case(**BATCH, dtype=dtype, key_size=head_size, value_size=head_size, num_kv_heads=1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cache_of_8_bits_gives_what_its_numbers_give(launch: Launch, make_case: MakeCase, dtype: torch.dtype) -> None:
    check(launch, make_case(**BATCH, dtype=dtype, cache_dtype=torch.float8_e4m3fn, has_sinks=True, num_kv_heads=1))


@pytest.mark.parametrize("sliding_window", [1, thorough(16), 33, thorough(1000)])
def test_a_sliding_window_gives_the_reference(launch: Launch, make_case: MakeCase, sliding_window: int) -> None:
    check(launch, make_case(**BATCH, sliding_window=sliding_window, num_kv_heads=1))


@pytest.mark.parametrize(
    ("has_sinks", "softcap", "sliding_window"),
    [
        (False, None, None),
        (False, 2.0, 20),
        (True, None, None),
        (True, 2.0, 20),
        thorough(False, None, 20),
        thorough(False, 2.0, None),
        thorough(True, None, 20),
        thorough(True, 2.0, None),
    ],
)
def test_soft_caps_sinks_and_windows_combine(
    launch: Launch, make_case: MakeCase, sliding_window: int | None, softcap: float | None, has_sinks: bool
) -> None:
    check(launch, make_case(**BATCH, sliding_window=sliding_window, softcap=softcap, has_sinks=has_sinks, num_kv_heads=1))


@pytest.mark.parametrize("sliding_window", [None, thorough(1), 20])
def test_tokens_of_an_image_see_all_of_it(launch: Launch, make_case: MakeCase, sliding_window: int | None) -> None:
    case = make_case(context_lens=(130, 70), query_lens=(130, 37), sliding_window=sliding_window, num_kv_heads=1)
    key_stops_T = torch.zeros(167, dtype=torch.int64)
    for first, stop, end in ((5, 90, 90), (91, 130, 130), (130, 140, 43), (150, 167, 70)):
        key_stops_T[first:stop] = end
    arguments = case.prefill_arguments() | {"key_stops_T": key_stops_T}
    result = launch(varlen_prefill, **arguments, max_query_len=130).result
    torch.testing.assert_close(result, references.varlen_prefill(**arguments), atol=case.tolerance(), rtol=0)


@pytest.mark.parametrize("prefix_len", [0, thorough(1), 15, thorough(16), 17, thorough(63), 64, 65, thorough(137)])
@pytest.mark.parametrize("query_len", [thorough(1), 16, thorough(63)])
def test_a_chunk_after_any_prefix_gives_the_reference(launch: Launch, make_case: MakeCase, prefix_len: int, query_len: int) -> None:
    check(launch, make_case(context_lens=(prefix_len + query_len,), query_lens=(query_len,), num_kv_heads=1))


@pytest.mark.parametrize("sliding_window", [None, 24])
def test_a_prompt_gives_the_same_in_chunks_as_whole(launch: Launch, make_case: MakeCase, sliding_window: int | None) -> None:
    whole = make_case(context_lens=(150,), query_lens=(150,), sliding_window=sliding_window, num_kv_heads=1)
    arguments = whole.prefill_arguments()
    result = launch(varlen_prefill, **arguments, max_query_len=150).result
    chunks = []
    for start, end in [(0, 16), (16, 23), (23, 100), (100, 150)]:
        lens = {"query_start_loc": torch.tensor([0, end - start]), "context_lens_B": torch.tensor([end])}
        chunk = arguments | lens | {"query_THD": arguments["query_THD"][start:end]}
        chunks.append(launch(varlen_prefill, **chunk, max_query_len=end - start).result)
    torch.testing.assert_close(torch.cat(chunks), result, atol=whole.tolerance(), rtol=0)


def test_sequences_before_the_first_and_rows_of_no_sequence_are_left_alone(launch: Launch, make_case: MakeCase) -> None:
    arguments = make_case(**BATCH).prefill_arguments()
    padding = torch.zeros(3, *arguments["query_THD"].shape[1:])
    arguments["query_THD"] = torch.cat([arguments["query_THD"], padding])
    out = torch.full_like(arguments["query_THD"], 7.0)
    after = launch(varlen_prefill, **arguments, max_query_len=37, first_sequence=2, out=out).arguments["out"]
    start, end = arguments["query_start_loc"][[2, -1]].tolist()
    torch.testing.assert_close(after[start:end], references.varlen_prefill(**arguments)[start:end], atol=2e-5, rtol=0)
    assert torch.equal(after[:start], out[:start])
    assert torch.equal(after[end:], out[end:])


def test_a_bound_above_the_longest_query_changes_nothing(launch: Launch, make_case: MakeCase) -> None:
    arguments = make_case(**BATCH).prefill_arguments()
    result = launch(varlen_prefill, **arguments, max_query_len=300).result
    torch.testing.assert_close(result, references.varlen_prefill(**arguments), atol=2e-5, rtol=0)


def test_queries_may_be_strided_and_indices_have_32_bits(launch: Launch, make_case: MakeCase) -> None:
    case = make_case(**BATCH, index_dtype=torch.int32)
    arguments = case.prefill_arguments()
    expected = references.varlen_prefill(**arguments)
    arguments["query_THD"] = arguments["query_THD"].transpose(0, 1).contiguous().transpose(0, 1)
    result = launch(varlen_prefill, **arguments, max_query_len=37).result
    torch.testing.assert_close(result, expected, atol=case.tolerance(), rtol=0)


def test_an_empty_batch_launches_nothing(launch: Launch, make_case: MakeCase) -> None:
    arguments = make_case(context_lens=(), query_lens=()).prefill_arguments()
    assert launch(varlen_prefill, **arguments, max_query_len=0).result.shape == (0, 4, 64)
