"""Quantized weights of models: a GGUF file's matrices, the file that keeps them, loading without the originals, and rounding the rest.

A GGUF file's matrices of few bits are best served as they are: nothing is rounded twice. Others are rounded on request. There is one copy
of a weight, for any number of rows: codes of 4 bits are 2.2 times as fast as bfloat16 at 1 row, and still 1.4 times as fast at 512
(`benchmarks/linear.py`), so a second copy in bfloat16 for prompts would only take memory.

The file lies beside the model's other weights and holds for each matrix `NAME`, by its parameter's name, the blocks of a `PackedWeight`.
Its metadata says for each matrix the type of the blocks, the number of rows, and the type that it had in the GGUF file."""

import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from penstock.engine.config import QuantizationMode
from penstock.engine.errors import ConfigurationError
from penstock.engine.weights.experts import GroupedLinear, quantize_experts, stored_experts
from penstock.engine.weights.float8 import Float8Linear, Float8Weight, GroupedFloat8Linear, can_panel_float8
from penstock.engine.weights.linear import (
    QuantizedEmbedding,
    QuantizedLinear,
    can_quantize,
    embedding_scale,
    quantize_linears,
    reads_weight,
)
from penstock.engine.weights.packed import TILE, TYPES, PackedWeight, pack, quantized

if TYPE_CHECKING:
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
