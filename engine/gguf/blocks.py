"""Quantized matrices as GGUF files hold them: rows of blocks, each 32 weights long."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from penstock.engine.quantization.quantized_weight import QuantizedWeight

if TYPE_CHECKING:
    from gguf import ReaderTensor

# What is served in its own precision. The other types have larger blocks with several scales, or codes that are no multiples of a step.
TYPES = ("Q4_0", "Q4_1", "Q8_0")


def read_blocks(tensor: "ReaderTensor") -> QuantizedWeight | None:
    """The weight in a tensor of the file; None where it is no matrix of one of `TYPES`.

    Format: ggml's block_q4_0 (scale, 16 bytes of codes from 0 to 15 that mean -8 to 7), block_q4_1 (scale, minimum, 16 bytes of codes) and
    block_q8_0 (scale, 32 signed bytes). Byte i of 4-bit codes holds weight i and in its upper half weight i + 16.
    """
    kind = tensor.tensor_type.name
    if kind not in TYPES or len(tensor.shape) != 2:
        return None
    block_bytes = {"Q4_0": 18, "Q4_1": 20, "Q8_0": 34}[kind]
    blocks_OGB = torch.from_numpy(tensor.data.copy()).unflatten(1, (-1, block_bytes))  # type: ignore[no-untyped-call]
    scales_OG = _half(blocks_OGB, 0)
    if kind == "Q8_0":
        codes_OGS = blocks_OGB[..., 2:] ^ 128  # two's complement moved up by 128
        return QuantizedWeight(8, codes_OGS.flatten(1), scales_OG, -128 * scales_OG)
    halves_OGH = blocks_OGB[..., -16:]
    codes_OGS = torch.cat([halves_OGH & 15, halves_OGH >> 4], dim=-1)
    minimums_OG = _half(blocks_OGB, 2) if kind == "Q4_1" else -8 * scales_OG
    return QuantizedWeight(4, codes_OGS.flatten(1), scales_OG, minimums_OG)


def _half(blocks_OGB: Tensor, start: int) -> Tensor:
    return blocks_OGB[..., start : start + 2].contiguous().view(torch.float16)[..., 0]
