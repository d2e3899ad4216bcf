"""Looks rows up in a weight of 4 or 8 bits. Tied to an output layer, it reads the one copy that the layer computes with."""

import torch
from torch import Tensor, nn

from penstock.engine.layers.quantized import GROUP_SIZE, STEP, TILE, QuantizedWeight, num_bits
from penstock.engine.native.library import native_library


class QuantizedEmbedding(nn.Module):
    """Token ids of any shape [...] to rows of `dtype` [..., columns]. `blocks` are those of a `QuantizedLinear` or made by `pack`."""

    blocks: Tensor

    def __init__(self, blocks_TGB: Tensor, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.register_buffer("blocks", blocks_TGB, persistent=False)

    def forward(self, token_ids: Tensor) -> Tensor:
        ids_N = token_ids.flatten().long().contiguous()
        library = native_library() if token_ids.device.type == "cpu" else None
        if library is None:
            rows_NI = unpacked_rows(self.blocks, ids_N).dequantized()
        else:
            num_groups = self.blocks.shape[1]
            rows_NI = torch.empty(len(ids_N), num_groups * GROUP_SIZE)
            library.penstock_quantized_rows(
                rows_NI.data_ptr(), self.blocks.data_ptr(), ids_N.data_ptr(), len(ids_N), num_groups, num_bits(self.blocks)
            )
        return rows_NI.to(self.dtype).view(*token_ids.shape, rows_NI.shape[1])


def unpacked_rows(blocks_TGB: Tensor, rows_N: Tensor) -> QuantizedWeight:
    """These rows of the weight that `pack` made the blocks from; every row has its own lane in its tile."""
    tiles_N, lanes_N = rows_N // TILE, rows_N % TILE
    bits = num_bits(blocks_TGB)
    num_code_bytes = TILE * GROUP_SIZE * bits // 8
    codes_TGCLS = blocks_TGB[..., :num_code_bytes].unflatten(-1, (-1, TILE, STEP))  # type: ignore[no-untyped-call]
    codes_NGCS = codes_TGCLS[tiles_N, :, :, lanes_N]
    if bits == 4:
        codes_NGCS = torch.cat([codes_NGCS & 15, codes_NGCS >> 4], dim=2)
    numbers_TGKLB = blocks_TGB[..., num_code_bytes:].unflatten(-1, (-1, TILE, 2))  # type: ignore[no-untyped-call]
    scales_NG, *minimums_NG = numbers_TGKLB[tiles_N, :, :, lanes_N].contiguous().view(torch.float16)[..., 0].unbind(-1)
    return QuantizedWeight(bits, codes_NGCS.flatten(1), scales_NG, minimums_NG[0] if minimums_NG else -128 * scales_NG)
