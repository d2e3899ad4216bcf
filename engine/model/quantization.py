"""Quantized weights: a GGUF file's blocks, the file that keeps their codes, loading without the originals, and rounding the rest.

A GGUF file's matrices of few bits are best served in their own precision: nothing is rounded twice. Others are rounded on request. There is
one copy of a weight, for any number of rows: codes of 4 bits are 2.2 times as fast as bfloat16 at 1 row, and still 1.4 times as fast at 512
(`benchmarks/linear.py`), so a second copy in bfloat16 for prompts would only take memory.

The file lies beside the model's other weights and holds for each matrix `NAME`, by its parameter's name, the tensors of a
`QuantizedWeight`: `NAME.codes`, `NAME.scales` and `NAME.minimums`. Codes are uint8 [O, I], or [O, I / 2] where two of 4 bits share a byte,
the first of them in its lower half, or [O, 5 I / 8] where the fifth bits follow those, eight in a byte. Minimums are left out where all
they do is make the codes signed: where they are -8 scales for 4 bits, -16 for 5, -128 for 8."""

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from penstock.engine.config import QuantizationMode
from penstock.engine.errors import ConfigurationError
from penstock.engine.model.linear import (
    GROUP_SIZE,
    QuantizedEmbedding,
    QuantizedLinear,
    QuantizedWeight,
    can_quantize,
    pack,
    packed_bits,
    quantize_linears,
    quantized,
    reads_weight,
    signing_minimums,
    unpacked_bits,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

if TYPE_CHECKING:
    from gguf import ReaderTensor

logger = logging.getLogger(__name__)

FILE_NAME = "quantized.safetensors"
_CODES = ".codes"
# Which token comes next, and which expert computes it, suffers most from rounding: with a vocabulary of 4 bits the default model's
# perplexity is 24.4 where it is 22.6 (`benchmarks/quality.py`).
VOCABULARY_BITS = 8
ROUTERS = ("gate", "router", "shared_expert_gate")


def write_quantized(directory: Path, weights: Mapping[str, QuantizedWeight]) -> None:
    """Writes the file of quantized matrices."""
    save_file(
        {f"{name}.{part}": tensor for name, weight in weights.items() for part, tensor in encoded(weight).items()}, directory / FILE_NAME
    )


def quantized_names(directory: Path) -> list[str]:
    """The matrices that the directory holds in few bits, if any. Raises `ConfigurationError` where the file is broken."""
    path = directory / FILE_NAME
    if not path.is_file():
        return []
    try:
        with safe_open(path, "pt") as file:
            return [name.removesuffix(_CODES) for name in list(file.keys()) if name.endswith(_CODES)]
    except (OSError, SafetensorError) as error:
        raise ConfigurationError(f"{path} cannot be read: {error}") from error


def read_quantized(directory: Path, device: torch.device) -> Iterator[tuple[str, QuantizedWeight]]:
    """The matrices one by one, as tensors of their own; on the meta device with their shapes and nothing in them.

    Raises `ConfigurationError` where the file is broken.
    """
    names = quantized_names(directory)
    if not names:
        return
    try:
        with safe_open(directory / FILE_NAME, "pt") as file:
            stored = set(file.keys())
            for name in names:
                keys = {part: f"{name}.{part}" for part in ("codes", "scales", "minimums") if f"{name}.{part}" in stored}
                if device.type == "meta":
                    yield name, decoded({part: _empty(file.get_slice(key)) for part, key in keys.items()})
                else:
                    yield name, decoded({part: file.get_tensor(key) for part, key in keys.items()})
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise ConfigurationError(f"{directory / FILE_NAME} cannot be read: {error}") from error


def encoded(weight: QuantizedWeight) -> dict[str, Tensor]:
    """The parts of a weight as they are stored."""
    codes = weight.codes_OI
    if weight.bits < 8:
        lower_OI = codes & 15
        codes = lower_OI[:, ::2] | lower_OI[:, 1::2] << 4
    if weight.bits == 5:
        codes = torch.cat([codes, packed_bits(weight.codes_OI >> 4)], dim=1)
    parts = {"codes": codes, "scales": weight.scales_OG}
    if not weight.is_symmetric:
        parts["minimums"] = weight.minimums_OG
    return {part: tensor.contiguous() for part, tensor in parts.items()}


def decoded(parts: Mapping[str, Tensor]) -> QuantizedWeight:
    """The weight that `encoded` took apart. Raises `ValueError` where the parts do not fit each other."""
    codes, scales_OG = parts["codes"], parts["scales"]
    if codes.ndim != 2 or scales_OG.ndim != 2 or codes.dtype != torch.uint8 or scales_OG.dtype != torch.float16:
        raise ValueError("codes are a matrix of uint8, and scales one of float16")
    in_features = scales_OG.shape[1] * GROUP_SIZE
    bits = next((bits for bits in (4, 5, 8) if codes.shape == (scales_OG.shape[0], in_features * bits // 8)), None)
    if bits is None:
        raise ValueError(f"codes of shape {tuple(codes.shape)} do not go with scales of shape {tuple(scales_OG.shape)}")
    minimums_OG = parts.get("minimums", signing_minimums(bits, scales_OG))
    if minimums_OG.shape != scales_OG.shape or minimums_OG.dtype != torch.float16 or (bits == 8 and "minimums" in parts):
        raise ValueError("minimums are for codes of 4 or 5 bits, and of float16 like scales")
    if bits == 8:
        return QuantizedWeight(bits, codes, scales_OG, minimums_OG)
    halves = codes[:, : in_features // 2]
    codes_OI = torch.stack([halves & 15, halves >> 4], dim=-1).flatten(1)
    if bits == 5:
        codes_OI = codes_OI | unpacked_bits(codes[:, in_features // 2 :]) << 4
    return QuantizedWeight(bits, codes_OI, scales_OG, minimums_OG)


def _empty(stored: Any) -> Tensor:
    dtype = {"U8": torch.uint8, "F16": torch.float16}.get(stored.get_dtype(), torch.float32)
    return torch.empty(stored.get_shape(), dtype=dtype, device="meta")


# What is made of a stored weight: it or another, or None where it is to be inflated. The second argument: whether it is of the vocabulary.
Choice = Callable[[QuantizedWeight, bool], QuantizedWeight | None]
# By the parameter's name, the modules that it is the weight of.
Places = Mapping[str, list[str]]


def leave_out(model: "PreTrainedModel", names: Collection[str]) -> Places:
    """Takes these weights, and what is tied to them, out of their layers. Raises `ConfigurationError` where the model has none such."""
    layers = {f"{path}.weight" for path, module in model.named_modules() if isinstance(module, nn.Linear | nn.Embedding)}
    if unknown := set(names) - (layers & dict(model.named_parameters()).keys()):
        raise ConfigurationError(f"{', '.join(sorted(unknown)[:3])}: there are quantized weights that the model has no place for")
    tied = model.all_tied_weights_keys
    places = {name: [name, *(target for target, source in tied.items() if source == name)] for name in names}
    for name in (name for sharing in places.values() for name in sharing):
        module: Any = model.get_submodule(name.removesuffix(".weight"))
        module.weight = None
        module._is_hf_initialized = True  # else transformers fills it with random numbers
    model.all_tied_weights_keys = {target: source for target, source in tied.items() if source not in places}
    return {name: [sharing.removesuffix(".weight") for sharing in places[name]] for name in places}


def put_in(
    model: "PreTrainedModel", places: Places, weights: Iterable[tuple[str, QuantizedWeight]], choose: Choice, dtype: torch.dtype
) -> None:
    """Gives each layer that `leave_out` has left without a weight its own; `dtype` is that of what is inflated.

    Raises `ConfigurationError` for a weight of another shape than its layer.
    """
    output = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    for name, stored in weights:
        layers = [(path, model.get_submodule(path)) for path in places[name]]
        if any(_shape(layer) != stored.codes_OI.shape for _, layer in layers):
            raise ConfigurationError(f"{name}: there is a quantized weight of shape {tuple(stored.codes_OI.shape)} for a layer of another")
        is_vocabulary = any(isinstance(layer, nn.Embedding) or layer is output for _, layer in layers)
        weight = choose(stored, is_vocabulary)
        quantized = [(path, layer) for path, layer in layers if weight is not None and can_replace(model, path)]
        if weight is not None:
            _put_in_quantized(model, quantized, weight, dtype)
        plain = [layer for path, layer in layers if (path, layer) not in quantized]
        if plain:
            parameter = nn.Parameter(stored.dequantized().to(model.device, dtype), requires_grad=False)
            parameter._is_hf_initialized = True  # type: ignore[attr-defined]
            for layer in plain:
                layer.weight = parameter
                if layer._buffers:  # such as the factor of an embedding that scales its rows
                    model._init_weights(layer)  # type: ignore[no-untyped-call]


def _shape(layer: Any) -> tuple[int, int]:
    if isinstance(layer, nn.Embedding):
        return layer.num_embeddings, layer.embedding_dim
    return layer.out_features, layer.in_features


def _put_in_quantized(model: nn.Module, layers: Collection[tuple[str, nn.Module]], weight: QuantizedWeight, dtype: torch.dtype) -> None:
    # An embedding shares its rows with the output layer that it is tied to.
    blocks = None
    for path, layer in layers:
        if isinstance(layer, nn.Linear):
            linear = QuantizedLinear(weight, layer.bias)
            blocks = linear.blocks
            model.set_submodule(path, linear)
    for path, layer in layers:
        if isinstance(layer, nn.Embedding):
            model.set_submodule(path, QuantizedEmbedding(pack(weight) if blocks is None else blocks, dtype))


def can_replace(model: nn.Module, path: str) -> bool:
    """Whether the layer there does nothing beside what a quantized one does, and no other code reads its weight."""
    parent, _, name = path.rpartition(".")
    return type(model.get_submodule(path)) in (nn.Linear, nn.Embedding) and not reads_weight(type(model.get_submodule(parent)), name)  # type: ignore[arg-type]


def resolve_quantization(mode: QuantizationMode, device: torch.device) -> QuantizationMode:
    """What was asked for, or `none` where `auto` comes to that. Raises `ConfigurationError` for what the device cannot do."""
    if device.type != "cpu" and mode in ("int4", "int8"):
        raise ConfigurationError(f"--quantization {mode} is for models on the CPU, and this one goes to {device}: use auto or none")
    if mode == "auto" and (device.type != "cpu" or not can_quantize()):
        return "none"
    if mode != "none" and not can_quantize():
        logger.warning("--quantization %s saves memory but is slow here: its kernels take a C++ compiler.", mode)
    return mode


def put_in_stored(model: "PreTrainedModel", directory: Path, places: Places, mode: QuantizationMode, dtype: torch.dtype) -> None:
    """Puts in what the model's directory holds in few bits and `leave_out` left out, by a resolved mode.

    A weight of more bits than were asked for is rounded again. One of fewer stays: more bits would not make it better.
    """

    def choose(weight: QuantizedWeight, is_vocabulary: bool) -> QuantizedWeight | None:
        if mode == "none":
            return None
        bits = _bits(mode, is_vocabulary)
        return weight if weight.bits <= bits else quantized(weight.dequantized(), bits)

    put_in(model, places, read_quantized(directory, model.device), choose, dtype)


def quantize_plain(model: "PreTrainedModel", mode: QuantizationMode) -> None:
    """Rounds the weights that are in no few bits yet, where a resolved mode says so: of linear layers, and of embeddings tied to them.

    Layers stay as they are that have a number of inputs which is no multiple of 32, that choose experts, or whose weights the model's code
    reads beside calling them; so do experts that are one tensor.
    """
    if mode not in ("int4", "int8"):
        return
    output, embedding = model.get_output_embeddings(), model.get_input_embeddings()  # type: ignore[no-untyped-call]
    is_tied = isinstance(output, nn.Linear) and type(embedding) is nn.Embedding and embedding.weight is output.weight
    quantize_linears(model, _bits(mode, False), skip=(*ROUTERS, *_paths(model, output)))
    quantize_linears(model, _bits(mode, True), skip=ROUTERS)
    rounded = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    if is_tied and isinstance(rounded, QuantizedLinear):
        for path in _paths(model, embedding):
            if can_replace(model, path):
                model.set_submodule(path, QuantizedEmbedding(rounded.blocks, model.dtype))


def quantized_layers(model: nn.Module) -> dict[int, int]:
    """How many linear layers are served in how many bits: `{4: 120, 8: 1}`."""
    return dict(sorted(Counter(module.bits for module in model.modules() if isinstance(module, QuantizedLinear)).items()))


def _bits(mode: QuantizationMode, is_vocabulary: bool) -> int:
    return 4 if mode == "int4" and not is_vocabulary else VOCABULARY_BITS


def _paths(model: nn.Module, wanted: nn.Module | None) -> list[str]:
    return [path for path, module in model.named_modules() if module is wanted]


# Types that a `QuantizedWeight` holds exactly, with the bytes of their blocks of 32 weights.
EXACT_TYPES = {"Q4_0": 18, "Q4_1": 20, "Q5_0": 22, "Q5_1": 24, "Q8_0": 34, "IQ4_NL": 18}
# What the codes of IQ4_NL stand for: levels that lie closer to each other around zero, as weights do.
_NONLINEAR_LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_PLAIN_TYPES = ("F64", "F32", "F16", "BF16")
_K_BYTES = {"Q4_K": 144, "Q5_K": 176}  # of a block of 256 weights
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
    """The weight in a quantized matrix of the file, in 4, 5 or 8 bits.

    It is exactly the file's for `EXACT_TYPES`. Q4_K and Q5_K keep their codes; scales and minimums are rounded to float16. Other types are
    rounded to 8 bits. Either is a small fraction of the rounding that made the file.
    """
    kind = tensor.tensor_type.name
    if kind in _K_BYTES:
        return _read_k(kind, torch.from_numpy(tensor.data.copy()))
    if kind not in EXACT_TYPES:
        return quantized(dequantized(tensor), 8)
    blocks_OGB = torch.from_numpy(tensor.data.copy()).unflatten(1, (-1, EXACT_TYPES[kind]))  # type: ignore[no-untyped-call]
    return _read_exact(kind, blocks_OGB)


def _read_exact(kind: str, blocks_OGB: Tensor) -> QuantizedWeight:
    """Format: ggml's block_q4_0 (scale, 16 bytes of codes from 0 to 15 that mean -8 to 7), block_q4_1 (scale, minimum, 16 bytes of codes),
    block_q5_0 (scale, 4 bytes of fifth bits, 16 bytes of the other four; the codes mean -16 to 15), block_q5_1 (scale, minimum, then the
    same), block_q8_0 (scale, 32 signed bytes) and block_iq4_nl (like block_q4_0, the codes being numbers of levels). Byte i of 4-bit codes
    holds weight i and in its upper half weight i + 16.
    """
    scales_OG = _half(blocks_OGB, 0)
    if kind == "Q8_0":
        codes_OGS = blocks_OGB[..., 2:] ^ 128  # two's complement moved up by 128
        return QuantizedWeight(8, codes_OGS.flatten(1), scales_OG, -128 * scales_OG)
    codes_OGS = _nibbles(blocks_OGB[..., -16:])
    if kind == "IQ4_NL":
        levels = torch.tensor(_NONLINEAR_LEVELS) + 128
        return QuantizedWeight(8, levels.to(torch.uint8)[codes_OGS.int()].flatten(1), scales_OG, signing_minimums(8, scales_OG))
    bits = 5 if kind.startswith("Q5") else 4
    if bits == 5:
        codes_OGS = codes_OGS | unpacked_bits(blocks_OGB[..., -20:-16]) << 4
    minimums_OG = _half(blocks_OGB, 2) if kind.endswith("_1") else signing_minimums(bits, scales_OG)
    return QuantizedWeight(bits, codes_OGS.flatten(1), scales_OG, minimums_OG)


def _read_k(kind: str, rows_OB: Tensor) -> QuantizedWeight:
    """Format: ggml's block_q4_K, 256 weights in 8 groups of 32: a scale of the scales and one of the minimums (float16), 12 bytes with 8
    scales and 8 minimums of 6 bits, 128 bytes of codes. Of the 12 bytes, the first 4 hold the scales of groups 0 to 3, the next 4 their
    minimums, the last 4 the lower halves of the other groups' scales and minimums, whose two upper bits are those of the first 8 bytes.
    Byte i of 32 bytes of codes holds weight i of a group and in its upper half weight i of the next. block_q5_K has 32 bytes of fifth bits
    before the codes: bit g of byte i is that of weight i of group g.
    """
    blocks_OKB = rows_OB.unflatten(1, (-1, _K_BYTES[kind]))  # type: ignore[no-untyped-call]
    low_OK4, middle_OK4, high_OK4 = blocks_OKB[..., 4:16].split(4, dim=-1)
    scales_OK8 = torch.cat([low_OK4 & 63, high_OK4 & 15 | low_OK4 >> 6 << 4], dim=-1)
    minimums_OK8 = torch.cat([middle_OK4 & 63, high_OK4 >> 4 | middle_OK4 >> 6 << 4], dim=-1)
    codes_OKPS = _nibbles(blocks_OKB[..., -128:].unflatten(-1, (4, 32)))
    if kind == "Q5_K":
        fifth_bits_OK8S = blocks_OKB[..., None, 16:48] >> torch.arange(8, dtype=torch.uint8)[:, None] & 1
        codes_OKPS = codes_OKPS | fifth_bits_OK8S.flatten(-2).unflatten(-1, (4, 64)) << 4
    scales_OG = (_half(blocks_OKB, 0).float()[..., None] * scales_OK8).half().flatten(1)
    minimums_OG = -(_half(blocks_OKB, 2).float()[..., None] * minimums_OK8).half().flatten(1)
    return QuantizedWeight(4 if kind == "Q4_K" else 5, codes_OKPS.flatten(1), scales_OG, minimums_OG)


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


def take_quantized_matrices(model: "PreTrainedModel", file_tensors: "Iterable[ReaderTensor]") -> dict[str, QuantizedWeight]:
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
