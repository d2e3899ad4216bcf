"""Which matrices of a model can stay in few bits, as the GGUF file that the model came from has them."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from penstock.engine.layers.quantized import QuantizedWeight, quantized
from penstock.engine.quantization import leave_out

if TYPE_CHECKING:
    from gguf import ReaderTensor

# Types that a `QuantizedWeight` holds exactly, with the bytes of their blocks of 32 weights.
EXACT_TYPES = {"Q4_0": 18, "Q4_1": 20, "Q5_0": 22, "Q8_0": 34}
_PLAIN_TYPES = ("F64", "F32", "F16", "BF16")
_Q4_K_BYTES = 144
# How many rows are looked at at a time, which bounds the memory that it takes.
CHUNK_ROWS = 4096
_INTEGERS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}


def is_quantized(tensor: "ReaderTensor") -> bool:
    """Whether the file holds a matrix there, in fewer bits than plain numbers have."""
    return len(tensor.shape) == 2 and tensor.tensor_type.name not in _PLAIN_TYPES


def dequantized(tensor: "ReaderTensor") -> Tensor:
    """Float32 [O, I]: what the file's codes stand for."""
    import gguf

    return torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type))


def read_blocks(tensor: "ReaderTensor") -> QuantizedWeight:
    """The weight in a quantized matrix of the file, in 4 or 8 bits.

    It is exactly the file's for `EXACT_TYPES`. Q4_K keeps its codes; scales and minimums are rounded to float16. Other types are rounded
    to 8 bits. Either is a small fraction of the rounding that made the file.
    """
    kind = tensor.tensor_type.name
    if kind == "Q4_K":
        return _read_q4_k(torch.from_numpy(tensor.data.copy()))
    if kind not in EXACT_TYPES:
        return quantized(dequantized(tensor), 8)
    blocks_OGB = torch.from_numpy(tensor.data.copy()).unflatten(1, (-1, EXACT_TYPES[kind]))  # type: ignore[no-untyped-call]
    return _read_exact(kind, blocks_OGB)


def _read_exact(kind: str, blocks_OGB: Tensor) -> QuantizedWeight:
    """Format: ggml's block_q4_0 (scale, 16 bytes of codes from 0 to 15 that mean -8 to 7), block_q4_1 (scale, minimum, 16 bytes of codes),
    block_q5_0 (scale, 4 bytes of fifth bits, 16 bytes of the other four; the codes mean -16 to 15) and block_q8_0 (scale, 32 signed bytes).
    Byte i of 4-bit codes holds weight i and in its upper half weight i + 16.
    """
    scales_OG = _half(blocks_OGB, 0)
    if kind == "Q8_0":
        codes_OGS = blocks_OGB[..., 2:] ^ 128  # two's complement moved up by 128
        return QuantizedWeight(8, codes_OGS.flatten(1), scales_OG, -128 * scales_OG)
    codes_OGS = _nibbles(blocks_OGB[..., -16:])
    if kind == "Q5_0":
        fifth_bits_OGS = (blocks_OGB[..., 2:6, None] >> torch.arange(8) & 1).flatten(-2)
        codes_OGS = codes_OGS + 16 * fifth_bits_OGS + (128 - 16)  # of 8 bits, where 128 means zero
        return QuantizedWeight(8, codes_OGS.to(torch.uint8).flatten(1), scales_OG, -128 * scales_OG)
    minimums_OG = _half(blocks_OGB, 2) if kind == "Q4_1" else -8 * scales_OG
    return QuantizedWeight(4, codes_OGS.flatten(1), scales_OG, minimums_OG)


def _read_q4_k(rows_OB: Tensor) -> QuantizedWeight:
    """Format: ggml's block_q4_K, 256 weights in 8 groups of 32: a scale of the scales and one of the minimums (float16), 12 bytes with 8
    scales and 8 minimums of 6 bits, 128 bytes of codes. Of the 12 bytes, the first 4 hold the scales of groups 0 to 3, the next 4 their
    minimums, the last 4 the lower halves of the other groups' scales and minimums, whose two upper bits are those of the first 8 bytes.
    Byte i of 32 bytes of codes holds weight i of a group and in its upper half weight i of the next.
    """
    blocks_OKB = rows_OB.unflatten(1, (-1, _Q4_K_BYTES))  # type: ignore[no-untyped-call]
    low_OK4, middle_OK4, high_OK4 = blocks_OKB[..., 4:16].split(4, dim=-1)
    scales_OK8 = torch.cat([low_OK4 & 63, high_OK4 & 15 | low_OK4 >> 6 << 4], dim=-1)
    minimums_OK8 = torch.cat([middle_OK4 & 63, high_OK4 >> 4 | middle_OK4 >> 6 << 4], dim=-1)
    codes_OKPS = _nibbles(blocks_OKB[..., 16:].unflatten(-1, (4, 32)))
    scales_OG = (_half(blocks_OKB, 0).float()[..., None] * scales_OK8).half().flatten(1)
    minimums_OG = -(_half(blocks_OKB, 2).float()[..., None] * minimums_OK8).half().flatten(1)
    return QuantizedWeight(4, codes_OKPS.flatten(1), scales_OG, minimums_OG)


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


def take_quantized_matrices(model: PreTrainedModel, file_tensors: "Iterable[ReaderTensor]") -> dict[str, QuantizedWeight]:
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
            weight = read_blocks(tensor)
            matrices[name] = QuantizedWeight(weight.bits, weight.codes_OI[rows_O], weight.scales_OG[rows_O], weight.minimums_OG[rows_O])
            leave_out(model, [name])
    return matrices
