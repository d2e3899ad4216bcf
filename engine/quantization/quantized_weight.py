"""A weight matrix in few bits: codes, and a scale and a minimum for every 32 of them along a row."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

GROUP_SIZE = 32


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """O rows of I weights, I a multiple of 32: weight[o, i] = scales[o, i // 32] * codes[o, i] + minimums[o, i // 32].

    `codes_OI` is uint8, one code below 2**bits in each byte; `bits` is 4 or 8. `scales_OG` and `minimums_OG` are float16 [O, I / 32].
    GGUF's Q4_0, Q4_1, Q5_0 and Q8_0 are exactly of this form. Minimums of 8 bits are always -128 scales.
    """

    bits: int
    codes_OI: Tensor
    scales_OG: Tensor
    minimums_OG: Tensor

    def dequantized(self) -> Tensor:
        """Float32 [O, I]."""
        codes_OGS: Tensor = self.codes_OI.unflatten(1, (-1, GROUP_SIZE)).float()  # type: ignore[no-untyped-call]
        return (codes_OGS * self.scales_OG.float()[..., None] + self.minimums_OG.float()[..., None]).flatten(1)


def quantized(weight_OI: Tensor, bits: int) -> QuantizedWeight:
    """Rounds each group between its extremes: to 16 levels for 4 bits, and to 255 levels around zero for 8, as GGUF's Q4_1 and Q8_0 do."""
    groups_OGS: Tensor = weight_OI.float().unflatten(1, (-1, GROUP_SIZE))  # type: ignore[no-untyped-call]
    if bits == 4:
        low_OG, high_OG = groups_OGS.aminmax(dim=-1)
        scales_OG = ((high_OG - low_OG) / 15).half()
        minimums_OG = low_OG.half()
    else:
        assert bits == 8
        scales_OG = (groups_OGS.abs().amax(-1) / 127).half()
        minimums_OG = -128 * scales_OG
    # Codes go by the scale and minimum as they were rounded; a group of equal weights has none to speak of.
    steps_OG = torch.where(scales_OG > 0, scales_OG.float(), 1.0)
    codes_OGS = ((groups_OGS - minimums_OG.float()[..., None]) / steps_OG[..., None]).round().clamp(0, 2**bits - 1)
    return QuantizedWeight(bits, codes_OGS.to(torch.uint8).flatten(1), scales_OG, minimums_OG)


def stacked(weights: Sequence[QuantizedWeight]) -> QuantizedWeight:
    """One below the other: the weight of a layer that computes all of theirs. They agree on bits and inputs."""
    (bits,) = {weight.bits for weight in weights}
    return QuantizedWeight(
        bits,
        torch.cat([weight.codes_OI for weight in weights]),
        torch.cat([weight.scales_OG for weight in weights]),
        torch.cat([weight.minimums_OG for weight in weights]),
    )
