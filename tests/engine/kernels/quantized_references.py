"""What the launchers of `kernels/quantized.py` compute, in plain torch: products by weights that are dequantized as a whole."""

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from penstock.engine.weights.float8 import Float8Weight
from penstock.engine.weights.packed import PackedWeight, WeightType


def quantized_linear(
    x: Tensor, blocks: Sequence[Tensor], forms: Sequence[WeightType], out_features: Sequence[int], bias: Tensor | None
) -> Tensor:
    weights = [PackedWeight(form.name, size, own).dequantized() for own, form, size in zip(blocks, forms, out_features, strict=True)]
    return nn.functional.linear(x, torch.cat(weights).to(x.dtype), bias)


def grouped_linear(
    x_SI: Tensor,
    starts_E: Tensor,
    blocks: Sequence[Tensor],
    forms: Sequence[WeightType],
    out_features: Sequence[int],
    bias_EO: Tensor | None,
) -> Tensor:
    return torch.cat(
        [
            quantized_linear(
                x_SI[first:end], [own[expert] for own in blocks], forms, out_features, None if bias_EO is None else bias_EO[expert]
            )
            for expert, (first, end) in enumerate(itertools.pairwise(starts_E.tolist()))
        ]
    )


def dequantized_rows(blocks_TKB: Tensor, form: WeightType, rows_N: Tensor, dtype: torch.dtype) -> Tensor:
    return PackedWeight(form.name, 16 * len(blocks_TKB), blocks_TKB).dequantized()[rows_N].to(dtype)


def float8_linear(x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None, scale_columns: int, out_features: int) -> Tensor:
    return nn.functional.linear(x, Float8Weight(out_features, scale_columns, codes, scales).dequantized().to(x.dtype), bias)


def grouped_float8_linear(
    x_SI: Tensor, starts_E: Tensor, codes: Tensor, scales: Tensor, bias_EO: Tensor | None, scale_columns: int, out_features: int
) -> Tensor:
    return torch.cat(
        [
            float8_linear(
                x_SI[first:end], codes[expert], scales[expert], None if bias_EO is None else bias_EO[expert], scale_columns, out_features
            )
            for expert, (first, end) in enumerate(itertools.pairwise(starts_E.tolist()))
        ]
    )
