"""Linear layers and embeddings on the CPU, over packed weights: bfloat16 in panels, or quantized in 4, 5 or 8 bits.

bfloat16 weights are packed in panels for a native kernel, others in oneDNN's layout, which else reorders them on every call or falls
back to slower loops (`benchmarks/linear.py`). The plain copy is dropped, so memory stays the same."""

import functools
import inspect
import itertools
import linecache
import weakref
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from penstock.engine.native.library import native_library
from penstock.engine.native.threads import by_rows

PANEL = 32


def can_panel(weight_OI: Tensor, bias: Tensor | None = None) -> bool:
    """Whether there is a kernel here that takes a weight and bias of this type and shape."""
    is_suited = weight_OI.dtype == torch.bfloat16 and weight_OI.shape[0] % 16 == 0 and weight_OI.shape[1] % 2 == 0
    return is_suited and (bias is None or bias.dtype == weight_OI.dtype) and native_library() is not None


def panels(weight_OI: Tensor) -> Tensor:
    """The weight as [outputs / 32 rounded up, inputs / 2, 32, 2]: pairs of inputs side by side, zeros for missing outputs."""
    (panels_PIOE,) = by_rows(_panels, [weight_OI], PANEL)
    return panels_PIOE


def _panels(weight_OI: Tensor) -> tuple[Tensor]:
    padded_OI = nn.functional.pad(weight_OI, (0, 0, 0, -weight_OI.shape[0] % PANEL))
    pairs_OI = padded_OI.view(torch.int32)  # copied as one number each, which takes half the time
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


GROUP_SIZE = 32
# Rows of a weight that lie side by side, one in each lane of a vector.
TILE = 16
# A lane takes four products at a time.
STEP = 4
# A torch fallback inflates this many tiles at a time.
TILES_AT_ONCE = 64


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """O rows of I weights, I a multiple of 32: weight[o, i] = scales[o, i // 32] * codes[o, i] + minimums[o, i // 32].

    `codes_OI` is uint8, one code below 2**bits in each byte; `bits` is 4, 5 or 8. `scales_OG` and `minimums_OG` are float16 [O, I / 32].
    GGUF's Q4_0, Q4_1, Q5_0, Q5_1, Q8_0 and IQ4_NL are exactly of this form. Minimums of 8 bits are always -128 scales.
    """

    bits: int
    codes_OI: Tensor
    scales_OG: Tensor
    minimums_OG: Tensor

    @property
    def is_symmetric(self) -> bool:
        """Whether all that minimums do is make the codes signed."""
        return not self.scales_OG.is_meta and torch.equal(self.minimums_OG, signing_minimums(self.bits, self.scales_OG))

    def widened(self, bits: int) -> "QuantizedWeight":
        """The weight in so many bits, which are more: exactly the same where it is symmetric, else rounded again."""
        if not self.is_symmetric:
            return quantized(self.dequantized(), bits)
        codes_OI = self.codes_OI + (2 ** (bits - 1) - 2 ** (self.bits - 1))
        return QuantizedWeight(bits, codes_OI, self.scales_OG, signing_minimums(bits, self.scales_OG))

    def dequantized(self) -> Tensor:
        """Float32 [O, I]."""
        codes_OGS: Tensor = self.codes_OI.unflatten(1, (-1, GROUP_SIZE)).float()  # type: ignore[no-untyped-call]
        return (codes_OGS * self.scales_OG.float()[..., None] + self.minimums_OG.float()[..., None]).flatten(1)


def signing_minimums(bits: int, scales_OG: Tensor) -> Tensor:
    """Those with which half of the codes stand for what is less than zero."""
    return scales_OG * float(-(2 ** (bits - 1)))


def quantized(weight_OI: Tensor, bits: int) -> QuantizedWeight:
    """Rounds each group between its extremes: to 16 or 32 levels for 4 or 5 bits, and to 255 levels around zero for 8, as GGUF's Q4_1, Q5_1
    and Q8_0 do.
    """
    return QuantizedWeight(bits, *by_rows(functools.partial(_quantized, bits=bits), [weight_OI]))


def _quantized(weight_OI: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales and minimums."""
    groups_OGS: Tensor = weight_OI.float().unflatten(1, (-1, GROUP_SIZE))  # type: ignore[no-untyped-call]
    if bits == 8:
        scales_OG = (groups_OGS.abs().amax(-1) / 127).half()
        minimums_OG = signing_minimums(bits, scales_OG)
    else:
        low_OG, high_OG = groups_OGS.aminmax(dim=-1)
        scales_OG = ((high_OG - low_OG) / (2**bits - 1)).half()
        minimums_OG = low_OG.half()
    # Codes go by the scale and minimum as they were rounded; a group of equal weights has none to speak of.
    steps_OG = torch.where(scales_OG > 0, scales_OG.float(), 1.0)
    codes_OGS = ((groups_OGS - minimums_OG.float()[..., None]) / steps_OG[..., None]).round().clamp(0, 2**bits - 1)
    return codes_OGS.to(torch.uint8).flatten(1), scales_OG, minimums_OG


def stacked(weights: Sequence[QuantizedWeight]) -> QuantizedWeight:
    """One below the other: the weight of a layer that computes all of theirs. They agree on bits and inputs."""
    (bits,) = {weight.bits for weight in weights}
    return QuantizedWeight(
        bits,
        torch.cat([weight.codes_OI for weight in weights]),
        torch.cat([weight.scales_OG for weight in weights]),
        torch.cat([weight.minimums_OG for weight in weights]),
    )


_library.define("quantized_linear(Tensor x, Tensor blocks, Tensor? bias, SymInt out_features) -> Tensor")  # type: ignore[no-untyped-call]


@torch.library.impl(_library, "quantized_linear", "CPU")
def _quantized_linear(x: Tensor, blocks_TGB: Tensor, bias: Tensor | None, out_features: int) -> Tensor:
    library = native_library()
    if library is None:
        return torch_linear(x, blocks_TGB, bias, out_features)
    if x.dtype not in (torch.bfloat16, torch.float32):
        return _quantized_linear(x.float(), blocks_TGB, None if bias is None else bias.float(), out_features).to(x.dtype)
    assert blocks_TGB.is_contiguous()
    assert x.shape[-1] == blocks_TGB.shape[1] * GROUP_SIZE
    assert bias is None or bias.dtype == x.dtype
    x = x.contiguous()
    out = x.new_empty(*x.shape[:-1], out_features)
    library.penstock_quantized_linear(
        out.data_ptr(),
        x.data_ptr(),
        blocks_TGB.data_ptr(),
        None if bias is None else bias.data_ptr(),
        x.shape[:-1].numel(),
        x.shape[-1],
        out_features,
        num_bits(blocks_TGB),
        x.dtype == torch.bfloat16,
    )
    return out


@torch.library.register_fake("penstock::quantized_linear", lib=_library)  # type: ignore[untyped-decorator]
def _quantized_linear_shape(x: Tensor, blocks_TGB: Tensor, bias: Tensor | None, out_features: int) -> Tensor:
    return x.new_empty(*x.shape[:-1], out_features)


class QuantizedLinear(nn.Module):
    """[..., in_features] of any float type to [..., out_features] of the same.

    `blocks`, a buffer, is uint8 [out_features / 16 rounded up, in_features / 32, bytes], and a block holds 16 rows' codes of a group of 32
    columns, then their 16 scales and for less than 8 bits 16 minimums.
    """

    blocks: Tensor

    def __init__(self, weight: QuantizedWeight, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.codes_OI.shape
        self.bits = weight.bits
        self.register_buffer("blocks", pack(weight), persistent=False)
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)

    @classmethod
    def joined(cls, layers: Sequence["QuantizedLinear"]) -> "QuantizedLinear":
        """One layer that computes all of theirs, for layers that `can_join`."""
        whole = cls.__new__(cls)
        nn.Module.__init__(whole)
        whole.in_features, whole.bits = layers[0].in_features, layers[0].bits
        whole.out_features = sum(layer.out_features for layer in layers)
        whole.register_buffer("blocks", torch.cat([layer.blocks for layer in layers]), persistent=False)
        biases: list[Tensor] = [layer.bias for layer in layers if layer.bias is not None]
        whole.bias = nn.Parameter(torch.cat(biases), requires_grad=False) if biases else None
        return whole

    def in_bits(self, bits: int) -> "QuantizedLinear":
        """This layer, or one of so many bits, which are more, as `QuantizedWeight.widened` has it."""
        return self if bits == self.bits else QuantizedLinear(unpack(self.blocks, self.out_features).widened(bits), self.bias)

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.penstock.quantized_linear(x, self.blocks, self.bias, self.out_features)  # type: ignore[no-any-return]


def pack(weight: QuantizedWeight) -> Tensor:
    """The weight as the kernel reads it, from the beginning to the end: what `QuantizedLinear.blocks` is.

    Codes of a block lie as [8, 16, 4]: four columns of each row, eight times. Of 4 and 5 bits, byte i holds the lower four of code i and in
    its upper half those of code i + 256; then come the fifth bits, eight in a byte. Missing rows of the last tile are zeros.
    """
    (blocks_TGB,) = by_rows(functools.partial(_pack, bits=weight.bits), [weight.codes_OI, weight.scales_OG, weight.minimums_OG], TILE)
    return blocks_TGB


def _pack(*parts: Tensor, bits: int) -> tuple[Tensor]:
    num_missing = -parts[0].shape[0] % TILE
    codes_OI, scales_OG, minimums_OG = (nn.functional.pad(part, (0, 0, 0, num_missing)) for part in parts)
    num_tiles, num_groups = codes_OI.shape[0] // TILE, scales_OG.shape[1]
    codes_TGC = codes_OI.view(num_tiles, TILE, num_groups, GROUP_SIZE // STEP, STEP).permute(0, 2, 3, 1, 4).flatten(2)
    code_bytes = [codes_TGC]
    if bits < 8:
        low, high = (codes_TGC & 15).chunk(2, dim=-1)
        code_bytes = [low | high << 4]
    if bits == 5:
        code_bytes.append(packed_bits(codes_TGC >> 4))
    numbers = [scales_OG, minimums_OG] if bits < 8 else [scales_OG]
    bytes_TGB = [part.view(num_tiles, TILE, num_groups).transpose(1, 2).contiguous().view(torch.uint8) for part in numbers]
    return (torch.cat([*code_bytes, *bytes_TGB], dim=-1),)


def packed_bits(bits_N: Tensor) -> Tensor:
    """Zeros and ones [..., 8 n] as bytes [..., n], the first of eight in the lowest place."""
    eights: Tensor = bits_N.unflatten(-1, (-1, 8))  # type: ignore[no-untyped-call]
    return (eights << torch.arange(8, dtype=torch.uint8, device=bits_N.device)).sum(-1, dtype=torch.uint8)


def unpacked_bits(bytes_N: Tensor) -> Tensor:
    """What `packed_bits` packed."""
    return (bytes_N[..., None] >> torch.arange(8, dtype=torch.uint8, device=bytes_N.device) & 1).flatten(-2)


def _codes(blocks_TGB: Tensor) -> Tensor:
    """The codes of blocks [..., bytes], as [..., 8, 16, 4]."""
    bits, num_half_bytes = num_bits(blocks_TGB), TILE * GROUP_SIZE // 2
    if bits == 8:
        codes = blocks_TGB[..., : 2 * num_half_bytes]
    else:
        codes = torch.cat([blocks_TGB[..., :num_half_bytes] & 15, blocks_TGB[..., :num_half_bytes] >> 4], dim=-1)
    if bits == 5:
        codes = codes | unpacked_bits(blocks_TGB[..., num_half_bytes : num_half_bytes * 5 // 4]) << 4
    return codes.unflatten(-1, (GROUP_SIZE // STEP, TILE, STEP))  # type: ignore[no-untyped-call, no-any-return]


def unpack(blocks_TGB: Tensor, out_features: int) -> QuantizedWeight:
    """The weight that `pack` made the blocks from."""
    num_tiles, num_groups, _ = blocks_TGB.shape
    bits = num_bits(blocks_TGB)
    numbers_TGN = blocks_TGB[..., TILE * GROUP_SIZE * bits // 8 :].contiguous().view(torch.float16)
    codes = _codes(blocks_TGB).permute(0, 3, 1, 2, 4)
    codes_OI = codes.reshape(num_tiles * TILE, num_groups * GROUP_SIZE)[:out_features]
    scales_OG, *minimums_OG = (
        part.transpose(1, 2).flatten(0, 1)[:out_features] for part in numbers_TGN.chunk(2 if bits < 8 else 1, dim=-1)
    )
    return QuantizedWeight(bits, codes_OI, scales_OG, minimums_OG[0] if minimums_OG else signing_minimums(bits, scales_OG))


def num_bits(blocks_TGB: Tensor) -> int:
    return {_block_bytes(bits): bits for bits in (4, 5, 8)}[blocks_TGB.shape[-1]]


def _block_bytes(bits: int) -> int:
    return TILE * (GROUP_SIZE * bits // 8 + (2 if bits == 8 else 4))


def torch_linear(x: Tensor, blocks_TGB: Tensor, bias: Tensor | None, out_features: int) -> Tensor:
    """Without the kernel: slower by far, since every call inflates the weight, a part at a time."""
    parts = []
    for first in range(0, blocks_TGB.shape[0], TILES_AT_ONCE):
        blocks = blocks_TGB[first : first + TILES_AT_ONCE]
        weight = unpack(blocks, min(out_features - first * TILE, blocks.shape[0] * TILE))
        parts.append(x.float() @ weight.dequantized().T)
    out = torch.cat(parts, dim=-1)
    return (out if bias is None else out + bias).to(x.dtype)


def can_join(layers: Sequence[QuantizedLinear]) -> bool:
    """Whether these layers could be one: they end where tiles end, and agree on inputs, bits and having a bias."""
    if any(layer.out_features % TILE for layer in layers[:-1]):
        return False
    return len({(layer.in_features, layer.bits, layer.bias is None) for layer in layers}) == 1


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
        return QuantizedLinear(quantized(linear.weight.detach(), bits), linear.bias)

    return replace_linears(model, quantize, skip=skip)


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
    blocks_NGB = blocks_TGB[tiles_N]
    order_N = torch.arange(len(rows_N))
    codes_NGCS = _codes(blocks_NGB)[order_N, :, :, lanes_N]
    numbers_NGKLB = blocks_NGB[..., TILE * GROUP_SIZE * bits // 8 :].unflatten(-1, (-1, TILE, 2))  # type: ignore[no-untyped-call]
    scales_NG, *minimums_NG = numbers_NGKLB[order_N, :, :, lanes_N].contiguous().view(torch.float16)[..., 0].unbind(-1)
    return QuantizedWeight(bits, codes_NGCS.flatten(1), scales_NG, minimums_NG[0] if minimums_NG else signing_minimums(bits, scales_NG))
