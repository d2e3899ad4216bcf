"""Quantized weights: their types; rounding to them; and their blocks, in the order in which the kernels read them."""

import functools
from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from penstock.engine.native.runtime import by_rows

GROUP_SIZE = 32
SUPER_BLOCK = 256
# Rows of a weight that lie side by side, one in each lane of a vector.
TILE = 16
# A lane takes four products at a time.
STEP = 4
STEPS = GROUP_SIZE // STEP
HALF_BYTES = TILE * GROUP_SIZE // 2
# What the codes of IQ4_NL and IQ4_XS stand for: levels that lie closer to each other around zero, as weights do.
LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
# What those of MXFP4 stand for: numbers with a sign, two bits of exponent and one of mantissa, twice their size.
E2M1_LEVELS = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


@dataclass(frozen=True, slots=True)
class WeightType:
    """A type of GGUF's, which the kernels know by ggml's `number`, or one of other checkpoints, with a number beyond those.

    Codes have `bits`, and are `offset` more than what they stand for, or numbers of `levels`. A scale is for `group` columns: float16; the
    exponent of a power of two; or `scale_bits` of an integer that is multiplied by a factor of its super-block. Zero points are integers
    in place of minimums: `offset` less than the code that stands for zero.
    """

    name: str
    number: int
    bits: int
    offset: int = 0
    group: int = GROUP_SIZE
    scale_bits: int = 16
    has_minimums: bool = False
    has_zero_points: bool = False
    has_exponents: bool = False
    levels: tuple[int, ...] = ()

    @property
    def has_factors(self) -> bool:
        return self.scale_bits < 16 and not self.has_exponents

    @property
    def columns(self) -> int:
        """Of a block."""
        return SUPER_BLOCK if self.has_factors else max(self.group, GROUP_SIZE)

    @property
    def scale_dtype(self) -> torch.dtype:
        return torch.float16 if self.scale_bits == 16 else torch.uint8 if self.has_minimums or self.has_exponents else torch.int8

    @property
    def bits_per_weight(self) -> float:
        minimum_bits = ZERO_POINT_BITS if self.has_zero_points else self.scale_bits * self.has_minimums
        factor_bits = 16 * (1 + self.has_minimums) * self.has_factors
        return self.bits + (self.scale_bits + minimum_bits) / self.group + factor_bits / SUPER_BLOCK

    @property
    def block_bytes(self) -> int:
        """Of a block of the kernels, which has the rows of a tile."""
        return round(self.columns * self.bits_per_weight * TILE / 8)


ZERO_POINT_BITS = 8
# What the columns of a block of INT4 and UINT4 have in common.
LARGE_GROUP = 128
TYPES = {
    type_.name: type_
    for type_ in (
        WeightType("Q4_0", 2, 4, offset=8),
        WeightType("Q4_1", 3, 4, has_minimums=True),
        WeightType("Q5_0", 6, 5, offset=16),
        WeightType("Q5_1", 7, 5, has_minimums=True),
        WeightType("Q8_0", 8, 8, offset=128),
        WeightType("Q4_K", 12, 4, scale_bits=6, has_minimums=True),
        WeightType("Q5_K", 13, 5, scale_bits=6, has_minimums=True),
        WeightType("Q6_K", 14, 6, offset=32, group=16, scale_bits=8),
        WeightType("IQ4_NL", 20, 4, levels=LEVELS),
        WeightType("IQ4_XS", 23, 4, scale_bits=6, levels=LEVELS),
        WeightType("MXFP4", 39, 4, scale_bits=8, has_exponents=True, levels=E2M1_LEVELS),
        WeightType("INT4", 256, 4, offset=8, group=LARGE_GROUP),
        WeightType("UINT4", 257, 4, group=LARGE_GROUP, has_minimums=True, has_zero_points=True),
        WeightType("UINT8", 258, 8, offset=128, has_minimums=True, has_zero_points=True),
    )
}
# What numbers are rounded to, by bits.
ROUNDED = {4: TYPES["Q4_1"], 5: TYPES["Q5_1"], 8: TYPES["Q8_0"]}


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """O rows of I weights, exactly as a GGUF file of the type has them: number[o, i] * scale[o, i // group] + minimum[o, i // group].

    `codes_OI` is uint8, one code in each byte. `scales_OG` and `minimums_OG` are float16. Of types with factors they are integers, and
    `factors_OKF`, float16, has for every super-block that of the scales and, negated, that of the minimums. Exponents are uint8, and 128
    more than what they stand for; zero points are int8.
    """

    type: WeightType
    codes_OI: Tensor
    scales_OG: Tensor
    minimums_OG: Tensor | None = None
    factors_OKF: Tensor | None = None

    @property
    def bits(self) -> int:
        return self.type.bits

    def rows(self, rows_N: Tensor | slice) -> "QuantizedWeight":
        """The weight with these of its rows."""
        return QuantizedWeight(self.type, *(None if part is None else part[rows_N] for part in self.parts))  # type: ignore[arg-type]

    @property
    def parts(self) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        return self.codes_OI, self.scales_OG, self.minimums_OG, self.factors_OKF

    def dequantized(self) -> Tensor:
        """Float32 [O, I]."""
        if self.type.levels:
            numbers_OI = torch.tensor(self.type.levels, dtype=torch.float32, device=self.codes_OI.device)[self.codes_OI.int()]
        else:
            numbers_OI = self.codes_OI.float() - self.type.offset
        weight_OGS = numbers_OI.unflatten(1, (-1, self.type.group)) * self.multiplied(self.scales_OG, 0)[..., None]  # type: ignore[no-untyped-call]
        if self.minimums_OG is not None:
            weight_OGS = weight_OGS + self.multiplied(self.minimums_OG, 1)[..., None]
        return weight_OGS.flatten(1)  # type: ignore[no-any-return]

    def multiplied(self, numbers_OG: Tensor, which: int) -> Tensor:
        """Scales (0) or minimums (1) as float32, multiplied by their factors if they have any."""
        if self.type.has_exponents:
            return powers_of_two(numbers_OG)
        if self.type.has_zero_points and which == 1:
            return -numbers_OG.float() * self.scales_OG.float()
        if self.factors_OKF is None:
            return numbers_OG.float()
        per_block = SUPER_BLOCK // self.type.group
        return numbers_OG.float() * self.factors_OKF[..., which].float().repeat_interleave(per_block, dim=1)


def powers_of_two(exponents: Tensor) -> Tensor:
    """Float32, exactly, of exponents of uint8 that are 128 more than what they stand for. The two smallest give subnormal numbers."""
    integers = exponents.int()
    return torch.where(integers < 2, 0x200000 << integers.clamp(max=1), (integers - 1) << 23).view(torch.float32)


def quantized(weight_OI: Tensor, bits: int) -> QuantizedWeight:
    """Rounds each group between its extremes: to the 16 or 32 levels of Q4_1 or Q5_1 for 4 or 5 bits, and to the 255 levels around zero of
    Q8_0 for 8.
    """
    codes_OI, scales_OG, *minimums_OG = by_rows(functools.partial(_quantized, bits=bits), [weight_OI])
    return QuantizedWeight(ROUNDED[bits], codes_OI, scales_OG, *minimums_OG)


def _quantized(weight_OI: Tensor, bits: int) -> tuple[Tensor, ...]:
    """Codes, scales and minimums, if there are any."""
    groups_OGS: Tensor = weight_OI.float().unflatten(1, (-1, GROUP_SIZE))  # type: ignore[no-untyped-call]
    minimums: tuple[Tensor, ...] = ()
    if bits == 8:
        scales_OG = (groups_OGS.abs().amax(-1) / 127).half()
        lowest_OG = scales_OG.float() * -128
    else:
        low_OG, high_OG = groups_OGS.aminmax(dim=-1)
        scales_OG = ((high_OG - low_OG) / (2**bits - 1)).half()
        minimums = (low_OG.half(),)
        lowest_OG = minimums[0].float()
    # Codes go by the scale and minimum as they were rounded; a group of equal weights has none to speak of.
    steps_OG = torch.where(scales_OG > 0, scales_OG.float(), 1.0)
    codes_OGS = ((groups_OGS - lowest_OG[..., None]) / steps_OG[..., None]).round().clamp(0, 2**bits - 1)
    return (codes_OGS.to(torch.uint8).flatten(1), scales_OG, *minimums)


class PackedWeight(nn.Module):
    """`out_features` rows of a quantized weight, as `engine/native/quantized_types.h` describes them.

    `blocks`, a buffer, is uint8 [out_features / 16 rounded up, in_features / columns of a block, bytes of a block]. `order`, another, is
    int64 [in_features], where the columns are in another order: column i of the blocks is for input order[i].
    """

    blocks: Tensor
    order: Tensor | None

    def __init__(self, type_name: str, out_features: int, blocks_TKB: Tensor, order_I: Tensor | None = None) -> None:
        super().__init__()
        self.type_name = type_name
        self.out_features = out_features
        self.register_buffer("blocks", blocks_TKB, persistent=False)
        self.register_buffer("order", order_I, persistent=False)

    @property
    def weight_type(self) -> WeightType:
        return TYPES[self.type_name]

    @property
    def bits(self) -> int:
        return self.weight_type.bits

    @property
    def in_features(self) -> int:
        return self.blocks.shape[1] * self.weight_type.columns

    def can_be_followed(self, other: "PackedWeight") -> bool:
        """Whether the rows of `other` could come after those of this weight in one."""
        return self.type_name == other.type_name and self.out_features % TILE == 0

    def unpacked(self) -> QuantizedWeight:
        """The weight that `pack` was given, its columns as they are in the blocks."""
        return _unpacked(self.weight_type, self.blocks).rows(slice(self.out_features))

    def dequantized(self) -> Tensor:
        """Float32 [O, I], its columns in the order of the inputs."""
        weight_OI = self.unpacked().dequantized()
        if self.order is None:
            return weight_OI
        return torch.empty_like(weight_OI).index_copy_(1, self.order, weight_OI)

    def rows(self, rows_N: Tensor) -> "PackedWeight":
        """The weight with these of its rows."""
        first_T = rows_N[::TILE]
        is_tiled = len(rows_N) % TILE == 0 and not bool((first_T % TILE).any())
        if is_tiled and torch.equal(rows_N, (first_T[:, None] + torch.arange(TILE)).flatten()):
            return PackedWeight(self.type_name, len(rows_N), self.blocks[first_T // TILE], self.order)
        return pack(self.unpacked().rows(rows_N), self.order)

    def columns(self, columns: slice) -> "PackedWeight":
        """The weight with some of its columns. Raises `ValueError` where these are no whole blocks, or are for inputs in another order."""
        size = self.weight_type.columns
        if self.order is not None:
            raise ValueError("its columns are in an order of their own")
        if columns.start % size or columns.stop % size:
            raise ValueError(f"a part of {columns.stop - columns.start} inputs is no multiple of {size}")
        blocks_TKB = self.blocks[:, columns.start // size : columns.stop // size].contiguous()
        return PackedWeight(self.type_name, self.out_features, blocks_TKB)

    def unpacked_rows(self, rows_N: Tensor) -> QuantizedWeight:
        """Some of its rows: each has a lane in its tile."""
        tiles = _unpacked(self.weight_type, self.blocks[rows_N // TILE])
        return tiles.rows(torch.arange(len(rows_N), device=rows_N.device) * TILE + rows_N % TILE)


def pack(weight: QuantizedWeight, order_I: Tensor | None = None) -> PackedWeight:
    """The weight as the kernels read it, from its beginning to its end. Missing rows of the last tile are zeros.

    Its columns are for the inputs `order_I`.
    """
    names = [name for name, part in zip(_PARTS, weight.parts, strict=True) if part is not None]
    parts = [part.flatten(1) for part in weight.parts if part is not None]
    (blocks_TKB,) = by_rows(functools.partial(_pack, type_=weight.type, names=names), parts, TILE)
    return PackedWeight(weight.type.name, len(weight.codes_OI), blocks_TKB, order_I)


_PARTS = ("codes", "scales", "minimums", "factors")


def _pack(*parts: Tensor, type_: WeightType, names: Collection[str]) -> tuple[Tensor]:
    num_missing = -parts[0].shape[0] % TILE
    padded = [nn.functional.pad(part, (0, 0, 0, num_missing)) for part in parts] if num_missing else parts
    num_blocks = parts[0].shape[1] // type_.columns

    def by_lanes(part_OC: Tensor) -> Tensor:
        """In blocks of columns, with the lanes of a tile last: [T, K, numbers of a block, 16]."""
        return part_OC.unflatten(0, (-1, TILE)).unflatten(2, (num_blocks, -1)).permute(0, 2, 3, 1)  # type: ignore[no-untyped-call, no-any-return]

    codes_OI, *numbers = padded
    # The codes of a step move together, as one integer.
    steps_TKGC = by_lanes(codes_OI.contiguous().view(torch.int32)).unflatten(2, (-1, STEPS)).flatten(3)  # type: ignore[no-untyped-call]
    codes_TKGC = steps_TKGC.view(torch.uint8)
    given = dict(zip(names, [codes_OI, *map(by_lanes, numbers)], strict=True))
    scales = _packed_scales(type_, given["scales"], given.get("minimums"))
    factors = given.get("factors")
    ends = [*scales, *([] if factors is None else [factors])]
    return (torch.cat([_packed_codes(type_.bits, codes_TKGC).flatten(2), *(_as_bytes(part) for part in ends)], dim=-1),)


def _as_bytes(numbers_TKNL: Tensor) -> Tensor:
    return numbers_TKNL.flatten(2).contiguous().view(torch.uint8)


def _packed_codes(bits: int, codes_C: Tensor) -> Tensor:
    """The codes [..., 512] of groups, in the bytes that they take."""
    if bits == 8:
        return codes_C
    low, high = (codes_C & 15).chunk(2, dim=-1)
    packed = [low | high << 4]
    if bits == 5:
        packed.append(packed_bits(codes_C >> 4, 1))
    if bits == 6:  # a byte's four pairs are 64 codes apart
        packed.append(packed_bits((codes_C >> 4).unflatten(-1, (2, 4, 64)).transpose(-1, -2).flatten(-3), 2))  # type: ignore[no-untyped-call]
    return torch.cat(packed, dim=-1)


def _packed_scales(type_: WeightType, scales_TKNL: Tensor, minimums_TKNL: Tensor | None) -> list[Tensor]:
    if type_.scale_bits != 6:
        return [scales_TKNL, *([] if minimums_TKNL is None else [minimums_TKNL])]
    if minimums_TKNL is None:
        codes = (scales_TKNL + 32).view(torch.uint8)
        pairs = [codes[..., group::2, :] >> 4 for group in range(2)]
        upper = torch.stack([packed_bits(pair.transpose(-1, -2), 2)[..., 0] for pair in pairs], dim=-2)
        return [codes[..., :4, :] & 15 | codes[..., 4:, :] << 4, upper]
    lower = scales_TKNL & 15 | minimums_TKNL << 4
    first, second = (scales_TKNL >> 4 | minimums_TKNL >> 4 << 2).chunk(2, dim=-2)
    return [lower, first | second << 4]


def packed_bits(numbers_N: Tensor, bits: int) -> Tensor:
    """Numbers of 1 or 2 bits [..., n] as bytes [..., n bits / 8], the first of a byte in the lowest place."""
    # The bytes of an integer, times powers of two that bring each to its place in the highest byte: no two of them meet, none carries.
    whole, num_bits = (torch.int64, 64) if bits == 1 else (torch.int32, 32)
    factor = sum(1 << num_bits - 8 - (8 - bits) * place for place in range(8 // bits))
    integers: Tensor = numbers_N.contiguous().view(whole) * factor
    return (integers >> num_bits - 8).to(torch.uint8)


def unpacked_bits(bytes_N: Tensor, bits: int) -> Tensor:
    """What `packed_bits` packed."""
    unpacked: Tensor = (bytes_N[..., None] >> torch.arange(0, 8, bits, dtype=torch.uint8, device=bytes_N.device) & 2**bits - 1).flatten(-2)
    return unpacked


def _unpacked(type_: WeightType, blocks_TKB: Tensor) -> QuantizedWeight:
    """The weight with all rows of all tiles."""
    num_groups = type_.columns // GROUP_SIZE
    num_code_bytes = TILE * type_.columns * type_.bits // 8
    codes_TKGC = _unpacked_codes(type_.bits, blocks_TKB[..., :num_code_bytes].unflatten(-1, (num_groups, -1)))  # type: ignore[no-untyped-call]
    codes_TKCL = codes_TKGC.unflatten(-1, (STEPS, TILE, STEP)).transpose(-1, -2).flatten(2, 4)  # type: ignore[no-untyped-call]
    rest, factors = blocks_TKB[..., num_code_bytes:], None
    if type_.has_factors:
        num_factor_bytes = 2 * TILE * (1 + type_.has_minimums)
        rest, last = rest[..., :-num_factor_bytes], rest[..., -num_factor_bytes:]
        factors = _by_rows(_lanes(last.contiguous().view(torch.float16))).unflatten(1, (blocks_TKB.shape[1], -1))  # type: ignore[no-untyped-call]
    scales, minimums = _unpacked_scales(type_, rest.contiguous())
    return QuantizedWeight(type_, _by_rows(codes_TKCL), _by_rows(scales), None if minimums is None else _by_rows(minimums), factors)


def _lanes(numbers_TKN: Tensor) -> Tensor:
    return numbers_TKN.unflatten(-1, (-1, TILE))  # type: ignore[no-untyped-call, no-any-return]


def _by_rows(numbers_TKNL: Tensor) -> Tensor:
    return numbers_TKNL.permute(0, 3, 1, 2).flatten(2).flatten(0, 1)


def _unpacked_codes(bits: int, bytes_B: Tensor) -> Tensor:
    if bits == 8:
        return bytes_B
    codes = torch.cat([bytes_B[..., :HALF_BYTES] & 15, bytes_B[..., :HALF_BYTES] >> 4], dim=-1)
    if bits == 5:
        codes = codes | unpacked_bits(bytes_B[..., HALF_BYTES:], 1) << 4
    if bits == 6:
        pairs = unpacked_bits(bytes_B[..., HALF_BYTES:], 2).unflatten(-1, (2, 64, 4)).transpose(-1, -2)  # type: ignore[no-untyped-call]
        codes = codes | pairs.flatten(-3) << 4
    return codes


def _unpacked_scales(type_: WeightType, bytes_TKB: Tensor) -> tuple[Tensor, Tensor | None]:
    """Scales and minimums [T, K, N, 16]."""
    if type_.has_zero_points:
        scale_bytes, zero_point_bytes = bytes_TKB.split([2 * TILE, TILE], dim=-1)  # type: ignore[no-untyped-call]
        return _lanes(scale_bytes.contiguous().view(torch.float16)), _lanes(zero_point_bytes.view(torch.int8))
    if type_.scale_bits != 6:
        numbers = _lanes(bytes_TKB.view(type_.scale_dtype))
        scales, *minimums = numbers.chunk(1 + type_.has_minimums, dim=-2)
        return scales, minimums[0] if minimums else None
    lanes = _lanes(bytes_TKB)
    if type_.has_minimums:
        lower, upper = lanes.split([8, 4], dim=-2)  # type: ignore[no-untyped-call]
        pairs = torch.cat([upper & 15, upper >> 4], dim=-2)
        return lower & 15 | (pairs & 3) << 4, lower >> 4 | pairs >> 2 << 4
    lower, upper = lanes.split([4, 2], dim=-2)  # type: ignore[no-untyped-call]
    pairs = unpacked_bits(upper[..., None], 2).movedim(-1, -3).flatten(-3, -2)
    return (torch.cat([lower & 15, lower >> 4], dim=-2) | pairs << 4).view(torch.int8) - 32, None
