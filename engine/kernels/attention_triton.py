# mypy: disable-error-code="import-untyped,import-not-found,untyped-decorator"
# Triton has no types. This module needs Triton to be installed: the functions that launch its code import it when they are called.
"""Device code of the attention kernels, which `launch.py` launches."""

import triton
import triton.language as tl

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def first_state(sinks: tl.tensor, heads: tl.tensor, has_sink: tl.tensor, ROWS: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """The maximum and the sum of each row before its first key: those of its sink where it has one, which is a key without a value."""
    if sinks is None:
        row_max = tl.full([ROWS], float("-inf"), tl.float32)
        row_sum = tl.zeros([ROWS], tl.float32)
    else:
        row_max = tl.load(sinks + heads, mask=has_sink, other=float("-inf")).to(tl.float32) * LOG2_E
        row_sum = tl.where(row_max == float("-inf"), 0.0, 1.0)
    return row_max, row_sum


@triton.jit
def converted(cached: tl.tensor, like: tl.tensor) -> tl.tensor:
    if cached.dtype != like.dtype:
        cached = cached.to(tl.float32).to(like.dtype)  # straight from 8 bits to bfloat16, Triton 3.6 fails on sm_89
    return cached


@triton.jit
def attend(
    accumulator: tl.tensor,  # [ROWS, VALUE_PADDED] float32, with row_max and row_sum [ROWS]: the state so far
    row_max: tl.tensor,
    row_sum: tl.tensor,
    query: tl.tensor,  # [ROWS, KEY_PADDED]; keys and values are converted to its type
    query_rest: tl.tensor,  # [ROWS, REST_PADDED], or None
    positions: tl.tensor,  # [ROWS]: windows end there; -1: of a row that sees no keys
    last_keys: tl.tensor,  # [ROWS]: a row sees the keys up to there
    keys: tl.tensor,  # pointers to the caches at the KV head in question, and to the sequence's row of the block table
    values: tl.tensor,
    block_table: tl.tensor,
    first_key: tl.tensor,  # keys first_key..end_key are visited; first_key is a multiple of TILE_KEYS
    end_key: tl.tensor,
    key_block_stride: tl.tensor,
    key_token_stride: tl.tensor,
    value_block_stride: tl.tensor,
    value_token_stride: tl.tensor,
    scaling: tl.tensor,
    sliding_window: tl.tensor,  # or None, as softcap
    softcap: tl.tensor,
    KEY_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    KEY_PADDED: tl.constexpr,
    REST_PADDED: tl.constexpr,
    VALUE_PADDED: tl.constexpr,
    SHARES_KEYS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    IS_MASKED: tl.constexpr,  # False where every row sees every key of the range
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Moves the softmax state past a range of keys (Milakov and Gimelshein 2018; Dao et al. 2022). Maxima are in units of log2.

    The dimensions of keys are KEY_PADDED and, where that is a power of two below KEY_SIZE, REST_PADDED more. With SHARES_KEYS, values are
    the first dimensions of keys.
    """
    key_dims = tl.arange(0, KEY_PADDED)
    value_dims = tl.arange(0, VALUE_PADDED)
    if sliding_window is not None:
        oldest = tl.min(tl.where(positions < 0, 2**30, positions), 0) - sliding_window + 1  # a row of padding is at -1
    for tile_start in range(first_key, end_key, TILE_KEYS):
        key_positions = tile_start + tl.arange(0, TILE_KEYS)
        is_key = key_positions < end_key
        if sliding_window is not None:
            is_key &= key_positions >= oldest  # blocks before all windows may be other sequences' by now, and hold NaN
        # A cache may hold more than 2**31 elements: from here on, offsets are 64 bits wide.
        blocks = tl.load(block_table + key_positions // BLOCK_SIZE, mask=is_key, other=0).to(tl.int64)
        tokens = key_positions % BLOCK_SIZE
        key_offsets = blocks * key_block_stride + tokens * key_token_stride
        key_DN = tl.load(keys + key_offsets[None, :] + key_dims[:, None], mask=is_key[None, :] & (key_dims[:, None] < KEY_SIZE), other=0.0)
        key_DN = converted(key_DN, query)
        scores = tl.dot(query, key_DN, input_precision="ieee")
        if REST_PADDED:
            rest_dims = KEY_PADDED + tl.arange(0, REST_PADDED)
            is_rest = is_key[None, :] & (rest_dims[:, None] < KEY_SIZE)
            rest_DN = tl.load(keys + key_offsets[None, :] + rest_dims[:, None], mask=is_rest, other=0.0)
            scores = tl.dot(query_rest, converted(rest_DN, query), scores, input_precision="ieee")
        scores *= scaling
        if softcap is not None:
            scores = softcap * (2.0 * tl.sigmoid(2.0 * scores / softcap) - 1.0)  # softcap * tanh(scores / softcap)
        scores *= LOG2_E
        if IS_MASKED:
            is_visible = is_key[None, :] & (key_positions[None, :] <= last_keys[:, None])
            if sliding_window is not None:
                is_visible &= key_positions[None, :] > positions[:, None] - sliding_window
            scores = tl.where(is_visible, scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        # A row that has seen no key yet has -inf here, and -inf - -inf would be NaN.
        finite_max = tl.where(new_max == float("-inf"), 0.0, new_max)
        weights = tl.exp2(scores - finite_max[:, None])
        rescale = tl.exp2(row_max - finite_max)
        # Unwritten slots may hold NaN, which a weight of zero would not silence: they are read as zero.
        if SHARES_KEYS:
            value_ND = tl.trans(key_DN)
        else:
            value_offsets = blocks * value_block_stride + tokens * value_token_stride
            is_value = is_key[:, None] & (value_dims[None, :] < VALUE_SIZE)
            value_ND = converted(tl.load(values + value_offsets[:, None] + value_dims[None, :], mask=is_value, other=0.0), query)
        row_sum = row_sum * rescale + tl.sum(weights, 1)
        accumulator = accumulator * rescale[:, None]
        accumulator = tl.dot(weights.to(query.dtype), value_ND, accumulator, input_precision="ieee")
        row_max = new_max
    return accumulator, row_max, row_sum


@triton.jit
def bounded(element: tl.tensor, LARGEST: tl.constexpr) -> tl.tensor:
    """Cut off at LARGEST, unless that is None; NaN stays NaN, and shows that the model has failed."""
    if LARGEST is not None:
        element = element.to(tl.float32)
        element = tl.where(element > LARGEST, LARGEST, tl.where(element < -LARGEST, -LARGEST, element))
    return element


@triton.jit(do_not_specialize_on_alignment=["slot_mapping"])
def kv_write_kernel(
    key: tl.tensor,
    value: tl.tensor,  # or None, as its cache
    key_cache: tl.tensor,
    value_cache: tl.tensor,
    slot_mapping: tl.tensor,
    key_token_stride: tl.tensor,
    key_head_stride: tl.tensor,
    value_token_stride: tl.tensor,
    value_head_stride: tl.tensor,
    key_cache_block_stride: tl.tensor,
    key_cache_token_stride: tl.tensor,
    key_cache_head_stride: tl.tensor,
    value_cache_block_stride: tl.tensor,
    value_cache_token_stride: tl.tensor,
    value_cache_head_stride: tl.tensor,
    NUM_KV_HEADS: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEY_ELEMENTS: tl.constexpr,
    VALUE_ELEMENTS: tl.constexpr,
    LARGEST: tl.constexpr,
) -> None:
    """One program: all heads of one token. KEY_ELEMENTS and VALUE_ELEMENTS are heads times head size, padded to powers of two."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token).to(tl.int64)
    if slot < 0:
        return
    block = slot // BLOCK_SIZE
    offset = slot % BLOCK_SIZE

    element = tl.arange(0, KEY_ELEMENTS)
    head = element // KEY_SIZE
    dim = element % KEY_SIZE
    is_element = head < NUM_KV_HEADS
    source = key + token * key_token_stride + head * key_head_stride + dim
    target = key_cache + block * key_cache_block_stride + offset * key_cache_token_stride + head * key_cache_head_stride + dim
    tl.store(target, bounded(tl.load(source, mask=is_element), LARGEST), mask=is_element)

    if value is not None:
        element = tl.arange(0, VALUE_ELEMENTS)
        head = element // VALUE_SIZE
        dim = element % VALUE_SIZE
        is_element = head < NUM_KV_HEADS
        source = value + token * value_token_stride + head * value_head_stride + dim
        target = value_cache + block * value_cache_block_stride + offset * value_cache_token_stride + head * value_cache_head_stride + dim
        tl.store(target, bounded(tl.load(source, mask=is_element), LARGEST), mask=is_element)


@triton.jit
def visible_tiles(context_len: tl.tensor, sliding_window: tl.tensor, TILE_KEYS: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """The first tile of keys that the last token of a context sees, and the end of the last."""
    first_tile = context_len * 0
    if sliding_window is not None:
        first_tile = tl.maximum(context_len - sliding_window, 0) // TILE_KEYS
    return first_tile, tl.cdiv(context_len, TILE_KEYS)


PLAN_FIELDS: tl.constexpr = tl.constexpr(4)


# Rows and lengths are views of one packed tensor and begin anywhere in it: compiling for their alignment would only compile more often.
@triton.jit(do_not_specialize=["num_sequences", "num_wanted", "min_tiles", "max_items"], do_not_specialize_on_alignment=["context_lens"])
def plan_splits_kernel(
    plan: tl.tensor,  # int32, rows of PLAN_FIELDS as in `launch.SplitPlan`
    context_lens: tl.tensor,
    num_sequences: tl.tensor,
    num_wanted: tl.tensor,
    min_tiles: tl.tensor,
    max_items: tl.tensor,
    sliding_window: tl.tensor,
    TILE_KEYS: tl.constexpr,
    TILE_SEQUENCES: tl.constexpr,
) -> None:
    """One program: the whole batch. Grid (1,)."""
    total = 0
    for start in range(0, num_sequences, TILE_SEQUENCES):
        sequences = start + tl.arange(0, TILE_SEQUENCES)
        context_len = tl.load(context_lens + sequences, mask=sequences < num_sequences, other=0).to(tl.int32)
        first_tile, end_tile = visible_tiles(context_len, sliding_window, TILE_KEYS)
        total += tl.sum(end_tile - first_tile, 0)
    tiles_per_split = tl.maximum(min_tiles, tl.cdiv(total, num_wanted))
    num_items = 0
    num_merges = 0
    num_partials = 0
    for start in range(0, num_sequences, TILE_SEQUENCES):
        sequences = start + tl.arange(0, TILE_SEQUENCES)
        is_sequence = sequences < num_sequences
        context_len = tl.load(context_lens + sequences, mask=is_sequence, other=0).to(tl.int32)
        first_tile, end_tile = visible_tiles(context_len, sliding_window, TILE_KEYS)
        # A sequence without keys has one split as well, which writes its zeros.
        num_splits = tl.where(is_sequence, tl.maximum(tl.cdiv(end_tile - first_tile, tiles_per_split), 1), 0)
        is_merged = num_splits > 1
        num_merged = tl.where(is_merged, num_splits, 0)
        first_item = num_items + tl.cumsum(num_splits, 0) - num_splits
        first_partial = num_partials + tl.cumsum(num_merged, 0) - num_merged
        for split in range(tl.max(num_splits, 0)):
            row = plan + (1 + first_item + split) * PLAN_FIELDS
            is_split = split < num_splits
            tl.store(row, sequences, mask=is_split)
            tl.store(row + 1, num_splits, mask=is_split)
            tl.store(row + 2, first_partial, mask=is_split)
            tl.store(row + 3, tl.zeros_like(sequences) + split, mask=is_split)
        merge = num_merges + tl.cumsum(is_merged.to(tl.int32), 0) - 1
        row = plan + (1 + max_items + merge) * PLAN_FIELDS
        tl.store(row, sequences, mask=is_merged)
        tl.store(row + 1, num_splits, mask=is_merged)
        tl.store(row + 2, first_partial, mask=is_merged)
        num_items += tl.sum(num_splits, 0)
        num_merges += tl.sum(is_merged.to(tl.int32), 0)
        num_partials += tl.sum(num_merged, 0)
    tl.store(plan, num_items)
    tl.store(plan + 1, num_merges)


@triton.jit(do_not_specialize=["block_table_stride"], do_not_specialize_on_alignment=["table_rows", "context_lens"])
def paged_decode_kernel(
    output: tl.tensor,  # [B, H, VALUE_SIZE]; written for sequences of one split
    partial_output: tl.tensor,  # [partials, H, VALUE_SIZE] float32 and [partials, H] float32; written for sequences of several
    partial_log_sum: tl.tensor,
    plan: tl.tensor,  # of `plan_splits_kernel`, where IS_SPLIT
    query: tl.tensor,
    key_cache: tl.tensor,
    value_cache: tl.tensor,
    block_tables: tl.tensor,
    table_rows: tl.tensor,
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
    REST_PADDED: tl.constexpr,
    VALUE_PADDED: tl.constexpr,
    SHARES_KEYS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    IS_SPLIT: tl.constexpr,
) -> None:
    """One program: the query heads of a KV head of one sequence, over one of its splits. Grid (KV heads, splits of all sequences).

    Without a plan each sequence has one. The heads of a split run at the same time: their keys are neighbours in memory.
    """
    kv_head = tl.program_id(0)
    item = tl.program_id(1)
    split = 0
    num_splits = 1
    first_partial = 0
    sequence = item.to(tl.int64)
    if IS_SPLIT:
        if item >= tl.load(plan):
            return
        row = plan + (1 + item) * PLAN_FIELDS
        sequence = tl.load(row).to(tl.int64)
        num_splits = tl.load(row + 1)
        first_partial = tl.load(row + 2)
        split = tl.load(row + 3)
    context_len = tl.load(context_lens + sequence).to(tl.int32)

    first_tile, end_tile = visible_tiles(context_len, sliding_window, TILE_KEYS)
    tiles_per_split = tl.cdiv(end_tile - first_tile, num_splits)
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
    query_rest = None
    if REST_PADDED:
        rest_dims = KEY_PADDED + tl.arange(0, REST_PADDED)
        query_rest = tl.load(
            query + sequence * query_sequence_stride + heads[:, None] * query_head_stride + rest_dims[None, :],
            mask=is_row[:, None] & (rest_dims[None, :] < KEY_SIZE),
            other=0.0,
        )
    # The sink counts once: in the first split.
    row_max, row_sum = first_state(sinks, heads, rows < tl.where(split == 0, GROUP_SIZE, 0), TILE_ROWS)
    accumulator, row_max, row_sum = attend(
        tl.zeros([TILE_ROWS, VALUE_PADDED], tl.float32),
        row_max,
        row_sum,
        query_rows,
        query_rest,
        tl.where(is_row, context_len - 1, -1),
        tl.where(is_row, context_len - 1, -1),
        key_cache + kv_head.to(tl.int64) * key_head_stride,
        value_cache + kv_head.to(tl.int64) * value_head_stride,
        block_tables + tl.load(table_rows + sequence).to(tl.int64) * block_table_stride,
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
        REST_PADDED,
        VALUE_PADDED,
        SHARES_KEYS,
        BLOCK_SIZE,
        TILE_KEYS,
        True,
    )
    is_seen = row_sum > 0.0
    divisor = tl.where(is_seen, row_sum, 1.0)
    result = accumulator / divisor[:, None]
    is_stored = is_row[:, None] & (value_dims[None, :] < VALUE_SIZE)
    if num_splits > 1:
        partial = (first_partial + split) * (tl.num_programs(0) * GROUP_SIZE) + heads.to(tl.int64)
        tl.store(partial_output + partial[:, None] * VALUE_SIZE + value_dims[None, :], result, mask=is_stored & is_seen[:, None])
        tl.store(partial_log_sum + partial, tl.where(is_seen, row_max + tl.log2(divisor), float("-inf")), mask=is_row)
    else:
        pointers = output + sequence * output_sequence_stride + heads[:, None] * output_head_stride + value_dims[None, :]
        tl.store(pointers, result, mask=is_stored)


@triton.jit(do_not_specialize=["max_items"])
def merge_splits_kernel(
    output: tl.tensor,
    partial_output: tl.tensor,
    partial_log_sum: tl.tensor,
    plan: tl.tensor,
    max_items: tl.tensor,
    output_sequence_stride: tl.tensor,
    output_head_stride: tl.tensor,
    VALUE_SIZE: tl.constexpr,
    VALUE_PADDED: tl.constexpr,
    TILE_SPLITS: tl.constexpr,
) -> None:
    """One program: the splits of one query head of one sequence that has several, weighted by their softmax sums. Grid (H, sequences)."""
    head = tl.program_id(0)
    merge = tl.program_id(1)
    if merge >= tl.load(plan + 1):
        return
    row = plan + (1 + max_items + merge) * PLAN_FIELDS
    sequence = tl.load(row).to(tl.int64)
    num_splits = tl.load(row + 1)
    first_partial = tl.load(row + 2)
    value_dims = tl.arange(0, VALUE_PADDED)
    is_dim = value_dims < VALUE_SIZE
    accumulator = tl.zeros([VALUE_PADDED], tl.float32)
    largest = float("-inf")
    total = 0.0
    for first in range(0, num_splits, TILE_SPLITS):
        splits = first + tl.arange(0, TILE_SPLITS)
        partial = (first_partial + splits).to(tl.int64) * tl.num_programs(0) + head
        log_sum = tl.load(partial_log_sum + partial, mask=splits < num_splits, other=float("-inf"))
        new_largest = tl.maximum(largest, tl.max(log_sum, 0))
        finite = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        weights = tl.exp2(log_sum - finite)
        rescale = tl.exp2(largest - finite)
        # A split that saw no key has written no output.
        is_stored = (log_sum > float("-inf"))[:, None] & is_dim[None, :]
        parts = tl.load(partial_output + partial[:, None] * VALUE_SIZE + value_dims[None, :], mask=is_stored, other=0.0)
        accumulator = accumulator * rescale + tl.sum(parts * weights[:, None], 0)
        total = total * rescale + tl.sum(weights, 0)
        largest = new_largest
    result = accumulator / tl.where(total > 0.0, total, 1.0)
    tl.store(output + sequence * output_sequence_stride + head * output_head_stride + value_dims, result, mask=is_dim)


@triton.jit(
    do_not_specialize=["first_sequence", "block_table_stride"],
    do_not_specialize_on_alignment=["table_rows", "query_start_loc", "context_lens", "key_stops"],
)
def varlen_prefill_kernel(
    output: tl.tensor,
    query: tl.tensor,
    key_cache: tl.tensor,
    value_cache: tl.tensor,
    block_tables: tl.tensor,
    table_rows: tl.tensor,
    query_start_loc: tl.tensor,
    context_lens: tl.tensor,
    key_stops: tl.tensor,
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
    REST_PADDED: tl.constexpr,
    VALUE_PADDED: tl.constexpr,
    SHARES_KEYS: tl.constexpr,
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
    query_rest = None
    if REST_PADDED:
        rest_dims = KEY_PADDED + tl.arange(0, REST_PADDED)
        query_rest = tl.load(
            query + tokens[:, None] * query_token_stride + heads[:, None] * query_head_stride + rest_dims[None, :],
            mask=is_row[:, None] & (rest_dims[None, :] < KEY_SIZE),
            other=0.0,
        )

    end_key = tl.minimum(first_position + num_queries, context_len)
    last_keys = positions
    if key_stops is not None:
        last_keys = tl.maximum(positions, tl.load(key_stops + tokens, mask=is_row, other=0).to(tl.int32) - 1)
        end_key = tl.maximum(end_key, tl.max(last_keys, 0) + 1)
    keys = key_cache + kv_head.to(tl.int64) * key_head_stride
    values = value_cache + kv_head.to(tl.int64) * value_head_stride
    table = block_tables + tl.load(table_rows + sequence).to(tl.int64) * block_table_stride
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
            query_rest,
            positions,
            last_keys,
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
            REST_PADDED,
            VALUE_PADDED,
            SHARES_KEYS,
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
        query_rest,
        positions,
        last_keys,
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
        REST_PADDED,
        VALUE_PADDED,
        SHARES_KEYS,
        BLOCK_SIZE,
        TILE_KEYS,
        True,
    )
    # A row that saw no key gets zeros.
    result = accumulator / tl.where(row_sum > 0.0, row_sum, 1.0)[:, None]
    pointers = output + tokens[:, None] * output_token_stride + heads[:, None] * output_head_stride + value_dims[None, :]
    tl.store(pointers, result, mask=is_row[:, None] & (value_dims[None, :] < VALUE_SIZE))
