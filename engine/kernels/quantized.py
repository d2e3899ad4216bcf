"""Products by quantized weights on CUDA: a few rows by codes as they are read, many by weights that are dequantized some outputs at a time.

No copy of a weight is kept in another form. Shapes and grids depend on the shapes of operands alone, so that graphs hold every launch, and
nothing waits for the device. Results are those of the dequantized weight in the type of the activations, with sums in float32.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from penstock.engine.kernels.launch import COMPILER_OPTIONS
from penstock.engine.kernels.tuning import MIN_DOT_SIZE, next_power_of_two

TILE = 16  # rows of a weight in a block
GROUP_SIZE = 32  # columns
PANEL = 32  # rows of a weight of 8-bit floating point
FEW_ROWS = 64  # up to so many, it takes longer to write and read a dequantized weight than to decode its codes for each tile of rows
BLOCK_O = 64  # outputs of a program
BLOCK_I = 32  # inputs that it takes at a time, of 8-bit floating point
ROWS_AT_ONCE = 32  # that a program dequantizes
PROGRAMS = 512  # as many as keep a large GPU busy: fewer tiles of outputs share their inputs
MIN_SPLIT = 512  # inputs: a shorter split costs more to add up than it saves
DEQUANTIZED = 2**26  # numbers at a time


class WeightForm(Protocol):
    """What blocks of a type of quantized weights look like: `WeightType` of `weights/packed.py`."""

    @property
    def bits(self) -> int: ...
    @property
    def offset(self) -> int: ...
    @property
    def scale_bits(self) -> int: ...
    @property
    def has_minimums(self) -> bool: ...
    @property
    def has_zero_points(self) -> bool: ...
    @property
    def has_exponents(self) -> bool: ...
    @property
    def levels(self) -> tuple[int, ...]: ...
    @property
    def columns(self) -> int: ...
    @property
    def block_bytes(self) -> int: ...


def quantized_linear(
    x: Tensor, blocks: Sequence[Tensor], forms: Sequence[WeightForm], out_features: Sequence[int], bias: Tensor | None
) -> Tensor:
    """[..., inputs] to [..., sum of `out_features`], by weights in blocks [T, K, B] that each give some of the outputs."""
    x_TI = _rows(x)
    out_TO = x.new_empty(len(x_TI), sum(out_features))
    first = 0
    for blocks_TKB, form, num_outputs in zip(blocks, forms, out_features, strict=True):
        own_bias = None if bias is None else bias[first : first + num_outputs]
        part_TO = out_TO[:, first : first + num_outputs]
        if len(x_TI) <= FEW_ROWS:
            _few_rows(part_TO, x_TI, blocks_TKB, form, own_bias)
        else:
            for start in range(0, num_outputs, step := _outputs_at_once(x_TI.shape[1])):
                weight_OI = x.new_empty(min(step, num_outputs - start), x_TI.shape[1])
                _dequantize(weight_OI, blocks_TKB, form, first_row=start)
                _multiply(part_TO, x_TI, weight_OI, own_bias, start)
        first += num_outputs
    return out_TO.view(*x.shape[:-1], out_TO.shape[1])


def grouped_linear(
    x_SI: Tensor,
    starts_E: Tensor,
    blocks: Sequence[Tensor],
    forms: Sequence[WeightForm],
    out_features: Sequence[int],
    bias_EO: Tensor | None,
) -> Tensor:
    """As `quantized_linear`, by weights [E, T, K, B] of experts. The rows of expert e are those from `starts_E[e]` on, of [E + 1]."""
    x_SI = _rows(x_SI)
    out_SO = x_SI.new_empty(len(x_SI), sum(out_features))
    first = 0
    for blocks_ETKB, form, num_outputs in zip(blocks, forms, out_features, strict=True):
        bias = None if bias_EO is None else bias_EO[:, first : first + num_outputs].contiguous()
        _launch_linear(out_SO[:, first : first + num_outputs], x_SI, blocks_ETKB, form, bias, starts_E)
        first += num_outputs
    return out_SO


def dequantized_rows(blocks_TKB: Tensor, form: WeightForm, rows_N: Tensor, dtype: torch.dtype) -> Tensor:
    """Some rows of a weight, [N, inputs]."""
    out_NI = torch.empty(len(rows_N), blocks_TKB.shape[1] * form.columns, dtype=dtype, device=blocks_TKB.device)
    _dequantize(out_NI, blocks_TKB, form, row_numbers=rows_N)
    return out_NI


def float8_linear(x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None, scale_columns: int, out_features: int) -> Tensor:
    """[..., inputs] to [..., outputs], by a weight of e4m3 in panels, with a scale for each `scale_columns` columns of each row.

    Activations stay in their type: `torch._scaled_mm` would take them in 8 bits alone.
    """
    x_TI = _rows(x)
    out_TO = x.new_empty(len(x_TI), out_features)
    if len(x_TI) <= FEW_ROWS:
        splits, split_columns = _splits(x_TI, out_features, BLOCK_I)
        sums = out_TO if splits == 1 else x.new_empty(splits, *out_TO.shape, dtype=torch.float32)
        _launch_float8(sums, x_TI, codes, scales, bias if splits == 1 else None, None, scale_columns, split_columns)
        _add_up(out_TO, sums, bias)
    else:
        for start in range(0, out_features, step := _outputs_at_once(x_TI.shape[1])):
            weight_OI = x.new_empty(min(step, out_features - start), x_TI.shape[1])
            _dequantize_float8(weight_OI, codes, scales, scale_columns, start)
            _multiply(out_TO, x_TI, weight_OI, bias, start)
    return out_TO.view(*x.shape[:-1], out_features)


def grouped_float8_linear(
    x_SI: Tensor, starts_E: Tensor, codes: Tensor, scales: Tensor, bias_EO: Tensor | None, scale_columns: int, out_features: int
) -> Tensor:
    """As `float8_linear`, by the weights of experts; rows are as in `grouped_linear`."""
    x_SI = _rows(x_SI)
    out_SO = x_SI.new_empty(len(x_SI), out_features)
    _launch_float8(out_SO, x_SI, codes, scales, bias_EO, starts_E, scale_columns, -(-x_SI.shape[1] // BLOCK_I) * BLOCK_I)
    return out_SO


def _rows(x: Tensor) -> Tensor:
    x_TI = x.reshape(-1, x.shape[-1])
    return x_TI if x_TI.stride(1) == 1 else x_TI.contiguous()


def _outputs_at_once(num_inputs: int) -> int:
    """A multiple of what a program dequantizes."""
    return max(ROWS_AT_ONCE, DEQUANTIZED // num_inputs // ROWS_AT_ONCE * ROWS_AT_ONCE)


def _multiply(out_TO: Tensor, x_TI: Tensor, weight_OI: Tensor, bias: Tensor | None, start: int) -> None:
    """The outputs from `start` on that the weight has."""
    own = slice(start, start + len(weight_OI))
    out_TO[:, own] = nn.functional.linear(x_TI, weight_OI, None if bias is None else bias[own])


def _few_rows(out_TO: Tensor, x_TI: Tensor, blocks_TKB: Tensor, form: WeightForm, bias: Tensor | None) -> None:
    splits, split_columns = _splits(x_TI, out_TO.shape[1], GROUP_SIZE)
    if splits == 1:
        _launch_linear(out_TO, x_TI, blocks_TKB, form, bias, None)
        return
    sums_STO = x_TI.new_empty(splits, *out_TO.shape, dtype=torch.float32)
    _launch_linear(sums_STO, x_TI, blocks_TKB, form, None, None, split_columns // GROUP_SIZE)
    _add_up(out_TO, sums_STO, bias)


def _splits(x_TI: Tensor, num_outputs: int, step: int) -> tuple[int, int]:
    """How many programs share the inputs of a tile, and how many inputs each has: a multiple of `step`."""
    num_rows, num_inputs = x_TI.shape
    num_tiles = -(-num_outputs // BLOCK_O) * max(1, -(-num_rows // _tile_rows(num_rows)))
    wanted = max(1, min(PROGRAMS // num_tiles, num_inputs // MIN_SPLIT))
    split_columns = -(-num_inputs // (wanted * step)) * step
    return -(-num_inputs // split_columns), split_columns


def _add_up(out_TO: Tensor, sums: Tensor, bias: Tensor | None) -> None:
    """The splits, unless there is one, which is in place."""
    if sums is out_TO:
        return
    total_TO = sums.sum(0)
    out_TO.copy_(total_TO if bias is None else total_TO + bias)


def _tile_rows(num_rows: int) -> int:
    return min(FEW_ROWS, max(MIN_DOT_SIZE, next_power_of_two(num_rows)))


def _launch_linear(
    out: Tensor,
    x_TI: Tensor,
    blocks: Tensor,
    form: WeightForm,
    bias: Tensor | None,
    starts_E: Tensor | None,
    split_groups: int | None = None,
) -> None:
    """`out` is [T, O], or [splits, T, O] where a split has `split_groups` of the groups of inputs."""
    from penstock.engine.kernels.quantized_triton import quantized_linear_kernel

    num_rows, num_inputs = x_TI.shape
    if not num_rows:
        return
    assert blocks.is_contiguous()
    num_groups = num_inputs // GROUP_SIZE
    assert num_groups * GROUP_SIZE == blocks.shape[-2] * form.columns, "another number of inputs"
    split_groups = split_groups or num_groups
    grid, shared = _grid(out, num_rows, starts_E)
    quantized_linear_kernel[(*grid, -(-num_groups // split_groups))](
        out,
        x_TI,
        blocks,
        blocks.view(torch.float16),
        bias,
        starts_E,
        0 if starts_E is None else len(starts_E) - 1,
        num_rows,
        out.shape[-1],
        0 if starts_E is None else blocks[0].nbytes,
        x_TI.stride(0),
        out.stride(-2),
        out.stride(0) if out.dim() == 3 else 0,
        NUM_GROUPS=num_groups,
        SPLIT_GROUPS=split_groups,
        **shared,
        **_constants(form),
    )


def _launch_float8(
    out: Tensor,
    x_TI: Tensor,
    codes: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    starts_E: Tensor | None,
    scale_columns: int,
    split_columns: int,
) -> None:
    """As `_launch_linear`; a split has `split_columns` of the inputs."""
    from penstock.engine.kernels.quantized_triton import float8_linear_kernel

    num_rows, num_inputs = x_TI.shape
    if not num_rows:
        return
    assert codes.is_contiguous()
    assert scales.is_contiguous()
    assert num_inputs == 2 * codes.shape[-3]
    grid, shared = _grid(out, num_rows, starts_E)
    float8_linear_kernel[(*grid, -(-num_inputs // split_columns))](
        out,
        x_TI,
        codes,
        scales,
        bias,
        starts_E,
        0 if starts_E is None else len(starts_E) - 1,
        num_rows,
        out.shape[-1],
        0 if starts_E is None else codes[0].numel(),
        0 if starts_E is None else scales[0].numel(),
        x_TI.stride(0),
        out.stride(-2),
        out.stride(0) if out.dim() == 3 else 0,
        scale_columns,
        scales.shape[-2],
        NUM_COLUMNS=num_inputs,
        SPLIT_COLUMNS=split_columns,
        BLOCK_I=BLOCK_I,
        HAS_ONE_SCALE=_has_one_scale(scales, scale_columns),
        **shared,
    )


def _grid(out: Tensor, num_rows: int, starts_E: Tensor | None) -> tuple[tuple[int, int], dict[str, Any]]:
    """Tiles of outputs and of rows, and the constants that both kernels have. Tiles of experts are as many as there may be."""
    num_experts = 0 if starts_E is None else len(starts_E) - 1
    tile_rows = _tile_rows(num_rows // max(1, num_experts))
    num_tiles = -(-num_rows // tile_rows) if starts_E is None else min(num_rows, num_rows // tile_rows + num_experts)
    experts_padded = next_power_of_two(max(1, num_experts))
    shared = {"BLOCK_T": tile_rows, "BLOCK_O": BLOCK_O, "EXPERTS_PADDED": experts_padded, "num_warps": 4, **COMPILER_OPTIONS}
    return (-(-out.shape[-1] // BLOCK_O), num_tiles), shared


def _dequantize(out_NI: Tensor, blocks_TKB: Tensor, form: WeightForm, *, first_row: int = 0, row_numbers: Tensor | None = None) -> None:
    from penstock.engine.kernels.quantized_triton import dequantize_kernel

    num_rows, num_inputs = out_NI.shape
    if not num_rows:
        return
    dequantize_kernel[(-(-num_rows // ROWS_AT_ONCE), num_inputs // GROUP_SIZE)](
        out_NI,
        blocks_TKB,
        blocks_TKB.view(torch.float16),
        row_numbers,
        first_row,
        num_rows,
        NUM_GROUPS=num_inputs // GROUP_SIZE,
        BLOCK_O=ROWS_AT_ONCE,
        num_warps=4,
        **_constants(form),
        **COMPILER_OPTIONS,
    )


def _dequantize_float8(weight_OI: Tensor, codes: Tensor, scales: Tensor, scale_columns: int, first_row: int) -> None:
    from penstock.engine.kernels.quantized_triton import dequantize_float8_kernel

    num_rows, num_inputs = weight_OI.shape
    dequantize_float8_kernel[(-(-num_rows // ROWS_AT_ONCE), -(-num_inputs // BLOCK_I))](
        weight_OI,
        codes,
        scales,
        first_row,
        num_rows,
        scale_columns,
        scales.shape[-2],
        NUM_COLUMNS=num_inputs,
        HAS_ONE_SCALE=_has_one_scale(scales, scale_columns),
        BLOCK_O=ROWS_AT_ONCE,
        BLOCK_I=BLOCK_I,
        num_warps=4,
        **COMPILER_OPTIONS,
    )


def _has_one_scale(scales: Tensor, scale_columns: int) -> bool:
    """Whether a row has one scale for all inputs that a program takes at a time."""
    return scales.shape[-2] == 1 or scale_columns % BLOCK_I == 0


def _constants(form: WeightForm) -> dict[str, Any]:
    """What the kernels for blocks are compiled for."""
    low, high = (int.from_bytes(bytes(level & 255 for level in half), "little", signed=True) for half in (form.levels[:8], form.levels[8:]))
    return {
        "BITS": form.bits,
        "OFFSET": form.offset,
        "BLOCK_GROUPS": form.columns // GROUP_SIZE,
        "GROUP_BYTES": TILE * GROUP_SIZE * form.bits // 8,
        "BLOCK_BYTES": form.block_bytes,
        "SCALES": _scales(form),
        "HAS_MINIMUMS": form.has_minimums,
        "LOW_LEVELS": low if form.levels else None,
        "HIGH_LEVELS": high if form.levels else None,
    }


def _scales(form: WeightForm) -> str:
    if form.has_zero_points:
        return "zero_point"
    if form.has_exponents:
        return "exponent"
    return {16: "half", 8: "byte", 6: "six_bits"}[form.scale_bits]
