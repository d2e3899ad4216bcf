"""Several operations of a model's own code in one: projections of one input, norms, rotary embeddings.

One matrix multiplication replaces those of query, key and value, or of gate and up; on a GPU, one kernel replaces the seven of a norm and
the ten of a rotation.
"""

import functools
from collections.abc import Callable, Sequence
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from penstock.engine.kernels.launch import rms_norm, rotate
from penstock.engine.model.linear import QuantizedLinear, can_join, reads_weight

# What architectures call projections of one and the same input.
FUSED_PROJECTIONS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
MAX_ROUNDINGS = 4  # that a result may differ by: some models round once, others twice
ROTATION_FUNCTION = "apply_rotary_pos_emb"  # what transformers calls the function, in every module of a model that has one
ROTATION_TOLERANCE = 1e-5


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
    """Takes the place of one of the linear layers."""

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
        for names in FUSED_PROJECTIONS:
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
    """The layers as one; None where they are not of one kind."""
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


def fuse_norms(model: nn.Module) -> int:
    """Replaces in place what normalizes by root mean square, and returns how many modules that were.

    Which modules do is tested: of each class, one of each size computes random numbers both ways. The others stay as they are,
    such as those that add one to their weights.
    """
    is_alike: dict[tuple[type[nn.Module], int], bool] = {}
    num_fused = 0
    for module in model.modules():
        weight, epsilon = getattr(module, "weight", None), getattr(module, "variance_epsilon", getattr(module, "eps", None))
        if not type(module).__name__.endswith("RMSNorm") or not isinstance(weight, Tensor) or weight.dim() != 1 or epsilon is None:
            continue
        fused = functools.partial(rms_norm, weight=weight, epsilon=float(epsilon))
        kind = (type(module), len(weight))
        if kind not in is_alike:
            is_alike[kind] = _norms_agree(module, fused, weight)
        if is_alike[kind]:
            module.forward = fused
            num_fused += 1
    return num_fused


@torch.inference_mode()
def _norms_agree(module: nn.Module, fused: "functools.partial[Tensor]", weight: Tensor) -> bool:
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(2, 3, len(weight), generator=generator).to(weight.device, weight.dtype) * 3
    expected, got = module(states), fused(states)
    if not isinstance(expected, Tensor) or expected.shape != got.shape or expected.dtype != got.dtype:
        return False
    bound = MAX_ROUNDINGS * torch.finfo(got.dtype).eps
    return bool(((got.float() - expected.float()).abs() <= bound * expected.float().abs() + bound).all())


Rotation = Callable[..., tuple[Tensor, Tensor]]


def fuse_rotary(model: nn.Module) -> int:
    """Replaces in place what rotates queries and keys, and returns in how many modules.

    A module's `forward` is given another function by that name; the model's code and other models keep theirs. Whether it means the same is
    tested on random numbers: some models rotate other pairs, or a part of the head alone, and stay as they are.
    """
    num_fused = 0
    is_alike: dict[tuple[Rotation, int], bool] = {}
    for module in model.modules():
        forward = type(module).forward
        size = getattr(module, "head_dim", None)
        if not isinstance(forward, FunctionType) or ROTATION_FUNCTION not in forward.__code__.co_names or not isinstance(size, int):
            continue
        own = forward.__globals__[ROTATION_FUNCTION]
        if (own, size) not in is_alike:
            is_alike[own, size] = _rotations_agree(own, size, next(module.parameters()).device)
        if is_alike[own, size]:
            namespace = {**forward.__globals__, ROTATION_FUNCTION: _rotation(own)}
            copied = FunctionType(forward.__code__, namespace, forward.__name__, forward.__defaults__, forward.__closure__)
            copied.__kwdefaults__ = forward.__kwdefaults__
            module.forward = MethodType(copied, module)
            num_fused += 1
    return num_fused


def _rotation(own: Rotation) -> Rotation:
    """The kernel, or the model's own function for calls that the kernel does not take, such as rotations of a part of each head."""

    def apply(query: Tensor, key: Tensor, cosines: Tensor, sines: Tensor, *rest: Any, **named: Any) -> tuple[Tensor, Tensor]:
        is_whole = cosines.shape == sines.shape == (1, *query.shape[2:]) and len(query) == 1
        is_dense = query.stride(-1) == key.stride(-1) == cosines.stride(-1) == sines.stride(-1) == 1
        if is_whole and is_dense and not rest and not named:
            return rotate(query, key, cosines, sines)
        return own(query, key, cosines, sines, *rest, **named)

    return apply


@torch.inference_mode()
def _rotations_agree(own: Rotation, size: int, device: torch.device) -> bool:
    # In float32, so that rounding hides nothing.
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(1, heads, 3, size, generator=generator).to(device) for heads in (4, 2))
    cosines, sines = (torch.randn(1, 3, size, generator=generator).to(device) for _ in range(2))
    try:
        expected = own(query, key, cosines, sines)
    except (TypeError, RuntimeError):  # it wants other arguments, or shapes
        return False
    pairs = zip(expected, rotate(query, key, cosines, sines), strict=True)
    return all(
        one.shape == other.shape and torch.allclose(one, other, atol=ROTATION_TOLERANCE, rtol=ROTATION_TOLERANCE) for one, other in pairs
    )
