"""In how many bits a model's weights are served: the file of quantized matrices, loading without them, and rounding the rest.

A GGUF file's matrices of few bits are best served in their own precision: nothing is rounded twice. Others are rounded on request. There is
one copy of a weight, for any number of rows: codes of 4 bits are 2.2 times as fast as bfloat16 at 1 row, and still 1.4 times as fast at 512
(`benchmarks/linear.py`), so a second copy in bfloat16 for prompts would only take memory.

The file lies beside the model's other weights and holds for each matrix `NAME`, by its parameter's name, the tensors of a
`QuantizedWeight`: `NAME.codes`, `NAME.scales` and `NAME.minimums`. Codes are uint8 [O, I], or [O, I / 2] where two of 4 bits share a byte,
the first of them in its lower half. Minimums are left out where all they do is make the codes signed: where they are -8 scales for 4 bits,
-128 scales for 8.
"""

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from penstock.engine.config import QuantizationMode
from penstock.engine.errors import ConfigurationError
from penstock.engine.layers.linear import reads_weight
from penstock.engine.layers.quantized import (
    GROUP_SIZE,
    QuantizedEmbedding,
    QuantizedLinear,
    QuantizedWeight,
    can_quantize,
    pack,
    quantize_linears,
    quantized,
)

logger = logging.getLogger(__name__)

FILE_NAME = "quantized.safetensors"
_CODES = ".codes"
METHOD = "penstock"
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
    codes_OI = weight.codes_OI
    parts = {"codes": codes_OI if weight.bits == 8 else codes_OI[:, ::2] | codes_OI[:, 1::2] << 4, "scales": weight.scales_OG}
    if weight.bits == 4 and not torch.equal(weight.minimums_OG, _signing_minimums(weight.bits, weight.scales_OG)):
        parts["minimums"] = weight.minimums_OG
    return {part: tensor.contiguous() for part, tensor in parts.items()}


def decoded(parts: Mapping[str, Tensor]) -> QuantizedWeight:
    """The weight that `encoded` took apart. Raises `ValueError` where the parts do not fit each other."""
    codes, scales_OG = parts["codes"], parts["scales"]
    if codes.ndim != 2 or scales_OG.ndim != 2 or codes.dtype != torch.uint8 or scales_OG.dtype != torch.float16:
        raise ValueError("codes are a matrix of uint8, and scales one of float16")
    in_features = scales_OG.shape[1] * GROUP_SIZE
    bits = 8 if codes.shape[1] == in_features else 4
    if codes.shape != (scales_OG.shape[0], in_features * bits // 8):
        raise ValueError(f"codes of shape {tuple(codes.shape)} do not go with scales of shape {tuple(scales_OG.shape)}")
    codes_OI = codes if bits == 8 else torch.stack([codes & 15, codes >> 4], dim=-1).flatten(1)
    minimums_OG = parts.get("minimums", _signing_minimums(bits, scales_OG))
    if minimums_OG.shape != scales_OG.shape or minimums_OG.dtype != torch.float16 or (bits == 8 and "minimums" in parts):
        raise ValueError("minimums are for codes of 4 bits, and of float16 like scales")
    return QuantizedWeight(bits, codes_OI, scales_OG, minimums_OG)


def _signing_minimums(bits: int, scales_OG: Tensor) -> Tensor:
    return scales_OG * float(-(2 ** (bits - 1)))


def _empty(stored: Any) -> Tensor:
    dtype = {"U8": torch.uint8, "F16": torch.float16}.get(stored.get_dtype(), torch.float32)
    return torch.empty(stored.get_shape(), dtype=dtype, device="meta")


# What is made of a stored weight: it or another, or None where it is to be inflated. The second argument: whether it is of the vocabulary.
Choice = Callable[[QuantizedWeight, bool], QuantizedWeight | None]
# By the parameter's name, the modules that it is the weight of.
Places = Mapping[str, list[str]]


@register_quantization_config(METHOD)
class StoredWeightsConfig(QuantizationConfigMixin):
    """Makes `from_pretrained` leave out these parameters of the model; afterwards `places` says where they belong.

    transformers builds a model, then reads its weights. Layers that have lost theirs in between cost neither memory nor time.
    """

    def __init__(self, names: Collection[str]) -> None:
        self.quant_method = METHOD  # type: ignore[assignment]  # transformers lists its own methods, and takes others
        self.names = names
        self.places: Places = {}


@register_quantizer(METHOD)
class StoredWeightsQuantizer(HfQuantizer):
    quantization_config: StoredWeightsConfig

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> None:
        self.quantization_config.places = leave_out(model, self.quantization_config.names)

    def is_serializable(self) -> bool:
        return False

    @property
    def is_trainable(self) -> bool:
        return False


def forget_config(model: PreTrainedModel) -> None:
    """Takes the `StoredWeightsConfig` that it was loaded with off the model, which to all other code is one of plain weights."""
    quantizer: Any = model.hf_quantizer
    quantizer.remove_quantization_config(model)


def leave_out(model: PreTrainedModel, names: Collection[str]) -> Places:
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
    model: PreTrainedModel, places: Places, weights: Iterable[tuple[str, QuantizedWeight]], choose: Choice, dtype: torch.dtype
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
            parameter = nn.Parameter(stored.dequantized().to(dtype), requires_grad=False)
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


def put_in_stored(model: PreTrainedModel, directory: Path, places: Places, mode: QuantizationMode, dtype: torch.dtype) -> None:
    """Puts in what the model's directory holds in few bits and `leave_out` left out, by a resolved mode.

    A weight of more bits than were asked for is rounded again. One of fewer stays: more bits would not make it better.
    """

    def choose(weight: QuantizedWeight, is_vocabulary: bool) -> QuantizedWeight | None:
        if mode == "none":
            return None
        bits = _bits(mode, is_vocabulary)
        return weight if weight.bits <= bits else quantized(weight.dequantized(), bits)

    put_in(model, places, read_quantized(directory, model.device), choose, dtype)


def quantize_plain(model: PreTrainedModel, mode: QuantizationMode) -> None:
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
