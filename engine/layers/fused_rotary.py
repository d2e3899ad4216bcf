"""One kernel in place of the ten that a model's own code takes to rotate queries and keys, on a GPU."""

from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from penstock.engine.kernels.layers import rotate

NAME = "apply_rotary_pos_emb"  # what transformers calls the function, in every module of a model that has one
TOLERANCE = 1e-5

Rotation = Callable[..., tuple[Tensor, Tensor]]


def fuse_rotary(model: nn.Module) -> int:
    """Replaces in place what rotates queries and keys, and returns in how many modules.

    A module's `forward` is given another function by that name; the model's code and other models keep theirs. Whether it means the same is
    tried on random numbers: some models rotate other pairs, or a part of the head alone, and stay as they are.
    """
    num_fused = 0
    is_alike: dict[tuple[Rotation, int], bool] = {}
    for module in model.modules():
        forward = type(module).forward
        size = getattr(module, "head_dim", None)
        if not isinstance(forward, FunctionType) or NAME not in forward.__code__.co_names or not isinstance(size, int):
            continue
        own = forward.__globals__[NAME]
        if (own, size) not in is_alike:
            is_alike[own, size] = _rotations_agree(own, size, next(module.parameters()).device)
        if is_alike[own, size]:
            namespace = {**forward.__globals__, NAME: _rotation(own)}
            copied = FunctionType(forward.__code__, namespace, forward.__name__, forward.__defaults__, forward.__closure__)
            copied.__kwdefaults__ = forward.__kwdefaults__
            module.forward = MethodType(copied, module)
            num_fused += 1
    return num_fused


def _rotation(own: Rotation) -> Rotation:
    """The kernel, and the model's own function for calls that it is not made for, as where a part of each head is rotated."""

    def apply(query: Tensor, key: Tensor, cosines: Tensor, sines: Tensor, *rest: Any, **named: Any) -> tuple[Tensor, Tensor]:
        is_whole = cosines.shape == sines.shape == (1, *query.shape[2:]) and len(query) == 1
        is_dense = query.stride(-1) == key.stride(-1) == cosines.stride(-1) == sines.stride(-1) == 1
        if is_whole and is_dense and not rest and not named:
            return rotate(query, key, cosines, sines)
        return own(query, key, cosines, sines, *rest, **named)

    return apply


@torch.inference_mode()
def _rotations_agree(own: Rotation, size: int, device: torch.device) -> bool:
    """In float32, where nothing hides behind rounding."""
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(1, heads, 3, size, generator=generator).to(device) for heads in (4, 2))
    cosines, sines = (torch.randn(1, 3, size, generator=generator).to(device) for _ in range(2))
    try:
        expected = own(query, key, cosines, sines)
    except (TypeError, RuntimeError):  # it wants other arguments, or shapes
        return False
    pairs = zip(expected, rotate(query, key, cosines, sines), strict=True)
    return all(one.shape == other.shape and torch.allclose(one, other, atol=TOLERANCE, rtol=TOLERANCE) for one, other in pairs)
