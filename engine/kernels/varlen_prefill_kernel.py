# mypy: disable-error-code="import-untyped,import-not-found,untyped-decorator"
"""Device code of `varlen_prefill`; needs Triton to be installed."""

import triton
import triton.language as tl

from penstock.engine.kernels.attention_triton import attend, first_state


@triton.jit(
    do_not_specialize=["first_sequence", "block_table_stride"],
    do_not_specialize_on_alignment=["block_table", "query_start_loc", "context_lens"],
)
def varlen_prefill_kernel(
    output: tl.tensor,
    query: tl.tensor,
    key_cache: tl.tensor,
    value_cache: tl.tensor,
    block_table: tl.tensor,
    query_start_loc: tl.tensor,
    context_lens: tl.tensor,
    sinks: tl.tensor,
    first_sequence: tl.tensor,
    scaling: tl.tensor,
    sliding_window: tl.tensor,
    softcap: tl.tensor,
    output_token_stride: tl.tensor,
    output_head_stride: tl.tensor,
    query_token_stride: tl.tensor,
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
) -> None:
    """One program: a run of queries of one sequence, times the query heads of one KV head. Grid (query tiles, KV heads, sequences).

    The heads of a group lie side by side in a tile (row = query * GROUP_SIZE + head), so that a key is read once for all of them and
    short queries still fill the tile.
    """
    # The last tile of a sequence sees the most keys: it starts first, and the short ones fill the gaps at the end.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1)
    sequence = (first_sequence + tl.program_id(2)).to(tl.int64)
    query_start = tl.load(query_start_loc + sequence).to(tl.int32)
    query_len = tl.load(query_start_loc + sequence + 1).to(tl.int32) - query_start
    num_queries: tl.constexpr = TILE_ROWS // GROUP_SIZE
    first_query = tile * num_queries
    if first_query >= query_len:
        return
    context_len = tl.load(context_lens + sequence).to(tl.int32)

    rows = tl.arange(0, TILE_ROWS)
    queries = first_query + rows // GROUP_SIZE
    heads = kv_head * GROUP_SIZE + rows % GROUP_SIZE
    is_row = (rows < num_queries * GROUP_SIZE) & (queries < query_len)
    first_position = context_len - query_len + first_query
    positions = tl.where(is_row, context_len - query_len + queries, -1)
    tokens = (query_start + queries).to(tl.int64)
    key_dims = tl.arange(0, KEY_PADDED)
    value_dims = tl.arange(0, VALUE_PADDED)
    query_rows = tl.load(
        query + tokens[:, None] * query_token_stride + heads[:, None] * query_head_stride + key_dims[None, :],
        mask=is_row[:, None] & (key_dims[None, :] < KEY_SIZE),
        other=0.0,
    )

    end_key = tl.minimum(first_position + num_queries, context_len)
    keys = key_cache + kv_head.to(tl.int64) * key_head_stride
    values = value_cache + kv_head.to(tl.int64) * value_head_stride
    table = block_table + sequence * block_table_stride
    accumulator = tl.zeros([TILE_ROWS, VALUE_PADDED], tl.float32)
    row_max, row_sum = first_state(sinks, heads, is_row, TILE_ROWS)
    if sliding_window is None:
        # Whole tiles that the first query of the tile sees are seen by all of them, and need no mask.
        first_masked_key = tl.maximum(first_position + 1, 0) // TILE_KEYS * TILE_KEYS
        accumulator, row_max, row_sum = attend(
            accumulator,
            row_max,
            row_sum,
            query_rows,
            positions,
            keys,
            values,
            table,
            0,
            first_masked_key,
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
            False,
        )
    else:
        first_masked_key = tl.maximum(first_position + 1 - sliding_window, 0) // TILE_KEYS * TILE_KEYS
    accumulator, row_max, row_sum = attend(
        accumulator,
        row_max,
        row_sum,
        query_rows,
        positions,
        keys,
        values,
        table,
        first_masked_key,
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
    # A row that saw no key gets zeros.
    result = accumulator / tl.where(row_sum > 0.0, row_sum, 1.0)[:, None]
    pointers = output + tokens[:, None] * output_token_stride + heads[:, None] * output_head_stride + value_dims[None, :]
    tl.store(pointers, result, mask=is_row[:, None] & (value_dims[None, :] < VALUE_SIZE))
