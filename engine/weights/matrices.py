"""The quantized matrices of GGUF files: their blocks, read exactly, and which of a converted model's matrices they are."""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from penstock.engine.native.runtime import by_rows
from penstock.engine.weights.experts import expert_matrices
from penstock.engine.weights.packed import TILE, TYPES, PackedWeight, QuantizedWeight, WeightType, pack, quantized, unpacked_bits
from penstock.engine.weights.quantization import StoredWeight, leave_out

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType, ReaderTensor
    from transformers import PreTrainedModel

_PLAIN_TYPES = ("F64", "F32", "F16", "BF16")
# How many rows are looked at at a time, which bounds the memory that it takes.
CHUNK_ROWS = 4096
_INTEGERS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}


def is_quantized(tensor: "ReaderTensor") -> bool:
    """Whether the file holds a matrix there, in fewer bits than plain numbers have."""
    return len(tensor.shape) == 2 and tensor.tensor_type.name not in _PLAIN_TYPES


@dataclass(frozen=True, slots=True)
class ExpertTensor:
    """One expert's matrix of a tensor that holds those of all."""

    data: Any
    tensor_type: Any


def dequantized(tensor: "ReaderTensor | ExpertTensor") -> Tensor:
    """Float32 [O, I]: what the file's codes stand for."""
    import gguf

    return torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type))


def read_blocks(tensor: "ReaderTensor | ExpertTensor") -> QuantizedWeight:
    """The weight in a quantized matrix of the file: exactly, where the type is one of `TYPES` or Q3_K; others are rounded to 8 bits."""
    kind = tensor.tensor_type.name
    if kind == "Q3_K":
        return _read_q3_k(torch.from_numpy(np.require(tensor.data, requirements="W")))
    if kind not in TYPES:
        return quantized(dequantized(tensor), 8)
    num_bytes = TYPES[kind].block_bytes // TILE
    blocks_OKB = torch.from_numpy(np.require(tensor.data, requirements="W")).unflatten(1, (-1, num_bytes))  # type: ignore[no-untyped-call]
    return READERS.get(kind, _read_flat)(TYPES[kind], blocks_OKB)


def _stored_rows_of(tensor: "ReaderTensor | ExpertTensor", rows_O: Tensor) -> StoredWeight:
    """The matrix with its rows in this order: read and packed some rows at a time, from the file's cache pages to the kernels' blocks."""
    types: set[str] = set()

    def pack_rows(numbers_O1: Tensor) -> tuple[Tensor]:
        packed = pack(read_blocks(ExpertTensor(tensor.data[numbers_O1[:, 0].numpy()], tensor.tensor_type)))
        types.add(packed.type_name)
        return (packed.blocks,)

    (blocks_TKB,) = by_rows(pack_rows, [rows_O[:, None]], TILE, row_bytes=tensor.data[:1].nbytes)
    (type_name,) = types
    return StoredWeight(PackedWeight(type_name, len(rows_O), blocks_TKB), tensor.tensor_type.name)


def _read_flat(type_: WeightType, blocks_OGB: Tensor) -> QuantizedWeight:
    """Format: ggml's block_q4_0 (scale, 16 bytes of codes from 0 to 15 that mean -8 to 7), block_q4_1 (scale, minimum, 16 bytes of codes),
    block_q5_0 (scale, 4 bytes of fifth bits, 16 bytes of the other four; the codes mean -16 to 15), block_q5_1 (scale, minimum, then the
    same), block_q8_0 (scale, 32 signed bytes) and block_iq4_nl (like block_q4_0, the codes being numbers of levels). Byte i of 4-bit codes
    holds weight i and in its upper half weight i + 16.
    """
    # Of 8 bits, two's complement moved up by 128.
    codes_OGS = blocks_OGB[..., 2:] ^ 128 if type_.bits == 8 else _nibbles(blocks_OGB[..., -16:])
    if type_.bits == 5:
        codes_OGS = codes_OGS | unpacked_bits(blocks_OGB[..., -20:-16], 1) << 4
    minimums_OG = _half(blocks_OGB, 2) if type_.has_minimums else None
    return QuantizedWeight(type_, codes_OGS.flatten(1), _half(blocks_OGB, 0), minimums_OG)


def _read_q4_k(type_: WeightType, blocks_OKB: Tensor) -> QuantizedWeight:
    """Format: ggml's block_q4_K, 256 weights in 8 groups of 32: a factor of the scales and one of the minimums (float16), 12 bytes with 8
    scales and 8 minimums of 6 bits, 128 bytes of codes. Of the 12 bytes, the first 4 hold the scales of groups 0 to 3, the next 4 their
    minimums, the last 4 the lower halves of the other groups' scales and minimums, whose two upper bits are those of the first 8 bytes.
    Byte i of 32 bytes of codes holds weight i of a group and in its upper half weight i of the next. block_q5_K has 32 bytes of fifth bits
    before the codes: bit g of byte i is that of weight i of group g.
    """
    low_OK4, middle_OK4, high_OK4 = blocks_OKB[..., 4:16].split(4, dim=-1)  # type: ignore[no-untyped-call]
    scales_OK8 = torch.cat([low_OK4 & 63, high_OK4 & 15 | low_OK4 >> 6 << 4], dim=-1)
    minimums_OK8 = torch.cat([middle_OK4 & 63, high_OK4 >> 4 | middle_OK4 >> 6 << 4], dim=-1)
    codes_OKPS = _nibbles(blocks_OKB[..., -128:].unflatten(-1, (4, 32)))  # type: ignore[no-untyped-call]
    if type_.bits == 5:
        fifth_bits_OK8S = blocks_OKB[..., None, 16:48] >> torch.arange(8, dtype=torch.uint8)[:, None] & 1
        codes_OKPS = codes_OKPS | fifth_bits_OK8S.flatten(-2).unflatten(-1, (4, 64)) << 4  # type: ignore[no-untyped-call]
    factors_OKF = torch.stack([_half(blocks_OKB, 0), -_half(blocks_OKB, 2)], dim=-1)
    return QuantizedWeight(type_, codes_OKPS.flatten(1), scales_OK8.flatten(1), minimums_OK8.flatten(1), factors_OKF)


def _read_q6_k(type_: WeightType, blocks_OKB: Tensor) -> QuantizedWeight:
    """Format: ggml's block_q6_K, 256 weights in 16 groups of 16: 128 bytes of the lower four bits of codes, 64 of the upper two, 16 scales
    (signed bytes), a factor (float16). Of either half of the weights, byte i of 64 holds weight i and in its upper half weight i + 64; byte
    i of 32 holds the upper bits of the weights i, i + 32, i + 64 and i + 96.
    """
    lower_OKHS = _nibbles(blocks_OKB[..., :128].unflatten(-1, (2, 64)))  # type: ignore[no-untyped-call]
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8)[:, None]
    upper_OKHS = (blocks_OKB[..., 128:192].unflatten(-1, (2, 1, 32)) >> shifts & 3).flatten(-2)  # type: ignore[no-untyped-call]
    scales_OG = blocks_OKB[..., 192:208].flatten(1).view(torch.int8)
    return QuantizedWeight(type_, (lower_OKHS | upper_OKHS << 4).flatten(1), scales_OG, factors_OKF=_half(blocks_OKB, 208)[..., None])


def _read_q3_k(rows_OB: Tensor) -> QuantizedWeight:
    """As Q6_K, whose codes and scales include its own.

    Format: ggml's block_q3_K, 256 weights in 16 groups of 16: 32 bytes of third bits, 64 of the other two of codes, 12 of scales, a factor
    (float16). Bit g of byte i is that of weight 32 g + i. Of either half of the weights, byte i of 32 holds the weights i, i + 32, i + 64
    and i + 96. Codes are 4 more than what they stand for. Scales have 6 bits and are 32 more: the lower four of the scales s and s + 8 in
    byte s of 8, the upper two of s, s + 4, s + 8 and s + 12 in byte s of 4.
    """
    blocks_OKB = rows_OB.unflatten(1, (-1, 110))  # type: ignore[no-untyped-call]
    third_OK8S = blocks_OKB[..., None, :32] >> torch.arange(8, dtype=torch.uint8)[:, None] & 1
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8)[:, None]
    lower_OKHS = (blocks_OKB[..., 32:96].unflatten(-1, (2, 1, 32)) >> shifts & 3).flatten(-3)
    upper_OK16 = (blocks_OKB[..., None, 104:108] >> shifts & 3).flatten(-2)
    scales_OG = (_nibbles(blocks_OKB[..., 96:104]) | upper_OK16 << 4).flatten(1).view(torch.int8) - 32
    codes_OI = (lower_OKHS | third_OK8S.flatten(-2) << 2).flatten(1) + (32 - 4)
    return QuantizedWeight(TYPES["Q6_K"], codes_OI, scales_OG, factors_OKF=_half(blocks_OKB, 108)[..., None])


def _read_iq4_xs(type_: WeightType, blocks_OKB: Tensor) -> QuantizedWeight:
    """Format: ggml's block_iq4_xs, 256 weights in 8 groups of 32: a factor (float16), the upper two bits of 8 scales (2 bytes), their lower
    four (4 bytes), the first of a byte in its lowest place, and 128 bytes of numbers of levels, 16 for a group as in block_iq4_nl. Scales
    are 32 more than what they stand for.
    """
    lower_OK8 = torch.stack([blocks_OKB[..., 4:8] & 15, blocks_OKB[..., 4:8] >> 4], dim=-1).flatten(-2)
    scales_OG = (lower_OK8 | unpacked_bits(blocks_OKB[..., 2:4], 2) << 4).flatten(1).view(torch.int8) - 32
    codes_OKGS = _nibbles(blocks_OKB[..., 8:].unflatten(-1, (8, 16)))  # type: ignore[no-untyped-call]
    return QuantizedWeight(type_, codes_OKGS.flatten(1), scales_OG, factors_OKF=_half(blocks_OKB, 0)[..., None])


def _read_mxfp4(type_: WeightType, blocks_OGB: Tensor) -> QuantizedWeight:
    """Format: ggml's block_mxfp4: an exponent (with levels doubled, it is 128 more than what it stands for), and 16 bytes of numbers of
    levels as in block_iq4_nl.
    """
    return QuantizedWeight(type_, _nibbles(blocks_OGB[..., 1:]).flatten(1), blocks_OGB[..., 0])


READERS: Mapping[str, Callable[[WeightType, Tensor], QuantizedWeight]] = {
    "Q4_K": _read_q4_k,
    "Q5_K": _read_q4_k,
    "Q6_K": _read_q6_k,
    "IQ4_XS": _read_iq4_xs,
    "MXFP4": _read_mxfp4,
}


def _nibbles(bytes_B: Tensor) -> Tensor:
    """The lower halves of all bytes, then the upper ones."""
    return torch.cat([bytes_B & 15, bytes_B >> 4], dim=-1)


def _half(blocks_OGB: Tensor, start: int) -> Tensor:
    return blocks_OGB[..., start : start + 2].contiguous().view(torch.float16)[..., 0]


def fingerprints(rows_OI: Tensor) -> Tensor:
    """Int64 [O]: equal for equal rows, and otherwise different but for one chance in 2**64."""
    generator = torch.Generator().manual_seed(0)
    factors_I = torch.randint(-(2**62), 2**62, (rows_OI.shape[1],), generator=generator)
    # Adding zero makes negative zeros positive ones. The sums wrap around.
    chunks = (((chunk + 0.0).view(_INTEGERS[rows_OI.dtype]).long() * factors_I).sum(1) for chunk in rows_OI.split(CHUNK_ROWS))  # type: ignore[no-untyped-call]
    return torch.cat(list(chunks))


class RowIndex:
    """Matrices by what is in their rows."""

    def __init__(self, matrices: Iterable[tuple[str, Tensor]]) -> None:
        self._fingerprints: dict[tuple[torch.Size, int], tuple[str, Tensor]] = {}
        for name, matrix_OI in matrices:
            rows_O = fingerprints(matrix_OI)
            self._fingerprints[matrix_OI.shape, int(rows_O.sum())] = (name, rows_O)

    def find(self, matrix_OI: Tensor) -> tuple[str, Tensor] | None:
        """The name of the matrix that has the same rows, and int64 [O]: which row of it each row here is."""
        rows_O = fingerprints(matrix_OI)
        found = self._fingerprints.get((matrix_OI.shape, int(rows_O.sum())))
        if found is None:
            return None
        name, their_rows_O = found
        if torch.equal(rows_O, their_rows_O):
            return name, torch.arange(len(rows_O))
        order_O = torch.empty_like(rows_O)
        order_O[rows_O.argsort()] = their_rows_O.argsort()
        return name, order_O


@contextmanager
def numbered_rows(file_tensors: "Iterable[ReaderTensor]") -> "Iterator[list[NumberedTensor]]":
    """Meanwhile `gguf.dequantize` gives float64 [O, 1] for a quantized matrix of the file: its rows' numbers, counted through the file."""
    import gguf

    first = 0
    numbered: dict[int, NumberedTensor] = {}
    for tensor in filter(is_quantized, file_tensors):
        numbered[id(tensor.data)] = NumberedTensor(tensor, first)
        first += len(tensor.data)
    dequantize = gguf.dequantize

    def number(data: "np.ndarray[Any, Any]", kind: "GGMLQuantizationType") -> "np.ndarray[Any, Any]":
        known = numbered.get(id(data))
        return dequantize(data, kind) if known is None else known.numbers_O1

    setattr(gguf, "dequantize", number)  # noqa: B010  # a module has no such attribute to the type checker
    try:
        yield list(numbered.values())
    finally:
        setattr(gguf, "dequantize", dequantize)  # noqa: B010


@dataclass(frozen=True, slots=True)
class NumberedTensor:
    """A matrix of the file, and the number of its first row among all matrices' rows."""

    tensor: "ReaderTensor"
    first: int

    @property
    def numbers_O1(self) -> "np.ndarray[Any, Any]":
        return np.arange(self.first, self.first + len(self.tensor.data), dtype=np.float64)[:, None]


def stored_rows(numbers_O1: Tensor, tensors: "Sequence[NumberedTensor]") -> StoredWeight | None:
    """The matrix whose rows have these numbers, in their order. None where they are not all rows of one matrix, each of them once."""
    if numbers_O1.ndim != 2 or numbers_O1.shape[1] != 1:
        return None
    numbers_O = numbers_O1[:, 0]
    numbered = tensors[bisect_right(tensors, float(numbers_O.min()), key=lambda tensor: tensor.first) - 1]
    rows_O = numbers_O - numbered.first
    if not torch.equal(rows_O.sort().values, torch.arange(len(numbered.tensor.data), dtype=rows_O.dtype)):
        return None
    return _stored_rows_of(numbered.tensor, rows_O.long())


def take_quantized_matrices(model: "PreTrainedModel", file_tensors: "Iterable[ReaderTensor]") -> dict[str, StoredWeight]:
    """The matrices of linear layers and embeddings that are, but for the order of rows, matrices of the file, by their names in the model.

    The model is left without them. Conversion renames, transposes, shifts and permutes as each architecture asks. Instead of asking it too,
    this looks at what came out: `model`, whose weights were dequantized and rounded to its type. A matrix that is not exactly what its
    codes stand for stays where it is.
    """
    tensors = {tensor.name: tensor for tensor in file_tensors if is_quantized(tensor)}
    index = RowIndex((name, dequantized(tensor).to(model.dtype)) for name, tensor in tensors.items())
    matrices = {}
    for name in [name for name, _ in model.named_parameters()]:
        matrix_OI = model.get_parameter(name).detach()
        if not isinstance(model.get_submodule(name.rpartition(".")[0]), nn.Linear | nn.Embedding) or matrix_OI.ndim != 2:
            continue
        found = index.find(matrix_OI)
        if found is None:
            continue
        tensor, rows_O = tensors[found[0]], found[1]
        if torch.equal(dequantized(tensor).to(matrix_OI.dtype)[rows_O], matrix_OI):
            matrices[name] = _stored_rows_of(tensor, rows_O)
            leave_out(model, [name])
    return matrices


def take_quantized_experts(model: "PreTrainedModel", file_tensors: "Iterable[ReaderTensor]") -> dict[str, StoredWeight]:
    """The experts that are, matrix by matrix, what the file's tensors of experts hold, by the names of `StoredExperts`.

    The model is left without them. They are recognised by their values, as in `take_quantized_matrices`. Of a layer, all are taken or none.
    """
    tensors = {
        f"{tensor.name}.{expert}": ExpertTensor(data, tensor.tensor_type)
        for tensor in file_tensors
        if len(tensor.shape) == 3 and tensor.tensor_type.name not in _PLAIN_TYPES
        for expert, data in enumerate(tensor.data)
    }
    index = RowIndex((name, dequantized(tensor).to(model.dtype)) for name, tensor in tensors.items())
    experts: dict[str, StoredWeight] = {}
    for matrices in expert_matrices(model) if tensors else ():
        found = {name: index.find(matrix_OI) for name, matrix_OI in matrices.items()}
        places = {name: (tensors[place[0]], place[1]) for name, place in found.items() if place is not None}
        if len(places) < len(matrices):
            continue
        if all(torch.equal(dequantized(tensor).to(model.dtype)[rows], matrices[name]) for name, (tensor, rows) in places.items()):
            taken = {name: _stored_rows_of(tensor, rows) for name, (tensor, rows) in places.items()}
            leave_out(model, taken)
            experts |= taken
    return experts
