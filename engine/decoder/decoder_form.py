"""The most common form of a decoder, read from a model's modules: what each layer multiplies by, norms with and looks back to.

x += o(attention(rotate(qkv(norm(x))))), then x += down(silu(gate(norm(x))) * up(norm(x))): Llama, Mistral, Qwen2, Qwen3 and many others.
Parts are told by the names that architectures share. That they are used as here has to be tried out.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from penstock.engine.decoder.decoder_layers import decoder_layers
from penstock.engine.layers.fused import FusedPart
from penstock.engine.layers.linear import PackedLinear, packed_weight
from penstock.engine.layers.quantized import QuantizedLinear

LAYER_PARTS = {"input_layernorm", "self_attn", "post_attention_layernorm", "mlp"}
ATTENTION_PARTS = {"q_proj", "k_proj", "v_proj", "o_proj"}
QUERY_KEY_NORMS = {"q_norm", "k_norm"}
NORMS = {"input_layernorm", "post_attention_layernorm", *QUERY_KEY_NORMS}
MLP_PARTS = {"gate_proj", "up_proj", "down_proj", "act_fn"}
LANES = 16  # the native code takes so many numbers of a row at a time
STATIC_ROPES = ("default", "linear", "llama3", "yarn")  # those whose frequencies do not depend on how long the text is


class UnsuitableModel(Exception):
    """What of the model is not of this form."""


@dataclass(frozen=True, slots=True)
class LinearForm:
    """`weight` is in panels where `bits` is 16, else in blocks as `QuantizedLinear` has them; `bias` is bfloat16."""

    bits: int
    inputs: int
    outputs: int
    weight: Tensor
    bias: Tensor | None


@dataclass(frozen=True, slots=True)
class LayerForm:
    """Norms are float32, of heads only where the layer has them."""

    query_key_value: LinearForm
    output: LinearForm
    gate_up: LinearForm
    down: LinearForm
    input_norm: Tensor
    post_norm: Tensor
    query_norm: Tensor | None
    key_norm: Tensor | None
    scaling: float


@dataclass(frozen=True, slots=True)
class DecoderForm:
    """`inverse_frequencies` are those of the rotary positions, float32 [head size / 2]."""

    modules: list[nn.Module]
    layers: list[LayerForm]
    final_norm: Tensor
    epsilon: float
    inverse_frequencies: Tensor
    rope_factor: float


def read_form(model: PreTrainedModel, num_layers: int) -> DecoderForm:
    """Raises `UnsuitableModel` where a part is missing, or there is one too many."""
    modules = decoder_layers(model, num_layers)
    _require(bool(modules), "its layers cannot be told apart")
    layers = [_read_layer(module) for module in modules]
    _require_sizes(layers)
    base: Any = model.get_decoder()  # type: ignore[no-untyped-call]
    rope = getattr(base, "rotary_emb", None)
    frequencies = getattr(rope, "inv_freq", None)
    if not isinstance(frequencies, Tensor) or getattr(rope, "rope_type", None) not in STATIC_ROPES:
        raise UnsuitableModel("its positions are of another kind")
    final_norm = getattr(base, "norm", None)
    norms = [final_norm, *(part for layer in modules for name, part in layer.named_modules() if name.rpartition(".")[2] in NORMS)]
    epsilons = {getattr(norm, "variance_epsilon", None) for norm in norms}
    epsilon = epsilons.pop()
    if epsilons or epsilon is None:
        raise UnsuitableModel("its norms are of another kind")
    return DecoderForm(
        modules=modules,
        layers=layers,
        final_norm=_weight_of(final_norm, layers[0].output.outputs),
        epsilon=epsilon,
        inverse_frequencies=frequencies.detach().float().contiguous(),
        rope_factor=float(getattr(rope, "attention_scaling", 1.0)),
    )


def _read_layer(layer: Any) -> LayerForm:
    _require_parts(layer, LAYER_PARTS)
    attention, mlp = layer.self_attn, layer.mlp
    has_norms = "q_norm" in attention._modules
    _require_parts(attention, ATTENTION_PARTS | QUERY_KEY_NORMS if has_norms else ATTENTION_PARTS)
    _require_parts(mlp, MLP_PARTS)
    _require(isinstance(mlp.act_fn, nn.SiLU) or type(mlp.act_fn).__name__ == "SiLUActivation", "its activation is another one")
    _require(isinstance(getattr(attention, "scaling", None), float), "its attention says no scaling")
    output, head_size = read_linear(attention.o_proj), getattr(attention, "head_dim", 0)
    return LayerForm(
        query_key_value=_read_fused([attention.q_proj, attention.k_proj, attention.v_proj]),
        output=output,
        gate_up=_read_fused([mlp.gate_proj, mlp.up_proj]),
        down=read_linear(mlp.down_proj),
        input_norm=_weight_of(layer.input_layernorm, output.outputs),
        post_norm=_weight_of(layer.post_attention_layernorm, output.outputs),
        query_norm=_weight_of(attention.q_norm, head_size) if has_norms else None,
        key_norm=_weight_of(attention.k_norm, head_size) if has_norms else None,
        scaling=attention.scaling,
    )


def _read_fused(parts: list[nn.Module]) -> LinearForm:
    wholes = {part.fused for part in parts if isinstance(part, FusedPart)}
    if len(wholes) != 1 or not all(isinstance(part, FusedPart) for part in parts):
        raise UnsuitableModel("its projections are not fused")
    return read_linear(wholes.pop().linear)


def read_linear(linear: nn.Module) -> LinearForm:
    """Raises `UnsuitableModel` for one whose weight the kernels do not read."""
    if isinstance(linear, QuantizedLinear) and (linear.bias is None or linear.bias.dtype == torch.bfloat16):
        return LinearForm(linear.bits, linear.in_features, linear.out_features, linear.blocks, linear.bias)
    if isinstance(linear, PackedLinear) and not packed_weight(linear).is_mkldnn:
        return LinearForm(16, linear.in_features, linear.out_features, packed_weight(linear), linear.bias)
    raise UnsuitableModel(f"{type(linear).__name__} is a linear layer of another kind")


def _require_sizes(layers: list[LayerForm]) -> None:
    """The native code has room for the first layer's sizes, and goes over rows in whole vectors."""
    sizes = {
        tuple((linear.inputs, linear.outputs) for linear in (layer.query_key_value, layer.output, layer.gate_up, layer.down))
        for layer in layers
    }
    _require(len(sizes) == 1, "its layers differ in size")
    (hidden_size, _), (_, output_size), (gate_inputs, gate_outputs), (inner_size, down_outputs) = sizes.pop()
    _require(
        {output_size, gate_inputs, down_outputs} == {hidden_size} and gate_outputs == 2 * inner_size, "its sizes do not fit each other"
    )
    _require(hidden_size % LANES == 0 and inner_size % LANES == 0, f"its sizes are no multiples of {LANES}")


def _weight_of(norm: Any, size: int) -> Tensor:
    weight = getattr(norm, "weight", None)
    if not isinstance(weight, Tensor) or weight.shape != (size,):
        raise UnsuitableModel(f"{type(norm).__name__} is a norm of another kind")
    return weight.detach().float().contiguous()


def _require_parts(module: nn.Module, names: set[str]) -> None:
    parts = {**module._modules, **module._parameters}
    found = {name for name, part in parts.items() if part is not None}
    _require(found == names, f"{type(module).__name__} has other parts: {', '.join(sorted(found ^ names))}")


def _require(is_so: bool, otherwise: str) -> None:
    if not is_so:
        raise UnsuitableModel(otherwise)
