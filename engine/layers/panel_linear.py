"""Linear layers over bfloat16 weights as the native kernels read them: in panels of 32 outputs."""

import torch
from torch import Tensor, nn

from penstock.engine.native.library import native_library

PANEL = 32


def can_panel(weight_OI: Tensor) -> bool:
    """Whether the kernel takes a weight of this type and shape, on this processor."""
    library = native_library()
    is_suited = weight_OI.dtype == torch.bfloat16 and weight_OI.shape[0] % 16 == 0 and weight_OI.shape[1] % 2 == 0
    return is_suited and library is not None and bool(library.penstock_has_bfloat16_products())


def panels(weight_OI: Tensor) -> Tensor:
    """The weight as [outputs / 32 rounded up, inputs / 2, 32, 2]: pairs of inputs side by side, zeros for missing outputs."""
    padded_OI = nn.functional.pad(weight_OI, (0, 0, 0, -weight_OI.shape[0] % PANEL))
    return padded_OI.view(-1, PANEL, weight_OI.shape[1] // 2, 2).transpose(1, 2).contiguous()


def panel_linear(x: Tensor, weight: Tensor, bias: Tensor | None, out_features: int) -> Tensor:
    """bfloat16 [..., inputs] to [..., out_features], by a weight that `panels` gave. A row's result does not depend on the other rows."""
    library = native_library()
    assert library is not None
    assert x.dtype == weight.dtype
    assert x.shape[-1] == 2 * weight.shape[1]
    x = x.contiguous()
    out = x.new_empty(*x.shape[:-1], out_features)
    library.penstock_panel_linear(
        out.data_ptr(),
        x.data_ptr(),
        weight.data_ptr(),
        None if bias is None else bias.data_ptr(),
        x.shape[:-1].numel(),
        x.shape[-1],
        out_features,
    )
    return out
