"""One matrix multiplication in place of several with the same input: query, key and value, or gate and up.

The model's own code goes on calling its three or two projections. The first call computes them all, and the others take their part of it.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from penstock.engine.layers.linear import reads_weight
from penstock.engine.layers.quantized import QuantizedLinear, can_join

# What architectures call projections of one and the same input.
GROUPS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


class FusedLinear(nn.Module):
    """Several linear layers as one. Parts are views of one result, so they are valid until it is dropped, like any tensor."""

    def __init__(self, whole: nn.Module, sizes: Sequence[int]) -> None:
        super().__init__()
        self.sizes = list(sizes)
        self.linear = whole
        self._input: Tensor | None = None
        self._parts: list[Tensor] = []

    def take(self, x: Tensor, position: int) -> Tensor:
        """What the linear layer at `position` makes of `x`, [..., in_features]."""
        if self._input is not x:
            self._input, self._parts = x, list(self.linear(x).split(self.sizes, dim=-1))
        part = self._parts[position]
        if position == len(self.sizes) - 1:
            self._input, self._parts = None, []
        return part


class FusedPart(nn.Module):
    """Stands where one of the linear layers stood."""

    def __init__(self, fused: FusedLinear, position: int) -> None:
        super().__init__()
        self.fused = fused
        self.position = position

    def forward(self, x: Tensor) -> Tensor:
        return self.fused.take(x, self.position)


def fuse_linears(model: nn.Module) -> int:
    """Fuses in place what can be, and returns how many groups that was.

    Layers are fused that are all `nn.Linear` of one type or all `QuantizedLinear`, and agree on having a bias. Quantized ones take the most
    bits that one of them has.
    """
    num_fused = 0
    for parent in list(model.modules()):
        for names in GROUPS:
            layers = [getattr(parent, name, None) for name in names]
            if any(reads_weight(type(parent), name) for name in names):  # type: ignore[arg-type]
                continue
            fused = _fused(layers)
            if fused is None:
                continue
            for position, name in enumerate(names):
                setattr(parent, name, FusedPart(fused, position))
            num_fused += 1
    return num_fused


def _fused(layers: Sequence[nn.Module | None]) -> FusedLinear | None:
    """These layers as one; None where they are not of one kind."""
    quantized = [layer for layer in layers if isinstance(layer, QuantizedLinear)]
    if len(quantized) == len(layers):
        bits = max(layer.bits for layer in quantized)
        alike = [layer.in_bits(bits) for layer in quantized]
        return FusedLinear(QuantizedLinear.joined(alike), [layer.out_features for layer in alike]) if can_join(alike) else None
    linears = [layer for layer in layers if type(layer) is nn.Linear]
    if len(linears) < len(layers) or len({(linear.in_features, linear.bias is None, linear.weight.dtype) for linear in linears}) > 1:
        return None
    first, sizes = linears[0], [linear.out_features for linear in linears]
    whole = nn.Linear(first.in_features, sum(sizes), bias=first.bias is not None, device="meta")
    whole.weight = _joined([linear.weight for linear in linears])
    if first.bias is not None:
        whole.bias = _joined([linear.bias for linear in linears])
    return FusedLinear(whole, sizes)


def _joined(parameters: Sequence[Tensor]) -> nn.Parameter:
    return nn.Parameter(torch.cat([parameter.detach() for parameter in parameters]), requires_grad=False)
