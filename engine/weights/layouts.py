"""How checkpoints of other formats than GGUF store the weight of a layer, and its form for the kernels.

Codes and zero points are never rounded. Scales are where they do not fit float16 or, of FP8, float32.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.engine.weights.float8 import NAN_CODE, Float8Weight, pack_float8
from penstock.engine.weights.linear import PANEL
from penstock.engine.weights.packed import GROUP_SIZE, LARGE_GROUP, TILE, TYPES, PackedWeight, QuantizedWeight, WeightType, pack

Shape = tuple[int, ...]
FLOATS = ("F16", "BF16", "F32")  # as safetensors calls them
NAN_EXPONENT = 255
# Nibble i of a 32-bit number is that of column AWQ_ORDER[i] of eight.
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True, slots=True)
class Part:
    """A tensor of a layer: the types that it may have, by safetensors' names, and the shapes."""

    dtypes: tuple[str, ...]
    shapes: tuple[Shape, ...]
    is_optional: bool = False


class Layout(ABC):
    """One way to store the weight of a layer. `key` is the tensor that tells its size, of `num_dims`; `name` is for the log."""

    key: str
    name: str
    num_dims = 2

    @abstractmethod
    def size(self, key_shape: Shape) -> tuple[int, int]:
        """Outputs and inputs of the layer."""

    @abstractmethod
    def parts(self, outputs: int, inputs: int) -> dict[str, Part]:
        """The layer's tensors by their names in it. Raises `ValueError` for a size that cannot be stored so."""

    @abstractmethod
    def read(self, tensors: Mapping[str, Tensor]) -> PackedWeight | Float8Weight:
        """The weight that is stored in `tensors`. Raises `ValueError` for numbers that cannot be."""

    @abstractmethod
    def outline(self, outputs: int, inputs: int) -> PackedWeight | Float8Weight:
        """What `read` would give, on the meta device and with its columns in order."""


@dataclass(frozen=True, slots=True)
class Integers:
    """Codes [O, I], uint8; scales [O, G]; zero points [O, G], uint8, or None where they are in the middle of the codes.

    `order`: int64 [I], which input each column is for, where that is another order.
    """

    codes_OI: Tensor
    scales_OG: Tensor
    zero_points_OG: Tensor | None = None
    order_I: Tensor | None = None


@dataclass(frozen=True)
class IntegerLayout(Layout):
    """Integers of `bits` with a scale for every `group_size` columns, or for each row where that is None.

    Weights are (code - zero point) * scale.
    """

    bits: int
    group_size: int | None
    is_symmetric: bool

    def group(self, inputs: int) -> int:
        return self.group_size or inputs

    def num_groups(self, inputs: int) -> int:
        """Raises `ValueError` where the inputs are no multiple of what the layout or the kernels take at a time."""
        group = self.group(inputs)
        if not inputs or inputs % group or group % GROUP_SIZE:
            raise ValueError(f"{inputs} inputs in groups of {group} are not served: groups have a multiple of {GROUP_SIZE} inputs")
        return inputs // group

    def weight_type(self, inputs: int) -> WeightType:
        if self.bits == 8:
            return TYPES["Q8_0" if self.is_symmetric else "UINT8"]
        if self.group(inputs) % LARGE_GROUP == 0:
            return TYPES["INT4" if self.is_symmetric else "UINT4"]
        return TYPES["Q4_0" if self.is_symmetric else "Q5_0"]  # the difference of two numbers of 4 bits has 5

    @abstractmethod
    def integers(self, tensors: Mapping[str, Tensor]) -> Integers: ...

    def read(self, tensors: Mapping[str, Tensor]) -> PackedWeight:
        integers = self.integers(tensors)
        codes_OI, zero_points_OG = integers.codes_OI, integers.zero_points_OG
        inputs = codes_OI.shape[1]
        type_, group = self.weight_type(inputs), self.group(inputs)
        scales_OG = integers.scales_OG.half()
        if not scales_OG.isfinite().all():
            raise ValueError("there are scales that are no finite numbers of half precision")
        if zero_points_OG is not None and self.is_symmetric:
            if (zero_points_OG != 2 ** (self.bits - 1)).any():
                raise ValueError("the config calls the weights symmetric, and there are other zero points")
            zero_points_OG = None
        minimums_OG = None
        if zero_points_OG is not None and type_.has_zero_points:
            minimums_OG = (zero_points_OG.short() - type_.offset).to(torch.int8).repeat_interleave(group // type_.group, dim=1)
        elif zero_points_OG is not None:
            codes_OI = codes_OI + type_.offset - zero_points_OG.repeat_interleave(group, dim=1)  # never below 0 or above 31
        scales_OG = scales_OG.repeat_interleave(group // type_.group, dim=1)
        return pack(QuantizedWeight(type_, codes_OI, scales_OG, minimums_OG), integers.order_I)

    def outline(self, outputs: int, inputs: int) -> PackedWeight:
        return _outline(self.weight_type(inputs), outputs, inputs)

    def order(self, groups_I: Tensor | None, inputs: int) -> Tensor | None:
        """The order in which columns of one group lie side by side; None where they do already. Raises `ValueError` for uneven groups."""
        ascending_I = torch.arange(inputs) // self.group(inputs)
        if groups_I is None or (groups_I == -1).all() or torch.equal(groups_I.long(), ascending_I):
            return None
        sorted_I, order_I = groups_I.long().sort(stable=True)
        if not torch.equal(sorted_I, ascending_I):
            raise ValueError(f"its groups do not have {self.group(inputs)} columns each")
        return order_I


@dataclass(frozen=True)
class GptqLayout(IntegerLayout):
    """AutoGPTQ's: `qweight` [I bits / 32, O] has the codes of a column one below the other, `qzeros` [G, O bits / 32] side by side.

    `zero_offset` is what is added to stored zero points: 1, or 0 in checkpoints of version 2. `g_idx` [I] has the group of each column;
    it may be missing where groups are in order.
    """

    zero_offset: int = 1
    has_order: bool = False
    key = "qweight"

    @property
    def name(self) -> str:  # type: ignore[override]
        return f"GPTQ int{self.bits}"

    def size(self, key_shape: Shape) -> tuple[int, int]:
        return key_shape[1], key_shape[0] * 32 // self.bits

    def parts(self, outputs: int, inputs: int) -> dict[str, Part]:
        num_groups = self.num_groups(inputs)
        return {
            "qweight": Part(("I32",), ((inputs * self.bits // 32, outputs),)),
            "qzeros": Part(("I32",), ((num_groups, outputs * self.bits // 32),)),
            "scales": Part(FLOATS, ((num_groups, outputs),)),
            "g_idx": Part(("I32",), ((inputs,),), is_optional=not self.has_order),
        }

    def integers(self, tensors: Mapping[str, Tensor]) -> Integers:
        codes_OI = unpacked(tensors["qweight"].T, self.bits)
        # Version 1 stores one less; where that would be below 0, it is the highest number.
        zero_points_GO = (unpacked(tensors["qzeros"], self.bits) + self.zero_offset) & 2**self.bits - 1
        order_I = self.order(tensors.get("g_idx"), codes_OI.shape[1])
        return Integers(_columns(codes_OI, order_I), tensors["scales"].T, zero_points_GO.T, order_I)


@dataclass(frozen=True)
class AwqLayout(IntegerLayout):
    """AutoAWQ's for its GEMM: `qweight` [I, O / 8] and `qzeros` [G, O / 8] have eight outputs in a number, in an order of their own."""

    key = "qweight"
    name = "AWQ int4"

    def size(self, key_shape: Shape) -> tuple[int, int]:
        return key_shape[1] * 8, key_shape[0]

    def parts(self, outputs: int, inputs: int) -> dict[str, Part]:
        num_groups = self.num_groups(inputs)
        return {
            "qweight": Part(("I32",), ((inputs, outputs // 8),)),
            "qzeros": Part(("I32",), ((num_groups, outputs // 8),)),
            "scales": Part(FLOATS, ((num_groups, outputs),)),
        }

    def integers(self, tensors: Mapping[str, Tensor]) -> Integers:
        codes_IO, zero_points_GO = (_in_awq_order(unpacked(tensors[name], 4)) for name in ("qweight", "qzeros"))
        return Integers(codes_IO.T.contiguous(), tensors["scales"].T, zero_points_GO.T)


@dataclass(frozen=True)
class PackQuantizedLayout(IntegerLayout):
    """compressed-tensors' `pack-quantized`: `weight_packed` [O, I bits / 32] has the codes of a row side by side.

    Zero points, where there are any, are packed along the outputs, or int8 and lower by the middle of the codes. `weight_g_idx` [I] is as
    GPTQ's `g_idx`.
    """

    has_order: bool = False
    key = "weight_packed"

    @property
    def name(self) -> str:  # type: ignore[override]
        return f"compressed-tensors int{self.bits}"

    def size(self, key_shape: Shape) -> tuple[int, int]:
        return key_shape[0], key_shape[1] * 32 // self.bits

    def parts(self, outputs: int, inputs: int) -> dict[str, Part]:
        num_groups = self.num_groups(inputs)
        packed_outputs = -(-outputs * self.bits // 32)
        zero_points = Part(("I32", "I8"), ((packed_outputs, num_groups), (outputs, num_groups)))
        return {
            "weight_packed": Part(("I32",), ((outputs, inputs * self.bits // 32),)),
            "weight_scale": Part(FLOATS, ((outputs, num_groups),)),
            **({} if self.is_symmetric else {"weight_zero_point": zero_points}),
            "weight_shape": Part(("I64", "I32"), ((2,),), is_optional=True),
            "weight_g_idx": Part(("I32",), ((inputs,),), is_optional=not self.has_order),
        }

    def integers(self, tensors: Mapping[str, Tensor]) -> Integers:
        codes_OI = unpacked(tensors["weight_packed"], self.bits)
        outputs, inputs = codes_OI.shape
        if "weight_shape" in tensors and tensors["weight_shape"].tolist() != [outputs, inputs]:
            raise ValueError(f"weight_shape is {tensors['weight_shape'].tolist()}, and weight_packed has the codes of {[outputs, inputs]}")
        zero_points_OG = tensors.get("weight_zero_point")
        if zero_points_OG is not None and zero_points_OG.dtype == torch.int8:
            zero_points_OG = (zero_points_OG.short() + 2 ** (self.bits - 1)).to(torch.uint8)
        elif zero_points_OG is not None:
            zero_points_OG = unpacked(zero_points_OG.T, self.bits).T[:outputs]
        order_I = self.order(tensors.get("weight_g_idx"), inputs)
        return Integers(_columns(codes_OI, order_I), tensors["weight_scale"], zero_points_OG, order_I)


@dataclass(frozen=True)
class Int8Layout(IntegerLayout):
    """compressed-tensors' `int-quantized`: `weight` is int8, with a scale for each row, or one for all, and likewise zero points."""

    key = "weight"
    name = "compressed-tensors int8"

    def size(self, key_shape: Shape) -> tuple[int, int]:
        return key_shape[0], key_shape[1]

    def parts(self, outputs: int, inputs: int) -> dict[str, Part]:
        shapes: tuple[Shape, ...] = ((outputs, self.num_groups(inputs)), (1,), ())
        return {
            "weight": Part(("I8",), ((outputs, inputs),)),
            "weight_scale": Part(FLOATS, shapes),
            **({} if self.is_symmetric else {"weight_zero_point": Part(("I8",), shapes)}),
        }

    def integers(self, tensors: Mapping[str, Tensor]) -> Integers:
        codes_OI = _as_unsigned(tensors["weight"])
        outputs, zero_points = len(codes_OI), tensors.get("weight_zero_point")
        zero_points_OG = None if zero_points is None else _for_rows(_as_unsigned(zero_points), outputs)
        return Integers(codes_OI, _for_rows(tensors["weight_scale"], outputs), zero_points_OG)


@dataclass(frozen=True)
class Mxfp4Layout(Layout):
    """compressed-tensors' `mxfp4-pack-quantized`: `weight_packed`, two numbers of e2m1 in a byte, `weight_scale` e8m0 for 32 of them."""

    key = "weight_packed"
    name = "MXFP4"

    def size(self, key_shape: Shape) -> tuple[int, int]:
        return key_shape[0], key_shape[1] * 2

    def parts(self, outputs: int, inputs: int) -> dict[str, Part]:
        if inputs % GROUP_SIZE:
            raise ValueError(f"{inputs} inputs are not served: they are no multiple of {GROUP_SIZE}")
        return {
            "weight_packed": Part(("U8",), ((outputs, inputs // 2),)),
            "weight_scale": Part(("U8", "F8_E8M0"), ((outputs, inputs // GROUP_SIZE),)),
        }

    def read(self, tensors: Mapping[str, Tensor]) -> PackedWeight:
        return pack(mxfp4(tensors["weight_packed"], tensors["weight_scale"].view(torch.uint8)))

    def outline(self, outputs: int, inputs: int) -> PackedWeight:
        return _outline(TYPES["MXFP4"], outputs, inputs)


@dataclass(frozen=True)
class Mxfp4ExpertLayout(Mxfp4Layout):
    """Of an expert of gpt-oss: `blocks` [O, G, 16], two numbers of e2m1 in a byte, and `scales` [O, G], e8m0."""

    key = "blocks"
    num_dims = 3

    def size(self, key_shape: Shape) -> tuple[int, int]:
        return key_shape[0], key_shape[1] * GROUP_SIZE

    def parts(self, outputs: int, inputs: int) -> dict[str, Part]:
        num_groups = inputs // GROUP_SIZE
        return {
            "blocks": Part(("U8",), ((outputs, num_groups, GROUP_SIZE // 2),)),
            "scales": Part(("U8",), ((outputs, num_groups),)),
        }

    def read(self, tensors: Mapping[str, Tensor]) -> PackedWeight:
        return pack(mxfp4(tensors["blocks"].flatten(1), tensors["scales"]))


@dataclass(frozen=True)
class Float8Layout(Layout):
    """`weight` is e4m3, with a scale for all, for each row or, with `block`, for so many rows and columns."""

    scale: str
    block: tuple[int, int] | None = None
    key = "weight"
    name = "FP8"

    def size(self, key_shape: Shape) -> tuple[int, int]:
        return key_shape[0], key_shape[1]

    def parts(self, outputs: int, inputs: int) -> dict[str, Part]:
        if inputs % 2:
            raise ValueError(f"{inputs} inputs are not served: their number is odd")
        scale_shapes: tuple[Shape, ...] = ((outputs, 1), (outputs,), (1, 1), (1,), ())
        if self.block is not None:
            scale_shapes = ((-(-outputs // self.block[0]), -(-inputs // self.block[1])),)
        return {"weight": Part(("F8_E4M3",), ((outputs, inputs),)), self.scale: Part(FLOATS, scale_shapes)}

    def read(self, tensors: Mapping[str, Tensor]) -> Float8Weight:
        weight_OI, scales = tensors["weight"], tensors[self.scale].float()
        outputs, inputs = weight_OI.shape
        if (weight_OI.view(torch.uint8) & NAN_CODE == NAN_CODE).any() or not scales.isfinite().all():
            raise ValueError("there are weights or scales that are no finite numbers")
        if self.block is None:
            return pack_float8(weight_OI, scales.reshape(-1, 1).expand(outputs, 1), inputs)
        return pack_float8(weight_OI, scales.repeat_interleave(self.block[0], dim=0)[:outputs], self.block[1])

    def outline(self, outputs: int, inputs: int) -> Float8Weight:
        num_panels = -(-outputs // PANEL)
        scale_columns = inputs if self.block is None else self.block[1]
        codes = torch.empty(num_panels, inputs // 2, PANEL, 2, dtype=torch.uint8, device="meta")
        return Float8Weight(outputs, scale_columns, codes, torch.empty(num_panels, -(-inputs // scale_columns), PANEL, device="meta"))


def _outline(type_: WeightType, outputs: int, inputs: int) -> PackedWeight:
    blocks = torch.empty(-(-outputs // TILE), inputs // type_.columns, type_.block_bytes, dtype=torch.uint8, device="meta")
    return PackedWeight(type_.name, outputs, blocks)


def mxfp4(pairs_OB: Tensor, exponents_OG: Tensor) -> QuantizedWeight:
    """The weight of bytes with two codes each, the first in the lower half, and an exponent for 32 of these, 127 more than what it is.

    Raises `ValueError` for an exponent that stands for no number.
    """
    if (exponents_OG == NAN_EXPONENT).any():
        raise ValueError("there are scales that are no numbers")
    return QuantizedWeight(TYPES["MXFP4"], unpacked(pairs_OB, 4), exponents_OG)  # levels are doubled, so their exponents count from 128


def unpacked(packed: Tensor, bits: int) -> Tensor:
    """uint8 [..., n]: codes of 4 or 8 bits that lie side by side in integers, the first in the lowest place."""
    bytes_B = packed.contiguous().view(torch.uint8)
    return bytes_B if bits == 8 else torch.stack([bytes_B & 15, bytes_B >> 4], dim=-1).flatten(-2)


def _in_awq_order(nibbles_N: Tensor) -> Tensor:
    places = torch.tensor(AWQ_ORDER).argsort()
    eights: Tensor = nibbles_N.unflatten(-1, (-1, 8))  # type: ignore[no-untyped-call]
    return eights[..., places].flatten(-2)


def _as_unsigned(integers: Tensor) -> Tensor:
    """Of int8, as uint8: 128 more."""
    return integers.view(torch.uint8) ^ 128


def _for_rows(numbers: Tensor, outputs: int) -> Tensor:
    """[O, G], where there may be one number for all."""
    return numbers if numbers.ndim == 2 else numbers.reshape(1, 1).expand(outputs, 1)


def _columns(codes_OI: Tensor, order_I: Tensor | None) -> Tensor:
    return codes_OI if order_I is None else codes_OI.index_select(1, order_I)
