# mypy: disable-error-code="import-untyped,import-not-found,untyped-decorator"
# Triton has no types. This module needs Triton to be installed: the functions that launch its code import it when they are called.
"""The inner loop of paged attention, which decode and prefill share: online softmax over a range of keys."""

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
    positions: tl.tensor,  # [ROWS]: a row sees the keys up to its position; -1: none
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
    VALUE_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    IS_MASKED: tl.constexpr,  # False where every row sees every key of the range
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Moves the softmax state past a range of keys (Milakov and Gimelshein 2018; Dao et al. 2022). Maxima are in units of log2."""
    key_dims = tl.arange(0, KEY_PADDED)
    value_dims = tl.arange(0, VALUE_PADDED)
    for tile_start in range(first_key, end_key, TILE_KEYS):
        key_positions = tile_start + tl.arange(0, TILE_KEYS)
        is_key = key_positions < end_key
        # A cache may hold more than 2**31 elements: from here on, offsets are 64 bits wide.
        blocks = tl.load(block_table + key_positions // BLOCK_SIZE, mask=is_key, other=0).to(tl.int64)
        tokens = key_positions % BLOCK_SIZE
        key_offsets = blocks * key_block_stride + tokens * key_token_stride
        key_DN = tl.load(keys + key_offsets[None, :] + key_dims[:, None], mask=is_key[None, :] & (key_dims[:, None] < KEY_SIZE), other=0.0)
        scores = tl.dot(query, converted(key_DN, query), input_precision="ieee") * scaling
        if softcap is not None:
            scores = softcap * (2.0 * tl.sigmoid(2.0 * scores / softcap) - 1.0)  # softcap * tanh(scores / softcap)
        scores *= LOG2_E
        if IS_MASKED:
            is_visible = is_key[None, :] & (key_positions[None, :] <= positions[:, None])
            if sliding_window is not None:
                is_visible &= key_positions[None, :] > positions[:, None] - sliding_window
            scores = tl.where(is_visible, scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        # A row that has seen no key yet has -inf here, and -inf - -inf would be NaN.
        finite_max = tl.where(new_max == float("-inf"), 0.0, new_max)
        weights = tl.exp2(scores - finite_max[:, None])
        rescale = tl.exp2(row_max - finite_max)
        value_offsets = blocks * value_block_stride + tokens * value_token_stride
        # Unwritten slots may hold NaN, which a weight of zero would not silence: they are read as zero.
        value_ND = tl.load(
            values + value_offsets[:, None] + value_dims[None, :], mask=is_key[:, None] & (value_dims[None, :] < VALUE_SIZE), other=0.0
        )
        row_sum = row_sum * rescale + tl.sum(weights, 1)
        accumulator = accumulator * rescale[:, None]
        accumulator = tl.dot(weights.to(query.dtype), converted(value_ND, query), accumulator, input_precision="ieee")
        row_max = new_max
    return accumulator, row_max, row_sum
