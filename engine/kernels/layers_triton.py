# mypy: disable-error-code="import-untyped,import-not-found,untyped-decorator"
"""Device code of the layer kernels, which `launch.py` launches."""

import triton
import triton.language as tl


@triton.jit
def normalized(
    states: tl.tensor,  # in the type of the model
    weight: tl.tensor,
    epsilon: tl.tensor,
    dims: tl.tensor,
    SIZE: tl.constexpr,
    ADDS_ONE: tl.constexpr,
) -> tl.tensor:
    """Over the root of the mean square, times the weights, in float32. ADDS_ONE: times one more than the weights, as Gemma has them."""
    number = states.to(tl.float32)
    number *= tl.rsqrt(tl.sum(number * number, 0) / SIZE + epsilon)
    factor = tl.load(weight + dims, mask=dims < SIZE, other=0.0).to(tl.float32)
    # Gemma's own code rounds once; the other models' rounds before it weights.
    return number * (1.0 + factor) if ADDS_ONE else number.to(states.dtype).to(tl.float32) * factor


@triton.jit(do_not_specialize=["num_inner"])
def rms_norm_kernel(
    output: tl.tensor,
    states: tl.tensor,
    weight: tl.tensor,
    epsilon: tl.tensor,
    num_inner: tl.tensor,
    outer_stride: tl.tensor,
    inner_stride: tl.tensor,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    ADDS_ONE: tl.constexpr,
) -> None:
    """One program: one row. Row r of the output is row r % num_inner of row r // num_inner. Grid (rows,)."""
    row = tl.program_id(0).to(tl.int64)
    dims = tl.arange(0, PADDED)
    is_dim = dims < SIZE
    source = states + row // num_inner * outer_stride + row % num_inner * inner_stride + dims
    number = normalized(tl.load(source, mask=is_dim, other=0.0), weight, epsilon, dims, SIZE, ADDS_ONE)
    tl.store(output + row * SIZE + dims, number, mask=is_dim)


@triton.jit
def add_rms_norm_kernel(
    total: tl.tensor,  # [rows, SIZE], as all that follow
    normed: tl.tensor,  # or None, with the weight after
    residual: tl.tensor,
    states: tl.tensor,
    scale: tl.tensor,
    weight_before: tl.tensor,  # or None
    epsilon_before: tl.tensor,
    weight_after: tl.tensor,
    epsilon_after: tl.tensor,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    ADDS_ONE: tl.constexpr,
) -> None:
    """One program: one row. Rounds wherever the models' own operations do. Grid (rows,)."""
    row = tl.program_id(0).to(tl.int64)
    dims = tl.arange(0, PADDED)
    is_dim = dims < SIZE
    at = row * SIZE + dims
    added = tl.load(states + at, mask=is_dim, other=0.0)
    dtype: tl.constexpr = added.dtype
    if weight_before is not None:
        added = normalized(added, weight_before, epsilon_before, dims, SIZE, ADDS_ONE).to(dtype)
    added = (added.to(tl.float32) * scale).to(dtype).to(tl.float32)
    sum_ = (tl.load(residual + at, mask=is_dim, other=0.0).to(tl.float32) + added).to(dtype)
    tl.store(total + at, sum_, mask=is_dim)
    if weight_after is not None:
        tl.store(normed + at, normalized(sum_, weight_after, epsilon_after, dims, SIZE, ADDS_ONE), mask=is_dim)


@triton.jit
def gated_kernel(
    output: tl.tensor,  # [rows, size]
    gate: tl.tensor,
    up: tl.tensor,
    size: tl.tensor,
    gate_stride: tl.tensor,
    up_stride: tl.tensor,
    ACTIVATION: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """One program: a tile of one row. Grid (rows, tiles)."""
    row = tl.program_id(0).to(tl.int64)
    dims = tl.program_id(1) * TILE + tl.arange(0, TILE)
    is_dim = dims < size
    number = tl.load(gate + row * gate_stride + dims, mask=is_dim, other=0.0).to(tl.float32)
    exponent = number
    if ACTIVATION == "gelu_tanh":  # (1 + tanh(x)) / 2 is the sigmoid of 2 x
        exponent = 1.5957691216057308 * (number + 0.044715 * number * number * number)
    number *= tl.sigmoid(exponent) * tl.load(up + row * up_stride + dims, mask=is_dim, other=0.0).to(tl.float32)
    tl.store(output + row * size + dims, number, mask=is_dim)


@triton.jit
def rotate_heads(
    output: tl.tensor,  # of the token, [heads, SIZE], as the states
    states: tl.tensor,
    cosines: tl.tensor,  # of the token, as the sines
    sines: tl.tensor,
    first_head: tl.tensor,
    head_stride: tl.tensor,
    NUM_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    NUM_ROTATED: tl.constexpr,
    HALF_PADDED: tl.constexpr,
    REST_PADDED: tl.constexpr,
    TILE_HEADS: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
    COSINES: tl.constexpr,
) -> None:
    heads = first_head + tl.arange(0, TILE_HEADS)
    is_head = (heads < NUM_HEADS)[:, None]
    pairs = tl.arange(0, HALF_PADDED)
    is_pair = pairs < NUM_ROTATED // 2
    is_stored = is_head & is_pair[None, :]
    first_dims = 2 * pairs if IS_INTERLEAVED else pairs
    second_dims = first_dims + (1 if IS_INTERLEAVED else NUM_ROTATED // 2)
    first_angles = 2 * pairs if COSINES == "pairs" else pairs
    second_angles = first_angles
    if COSINES != "once":
        second_angles += 1 if COSINES == "pairs" else NUM_ROTATED // 2
    source = states + heads[:, None] * head_stride
    first = tl.load(source + first_dims[None, :], mask=is_stored, other=0.0).to(tl.float32)
    second = tl.load(source + second_dims[None, :], mask=is_stored, other=0.0).to(tl.float32)
    first_cosine = tl.load(cosines + first_angles, mask=is_pair, other=0.0).to(tl.float32)[None, :]
    second_cosine = tl.load(cosines + second_angles, mask=is_pair, other=0.0).to(tl.float32)[None, :]
    first_sine = tl.load(sines + first_angles, mask=is_pair, other=0.0).to(tl.float32)[None, :]
    second_sine = tl.load(sines + second_angles, mask=is_pair, other=0.0).to(tl.float32)[None, :]
    target = output + heads[:, None] * SIZE
    tl.store(target + first_dims[None, :], first * first_cosine - second * first_sine, mask=is_stored)
    tl.store(target + second_dims[None, :], second * second_cosine + first * second_sine, mask=is_stored)
    if NUM_ROTATED < SIZE:
        dims = NUM_ROTATED + tl.arange(0, REST_PADDED)
        is_rest = is_head & (dims < SIZE)[None, :]
        tl.store(target + dims[None, :], tl.load(source + dims[None, :], mask=is_rest, other=0.0), mask=is_rest)


@triton.jit
def rotate_kernel(
    query_output: tl.tensor,
    key_output: tl.tensor,
    query: tl.tensor,
    key: tl.tensor,
    cosines: tl.tensor,
    sines: tl.tensor,
    query_token_stride: tl.tensor,
    query_head_stride: tl.tensor,
    key_token_stride: tl.tensor,
    key_head_stride: tl.tensor,
    cosine_stride: tl.tensor,
    sine_stride: tl.tensor,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    NUM_ROTATED: tl.constexpr,
    HALF_PADDED: tl.constexpr,
    REST_PADDED: tl.constexpr,
    TILE_HEADS: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
    COSINES: tl.constexpr,
) -> None:
    """One program: some heads of one token's query or key. Grid (T, tiles of query heads and then of key heads)."""
    token = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    cosines += token * cosine_stride
    sines += token * sine_stride
    num_query_tiles: tl.constexpr = (NUM_HEADS + TILE_HEADS - 1) // TILE_HEADS
    if tile < num_query_tiles:
        rotate_heads(
            query_output + token * NUM_HEADS * SIZE,
            query + token * query_token_stride,
            cosines,
            sines,
            tile * TILE_HEADS,
            query_head_stride,
            NUM_HEADS,
            SIZE,
            NUM_ROTATED,
            HALF_PADDED,
            REST_PADDED,
            TILE_HEADS,
            IS_INTERLEAVED,
            COSINES,
        )
    else:
        rotate_heads(
            key_output + token * NUM_KV_HEADS * SIZE,
            key + token * key_token_stride,
            cosines,
            sines,
            (tile - num_query_tiles) * TILE_HEADS,
            key_head_stride,
            NUM_KV_HEADS,
            SIZE,
            NUM_ROTATED,
            HALF_PADDED,
            REST_PADDED,
            TILE_HEADS,
            IS_INTERLEAVED,
            COSINES,
        )


@triton.jit
def shrink_kernel(
    reduced: tl.tensor,  # float32 [SPLITS, rows, RANK]
    x: tl.tensor,  # [rows, SIZE]
    slots: tl.tensor,  # [rows]
    down: tl.tensor,  # [slots, RANK, SIZE]
    num_rows: tl.tensor,
    x_stride: tl.tensor,
    SIZE: tl.constexpr,
    RANK: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_I: tl.constexpr,
) -> None:
    """One program: some of the inputs of the rows of a tile that have one slot's adapter. Grid (tiles, slots, SPLITS)."""
    rows = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    slot, split = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    is_own = tl.load(slots + rows, mask=rows < num_rows, other=-1) == slot
    if tl.max(is_own.to(tl.int32), 0) == 0:
        return
    ranks, inputs = tl.arange(0, RANK), tl.arange(0, BLOCK_I)
    sums = tl.zeros([BLOCK_T, RANK], tl.float32)
    for first in range(split * BLOCK_I, SIZE, SPLITS * BLOCK_I):
        at = first + inputs
        is_input = at < SIZE
        x_TI = tl.load(x + rows[:, None].to(tl.int64) * x_stride + at[None, :], mask=is_own[:, None] & is_input[None, :], other=0.0)
        down_IR = tl.load(down + (slot * RANK + ranks[None, :]) * SIZE + at[:, None], mask=is_input[:, None], other=0.0)
        sums = tl.dot(x_TI, down_IR, sums, input_precision="ieee")
    target = reduced + (split * num_rows + rows[:, None]) * RANK + ranks[None, :]
    tl.store(target, sums, mask=is_own[:, None])


@triton.jit
def expand_kernel(
    output: tl.tensor,  # [rows, SIZE], is added to
    reduced: tl.tensor,  # float32 [SPLITS, rows, RANK]
    slots: tl.tensor,  # [rows]
    up: tl.tensor,  # [slots, SIZE, RANK]
    num_rows: tl.tensor,
    output_stride: tl.tensor,
    SIZE: tl.constexpr,
    RANK: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_O: tl.constexpr,
) -> None:
    """One program: some outputs of the rows of a tile that have one slot's adapter. Grid (tiles, slots, blocks of outputs)."""
    rows = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    slot = tl.program_id(1).to(tl.int64)
    is_own = tl.load(slots + rows, mask=rows < num_rows, other=-1) == slot
    if tl.max(is_own.to(tl.int32), 0) == 0:
        return
    ranks, columns = tl.arange(0, RANK), tl.program_id(2) * BLOCK_O + tl.arange(0, BLOCK_O)
    is_column = columns < SIZE
    sums = tl.zeros([BLOCK_T, RANK], tl.float32)
    for split in range(SPLITS):
        source = reduced + (split * num_rows + rows[:, None].to(tl.int64)) * RANK + ranks[None, :]
        sums += tl.load(source, mask=is_own[:, None], other=0.0)
    up_RO = tl.load(up + (slot * SIZE + columns[None, :]) * RANK + ranks[:, None], mask=is_column[None, :], other=0.0)
    added = tl.dot(sums.to(up_RO.dtype), up_RO, input_precision="ieee")
    target = output + rows[:, None].to(tl.int64) * output_stride + columns[None, :]
    is_target = is_own[:, None] & is_column[None, :]
    tl.store(target, tl.load(target, mask=is_target, other=0.0) + added, mask=is_target)
