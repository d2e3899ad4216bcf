"""Weights of 8-bit floating point (e4m3) with scales, and linear layers over them, one by one or of all experts of a mixture.

The kernels convert a panel of the weight to bfloat16 before they multiply by it: the result is, bit for bit, that of the weight that is
multiplied by its scales and rounded to bfloat16, and takes half the memory. On CUDA the type is that of the activations.
"""

import ctypes
import itertools
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from penstock.engine.kernels import quantized as cuda
from penstock.engine.native.runtime import native_library
from penstock.engine.weights.linear import PANEL, panels

FLOAT8 = torch.float8_e4m3fn
NAN_CODE = 0x7F  # and with a sign


class Float8Panels(ctypes.Structure):
    """`Float8Panels` of float8_linear.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("codes", "scales")),
        *((name, ctypes.c_int64) for name in ("scale_columns", "scales_per_row")),
    )


class Float8Weight(nn.Module):
    """`out_features` rows in panels of 32.

    Buffers: `codes`, uint8 [out_features / 32 rounded up, in_features / 2, 32, 2]; `scales`, float32 [the same, scales of a row, 32], each
    for `scale_columns` columns.
    """

    codes: Tensor
    scales: Tensor
    type_name = "FP8"
    order = None

    def __init__(self, out_features: int, scale_columns: int, codes_PIOE: Tensor, scales_PKO: Tensor) -> None:
        super().__init__()
        self.out_features = out_features
        self.scale_columns = scale_columns
        self.register_buffer("codes", codes_PIOE, persistent=False)
        self.register_buffer("scales", scales_PKO, persistent=False)

    @property
    def in_features(self) -> int:
        return 2 * self.codes.shape[1]

    @property
    def bits(self) -> int:
        return 8

    @property
    def bits_per_weight(self) -> float:
        return 8 + 32 * self.scales.shape[1] / self.in_features

    def dequantized(self) -> Tensor:
        """Float32 [O, I]."""
        codes_OI = self.codes.transpose(1, 2).reshape(-1, self.in_features)[: self.out_features]
        scales_OK = self.scales.transpose(1, 2).reshape(-1, self.scales.shape[1])[: self.out_features]
        scales_OI = scales_OK.repeat_interleave(self.scale_columns, dim=1)[:, : self.in_features]
        return codes_OI.view(FLOAT8).float() * scales_OI

    def native(self) -> Float8Panels:
        """For as long as the weight lives."""
        return Float8Panels(self.codes.data_ptr(), self.scales.data_ptr(), self.scale_columns, self.scales.shape[1])


def can_panel_float8(out_features: int, in_features: int) -> bool:
    """Whether the kernel takes a weight of this shape."""
    return out_features % 16 == 0 and in_features % 2 == 0


def pack_float8(codes_OI: Tensor, scales_OK: Tensor, scale_columns: int) -> Float8Weight:
    """A weight of these numbers of e4m3, of which each row has a float32 scale for every `scale_columns` columns, an even number."""
    num_missing = -len(codes_OI) % PANEL
    codes_PIOE = panels(codes_OI.view(torch.uint8))
    scales_PKO = nn.functional.pad(scales_OK, (0, 0, 0, num_missing)).unflatten(0, (-1, PANEL)).transpose(1, 2).contiguous()  # type: ignore[no-untyped-call]
    return Float8Weight(len(codes_OI), scale_columns, codes_PIOE, scales_PKO)


def can_join_float8(weights: Sequence[Float8Weight]) -> bool:
    """Whether these weights could be one: they agree on inputs and scales, and end with their panels."""
    kinds = {(weight.in_features, weight.scale_columns) for weight in weights}
    return len(kinds) == 1 and all(weight.out_features % PANEL == 0 for weight in weights[:-1])


def joined_float8(weights: Sequence[Float8Weight]) -> Float8Weight:
    """The rows of all, of weights that `can_join_float8`."""
    return Float8Weight(
        sum(weight.out_features for weight in weights),
        weights[0].scale_columns,
        torch.cat([weight.codes for weight in weights]),
        torch.cat([weight.scales for weight in weights]),
    )


_library = torch.library.Library("penstock", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(  # type: ignore[no-untyped-call]
    "float8_linear(Tensor x, Tensor codes, Tensor scales, Tensor? bias, int scale_columns, SymInt out_features) -> Tensor"
)


@torch.library.impl(_library, "float8_linear", "CPU")
def _float8_linear(x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None, scale_columns: int, out_features: int) -> Tensor:
    weight = Float8Weight(out_features, scale_columns, codes, scales)
    if x.dtype != torch.bfloat16:
        bias = None if bias is None else bias.bfloat16()
        return _float8_linear(x.bfloat16(), codes, scales, bias, scale_columns, out_features).to(x.dtype)
    library = native_library()
    if library is None:
        return nn.functional.linear(x, weight.dequantized().bfloat16(), bias)
    x = x.contiguous()
    out, native = x.new_empty(*x.shape[:-1], out_features), weight.native()
    library.penstock_float8_linear(
        out.data_ptr(),
        x.data_ptr(),
        ctypes.addressof(native),
        None if bias is None else bias.data_ptr(),
        x.shape[:-1].numel(),
        x.shape[-1],
        out_features,
    )
    return out


@torch.library.register_fake("penstock::float8_linear", lib=_library)  # type: ignore[untyped-decorator]
def _float8_linear_shape(x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None, scale_columns: int, out_features: int) -> Tensor:
    return x.new_empty(*x.shape[:-1], out_features)


class Float8Linear(nn.Module):
    """[..., in_features] of any float type to [..., out_features] of the same."""

    weight: Float8Weight

    def __init__(self, weight: Float8Weight, bias: Tensor | None) -> None:
        super().__init__()
        self.weight = weight
        self.in_features, self.out_features = weight.in_features, weight.out_features
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)

    @classmethod
    def joined(cls, layers: Sequence["Float8Linear"]) -> "Float8Linear | None":
        """One layer that computes all of theirs; None where they differ in having a bias, or their weights cannot be one."""
        weights = [layer.weight for layer in layers]
        if len({layer.bias is None for layer in layers}) > 1 or not can_join_float8(weights):
            return None
        biases: list[Tensor] = [layer.bias for layer in layers if layer.bias is not None]
        return cls(joined_float8(weights), torch.cat(biases) if biases else None)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight
        if x.device.type == "cuda":
            return cuda.float8_linear(x, weight.codes, weight.scales, self.bias, weight.scale_columns, self.out_features)
        return torch.ops.penstock.float8_linear(  # type: ignore[no-any-return]
            x, weight.codes, weight.scales, self.bias, weight.scale_columns, self.out_features
        )


_library.define(  # type: ignore[no-untyped-call]
    "grouped_float8_linear(Tensor x, Tensor starts, Tensor codes, Tensor scales, Tensor? bias, int scale_columns, SymInt out_features)"
    " -> Tensor"
)


@torch.library.impl(_library, "grouped_float8_linear", "CPU")
def _grouped_float8_linear(
    x_SI: Tensor, starts_E: Tensor, codes: Tensor, scales: Tensor, bias_EO: Tensor | None, scale_columns: int, out_features: int
) -> Tensor:
    library = native_library()
    if x_SI.dtype != torch.bfloat16 or library is None:
        out_SO = x_SI.new_empty(len(x_SI), out_features)
        for expert, (first, end) in enumerate(itertools.pairwise(starts_E.tolist())):
            bias_O = None if bias_EO is None else bias_EO[expert]
            out_SO[first:end] = _float8_linear(x_SI[first:end], codes[expert], scales[expert], bias_O, scale_columns, out_features)
        return out_SO
    x_SI = x_SI.contiguous()
    out_SO = x_SI.new_empty(len(x_SI), out_features)
    native = Float8Weight(out_features, scale_columns, codes[0], scales[0]).native()
    library.penstock_grouped_float8_linear(
        out_SO.data_ptr(),
        x_SI.data_ptr(),
        ctypes.addressof(native),
        None if bias_EO is None else bias_EO.data_ptr(),
        starts_E.data_ptr(),
        len(codes),
        x_SI.shape[1],
        out_features,
    )
    return out_SO


@torch.library.register_fake("penstock::grouped_float8_linear", lib=_library)  # type: ignore[untyped-decorator]
def _grouped_float8_linear_shape(
    x_SI: Tensor, starts_E: Tensor, codes: Tensor, scales: Tensor, bias_EO: Tensor | None, scale_columns: int, out_features: int
) -> Tensor:
    return x_SI.new_empty(x_SI.shape[0], out_features)


class GroupedFloat8Linear(nn.Module):
    """A linear layer of each expert. Rows [S, in_features] are in the order of experts: those of expert e begin at `starts_E[e]`.

    Buffers have those of a `Float8Weight` for each expert; `bias` is [E, out_features].
    """

    codes: Tensor
    scales: Tensor

    def __init__(self, weights: Sequence[Float8Weight], bias_EO: Tensor | None) -> None:
        """The experts' weights, of one size, each with one scale for as many numbers."""
        super().__init__()
        self.out_features, self.scale_columns = weights[0].out_features, weights[0].scale_columns
        self.num_experts = len(weights)
        self.register_buffer("codes", torch.stack([weight.codes for weight in weights]), persistent=False)
        self.register_buffer("scales", torch.stack([weight.scales for weight in weights]), persistent=False)
        self.bias = None if bias_EO is None else nn.Parameter(bias_EO.detach().contiguous(), requires_grad=False)

    @property
    def in_features(self) -> int:
        return 2 * self.codes.shape[2]

    def native(self) -> Float8Panels:
        """Of the first expert, for as long as the layer lives."""
        return Float8Panels(self.codes.data_ptr(), self.scales.data_ptr(), self.scale_columns, self.scales.shape[2])

    def forward(self, x_SI: Tensor, starts_E: Tensor) -> Tensor:
        if x_SI.device.type == "cuda":
            return cuda.grouped_float8_linear(x_SI, starts_E, self.codes, self.scales, self.bias, self.scale_columns, self.out_features)
        return torch.ops.penstock.grouped_float8_linear(  # type: ignore[no-any-return]
            x_SI, starts_E, self.codes, self.scales, self.bias, self.scale_columns, self.out_features
        )
