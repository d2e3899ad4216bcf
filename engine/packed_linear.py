"""Linear layers whose weights lie as the CPU's matrix multiplication wants them.

oneDNN reorders a plain weight on every call or falls back to slower loops; weights reordered once make the linear layers of the default
model 1.9 times as fast at 1 row, 1.5 times at 8 and 1.3 times at 32 (`benchmarks/linear.py`). The plain copy is dropped, so memory stays
the same. For up to `SMALL_ROWS` rows a kernel of our own takes a plain copy after all, where memory is no concern: it is a tenth faster.
"""

import functools
import inspect
import itertools
import weakref
from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from penstock.engine.native_library import native_library

SMALL_ROWS = 4


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """`packed` as oneDNN wants it; `plain_OI`, bfloat16 [out_features, in_features], where a second copy is kept for few rows."""

    packed: Tensor
    plain_OI: Tensor | None


# The packed weight is an opaque tensor that no compiler can look into, so the graph gets a one-element tensor holding its number here.
# An entry goes with the layer that it was made for.
_packed: dict[int, PackedWeight] = {}
_handles = itertools.count()

_library = torch.library.Library("penstock", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("packed_linear(Tensor x, Tensor handle, Tensor? bias, SymInt out_features) -> Tensor")  # type: ignore[no-untyped-call]


@torch.library.impl(_library, "packed_linear", "CPU")
def _packed_linear(x: Tensor, handle: Tensor, bias: Tensor | None, out_features: int) -> Tensor:
    weight = _packed[int(handle)]
    if weight.plain_OI is not None and 0 < x.shape[:-1].numel() <= SMALL_ROWS:
        return _small_linear(x, weight.plain_OI)
    return torch.ops.mkldnn._linear_pointwise(x, weight.packed, bias, "none", [], "")  # type: ignore[no-any-return]


def _small_linear(x: Tensor, weight_OI: Tensor) -> Tensor:
    library = native_library()
    assert library is not None
    x = x.contiguous()
    out_features, in_features = weight_OI.shape
    out = x.new_empty(*x.shape[:-1], out_features)
    num_rows = x.shape[:-1].numel()
    library.penstock_small_linear(out.data_ptr(), x.data_ptr(), weight_OI.data_ptr(), num_rows, in_features, out_features)
    return out


@torch.library.register_fake("penstock::packed_linear", lib=_library)  # type: ignore[untyped-decorator]
def _packed_linear_shape(x: Tensor, handle: Tensor, bias: Tensor | None, out_features: int) -> Tensor:
    return x.new_empty(*x.shape[:-1], out_features)


class PackedLinear(nn.Module):
    """Computes what the `nn.Linear` that it was made from computes: [..., in_features] to [..., out_features]."""

    def __init__(self, linear: nn.Linear, *, keep_plain: bool = False) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.bias = linear.bias
        handle = next(_handles)
        if not linear.weight.is_meta:
            weight_OI = linear.weight.detach()
            # A copy, not the weight itself, which may be a window into the mapped file and would keep all of it in memory.
            plain_OI = weight_OI.clone() if keep_plain and self.bias is None and can_take_few_rows(weight_OI) else None
            _packed[handle] = PackedWeight(torch.ops.mkldnn._reorder_linear_weight(weight_OI), plain_OI)
            weakref.finalize(self, _packed.pop, handle)
        self.register_buffer("handle", torch.tensor([handle]), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.penstock.packed_linear(x, self.handle, self.bias, self.out_features)  # type: ignore[no-any-return]


def can_pack(dtype: torch.dtype) -> bool:
    """Whether this build and processor have packed kernels for the type."""
    if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):  # type: ignore[no-untyped-call]
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def can_take_few_rows(weight_OI: Tensor) -> bool:
    """Whether this processor and a weight of this type and shape suit the kernel for few rows."""
    library = native_library()
    is_suited = weight_OI.dtype == torch.bfloat16 and weight_OI.shape[0] % 16 == 0 and weight_OI.shape[1] % 32 == 0
    return is_suited and library is not None and bool(library.penstock_has_small_linear())


def pack_linears(model: nn.Module, *, keep_plain: bool = False) -> int:
    """Replaces every `nn.Linear` on the CPU, or on the meta device in its place, and returns how many.

    With `keep_plain` a plain copy stays beside each packed weight, for the kernel that is faster over few rows.

    A weight shared with an embedding keeps its plain copy. Layers of a type without packed kernels stay as they are, and so do those whose
    weight the model's code reads beside calling them.
    """
    return replace_linears(model, lambda linear: PackedLinear(linear, keep_plain=keep_plain) if can_pack(linear.weight.dtype) else None)


def replace_linears(model: nn.Module, replacement: Callable[[nn.Linear], nn.Module | None], *, skip: Collection[str] = ()) -> int:
    """Puts what `replacement` returns in place of every `nn.Linear` on the CPU or the meta device, and returns how many.

    Where it returns None the layer stays. So do those whose weight the model's code reads beside calling them, and those that a parent has
    under one of the names in `skip`. What was replaced loses its weight.
    """
    places: dict[nn.Linear, list[tuple[nn.Module, str]]] = {}
    for parent in model.modules():
        for name, child in parent._modules.items():
            if type(child) is nn.Linear and child.weight.device.type in ("cpu", "meta"):
                places.setdefault(child, []).append((parent, name))
    num_replaced = 0
    for linear, parents in places.items():
        if any(name in skip or reads_weight(type(parent), name) for parent, name in parents):  # type: ignore[arg-type]
            continue
        replaced = replacement(linear)
        if replaced is None:
            continue
        linear.weight = None  # type: ignore[assignment]
        for parent, name in parents:
            setattr(parent, name, replaced)
        num_replaced += 1
    return num_replaced


@functools.cache
def reads_weight(parent: type[nn.Module], name: str) -> bool:
    """Whether the code of `parent` looks at the weight of its layer `name`, which a replacement would not have."""
    try:
        return any(f"self.{name}.weight" in inspect.getsource(base) for base in parent.__mro__ if issubclass(base, nn.Module))
    except OSError:  # a class without a source file
        return False
