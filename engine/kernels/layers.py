"""Normalization and rotation in one kernel each: the launchers of the kernels in `layers_triton.py`."""

import torch
from torch import Tensor

from penstock.engine.kernels.tuning import COMPILER_OPTIONS, next_power_of_two

ELEMENTS_PER_WARP = 512


def rms_norm(states: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Each row of [..., N] over the root of its mean square, times the weights [N]; contiguous, in the type of `states`.

    Rows may lie apart, as the heads of a fused projection do. Never waits for the device.
    Source: Zhang and Sennrich 2019.
    """
    from penstock.engine.kernels.layers_triton import rms_norm_kernel

    size = states.shape[-1]
    assert weight.shape == (size,)
    out = torch.empty(states.shape, dtype=states.dtype, device=states.device)
    if out.numel():
        rows = states.reshape(-1, states.shape[-2] if states.dim() > 1 else 1, size)  # a view, but for shapes that no model has
        if rows.stride(-1) != 1:
            rows = rows.contiguous()
        rms_norm_kernel[(rows.shape[0] * rows.shape[1],)](
            out,
            rows,
            weight,
            epsilon,
            rows.shape[1],
            rows.stride(0),
            rows.stride(1),
            SIZE=size,
            PADDED=next_power_of_two(size),
            num_warps=max(1, min(16, next_power_of_two(size) // ELEMENTS_PER_WARP)),
            **COMPILER_OPTIONS,
        )
    return out


TILE_HEADS = 8


def rotate(query_1HTD: Tensor, key_1HTD: Tensor, cosines_1TD: Tensor, sines_1TD: Tensor) -> tuple[Tensor, Tensor]:
    """Turns dimension d of each head with dimension d + D / 2. The results have the shapes of query and key, one token's heads together.

    Rounds once, at the end. Never waits for the device. Source: RoFormer (Su et al. 2021), in the halves of GPT-NeoX.
    """
    from penstock.engine.kernels.layers_triton import rotate_kernel

    _, num_heads, num_tokens, size = query_1HTD.shape
    num_kv_heads = key_1HTD.shape[1]
    assert len(query_1HTD) == len(key_1HTD) == 1
    assert query_1HTD.stride(-1) == key_1HTD.stride(-1) == cosines_1TD.stride(-1) == sines_1TD.stride(-1) == 1
    assert cosines_1TD.shape == sines_1TD.shape == (1, num_tokens, size)
    out_query_1THD = torch.empty(1, num_tokens, num_heads, size, dtype=query_1HTD.dtype, device=query_1HTD.device)
    out_key_1THD = torch.empty(1, num_tokens, num_kv_heads, size, dtype=key_1HTD.dtype, device=key_1HTD.device)
    if num_tokens:
        rotate_kernel[(num_tokens, -(-num_heads // TILE_HEADS) + -(-num_kv_heads // TILE_HEADS))](
            out_query_1THD,
            out_key_1THD,
            query_1HTD,
            key_1HTD,
            cosines_1TD,
            sines_1TD,
            query_1HTD.stride(2),
            query_1HTD.stride(1),
            key_1HTD.stride(2),
            key_1HTD.stride(1),
            cosines_1TD.stride(1),
            sines_1TD.stride(1),
            NUM_HEADS=num_heads,
            NUM_KV_HEADS=num_kv_heads,
            SIZE=size,
            HALF_PADDED=next_power_of_two(size // 2),
            TILE_HEADS=TILE_HEADS,
            num_warps=4,
            **COMPILER_OPTIONS,
        )
    return out_query_1THD.transpose(1, 2), out_key_1THD.transpose(1, 2)
