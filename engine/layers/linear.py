"""Linear layers over weights packed for the CPU's matrix multiplication.

bfloat16 weights are packed in panels for a native kernel, others in oneDNN's layout, which else reorders them on every call or falls
back to slower loops (`benchmarks/linear.py`). The plain copy is dropped, so memory stays the same.
"""

import functools
import inspect
import itertools
import linecache
import weakref
from collections.abc import Callable, Collection

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


# A packed weight is nothing that a compiler can look into, so the graph gets a one-element tensor holding its number here.
# An entry goes with the layer that it was made for.
_packed: dict[int, Tensor] = {}
_handles = itertools.count()

_library = torch.library.Library("penstock", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("packed_linear(Tensor x, Tensor handle, Tensor? bias, SymInt out_features) -> Tensor")  # type: ignore[no-untyped-call]


@torch.library.impl(_library, "packed_linear", "CPU")
def _packed_linear(x: Tensor, handle: Tensor, bias: Tensor | None, out_features: int) -> Tensor:
    weight = _packed[int(handle)]
    if not weight.is_mkldnn:
        return panel_linear(x, weight, bias, out_features)
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")  # type: ignore[no-any-return]


@torch.library.register_fake("penstock::packed_linear", lib=_library)  # type: ignore[untyped-decorator]
def _packed_linear_shape(x: Tensor, handle: Tensor, bias: Tensor | None, out_features: int) -> Tensor:
    return x.new_empty(*x.shape[:-1], out_features)


class PackedLinear(nn.Module):
    """Computes what the `nn.Linear` that it was made from computes: [..., in_features] to [..., out_features]."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.bias = linear.bias
        handle = next(_handles)
        if not linear.weight.is_meta:
            weight_OI = linear.weight.detach()
            is_for_panels = can_panel(weight_OI) and (linear.bias is None or linear.bias.dtype == weight_OI.dtype)
            _packed[handle] = panels(weight_OI) if is_for_panels else torch.ops.mkldnn._reorder_linear_weight(weight_OI)
            weakref.finalize(self, _packed.pop, handle)
        self.register_buffer("handle", torch.tensor([handle]), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.penstock.packed_linear(x, self.handle, self.bias, self.out_features)  # type: ignore[no-any-return]


def packed_weight(linear: PackedLinear) -> Tensor:
    """In panels, or oneDNN's own (`is_mkldnn`)."""
    handle = linear.handle
    assert isinstance(handle, Tensor)
    return _packed[int(handle)]


def can_pack(dtype: torch.dtype) -> bool:
    """Whether this build and processor have packed kernels for the type."""
    if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):  # type: ignore[no-untyped-call]
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def pack_linears(model: nn.Module) -> int:
    """Replaces every `nn.Linear` on the CPU, or on the meta device in its place, and returns how many.

    A weight shared with an embedding keeps its plain copy. Layers of a type without packed kernels stay as they are, and so do those whose
    weight the model's code reads beside calling them.
    """
    return replace_linears(model, lambda linear: PackedLinear(linear) if can_pack(linear.weight.dtype) else None)


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
    wanted = f"self.{name}.weight"
    # Finding a class in its file takes a parser and a tenth of a second, and most files have no such line anywhere.
    bases = [base for base in parent.__mro__ if issubclass(base, nn.Module) and wanted in _file_of(base)]  # type: ignore[arg-type]
    try:
        return any(wanted in inspect.getsource(base) for base in bases)
    except OSError:  # a class without a source file
        return False


@functools.cache
def _file_of(cls: type) -> str:
    """The text of the file that a class is from; empty without one."""
    try:
        return "".join(linecache.getlines(inspect.getsourcefile(cls) or ""))
    except TypeError:
        return ""
