# mypy: disable-error-code="import-untyped,import-not-found,untyped-decorator"
"""Device code of the products by quantized weights, which `quantized.py` launches.

Codes are read as they lie in the blocks of `weights/packed.py` and in the panels of `weights/float8.py`, and become numbers in registers.
"""

import triton
import triton.language as tl

TILE: tl.constexpr = tl.constexpr(16)  # rows of a weight in a block
GROUP_SIZE: tl.constexpr = tl.constexpr(32)  # columns
HALF: tl.constexpr = tl.constexpr(16)  # columns, whose codes share bytes with those of the other half of a group
HALF_BYTES: tl.constexpr = tl.constexpr(256)
PANEL: tl.constexpr = tl.constexpr(32)


@triton.jit
def byte(blocks: tl.tensor, place: tl.tensor, is_row: tl.tensor) -> tl.tensor:
    return tl.load(blocks + place, mask=is_row, other=0).to(tl.int32)


@triton.jit
def half(halves: tl.tensor, place: tl.tensor, is_row: tl.tensor) -> tl.tensor:
    """The number of half precision that begins at a byte."""
    return tl.load(halves + place // 2, mask=is_row, other=0.0).to(tl.float32)


@triton.jit
def signed(number: tl.tensor) -> tl.tensor:
    """What a byte stands for."""
    return (number ^ 128) - 128


@triton.jit
def codes_of(
    blocks: tl.tensor,
    place: tl.tensor,  # [1, ROWS]: the byte at which the group begins
    lanes: tl.tensor,  # [1, ROWS]
    is_row: tl.tensor,  # [1, ROWS]
    BITS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """The codes of a group's first 16 columns, and of the others, [16, ROWS]."""
    columns = tl.arange(0, HALF)[:, None]
    number = columns // 4 * 64 + lanes * 4 + columns % 4
    is_code = is_row & (columns < HALF)
    first = byte(blocks, place + number, is_code)
    if BITS == 8:
        second = byte(blocks, place + HALF_BYTES + number, is_code)
    else:
        second = first >> 4
        first = first & 15
    if BITS == 5:
        fifth = place + HALF_BYTES + number // 8
        first |= (byte(blocks, fifth, is_code) >> number % 8 & 1) << 4
        second |= (byte(blocks, fifth + HALF_BYTES // 8, is_code) >> number % 8 & 1) << 4
    if BITS == 6:
        upper = place + HALF_BYTES + lanes * 4 + columns % 4
        shift = columns // 4 * 2
        first |= (byte(blocks, upper, is_code) >> shift & 3) << 4
        second |= (byte(blocks, upper + HALF_BYTES // 4, is_code) >> shift & 3) << 4
    return first, second


@triton.jit
def scales_of(
    blocks: tl.tensor,
    halves: tl.tensor,  # the same memory in half precision
    start: tl.tensor,  # [1, ROWS]: the byte at which the scales of the block begin
    end: tl.tensor,  # [1, ROWS]: the byte at which the block ends
    lanes: tl.tensor,
    is_row: tl.tensor,
    group: tl.tensor,  # of the block
    SCALES: tl.constexpr,
    HAS_MINIMUMS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """What the codes of both halves of a group are multiplied by, and what is added then, [1, ROWS] float32."""
    minimum = tl.zeros_like(lanes).to(tl.float32)
    if SCALES == "half":
        scale = half(halves, start + 2 * lanes, is_row)
        if HAS_MINIMUMS:
            minimum = half(halves, start + 2 * (TILE + lanes), is_row)
    elif SCALES == "zero_point":
        scale = half(halves, start + 2 * lanes, is_row)
        minimum = -signed(byte(blocks, start + 2 * TILE + lanes, is_row)).to(tl.float32) * scale
    elif SCALES == "exponent":
        exponent = byte(blocks, start + lanes, is_row)
        bits = tl.where(exponent < 2, 0x200000 << tl.minimum(exponent, 1), (exponent - 1) << 23)
        scale = bits.to(tl.float32, bitcast=True)
    elif SCALES == "byte":
        factor = half(halves, end + 2 * (lanes - TILE), is_row)
        scale = signed(byte(blocks, start + 2 * group * TILE + lanes, is_row)).to(tl.float32) * factor
    elif HAS_MINIMUMS:
        lower = byte(blocks, start + group * TILE + lanes, is_row)
        upper = byte(blocks, start + (8 + group % 4) * TILE + lanes, is_row) >> (group // 4 * 4)
        scale = (lower & 15 | (upper & 3) << 4).to(tl.float32) * half(halves, end + 2 * (lanes - 2 * TILE), is_row)
        minimum = (lower >> 4 | (upper >> 2 & 3) << 4).to(tl.float32) * half(halves, end + 2 * (lanes - TILE), is_row)
    else:
        lower = byte(blocks, start + group % 4 * TILE + lanes, is_row) >> (group // 4 * 4) & 15
        upper = byte(blocks, start + (4 + group % 2) * TILE + lanes, is_row) >> (group // 2 * 2) & 3
        scale = ((lower | upper << 4) - 32).to(tl.float32) * half(halves, end + 2 * (lanes - TILE), is_row)
    second = scale
    if SCALES == "byte":
        second = signed(byte(blocks, start + (2 * group + 1) * TILE + lanes, is_row)).to(tl.float32) * factor
    return scale, second, minimum


@triton.jit
def numbers_of(codes: tl.tensor, OFFSET: tl.constexpr, LOW_LEVELS: tl.constexpr, HIGH_LEVELS: tl.constexpr) -> tl.tensor:
    """What codes stand for: the levels are the bytes of two numbers of 64 bits."""
    if LOW_LEVELS is None:
        numbers = codes - OFFSET
    else:
        low = tl.full([1, 1], LOW_LEVELS, tl.int64)
        high = tl.full([1, 1], HIGH_LEVELS, tl.int64)
        numbers = signed((tl.where(codes < 8, low, high) >> ((codes & 7) * 8).to(tl.int64)).to(tl.int32) & 255)
    return numbers.to(tl.float32)


@triton.jit
def weights_of(
    blocks: tl.tensor,
    halves: tl.tensor,
    rows: tl.tensor,  # [ROWS]: of the weight
    is_row: tl.tensor,  # [ROWS]
    group: tl.tensor,  # of 32 columns
    NUM_GROUPS: tl.constexpr,
    BITS: tl.constexpr,
    OFFSET: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
    GROUP_BYTES: tl.constexpr,
    BLOCK_BYTES: tl.constexpr,
    SCALES: tl.constexpr,
    HAS_MINIMUMS: tl.constexpr,
    LOW_LEVELS: tl.constexpr,
    HIGH_LEVELS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """The weights of the first 16 columns of a group, and of the others, [16, ROWS] float32."""
    lanes = (rows % TILE)[None, :]
    is_row = is_row[None, :]
    num_blocks: tl.constexpr = NUM_GROUPS // BLOCK_GROUPS
    start = ((rows // TILE).to(tl.int64)[None, :] * num_blocks + group // BLOCK_GROUPS) * BLOCK_BYTES
    own = group % BLOCK_GROUPS
    first, second = codes_of(blocks, start + own * GROUP_BYTES, lanes, is_row, BITS)
    first_scale, second_scale, minimum = scales_of(
        blocks, halves, start + BLOCK_GROUPS * GROUP_BYTES, start + BLOCK_BYTES, lanes, is_row, own, SCALES, HAS_MINIMUMS
    )
    first_weight = numbers_of(first, OFFSET, LOW_LEVELS, HIGH_LEVELS) * first_scale + minimum
    second_weight = numbers_of(second, OFFSET, LOW_LEVELS, HIGH_LEVELS) * second_scale + minimum
    return first_weight, second_weight


@triton.jit
def tile_of_expert(
    starts: tl.tensor, num_experts: tl.tensor, tile: tl.tensor, BLOCK_T: tl.constexpr, EXPERTS_PADDED: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """The expert whose rows a tile has, or `num_experts` past the last tile; the tile's first row, and the end of the expert's rows.

    Each expert's rows are cut into tiles of their own.
    """
    experts = tl.arange(0, EXPERTS_PADDED)
    is_expert = experts < num_experts
    first_row = tl.load(starts + experts, mask=is_expert, other=0)
    end_row = tl.load(starts + experts + 1, mask=is_expert, other=0)
    num_tiles = tl.cdiv(end_row - first_row, BLOCK_T).to(tl.int32)
    end_tile = tl.cumsum(num_tiles, 0)
    expert = tl.minimum(tl.sum((end_tile <= tile).to(tl.int32), 0), num_experts)
    is_own = experts == expert
    first_tile = tl.sum(tl.where(is_own, end_tile - num_tiles, 0), 0)
    row = tl.sum(tl.where(is_own, first_row, 0), 0) + (tile - first_tile) * BLOCK_T
    return expert, row, tl.sum(tl.where(is_own, end_row, 0), 0)


@triton.jit
def store_sums(
    output: tl.tensor,  # of the first split
    bias: tl.tensor,  # [outputs], or None
    sums: tl.tensor,  # [BLOCK_T, BLOCK_O]
    rows: tl.tensor,
    is_row: tl.tensor,
    outputs: tl.tensor,
    is_output: tl.tensor,
    output_stride: tl.tensor,
) -> None:
    if bias is not None:
        sums += tl.load(bias + outputs, mask=is_output, other=0.0).to(tl.float32)[None, :]
    target = output + rows[:, None].to(tl.int64) * output_stride + outputs[None, :]
    tl.store(target, sums, mask=is_row[:, None] & is_output[None, :])


@triton.jit(do_not_specialize=["num_rows", "num_experts"], do_not_specialize_on_alignment=["starts"])
def quantized_linear_kernel(
    output: tl.tensor,  # [rows, outputs], or float32 [splits, rows, outputs]
    x: tl.tensor,  # [rows, inputs]
    blocks: tl.tensor,
    halves: tl.tensor,
    bias: tl.tensor,  # [outputs], or None
    starts: tl.tensor,  # of the rows of each expert, [experts + 1], or None; then there are blocks and biases for each
    num_experts: tl.tensor,
    num_rows: tl.tensor,
    num_outputs: tl.tensor,
    expert_bytes: tl.tensor,
    x_stride: tl.tensor,
    output_stride: tl.tensor,
    split_stride: tl.tensor,
    NUM_GROUPS: tl.constexpr,
    SPLIT_GROUPS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_O: tl.constexpr,
    EXPERTS_PADDED: tl.constexpr,
    BITS: tl.constexpr,
    OFFSET: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
    GROUP_BYTES: tl.constexpr,
    BLOCK_BYTES: tl.constexpr,
    SCALES: tl.constexpr,
    HAS_MINIMUMS: tl.constexpr,
    LOW_LEVELS: tl.constexpr,
    HIGH_LEVELS: tl.constexpr,
) -> None:
    """One program: some outputs of a tile of rows, over a split of the inputs. Grid (tiles of outputs, tiles of rows, splits)."""
    outputs = tl.program_id(0) * BLOCK_O + tl.arange(0, BLOCK_O)
    is_output = outputs < num_outputs
    first_row = tl.program_id(1) * BLOCK_T
    end_row = num_rows
    if starts is not None:
        expert, first_row, end_row = tile_of_expert(starts, num_experts, tl.program_id(1), BLOCK_T, EXPERTS_PADDED)
        if expert >= num_experts:
            return
        blocks += expert.to(tl.int64) * expert_bytes
        halves += expert.to(tl.int64) * (expert_bytes // 2)
        if bias is not None:
            bias += expert.to(tl.int64) * num_outputs
    rows = first_row + tl.arange(0, BLOCK_T)
    is_row = rows < end_row
    split = tl.program_id(2)
    columns = tl.arange(0, HALF)[None, :]
    source = x + rows[:, None].to(tl.int64) * x_stride + columns
    is_read = is_row[:, None] & (columns < HALF)
    sums = tl.zeros([BLOCK_T, BLOCK_O], tl.float32)
    for group in range(split * SPLIT_GROUPS, tl.minimum((split + 1) * SPLIT_GROUPS, NUM_GROUPS)):
        first, second = weights_of(
            blocks,
            halves,
            outputs,
            is_output,
            group,
            NUM_GROUPS,
            BITS,
            OFFSET,
            BLOCK_GROUPS,
            GROUP_BYTES,
            BLOCK_BYTES,
            SCALES,
            HAS_MINIMUMS,
            LOW_LEVELS,
            HIGH_LEVELS,
        )
        x_first = tl.load(source + group * GROUP_SIZE, mask=is_read, other=0.0)
        x_second = tl.load(source + group * GROUP_SIZE + HALF, mask=is_read, other=0.0)
        sums = tl.dot(x_first, first.to(x_first.dtype), sums, input_precision="ieee")
        sums = tl.dot(x_second, second.to(x_second.dtype), sums, input_precision="ieee")
    store_sums(output + split.to(tl.int64) * split_stride, bias, sums, rows, is_row, outputs, is_output, output_stride)


@triton.jit(do_not_specialize=["first_row", "num_rows"])
def dequantize_kernel(
    output: tl.tensor,  # [rows, inputs]
    blocks: tl.tensor,
    halves: tl.tensor,
    row_numbers: tl.tensor,  # [rows]: which of the weight, or None
    first_row: tl.tensor,  # of the weight, where they are all that follow
    num_rows: tl.tensor,
    NUM_GROUPS: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BITS: tl.constexpr,
    OFFSET: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
    GROUP_BYTES: tl.constexpr,
    BLOCK_BYTES: tl.constexpr,
    SCALES: tl.constexpr,
    HAS_MINIMUMS: tl.constexpr,
    LOW_LEVELS: tl.constexpr,
    HIGH_LEVELS: tl.constexpr,
) -> None:
    """One program: a group of some rows. Grid (tiles of rows, groups)."""
    places = tl.program_id(0) * BLOCK_O + tl.arange(0, BLOCK_O)
    is_row = places < num_rows
    rows = first_row + places
    if row_numbers is not None:
        rows = tl.load(row_numbers + places, mask=is_row, other=0)
    group = tl.program_id(1)
    first, second = weights_of(
        blocks,
        halves,
        rows,
        is_row,
        group,
        NUM_GROUPS,
        BITS,
        OFFSET,
        BLOCK_GROUPS,
        GROUP_BYTES,
        BLOCK_BYTES,
        SCALES,
        HAS_MINIMUMS,
        LOW_LEVELS,
        HIGH_LEVELS,
    )
    columns = tl.arange(0, HALF)[:, None]
    target = output + places[None, :].to(tl.int64) * (NUM_GROUPS * GROUP_SIZE) + group * GROUP_SIZE + columns
    is_stored = is_row[None, :] & (columns < HALF)
    tl.store(target, first, mask=is_stored)
    tl.store(target + HALF, second, mask=is_stored)


@triton.jit
def float8_weights_of(
    codes: tl.tensor,
    scales: tl.tensor,
    rows: tl.tensor,  # [ROWS]: of the weight
    is_row: tl.tensor,
    columns: tl.tensor,  # [COLUMNS]
    num_columns: tl.tensor,
    scale_columns: tl.tensor,
    scales_per_row: tl.tensor,
    HAS_ONE_SCALE: tl.constexpr,  # whether all these columns of a row do
) -> tl.tensor:
    """[COLUMNS, ROWS] float32."""
    panel = (rows // PANEL).to(tl.int64)[None, :]
    lanes = (rows % PANEL)[None, :]
    is_code = is_row[None, :] & (columns < num_columns)[:, None]
    place = panel * (PANEL * num_columns) + (columns // 2 * (2 * PANEL) + columns % 2)[:, None] + 2 * lanes
    code = tl.load(codes + place, mask=is_code, other=0).to(tl.int32)
    # As half precision it has the exponent's bits where they belong, and is 2**8 too small; no chip but the newest converts it itself.
    number = ((code & 128) << 8 | (code & 127) << 7).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    place = panel * (PANEL * scales_per_row) + lanes
    if HAS_ONE_SCALE:
        scale = tl.load(scales + place + tl.min(columns, 0) // scale_columns * PANEL, mask=is_row[None, :], other=0.0)
    else:
        scale = tl.load(scales + place + (columns // scale_columns * PANEL)[:, None], mask=is_code, other=0.0)
    return number * scale


@triton.jit(do_not_specialize=["num_rows", "num_experts"], do_not_specialize_on_alignment=["starts"])
def float8_linear_kernel(
    output: tl.tensor,  # as those of `quantized_linear_kernel`
    x: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    bias: tl.tensor,
    starts: tl.tensor,
    num_experts: tl.tensor,
    num_rows: tl.tensor,
    num_outputs: tl.tensor,
    expert_codes: tl.tensor,
    expert_scales: tl.tensor,
    x_stride: tl.tensor,
    output_stride: tl.tensor,
    split_stride: tl.tensor,
    scale_columns: tl.tensor,
    scales_per_row: tl.tensor,
    NUM_COLUMNS: tl.constexpr,
    SPLIT_COLUMNS: tl.constexpr,
    HAS_ONE_SCALE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_I: tl.constexpr,
    EXPERTS_PADDED: tl.constexpr,
) -> None:
    """One program: some outputs of a tile of rows, over a split of the inputs. Grid (tiles of outputs, tiles of rows, splits)."""
    outputs = tl.program_id(0) * BLOCK_O + tl.arange(0, BLOCK_O)
    is_output = outputs < num_outputs
    first_row = tl.program_id(1) * BLOCK_T
    end_row = num_rows
    if starts is not None:
        expert, first_row, end_row = tile_of_expert(starts, num_experts, tl.program_id(1), BLOCK_T, EXPERTS_PADDED)
        if expert >= num_experts:
            return
        codes += expert.to(tl.int64) * expert_codes
        scales += expert.to(tl.int64) * expert_scales
        if bias is not None:
            bias += expert.to(tl.int64) * num_outputs
    rows = first_row + tl.arange(0, BLOCK_T)
    is_row = rows < end_row
    split = tl.program_id(2)
    sums = tl.zeros([BLOCK_T, BLOCK_O], tl.float32)
    for first in range(split * SPLIT_COLUMNS, tl.minimum((split + 1) * SPLIT_COLUMNS, NUM_COLUMNS), BLOCK_I):
        columns = first + tl.arange(0, BLOCK_I)
        weight = float8_weights_of(codes, scales, outputs, is_output, columns, NUM_COLUMNS, scale_columns, scales_per_row, HAS_ONE_SCALE)
        source = x + rows[:, None].to(tl.int64) * x_stride + columns[None, :]
        x_TI = tl.load(source, mask=is_row[:, None] & (columns < NUM_COLUMNS)[None, :], other=0.0)
        sums = tl.dot(x_TI, weight.to(x_TI.dtype), sums, input_precision="ieee")
    store_sums(output + split.to(tl.int64) * split_stride, bias, sums, rows, is_row, outputs, is_output, output_stride)


@triton.jit(do_not_specialize=["first_row", "num_rows"])
def dequantize_float8_kernel(
    output: tl.tensor,  # [rows, columns]
    codes: tl.tensor,
    scales: tl.tensor,
    first_row: tl.tensor,
    num_rows: tl.tensor,
    scale_columns: tl.tensor,
    scales_per_row: tl.tensor,
    NUM_COLUMNS: tl.constexpr,
    HAS_ONE_SCALE: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_I: tl.constexpr,
) -> None:
    """One program: some columns of some rows. Grid (tiles of rows, tiles of columns)."""
    places = tl.program_id(0) * BLOCK_O + tl.arange(0, BLOCK_O)
    is_row = places < num_rows
    columns = tl.program_id(1) * BLOCK_I + tl.arange(0, BLOCK_I)
    weight = float8_weights_of(
        codes, scales, first_row + places, is_row, columns, NUM_COLUMNS, scale_columns, scales_per_row, HAS_ONE_SCALE
    )
    target = output + places[None, :].to(tl.int64) * NUM_COLUMNS + columns[:, None]
    tl.store(target, weight, mask=is_row[None, :] & (columns < NUM_COLUMNS)[:, None])
