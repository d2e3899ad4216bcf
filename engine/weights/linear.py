"""Linear layers and embeddings over packed weights: on the CPU of bfloat16 in panels, on any device quantized ones (`packed.py`).

bfloat16 weights are packed in panels for a native kernel, others in oneDNN's layout, which else reorders them on every call or falls
back to slower loops (`benchmarks/linear.py`). The plain copy is dropped, so memory stays the same."""

import ctypes
import functools
import inspect
import itertools
import linecache
import weakref
from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor, nn

from penstock.engine.kernels import quantized as cuda
from penstock.engine.native.runtime import by_rows, native_library
from penstock.engine.weights.packed import GROUP_SIZE, TILE, TYPES, PackedWeight, pack, quantized

PANEL = 32


def can_panel(weight_OI: Tensor, bias: Tensor | None = None) -> bool:
    """Whether there is a kernel here that takes a weight and bias of this type and shape."""
    is_suited = weight_OI.dtype == torch.bfloat16 and weight_OI.shape[0] % 16 == 0 and weight_OI.shape[1] % 2 == 0
    return is_suited and (bias is None or bias.dtype == weight_OI.dtype) and native_library() is not None


def panels(weight_OI: Tensor) -> Tensor:
    """A weight of 16 bits or 8 as [outputs / 32 rounded up, inputs / 2, 32, 2]: pairs of inputs side by side, zeros for missing outputs."""
    (panels_PIOE,) = by_rows(_panels, [weight_OI], PANEL)
    return panels_PIOE


def _panels(weight_OI: Tensor) -> tuple[Tensor]:
    padded_OI = nn.functional.pad(weight_OI, (0, 0, 0, -weight_OI.shape[0] % PANEL))
    pairs_OI = padded_OI.view(
        torch.int32 if weight_OI.itemsize == 2 else torch.int16
    )  # copied as one number each, which takes half the time
    panels_PIO = pairs_OI.view(-1, PANEL, pairs_OI.shape[1]).transpose(1, 2).contiguous()
    return (panels_PIO.view(weight_OI.dtype).view(*panels_PIO.shape, 2),)


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
        weight_OI = linear.weight.detach()
        pack = panels if can_panel(weight_OI, linear.bias) else torch.ops.mkldnn._reorder_linear_weight
        self.keep(None if weight_OI.is_meta else pack(weight_OI))

    def keep(self, packed: Tensor | None) -> None:
        """`packed` is what `packed_weight` returns from now on; None on the meta device."""
        handle = next(_handles)
        if packed is not None:
            _packed[handle] = packed
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
    """Whether oneDNN has packed kernels for the type, on this processor."""
    if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):  # type: ignore[no-untyped-call]
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def pack_linears(model: nn.Module) -> int:
    """Replaces every `nn.Linear` on the CPU, or on the meta device in its place, and returns how many.

    A weight shared with an embedding keeps its plain copy. Layers of a type without packed kernels stay as they are, and so do those whose
    weight the model's code reads beside calling them.
    """

    def packed(linear: nn.Linear) -> nn.Module | None:
        return PackedLinear(linear) if can_panel(linear.weight, linear.bias) or can_pack(linear.weight.dtype) else None

    return replace_linears(model, packed)


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


# A torch fallback inflates this many tiles at a time.
TILES_AT_ONCE = 64

_library.define(  # type: ignore[no-untyped-call]
    "quantized_linear(Tensor x, Tensor[] blocks, int[] types, SymInt[] out_features, Tensor? bias) -> Tensor"
)


class QuantizedPart(ctypes.Structure):
    """Some of a layer's outputs, as the kernels read it: the address of their blocks, ggml's number of the type, and how many there are."""

    _fields_ = (("blocks", ctypes.c_void_p), ("type", ctypes.c_int64), ("outputs", ctypes.c_int64))


def native_parts(blocks: Sequence[Tensor], types: Sequence[int], out_features: Sequence[int]) -> "ctypes.Array[QuantizedPart]":
    parts = [QuantizedPart(each.data_ptr(), *numbers) for each, *numbers in zip(blocks, types, out_features, strict=True)]
    return (QuantizedPart * len(parts))(*parts)


@torch.library.impl(_library, "quantized_linear", "CPU")
def _quantized_linear(
    x: Tensor, blocks: Sequence[Tensor], types: Sequence[int], out_features: Sequence[int], bias: Tensor | None
) -> Tensor:
    library = native_library()
    if library is None:
        return torch_linear(x, blocks, types, out_features, bias)
    if x.dtype not in (torch.bfloat16, torch.float32):
        bias = None if bias is None else bias.float()
        return _quantized_linear(x.float(), blocks, types, out_features, bias).to(x.dtype)
    assert all(each.is_contiguous() for each in blocks)
    assert bias is None or bias.dtype == x.dtype
    x = x.contiguous()
    out = x.new_empty(*x.shape[:-1], sum(out_features))
    parts = native_parts(blocks, types, out_features)
    library.penstock_quantized_linear(
        out.data_ptr(),
        x.data_ptr(),
        ctypes.addressof(parts),
        len(parts),
        None if bias is None else bias.data_ptr(),
        x.shape[:-1].numel(),
        x.shape[-1],
        x.dtype == torch.bfloat16,
    )
    return out


@torch.library.register_fake("penstock::quantized_linear", lib=_library)  # type: ignore[untyped-decorator]
def _quantized_linear_shape(
    x: Tensor, blocks: Sequence[Tensor], types: Sequence[int], out_features: Sequence[int], bias: Tensor | None
) -> Tensor:
    return x.new_empty(*x.shape[:-1], sum(out_features))


def torch_linear(x: Tensor, blocks: Sequence[Tensor], types: Sequence[int], out_features: Sequence[int], bias: Tensor | None) -> Tensor:
    """Without the kernel: slower by far, since every call inflates the weight, a part at a time."""
    names = {type_.number: name for name, type_ in TYPES.items()}
    results = []
    for blocks_TKB, number, num_rows in zip(blocks, types, out_features, strict=True):
        for first in range(0, blocks_TKB.shape[0], TILES_AT_ONCE):
            tiles = blocks_TKB[first : first + TILES_AT_ONCE]
            packed = PackedWeight(names[number], min(num_rows - first * TILE, tiles.shape[0] * TILE), tiles)
            results.append(x.float() @ packed.unpacked().dequantized().T)
    out = torch.cat(results, dim=-1)
    return (out if bias is None else out + bias).to(x.dtype)


class QuantizedLinear(nn.Module):
    """[..., in_features] of any float type to [..., out_features] of the same, by weights of which each gives some of the outputs."""

    def __init__(self, weights: Sequence[PackedWeight], bias: Tensor | None) -> None:
        super().__init__()
        self.weights = nn.ModuleList(weights)
        self.in_features = weights[0].in_features
        self.out_features = sum(weight.out_features for weight in weights)
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)
        assert all(weight.in_features == self.in_features for weight in weights)

    @classmethod
    def joined(cls, layers: Sequence["QuantizedLinear"]) -> "QuantizedLinear":
        """One layer that computes all of theirs, for layers that `can_join`."""
        weights: list[PackedWeight] = []
        for weight in (weight for layer in layers for weight in layer.packed):
            if weights and weights[-1].can_be_followed(weight):
                before = weights.pop()
                blocks_TKB = torch.cat([before.blocks, weight.blocks])
                weights.append(PackedWeight(weight.type_name, before.out_features + weight.out_features, blocks_TKB, weight.order))
            else:
                weights.append(weight)
        biases: list[Tensor] = [layer.bias for layer in layers if layer.bias is not None]
        return cls(weights, torch.cat(biases) if biases else None)

    @property
    def packed(self) -> list[PackedWeight]:
        return list(self.weights)  # type: ignore[arg-type]

    @property
    def order(self) -> Tensor | None:
        """Int64 [in_features]: which input each column of the weights is for, where that is another order."""
        return self.packed[0].order

    def native_parts(self) -> "ctypes.Array[QuantizedPart]":
        """For as long as the layer lives."""
        return native_parts(*self._operands())

    def forward(self, x: Tensor) -> Tensor:
        ordered = x if self.order is None else x.index_select(-1, self.order)
        blocks, numbers, out_features = self._operands()
        if x.device.type == "cuda":
            return cuda.quantized_linear(ordered, blocks, [each.weight_type for each in self.packed], out_features, self.bias)
        return torch.ops.penstock.quantized_linear(ordered, blocks, numbers, out_features, self.bias)  # type: ignore[no-any-return]

    def _operands(self) -> tuple[list[Tensor], list[int], list[int]]:
        packed = self.packed
        return [each.blocks for each in packed], [each.weight_type.number for each in packed], [each.out_features for each in packed]


def can_join(layers: Sequence[QuantizedLinear]) -> bool:
    """Whether these layers could be one: they agree on inputs, the order of these, and having a bias."""
    if len({(layer.in_features, layer.bias is None, layer.order is None) for layer in layers}) > 1:
        return False
    orders = [layer.order for layer in layers if layer.order is not None and not layer.order.is_meta]
    return all(torch.equal(order, orders[0]) for order in orders)


def can_quantize() -> bool:
    """Whether there is a kernel here. Without one, quantized layers compute the same, but slowly."""
    return native_library() is not None


def quantize_linears(model: nn.Module, bits: int, *, skip: Collection[str] = ()) -> int:
    """Replaces every `nn.Linear` on the CPU, or on the meta device in its place, and returns how many.

    Layers that their parent calls by one of the names in `skip` stay as they are, and so do those whose inputs are no multiple of 32 and
    those whose weight the model's code reads beside calling them. Fuse before.
    """

    def quantize(linear: nn.Linear) -> nn.Module | None:
        if linear.in_features % GROUP_SIZE:
            return None
        return QuantizedLinear([pack(quantized(linear.weight.detach(), bits))], linear.bias)

    return replace_linears(model, quantize, skip=skip)


def embedding_scale(layer: nn.Module, dtype: torch.dtype) -> float | None:
    """What an embedding multiplies its rows by, as `dtype` has it. None for a layer that is no embedding, or does something else."""
    if type(layer) is nn.Embedding:
        return 1.0
    scale = getattr(layer, "scalar_embed_scale", None)  # Gemma's
    if not isinstance(layer, nn.Embedding) or not type(layer).__name__.endswith("ScaledWordEmbedding") or not isinstance(scale, float):
        return None
    return float(torch.tensor(scale, dtype=dtype))


class ScaledEmbedding(nn.Module):
    """Token ids of any shape [...] to rows of the weight times `scale`, [..., columns]."""

    def __init__(self, weight: Tensor, scale: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.scale = scale

    def forward(self, token_ids: Tensor) -> Tensor:
        return nn.functional.embedding(token_ids, self.weight) * self.scale


class QuantizedEmbedding(nn.Module):
    """Token ids of any shape [...] to rows of `dtype` times `scale`, [..., columns]. A tied output layer may have the same weight."""

    def __init__(self, weight: PackedWeight, dtype: torch.dtype, scale: float = 1.0) -> None:
        super().__init__()
        self.dtype = dtype
        self.weight = weight
        self.scale = scale

    def forward(self, token_ids: Tensor) -> Tensor:
        ids_N = token_ids.flatten().long().contiguous()
        if ids_N.device.type == "cuda":
            rows_NI = cuda.dequantized_rows(self.weight.blocks, self.weight.weight_type, ids_N, self.dtype)
            return self._scaled(rows_NI).view(*token_ids.shape, rows_NI.shape[1])
        library = native_library() if token_ids.device.type == "cpu" else None
        if library is None:
            rows_NI = self.weight.unpacked_rows(ids_N).dequantized()
        else:
            rows_NI = torch.empty(len(ids_N), self.weight.in_features, dtype=torch.float32)
            num_groups, type_ = self.weight.in_features // GROUP_SIZE, self.weight.weight_type
            library.penstock_quantized_rows(
                rows_NI.data_ptr(), self.weight.blocks.data_ptr(), ids_N.data_ptr(), len(ids_N), num_groups, type_.number
            )
        return self._scaled(rows_NI.to(self.dtype)).view(*token_ids.shape, rows_NI.shape[1])

    def _scaled(self, rows_NI: Tensor) -> Tensor:
        return rows_NI if self.scale == 1.0 else rows_NI * self.scale
