# mypy: disable-error-code="import-untyped,import-not-found,untyped-decorator"
"""Device code of `paged_decode`; needs Triton to be installed."""

import triton
import triton.language as tl

from penstock.engine.kernels.attention_triton import attend, first_state


# Tables and lengths are views of one packed tensor and begin anywhere in it: compiling for their alignment would only compile more often.
@triton.jit(do_not_specialize=["block_table_stride"], do_not_specialize_on_alignment=["block_table", "context_lens"])
def paged_decode_kernel(
    output: tl.tensor,  # [B, H, VALUE_SIZE]; written where there is one split
    partial_output: tl.tensor,  # [B, H, num_splits, VALUE_SIZE] float32 and [B, H, num_splits] float32; written where there are several
    partial_log_sum: tl.tensor,
    query: tl.tensor,
    key_cache: tl.tensor,
    value_cache: tl.tensor,
    block_table: tl.tensor,
    context_lens: tl.tensor,
    sinks: tl.tensor,
    scaling: tl.tensor,
    sliding_window: tl.tensor,
    softcap: tl.tensor,
    output_sequence_stride: tl.tensor,
    output_head_stride: tl.tensor,
    query_sequence_stride: tl.tensor,
    query_head_stride: tl.tensor,
    key_block_stride: tl.tensor,
    key_token_stride: tl.tensor,
    key_head_stride: tl.tensor,
    value_block_stride: tl.tensor,
    value_token_stride: tl.tensor,
    value_head_stride: tl.tensor,
    block_table_stride: tl.tensor,
    GROUP_SIZE: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    KEY_PADDED: tl.constexpr,
    VALUE_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    IS_SPLIT: tl.constexpr,
) -> None:
    """One program: the query heads of a KV head of one sequence, over one of num_splits ranges of its keys. Grid (B, KV heads, splits)."""
    sequence = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    num_splits = tl.num_programs(2)
    context_len = tl.load(context_lens + sequence).to(tl.int32)

    # The visible keys are dealt out in whole tiles, so that the splits of a short sequence stay few and those of a long one stay even.
    first_tile = 0
    if sliding_window is not None:
        first_tile = tl.maximum(context_len - sliding_window, 0) // TILE_KEYS
    tiles_per_split = tl.cdiv(tl.cdiv(context_len, TILE_KEYS) - first_tile, num_splits)
    first_key = (first_tile + split * tiles_per_split) * TILE_KEYS
    end_key = tl.minimum(first_key + tiles_per_split * TILE_KEYS, context_len)

    rows = tl.arange(0, TILE_ROWS)
    is_row = rows < GROUP_SIZE
    heads = kv_head * GROUP_SIZE + rows
    key_dims = tl.arange(0, KEY_PADDED)
    value_dims = tl.arange(0, VALUE_PADDED)
    query_rows = tl.load(
        query + sequence * query_sequence_stride + heads[:, None] * query_head_stride + key_dims[None, :],
        mask=is_row[:, None] & (key_dims[None, :] < KEY_SIZE),
        other=0.0,
    )
    # The sink counts once: in the first split.
    row_max, row_sum = first_state(sinks, heads, rows < tl.where(split == 0, GROUP_SIZE, 0), TILE_ROWS)
    accumulator, row_max, row_sum = attend(
        tl.zeros([TILE_ROWS, VALUE_PADDED], tl.float32),
        row_max,
        row_sum,
        query_rows,
        tl.where(is_row, context_len - 1, -1),
        key_cache + kv_head.to(tl.int64) * key_head_stride,
        value_cache + kv_head.to(tl.int64) * value_head_stride,
        block_table + sequence * block_table_stride,
        first_key,
        end_key,
        key_block_stride,
        key_token_stride,
        value_block_stride,
        value_token_stride,
        scaling,
        sliding_window,
        softcap,
        KEY_SIZE,
        VALUE_SIZE,
        KEY_PADDED,
        VALUE_PADDED,
        BLOCK_SIZE,
        TILE_KEYS,
        True,
    )
    is_seen = row_sum > 0.0
    divisor = tl.where(is_seen, row_sum, 1.0)
    result = accumulator / divisor[:, None]
    is_stored = is_row[:, None] & (value_dims[None, :] < VALUE_SIZE)
    if IS_SPLIT:
        num_heads = tl.num_programs(1) * GROUP_SIZE
        partial = (sequence * num_heads + heads) * num_splits + split
        tl.store(partial_output + partial[:, None] * VALUE_SIZE + value_dims[None, :], result, mask=is_stored & is_seen[:, None])
        tl.store(partial_log_sum + partial, tl.where(is_seen, row_max + tl.log2(divisor), float("-inf")), mask=is_row)
    else:
        pointers = output + sequence * output_sequence_stride + heads[:, None] * output_head_stride + value_dims[None, :]
        tl.store(pointers, result, mask=is_stored)


@triton.jit
def merge_splits_kernel(
    output: tl.tensor,
    partial_output: tl.tensor,
    partial_log_sum: tl.tensor,
    output_sequence_stride: tl.tensor,
    output_head_stride: tl.tensor,
    num_splits: tl.tensor,
    VALUE_SIZE: tl.constexpr,
    VALUE_PADDED: tl.constexpr,
    SPLITS_PADDED: tl.constexpr,
) -> None:
    """One program: the splits of one query head of one sequence, weighted by their softmax sums. Grid (B, H)."""
    sequence = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    splits = tl.arange(0, SPLITS_PADDED)
    value_dims = tl.arange(0, VALUE_PADDED)
    partial = (sequence * tl.num_programs(1) + head) * num_splits + splits
    log_sum = tl.load(partial_log_sum + partial, mask=splits < num_splits, other=float("-inf"))
    is_seen = log_sum > float("-inf")
    largest = tl.max(log_sum, 0)
    weights = tl.exp2(log_sum - tl.where(largest == float("-inf"), 0.0, largest))
    total = tl.sum(weights, 0)
    # A split that saw no key has written no output.
    parts = tl.load(
        partial_output + partial[:, None] * VALUE_SIZE + value_dims[None, :],
        mask=is_seen[:, None] & (value_dims[None, :] < VALUE_SIZE),
        other=0.0,
    )
    result = tl.sum(parts * weights[:, None], 0) / tl.where(total > 0.0, total, 1.0)
    pointers = output + sequence * output_sequence_stride + head * output_head_stride + value_dims
    tl.store(pointers, result, mask=value_dims < VALUE_SIZE)
