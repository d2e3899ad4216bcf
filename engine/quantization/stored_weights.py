"""Loads a model without the matrices that `quantized_file` keeps apart, and puts those in, as they are or inflated.

transformers builds a model, then reads its weights. Layers that have lost theirs in between cost neither memory nor time.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from penstock.engine.errors import ConfigurationError
from penstock.engine.layers.linear import reads_weight
from penstock.engine.layers.quantized import QuantizedEmbedding, QuantizedLinear, QuantizedWeight, pack

METHOD = "penstock"
# What is made of a stored weight: it or another, or None where it is to be inflated. The second argument: whether it is of the vocabulary.
Choice = Callable[[QuantizedWeight, bool], QuantizedWeight | None]
# By the parameter's name, the modules that it is the weight of.
Places = Mapping[str, list[str]]


@register_quantization_config(METHOD)
class StoredWeightsConfig(QuantizationConfigMixin):
    """Has `from_pretrained` leave out these parameters of the model; afterwards `places` says where they belong."""

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
    """Takes the `StoredWeightsConfig` that it was loaded with off the model, which is one of plain weights to everyone else."""
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
    """An embedding shares its rows with the output layer that it is tied to."""
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
    """Whether the layer there does nothing beside what a quantized one does, and nobody else looks at its weight."""
    parent, _, name = path.rpartition(".")
    return type(model.get_submodule(path)) in (nn.Linear, nn.Embedding) and not reads_weight(type(model.get_submodule(parent)), name)  # type: ignore[arg-type]
