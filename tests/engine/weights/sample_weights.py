"""Quantized weights of every type with any codes, and what the kernels make of them, one rounding after the other."""

from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType
from torch import Tensor

from penstock.engine.weights.matrices import read_blocks
from penstock.engine.weights.packed import GROUP_SIZE, TYPES, QuantizedWeight

# Where a block of the file has its numbers of half precision.
HALVES = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "Q3_K": (108,), "Q2_K": (80, 82)}


def random_tensor(name: str, num_rows: int, num_columns: int, seed: int = 0) -> Any:
    """What a reader of GGUF files finds: blocks of any codes and integer scales, with factors of a sensible size."""
    kind = GGMLQuantizationType[name]
    columns, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    random = np.random.default_rng(seed)
    blocks = random.integers(0, 256, (num_rows, num_columns // columns, num_bytes), dtype=np.uint8)
    if name == "MXFP4":
        blocks[..., 0] = random.integers(120, 125, blocks.shape[:2])
    for start in HALVES.get(name, () if name == "MXFP4" else (0,)):
        blocks[..., start : start + 2] = random.uniform(0.001, 0.01, (*blocks.shape[:2], 1)).astype(np.float16).view(np.uint8)
    return SimpleNamespace(data=blocks.reshape(num_rows, -1), tensor_type=kind, shape=(num_columns, num_rows))


def random_weight(name: str, num_rows: int, num_columns: int, seed: int = 0) -> QuantizedWeight:
    if name in GGUF_TYPES:
        return read_blocks(random_tensor(name, num_rows, num_columns, seed))
    type_, random = TYPES[name], torch.Generator().manual_seed(seed)
    codes_OI = torch.randint(0, 2**type_.bits, (num_rows, num_columns), dtype=torch.uint8, generator=random)
    scales_OG = torch.empty(num_rows, num_columns // type_.group).uniform_(0.001, 0.01, generator=random).half()
    zero_points_OG = torch.randint(-type_.offset, 2**type_.bits - type_.offset, scales_OG.shape, dtype=torch.int8, generator=random)
    return QuantizedWeight(type_, codes_OI, scales_OG, zero_points_OG if type_.has_zero_points else None)


def kernel_result(weight: QuantizedWeight, x_TI: Tensor) -> Tensor:
    """Float32 [T, O], bit for bit what any processor's kernel gives for finite float32 rows and no bias.

    Activations are rounded to 8 bits in groups of 32. The products of a group with the codes' integers are summed exactly. Their sum times
    the rounded product of both scales is added to the result in one rounding, and then the minimum times the sum of the activations.
    """
    groups_TGS = x_TI.unflatten(1, (-1, GROUP_SIZE))  # type: ignore[no-untyped-call]
    highest_TG = groups_TGS.abs().amax(-1)
    steps_TG = torch.full_like(highest_TG, 127.0) / highest_TG  # torch takes a number's quotient for its product with the reciprocal
    integers_TGS = (groups_TGS * torch.where(highest_TG < 1e-30, 0.0, steps_TG)[..., None]).round().double()
    row_scales_TG = highest_TG * (torch.tensor(1.0) / 127)
    if weight.type.levels:
        numbers_OI = torch.tensor(weight.type.levels).double()[weight.codes_OI.int()]
    else:
        numbers_OI = weight.codes_OI.double() - weight.type.offset
    scales_OG = weight.multiplied(weight.scales_OG, 0)
    minimums_OG = None if weight.minimums_OG is None else weight.multiplied(weight.minimums_OG, 1)
    group = min(weight.type.group, GROUP_SIZE)
    out_TO = torch.zeros(len(x_TI), len(numbers_OI))
    for first in range(0, x_TI.shape[1], group):
        g = first // GROUP_SIZE
        dots_TO = integers_TGS.flatten(1)[:, first : first + group] @ numbers_OI[:, first : first + group].T
        factors_TO = row_scales_TG[:, g, None] * scales_OG[:, first // weight.type.group]
        out_TO = (dots_TO * factors_TO.double() + out_TO.double()).float()
        if minimums_OG is not None:
            sums_T = row_scales_TG[:, g] * integers_TGS[:, g].sum(-1).float()
            minimum_O = minimums_OG[:, first // weight.type.group]
            out_TO = (sums_T[:, None].double() * minimum_O.double() + out_TO.double()).float()
    return out_TO


ALL_TYPES = tuple(TYPES)
GGUF_TYPES = tuple(name for name in ALL_TYPES if name in GGMLQuantizationType.__members__)
