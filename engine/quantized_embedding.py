"""Looks rows up in a weight of 4 or 8 bits. Tied to an output layer, it reads the one copy that the layer computes with."""

import torch
from torch import Tensor, nn

from penstock.engine.quantized_linear import FOOTER_BYTES, STEP, TILE
from penstock.engine.quantized_weight import QuantizedWeight


class QuantizedEmbedding(nn.Module):
    """Token ids of any shape [...] to rows of `dtype` [..., columns]. `blocks` are those of a `QuantizedLinear` or made by `pack`."""

    blocks: Tensor

    def __init__(self, blocks_TGB: Tensor, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.register_buffer("blocks", blocks_TGB, persistent=False)

    def forward(self, token_ids: Tensor) -> Tensor:
        rows_NI = unpacked_rows(self.blocks, token_ids.flatten()).dequantized().to(self.dtype)
        return rows_NI.view(*token_ids.shape, rows_NI.shape[1])


def unpacked_rows(blocks_TGB: Tensor, rows_N: Tensor) -> QuantizedWeight:
    """These rows of the weight that `pack` made the blocks from; every row has its own lane in its tile."""
    tiles_N, lanes_N = rows_N // TILE, rows_N % TILE
    half = FOOTER_BYTES // 2
    codes_TGCLS = blocks_TGB[..., :-FOOTER_BYTES].unflatten(-1, (-1, TILE, STEP))  # type: ignore[no-untyped-call]
    codes_NGCS = codes_TGCLS[tiles_N, :, :, lanes_N]
    bits = codes_NGCS.shape[2]  # 4 bits: half as many bytes
    if bits == 4:
        codes_NGCS = torch.cat([codes_NGCS & 15, codes_NGCS >> 4], dim=2)
    numbers = [part.unflatten(-1, (TILE, 2))[tiles_N, :, lanes_N] for part in blocks_TGB[..., -FOOTER_BYTES:].split(half, dim=-1)]  # type: ignore[no-untyped-call]
    scales_NG, minimums_NG = (part.contiguous().view(torch.float16)[..., 0] for part in numbers)
    return QuantizedWeight(bits, codes_NGCS.flatten(1), scales_NG, minimums_NG)
