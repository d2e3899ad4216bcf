"""Quantized weights of models: a GGUF file's matrices, the file that keeps them, loading without the originals, and rounding the rest.

A GGUF file's matrices of few bits are best served as they are: nothing is rounded twice. Others are rounded on request. There is one copy
of a weight, for any number of rows: codes of 4 bits are 2.2 times as fast as bfloat16 at 1 row, and still 1.4 times as fast at 512
(`benchmarks/linear.py`), so a second copy in bfloat16 for prompts would only take memory.

The file lies beside the model's other weights and holds for each matrix `NAME`, by its parameter's name, the blocks of a `PackedWeight`.
Its metadata says for each matrix the type of the blocks, the number of rows, and the type that it had in the GGUF file."""

import logging
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from penstock.engine.config import QuantizationMode
from penstock.engine.errors import ConfigurationError
from penstock.engine.native.runtime import by_rows
from penstock.engine.weights.experts import GroupedLinear, expert_matrices, quantize_experts, stored_experts
from penstock.engine.weights.float8 import Float8Linear, Float8Weight, GroupedFloat8Linear, can_panel_float8
from penstock.engine.weights.linear import (
    QuantizedEmbedding,
    QuantizedLinear,
    can_quantize,
    embedding_scale,
    quantize_linears,
    reads_weight,
)
from penstock.engine.weights.packed import TILE, TYPES, PackedWeight, QuantizedWeight, WeightType, pack, quantized, unpacked_bits

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType, ReaderTensor
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

FILE_NAME = "quantized.safetensors"
# Which token comes next, and which expert computes it, suffers most from rounding: with a vocabulary of 4 bits the default model's
# perplexity is 24.4 where it is 22.6 (`benchmarks/quality.py`).
VOCABULARY_BITS = 8
ROUTERS = ("gate", "router", "shared_expert_gate")


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """A matrix that a model's directory holds in few bits; `source` is the type that it has in the GGUF file or checkpoint.

    `bias` is that of the layer, where it is stored beside: some checkpoints have zeros there for layers without one.
    """

    packed: PackedWeight | Float8Weight
    source: str
    bias: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return self.packed.out_features, self.packed.in_features


def write_quantized(directory: Path, weights: Mapping[str, StoredWeight]) -> None:
    """Writes the file of quantized matrices."""
    blocks, metadata = {}, {}
    for name, weight in weights.items():
        assert isinstance(weight.packed, PackedWeight)
        blocks[name] = weight.packed.blocks
        metadata[name] = f"{weight.packed.type_name} {weight.packed.out_features} {weight.source}"
    save_file(blocks, directory / FILE_NAME, metadata)


def quantized_names(directory: Path) -> list[str]:
    """The matrices that the directory holds in few bits, if any. Raises `ConfigurationError` where the file is broken."""
    path = directory / FILE_NAME
    if not path.is_file():
        return []
    try:
        with safe_open(path, "pt") as file:
            return list(file.keys())
    except (OSError, SafetensorError) as error:
        raise ConfigurationError(f"{path} cannot be read: {error}") from error


def read_quantized(directory: Path, device: torch.device) -> Iterator[tuple[str, StoredWeight]]:
    """The matrices one by one, as tensors of their own; on the meta device with their shapes and nothing in them.

    Raises `ConfigurationError` where the file is broken.
    """
    names = quantized_names(directory)
    if not names:
        return
    try:
        with safe_open(directory / FILE_NAME, "pt") as file:
            metadata = file.metadata() or {}
            for name in names:
                if device.type == "meta":
                    part = file.get_slice(name)
                    is_bytes = part.get_dtype() == "U8"
                    blocks = torch.empty(part.get_shape(), dtype=torch.uint8 if is_bytes else torch.float32, device="meta")
                else:
                    blocks = file.get_tensor(name).clone()  # which begins where a line of the cache does
                yield name, _stored(metadata[name], blocks)
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise ConfigurationError(f"{directory / FILE_NAME} cannot be read: {error}") from error


def _stored(description: str, blocks_TKB: Tensor) -> StoredWeight:
    """Raises `ValueError` or `KeyError` where the blocks are not what the description says."""
    name, num_rows, source = description.split()
    is_packed = blocks_TKB.dtype == torch.uint8 and blocks_TKB.ndim == 3 and blocks_TKB.shape[2] == TYPES[name].block_bytes
    if not is_packed or blocks_TKB.shape[0] != -(-int(num_rows) // TILE):
        raise ValueError(f"blocks of {blocks_TKB.dtype} {tuple(blocks_TKB.shape)} are no {num_rows} rows of {name}")
    return StoredWeight(PackedWeight(name, int(num_rows), blocks_TKB), source)


# What is made of a stored weight: it or another, or None where it is to be inflated. The second argument: whether it is of the vocabulary.
Choice = Callable[[PackedWeight | Float8Weight, bool], PackedWeight | Float8Weight | None]
# By the parameter's name, the modules that it is the weight of.
Places = Mapping[str, list[str]]


def leave_out(model: "PreTrainedModel", names: Collection[str]) -> Places:
    """Takes these weights, and what is tied to them, out of their layers. Raises `ConfigurationError` where the model has none such."""
    experts = stored_experts(model, names)
    for layer in experts:
        layer.leave_out(model)
    of_experts = {name: [layer.path] for layer in experts for name in layer.names}
    names = [name for name in names if name not in of_experts]
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
    return of_experts | {name: [sharing.removesuffix(".weight") for sharing in places[name]] for name in places}


def put_in(
    model: "PreTrainedModel", places: Places, weights: Iterable[tuple[str, StoredWeight]], choose: Choice, dtype: torch.dtype
) -> "Counter[tuple[str, str]]":
    """Gives each layer that `leave_out` has left without a weight its own; `dtype` is that of what is inflated.

    Returns how many matrices of which type, in the file, became which other. Raises `ConfigurationError` for a weight of another shape than
    its layer, and for a bias that its layer does not have.
    """
    output = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    served: Counter[tuple[str, str]] = Counter()
    experts = {name: layer for layer in stored_experts(model, places) for name in layer.names}
    of_experts: defaultdict[str, dict[str, PackedWeight | Float8Weight | Tensor]] = defaultdict(dict)
    for name, stored in weights:
        if name in experts:
            whole, own = experts[name], _of_expert(_on(model.device, choose(stored.packed, False)))
            served[stored.source, str(dtype).removeprefix("torch.") if own is None else own.type_name] += 1
            of_experts[whole.path][name] = stored.packed.dequantized() if own is None else own
            if len(of_experts[whole.path]) == len(whole.names):
                whole.put_in(model, of_experts.pop(whole.path), dtype)
            continue
        layers = [(path, model.get_submodule(path)) for path in places[name]]
        if any(_shape(layer) != stored.shape for _, layer in layers):
            raise ConfigurationError(f"{name}: there is a quantized weight of shape {stored.shape} for a layer of another")
        if stored.bias is not None and stored.bias.any() and any(getattr(layer, "bias", None) is None for _, layer in layers):
            raise ConfigurationError(f"{name.removesuffix('weight')}bias: there is a bias for a layer without one")
        is_vocabulary = any(isinstance(layer, nn.Embedding) or layer is output for _, layer in layers)
        weight = _on(model.device, choose(stored.packed, is_vocabulary))
        quantized = [(path, layer) for path, layer in layers if weight is not None and _can_have(model, path, weight)]
        if weight is not None and quantized:
            _put_in_quantized(model, quantized, weight, dtype)
            served[stored.source, weight.type_name] += 1
        plain = [layer for path, layer in layers if (path, layer) not in quantized]
        if plain:
            if not quantized:
                served[stored.source, str(dtype).removeprefix("torch.")] += 1
            parameter = nn.Parameter(stored.packed.dequantized().to(model.device, dtype), requires_grad=False)
            parameter._is_hf_initialized = True  # type: ignore[attr-defined]
            for layer in plain:
                layer.weight = parameter
                if layer._buffers:  # such as the factor of an embedding that scales its rows
                    model._init_weights(layer)  # type: ignore[no-untyped-call]
    return served


def _on(device: torch.device, weight: PackedWeight | Float8Weight | None) -> PackedWeight | Float8Weight | None:
    # Each weight is moved as soon as it is made, so that a model's quantized weights may exceed the host's memory.
    return None if weight is None else nn.Module.to(weight, device)


def _of_expert(weight: PackedWeight | Float8Weight | None) -> PackedWeight | Float8Weight | None:
    """The weight, if grouped products take it."""
    return weight if weight is not None and weight.order is None else None


def _shape(layer: Any) -> tuple[int, int]:
    if isinstance(layer, nn.Embedding):
        return layer.num_embeddings, layer.embedding_dim
    return layer.out_features, layer.in_features


def _can_have(model: nn.Module, path: str, weight: PackedWeight | Float8Weight) -> bool:
    """Whether the layer there can be one over this weight: embeddings look up whole rows of blocks."""
    is_linear = isinstance(model.get_submodule(path), nn.Linear)
    return can_replace(model, path) and (is_linear or (isinstance(weight, PackedWeight) and weight.order is None))


def _put_in_quantized(
    model: nn.Module, layers: Collection[tuple[str, nn.Module]], weight: PackedWeight | Float8Weight, dtype: torch.dtype
) -> None:
    for path, layer in layers:
        replacement: nn.Module
        if isinstance(weight, Float8Weight):
            replacement = Float8Linear(weight, layer.bias)  # type: ignore[arg-type]
        elif isinstance(layer, nn.Linear):
            replacement = QuantizedLinear([weight], layer.bias)
        else:
            replacement = _quantized_embedding(layer, weight, dtype)
        model.set_submodule(path, replacement)


def _quantized_embedding(layer: nn.Module, weight: PackedWeight, dtype: torch.dtype) -> QuantizedEmbedding:
    return QuantizedEmbedding(weight, dtype, embedding_scale(layer, dtype) or 1.0)


def can_replace(model: nn.Module, path: str) -> bool:
    """Whether the layer there does nothing beside what a quantized one does, and no other code reads its weight."""
    parent, _, name = path.rpartition(".")
    layer = model.get_submodule(path)
    is_plain = type(layer) is nn.Linear or embedding_scale(layer, torch.float32) is not None
    return is_plain and not reads_weight(type(model.get_submodule(parent)), name)  # type: ignore[arg-type]


def resolve_quantization(mode: QuantizationMode, device: torch.device) -> QuantizationMode:
    """What was asked for, or `none` where `auto` comes to that. Raises `ConfigurationError` for what the device cannot do."""
    if device.type != "cpu":
        if mode in ("int4", "int8"):
            raise ConfigurationError(f"--quantization {mode} is for models on the CPU, and this one goes to {device}: use auto or none")
        return mode
    if mode == "auto" and not can_quantize():
        return "none"
    if mode != "none" and not can_quantize():
        logger.warning("--quantization %s saves memory but is slow here: its kernels take a C++ compiler.", mode)
    return mode


def put_in_stored(
    model: "PreTrainedModel",
    weights: Iterable[tuple[str, StoredWeight]],
    places: Places,
    mode: QuantizationMode,
    dtype: torch.dtype,
) -> None:
    """Puts in what the model's directory holds in few bits and `leave_out` left out, by a resolved mode.

    A weight of more bits than were asked for is rounded again. One of fewer stays: more bits would not make it better. One line of the log
    says in which type each was served.
    """

    def choose(weight: PackedWeight | Float8Weight, is_vocabulary: bool) -> PackedWeight | Float8Weight | None:
        if mode == "none" or (isinstance(weight, Float8Weight) and not can_panel_float8(weight.out_features, weight.in_features)):
            return None
        bits = _bits(mode, is_vocabulary)
        return weight if weight.bits <= bits else pack(quantized(weight.dequantized(), bits))

    served = put_in(model, places, weights, choose, dtype)
    if served and model.device.type != "meta":
        logger.info("%s", describe_served(served))


BITS_PER_WEIGHT = {name: type_.bits_per_weight for name, type_ in TYPES.items()} | {Float8Weight.type_name: 8.0}


def describe_served(served: Mapping[tuple[str, str], int]) -> str:
    """`9 quantized matrices: 8 Q5_0 as they are (5.5 bits per weight), 1 Q2_K as Q8_0 (8.5 bits per weight)`, of what `put_in` counts."""
    parts = []
    for (source, kind), number in sorted(served.items(), key=lambda item: -item[1]):
        how = kind if kind != source else "it is" if number == 1 else "they are"
        bits = f"{BITS_PER_WEIGHT[kind]:.4g} bits per weight" if kind in BITS_PER_WEIGHT else "dequantized"
        parts.append(f"{number} {source} as {how} ({bits})")
    return f"{sum(served.values())} quantized matrices: {', '.join(parts)}"


def quantize_plain(model: "PreTrainedModel", mode: QuantizationMode) -> None:
    """Rounds the weights that are in no few bits yet, where a resolved mode says so: of linear layers, and of embeddings tied to them.

    Layers stay as they are that have a number of inputs which is no multiple of 32, that choose experts, or whose weights the model's code
    reads beside calling them.
    """
    if mode not in ("int4", "int8"):
        return
    output, embedding = model.get_output_embeddings(), model.get_input_embeddings()  # type: ignore[no-untyped-call]
    is_tied = isinstance(output, nn.Linear) and isinstance(embedding, nn.Embedding) and embedding.weight is output.weight
    quantize_experts(model, _bits(mode, False))
    quantize_linears(model, _bits(mode, False), skip=(*ROUTERS, *_paths(model, output)))
    quantize_linears(model, _bits(mode, True), skip=ROUTERS)
    rounded = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    if is_tied and isinstance(rounded, QuantizedLinear):
        for path in _paths(model, embedding):
            if can_replace(model, path):
                model.set_submodule(path, _quantized_embedding(model.get_submodule(path), rounded.packed[0], model.dtype))


def quantized_layers(model: nn.Module) -> dict[str, int]:
    """How many linear layers are served in which type: `{"Q4_K": 120, "Q6_K": 1}`. A fused layer of several types counts for each.

    So does a layer of each expert.
    """
    counts: Counter[str] = Counter()
    for module in model.modules():
        if isinstance(module, QuantizedLinear):
            counts.update(weight.type_name for weight in module.packed)
        elif isinstance(module, GroupedLinear):
            for weight in module.grouped:
                counts[weight.type_name] += len(weight.blocks)
        elif isinstance(module, Float8Linear):
            counts[module.weight.type_name] += 1
        elif isinstance(module, GroupedFloat8Linear):
            counts[Float8Weight.type_name] += module.num_experts
    return dict(sorted(counts.items()))


def _bits(mode: QuantizationMode, is_vocabulary: bool) -> int:
    return 4 if mode == "int4" and not is_vocabulary else VOCABULARY_BITS


def _paths(model: nn.Module, wanted: nn.Module | None) -> list[str]:
    return [path for path, module in model.named_modules() if module is wanted]


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

    def pack_rows(numbers_OI: Tensor) -> tuple[Tensor]:
        packed = pack(read_blocks(ExpertTensor(tensor.data[numbers_OI[:, 0].numpy()], tensor.tensor_type)))
        types.add(packed.type_name)
        return (packed.blocks,)

    row_bytes = tensor.data.shape[1]
    numbers_OI = rows_O[:, None].expand(-1, row_bytes // rows_O.element_size())  # as many bytes as the rows of the file
    (blocks_TKB,) = by_rows(pack_rows, [numbers_OI], TILE)
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
