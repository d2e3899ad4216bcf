"""The form of a decoder that native code computes, as read from a model: parts are found by the names that architectures share.

x += o(attention(rotate(qkv(norm(x))))), then x += down(silu(gate(norm(x))) * up(norm(x))): Llama, Mistral, Qwen, Granite, SmolLM and more.
Gemma has norms after attention and the MLP too, OLMo has them there alone. Mixtral, Qwen MoE, OLMoE and gpt-oss have a mixture of experts
in place of the MLP: a router chooses a few for each row. `native.py` verifies that a model uses its parts in this way.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from penstock.engine.model.compiled_layers import decoder_layers
from penstock.engine.model.fused import LAYER_NORMS, ROTATION_FUNCTION, FusedPart
from penstock.engine.weights.experts import ExpertLinear, GroupedExperts, GroupedLinear, GroupedPanelLinear
from penstock.engine.weights.float8 import Float8Linear, Float8Panels
from penstock.engine.weights.linear import PackedLinear, QuantizedLinear, QuantizedPart, can_panel, packed_weight, panels

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PROJECTIONS = ("q_proj", "k_proj", "v_proj")
FUSED_PROJECTION, FUSED_GATE = "qkv_proj", "gate_up_proj"  # of models that have one in place of several
QUERY_KEY_NORMS = {"q_norm", "k_norm"}
NORMS = {*QUERY_KEY_NORMS, *(name for names in LAYER_NORMS for name in names)}
GATES = ("gate_proj", "up_proj")
ACTIVATIONS = {"SiLU": 0, "SiLUActivation": 0, "GELUTanh": 1, "PytorchGELUTanh": 1}  # by their classes, as in activation.h
CLAMPED_SWIGLU = 2  # gpt-oss's
MLPS = ("mlp", "block_sparse_moe")  # what layers call their MLP, or their mixture of experts
ROUTERS = ("gate", "router")
EXPERTS = "experts"
ROUTER_DEVIATION = 1e-2  # of weights that add up to at most one
NO_ROPE = -1  # in place of the number of a layer's rotary positions, as in decoder.h
IS_FLOAT8 = -1  # in place of a number of parts, as in decoder.h
LANES = 16  # the native code takes so many numbers of a row at a time
STATIC_ROPES = ("default", "linear", "llama3", "yarn")  # those whose frequencies do not depend on how long the text is


class UnsuitableModel(Exception):
    """The model is not of this form; the message names the part."""


@dataclass(frozen=True, slots=True)
class LinearForm:
    """`weights` are one of bfloat16 in panels or, where there are `parts`, what those point to; `bias` is bfloat16.

    `order`, int64 [inputs], is that of a quantized weight's columns, where it is not that of the inputs. Of a mixture's experts, sizes
    and addresses are those of the first, and the others' weights and biases follow. `strides` are the bytes from each quantized part to
    the next expert's.
    """

    inputs: int
    outputs: int
    weights: list[Tensor]
    parts: "ctypes.Array[QuantizedPart] | Float8Panels | None"
    bias: Tensor | None
    order: Tensor | None = None
    strides: "ctypes.Array[ctypes.c_int64] | None" = None

    @property
    def num_parts(self) -> int:
        """As decoder.h has it."""
        if isinstance(self.parts, Float8Panels):
            return IS_FLOAT8
        return 0 if self.parts is None else len(self.parts)

    @property
    def address(self) -> int:
        return self.weights[0].data_ptr() if self.parts is None else ctypes.addressof(self.parts)

    @property
    def weight_bytes(self) -> int:
        return sum(weight.nbytes for weight in self.weights)


@dataclass(frozen=True, slots=True)
class ActivationForm:
    """`kind` is one of `ACTIVATIONS` or `CLAMPED_SWIGLU`, which has the numbers."""

    kind: int
    alpha: float = 0.0
    limit: float = 0.0


@dataclass(frozen=True, slots=True)
class MixtureForm:
    """A mixture of experts: a row goes to `num_chosen` of them, whose weights are a softmax of the router's results, of these alone if it
    `normalizes` and else of those of all experts.
    """

    router: LinearForm
    gate_up: LinearForm
    down: LinearForm
    num_experts: int
    num_chosen: int
    normalizes: bool


@dataclass(frozen=True, slots=True)
class LayerForm:
    """Norms are float32, and None where the layer has none. Those of queries and keys are of one head, or of all heads together.

    A layer has `gate_up` and `down`, or a `mixture`. `rope` is the number of the layer's rotary positions among the model's, or `NO_ROPE`;
    `sinks`, float32, has a logit for each head. What attention and the MLP add is multiplied by `residual_multiplier`.
    """

    query_key_value: LinearForm
    output: LinearForm
    gate_up: LinearForm | None
    down: LinearForm | None
    mixture: MixtureForm | None
    attention_input_norm: Tensor | None
    attention_output_norm: Tensor | None
    mlp_input_norm: Tensor | None
    mlp_output_norm: Tensor | None
    query_norm: Tensor | None
    key_norm: Tensor | None
    sinks: Tensor | None
    activation: ActivationForm
    rope: int
    scaling: float
    softcap: float
    residual_multiplier: float

    @property
    def linears(self) -> list[LinearForm]:
        """All of them, the router and the experts included."""
        of_mixture = [] if self.mixture is None else [self.mixture.router, self.mixture.gate_up, self.mixture.down]
        of_mlp = [linear for linear in (self.gate_up, self.down) if linear is not None]
        return [self.query_key_value, self.output, *of_mlp, *of_mixture]


LAYER_LINEARS = ("query_key_value", "output", "gate_up", "down")  # the last two only without a mixture
LAYER_TENSORS = ("attention_input_norm", "attention_output_norm", "mlp_input_norm", "mlp_output_norm", "query_norm", "key_norm", "sinks")
LAYER_NUMBERS = ("rope", "scaling", "softcap", "residual_multiplier")


@dataclass(frozen=True, slots=True)
class RopeForm:
    """Rotary positions: float32 [rotary size / 2], and what cosines and sines are multiplied by.

    Neighbouring numbers of a head are turned together if it `is_interleaved`, else one of each half.
    """

    inverse_frequencies: Tensor
    factor: float
    is_interleaved: bool


@dataclass(frozen=True, slots=True)
class OuterForm:
    """What is done to the embedding's result, and to the head's: multiplied, then bounded by a soft cap, of which 0 is none."""

    embedding_multiplier: float = 1.0
    logit_multiplier: float = 1.0
    logit_softcap: float = 0.0

    @property
    def keeps_logits(self) -> bool:
        return self.logit_multiplier == 1.0 and not self.logit_softcap

    def logits(self, logits: Tensor) -> Tensor:
        if self.logit_multiplier != 1.0:
            logits = logits * self.logit_multiplier
        return torch.tanh(logits / self.logit_softcap) * self.logit_softcap if self.logit_softcap else logits


@dataclass(frozen=True, slots=True)
class DecoderForm:
    """The layers, and what is around them."""

    modules: list[nn.Module]
    layers: list[LayerForm]
    final_norm: Tensor
    epsilon: float
    ropes: list[RopeForm]
    outer: OuterForm


class PreparedMixture(nn.Module):
    """What native code computes a mixture with: the router in panels, and the experts."""

    router: Tensor
    router_bias: Tensor | None

    def __init__(self, up: ExpertLinear, down: ExpertLinear, form: MixtureForm) -> None:
        super().__init__()
        self.up, self.down = up, down
        self.num_experts, self.num_chosen, self.normalizes = form.num_experts, form.num_chosen, form.normalizes
        self.register_buffer("router", form.router.weights[0], persistent=False)
        self.register_buffer("router_bias", form.router.bias, persistent=False)

    def form(self) -> MixtureForm:
        router = LinearForm(2 * self.router.shape[1], _whole_lanes(self.num_experts), [self.router], None, self.router_bias)
        return MixtureForm(router, _read_experts(self.up), _read_experts(self.down), self.num_experts, self.num_chosen, self.normalizes)


class PreparedLayer(nn.Module):
    """What native code computes a layer with: fused projections, and norms in float32."""

    def __init__(self, linears: Sequence[nn.Module], mixture: PreparedMixture | None, form: LayerForm) -> None:
        super().__init__()
        for name, linear in zip(LAYER_LINEARS, linears, strict=False):
            self.add_module(name, linear)
        self.mixture = mixture
        self.activation, self.alpha, self.limit = form.activation.kind, form.activation.alpha, form.activation.limit
        for name in LAYER_NUMBERS:
            setattr(self, name, getattr(form, name))
        for name in LAYER_TENSORS:
            self.register_buffer(name, getattr(form, name), persistent=False)

    @classmethod
    def of(cls, layer: Any, form: LayerForm) -> "PreparedLayer":
        """Of a model's own layer, which has this form."""
        if form.mixture is None:
            return cls(linears_of(layer), None, form)
        experts: Any = mlp_of(layer).get_submodule(EXPERTS)
        return cls(linears_of(layer), PreparedMixture(experts.up, experts.down, form.mixture), form)

    def form(self) -> LayerForm:
        mixture = self._modules.get("mixture")
        parts: dict[str, Any] = dict.fromkeys(LAYER_LINEARS)
        parts |= {name: read_linear(linear) for name, linear in self.named_children() if linear is not mixture}
        parts["mixture"] = mixture.form() if isinstance(mixture, PreparedMixture) else None
        numbers: dict[str, Any] = {name: getattr(self, name) for name in LAYER_NUMBERS}
        return LayerForm(**(parts | self._buffers), **numbers, activation=ActivationForm(self.activation, self.alpha, self.limit))


class PreparedDecoder(nn.Module):
    """In place of a model that is computed by native code alone, and was verified in an earlier process."""

    def __init__(self, config: Any, form: DecoderForm, layers: list[PreparedLayer], embedding: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.config, self.form = config, form
        self.layers, self.embedding, self.head = nn.ModuleList(layers), embedding, head

    @property
    def base_model(self) -> nn.Module:
        return self

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding

    def get_output_embeddings(self) -> nn.Module:
        return self.head


def read_form(model: "PreTrainedModel | PreparedDecoder", num_layers: int) -> DecoderForm:
    """Raises `UnsuitableModel` where a part is missing, or there is one too many."""
    if isinstance(model, PreparedDecoder):
        return model.form
    modules = decoder_layers(model, num_layers)
    require(bool(modules), "its layers cannot be told apart")
    base: Any = model.get_decoder()  # type: ignore[no-untyped-call]
    ropes, ropes_of_layers = _read_ropes(base, num_layers, is_interleaved=_turns_neighbours(modules[0]))
    layers = [_read_layer(module, rope) for module, rope in zip(modules, ropes_of_layers, strict=True)]
    _require_sizes(layers)
    has_norms = any(norm is not None for layer in layers for norm in (layer.query_norm, layer.key_norm))
    require(not (ropes[0].is_interleaved and has_norms), "its norms of queries and keys are of another kind")
    final_norm = getattr(base, "norm", None)
    norms = [final_norm, *(part for layer in modules for name, part in layer.named_modules() if name.rpartition(".")[2] in NORMS)]
    epsilons = {getattr(norm, "variance_epsilon", getattr(norm, "eps", None)) for norm in norms}
    epsilon = epsilons.pop()
    if epsilons or not isinstance(epsilon, float):
        raise UnsuitableModel("its norms are of another kind")
    config = base.config
    return DecoderForm(
        modules=modules,
        layers=layers,
        final_norm=_weight_of(final_norm, layers[0].output.outputs),
        epsilon=epsilon,
        ropes=ropes,
        # That these are all, and mean that, is verified with the layers.
        outer=OuterForm(
            embedding_multiplier=float(getattr(base, "embedding_multiplier", 1.0)),
            logit_multiplier=1.0 / float(getattr(config, "logits_scaling", 1.0)),
            logit_softcap=float(getattr(config, "final_logit_softcapping", None) or 0.0),
        ),
    )


@torch.inference_mode()
def _turns_neighbours(layer: Any) -> bool:
    """Whether a layer's rotary positions turn neighbouring numbers. False where its code shows nothing of how they do."""
    forward = getattr(type(getattr(layer, "self_attn", None)), "forward", None)
    rotate = getattr(forward, "__globals__", {}).get(ROTATION_FUNCTION)
    if rotate is None:
        return False
    head = torch.zeros(1, 1, 1, 2 * LANES)
    head[..., 0] = 1.0
    try:
        turned, _ = rotate(head, head, torch.zeros(1, 1, 2 * LANES), torch.ones(1, 1, 2 * LANES))
    except (TypeError, ValueError, RuntimeError, AttributeError, IndexError, AssertionError):  # it wants other arguments, or shapes
        return False
    return bool(turned[..., 1].any())


def _read_ropes(base: Any, num_layers: int, *, is_interleaved: bool) -> tuple[list[RopeForm], list[int]]:
    """The rotary positions of a model, and which of them each layer has."""
    # Ministral 3's factor grows too slowly for what is verified to show it in every context.
    parameters = getattr(base.config, "rope_parameters", None) or {}
    require(not parameters.get("llama_4_scaling_beta"), "its queries are scaled by their positions")
    module = getattr(base, "rotary_emb", None)
    types = getattr(module, "rope_type", None)
    if isinstance(types, dict):  # by types of layers
        kinds = list(types)
        read = [
            (types[kind], getattr(module, f"{kind}_inv_freq", None), getattr(module, f"{kind}_attention_scaling", 1.0)) for kind in kinds
        ]
        layer_types = list(base.config.layer_types)
        require(len(layer_types) == num_layers and set(layer_types) <= set(kinds), "its positions are of another kind")
        numbers = [kinds.index(kind) for kind in layer_types]
    else:
        read = [(types, getattr(module, "inv_freq", None), getattr(module, "attention_scaling", 1.0))]
        numbers = [0] * num_layers
    ropes = []
    for rope_type, frequencies, factor in read:
        if rope_type not in STATIC_ROPES or not isinstance(frequencies, Tensor):
            raise UnsuitableModel("its positions are of another kind")
        ropes.append(RopeForm(frequencies.detach().float().contiguous(), float(factor), is_interleaved))
    require(len({len(rope.inverse_frequencies) for rope in ropes}) == 1, "its positions differ in size")
    return ropes, numbers


def _read_layer(layer: Any, rope: int) -> LayerForm:
    norm_names = _norm_names(layer)
    attention: Any = layer.self_attn
    mlp: Any = mlp_of(layer)
    has_norms, has_sinks = "q_norm" in attention._modules, "sinks" in attention._parameters
    linear_parts = {path for names in linear_names(layer) for path in names}
    own_parts = (QUERY_KEY_NORMS if has_norms else set()) | ({"sinks"} if has_sinks else set())
    _require_parts(attention, _below("self_attn.", linear_parts) | own_parts)
    require(isinstance(getattr(attention, "scaling", None), float), "its attention says no scaling")
    require(getattr(getattr(attention, "config", None), "clip_qkv", None) is None, "its queries, keys and values are clipped")
    query_key_value, output, *dense = map(read_linear, linears_of(layer))
    hidden_size = output.outputs
    mixture = None
    if dense:
        activation_name = "activation_fn" if FUSED_GATE in mlp._modules else "act_fn"
        _require_parts(mlp, _below("mlp.", linear_parts) | {activation_name})
        activation = _activation_of(getattr(mlp, activation_name))
    else:
        mixture = _read_mixture(mlp, hidden_size)
        activation = _activation_of_experts(mlp.experts.own)
    query_norm, key_norm = (_weight_of(norm) for norm in (attention.q_norm, attention.k_norm)) if has_norms else (None, None)
    norms: list[Any] = [None if name is None else _weight_of(getattr(layer, name), hidden_size) for name in norm_names]
    return LayerForm(
        query_key_value=query_key_value,
        output=output,
        gate_up=dense[0] if dense else None,
        down=dense[1] if dense else None,
        mixture=mixture,
        **dict(zip(LAYER_TENSORS, norms, strict=False)),
        query_norm=query_norm,
        key_norm=key_norm,
        sinks=attention.sinks.detach().float().contiguous() if has_sinks else None,
        rope=rope if getattr(attention, "use_rope", True) else NO_ROPE,
        activation=activation,
        scaling=attention.scaling,
        softcap=float(getattr(attention, "attn_logit_softcapping", None) or 0.0),
        residual_multiplier=float(getattr(layer, "residual_multiplier", 1.0)),
    )


def _activation_of(module: Any) -> ActivationForm:
    kind = ACTIVATIONS.get(type(module).__name__)
    if kind is None:
        raise UnsuitableModel("its activation is another one")
    return ActivationForm(kind)


def _activation_of_experts(own: Any) -> ActivationForm:
    # Bounds are seldom reached, so that what is verified may not show them: code is known by its name.
    name = type(own)._apply_gate.__qualname__
    if name == "GptOssExperts._apply_gate":
        return ActivationForm(CLAMPED_SWIGLU, float(own.alpha), float(own.limit))
    require(name == "_default_apply_gate" and bool(own.is_concatenated), "its experts have a gate of another kind")
    return _activation_of(own.act_fn)


def _read_mixture(mlp: Any, hidden_size: int) -> MixtureForm:
    name = next((name for name in ROUTERS if name in mlp._modules), "")
    _require_parts(mlp, {name, EXPERTS})
    experts, router = mlp.experts, getattr(mlp, name)
    if not isinstance(experts, GroupedExperts) or not experts.own.has_gate or experts.own.has_post_expert_norm:
        raise UnsuitableModel("its experts are of another kind")
    _require_parts(router, {"weight"} | ({"bias"} if router._parameters.get("bias") is not None else set()))
    num_chosen = getattr(router, "top_k", None)
    weight, bias, num_experts = router.weight.detach(), router._parameters.get("bias"), experts.num_experts
    if not isinstance(num_chosen, int) or weight.shape != (num_experts, hidden_size) or router._buffers:
        raise UnsuitableModel("its router is of another kind")
    normalizes = _normalizes(router, weight, bias, num_chosen)
    num_missing = _whole_lanes(num_experts) - num_experts
    weight_OI = nn.functional.pad(weight, (0, 0, 0, num_missing))
    bias_O = None if bias is None else nn.functional.pad(bias.detach(), (0, num_missing))
    require(can_panel(weight_OI, bias_O), "its router is of another type")
    form = LinearForm(hidden_size, num_experts + num_missing, [panels(weight_OI)], None, bias_O)
    return MixtureForm(form, _read_experts(experts.up), _read_experts(experts.down), num_experts, num_chosen, normalizes)


@torch.inference_mode()
def _normalizes(router: Any, weight_EH: Tensor, bias_E: Tensor | None, num_chosen: int) -> bool:
    """Whether the weights of the experts that a router chooses add up to one, rather than be a part of the softmax over all experts."""
    x_TH = torch.randn(8, weight_EH.shape[1], generator=torch.Generator().manual_seed(0)).to(weight_EH.dtype)
    logits_TE = nn.functional.linear(x_TH, weight_EH, bias_E).float()
    highest_TK = logits_TE.topk(num_chosen).values
    candidates = {True: highest_TK.softmax(-1), False: (highest_TK - logits_TE.logsumexp(-1, keepdim=True)).exp()}
    try:
        _, given_TK, chosen_TK = router(x_TH)
        deviations = {normalizes: float((given_TK.float() - weights_TK).abs().max()) for normalizes, weights_TK in candidates.items()}
        best = min(deviations, key=deviations.__getitem__)
        is_alike = torch.allclose(logits_TE.gather(1, chosen_TK), highest_TK) and deviations[best] < ROUTER_DEVIATION
    except (TypeError, ValueError, RuntimeError, AttributeError, IndexError) as error:  # it wants or gives something else
        raise UnsuitableModel("its router is of another kind") from error
    require(is_alike, "its router weighs or chooses experts in another way")
    return best


def _whole_lanes(num_outputs: int) -> int:
    return -(-num_outputs // LANES) * LANES


def _read_experts(experts: ExpertLinear) -> LinearForm:
    inputs, bias = experts.in_features, experts.bias
    require(bias is None or bias.dtype == torch.bfloat16, "its experts are of another type")
    if isinstance(experts, GroupedLinear):
        blocks = [weight.blocks for weight in experts.grouped]
        strides = (ctypes.c_int64 * len(blocks))(*(each[0].nbytes for each in blocks))
        return LinearForm(inputs, sum(each.out_features for each in experts.grouped), blocks, experts.native_parts(), bias, strides=strides)
    if isinstance(experts, GroupedPanelLinear):
        return LinearForm(inputs, experts.out_features, [experts.panels], None, bias)
    return LinearForm(inputs, experts.out_features, [experts.codes, experts.scales], experts.native(), bias)


def mlp_of(layer: nn.Module) -> nn.Module:
    """Its MLP or mixture of experts. Raises `UnsuitableModel`."""
    name = next((name for name in MLPS if name in layer._modules), None)
    if name is None:
        raise UnsuitableModel(f"{type(layer).__name__} has no MLP")
    return layer.get_submodule(name)


def linear_names(layer: nn.Module) -> list[tuple[str, ...]]:
    """The paths of a layer's linear layers, in the order in which it computes them: those that are fused together in one tuple.

    The last two, which are the MLP's, are empty where a mixture of experts is in its place. Raises `UnsuitableModel` without either.
    """
    attention, mlp = layer.get_submodule("self_attn"), mlp_of(layer)
    projections = (FUSED_PROJECTION,) if FUSED_PROJECTION in attention._modules else PROJECTIONS
    gates = (FUSED_GATE,) if FUSED_GATE in mlp._modules else GATES
    of_mlp: list[tuple[str, ...]] = [(), ()] if EXPERTS in mlp._modules else [gates, ("down_proj",)]
    paths: list[tuple[str, tuple[str, ...]]] = [("self_attn", projections), ("self_attn", ("o_proj",))]
    paths += [("mlp", names) for names in of_mlp]
    return [tuple(f"{parent}.{name}" for name in names) for parent, names in paths]


def _norm_names(layer: Any) -> tuple[str | None, str | None, str | None, str | None]:
    """As in `LAYER_NORMS`."""
    found = {name for name, part in layer._modules.items() if part is not None and not isinstance(part, nn.Dropout | nn.Identity)}
    found |= {name for name, parameter in layer._parameters.items() if parameter is not None}
    for names in LAYER_NORMS:
        for mlp in MLPS:
            if found == {"self_attn", mlp, *filter(None, names)}:
                return names
    raise UnsuitableModel(f"{type(layer).__name__} has other parts: {', '.join(sorted(found))}")


def _below(prefix: str, paths: set[str]) -> set[str]:
    return {path.removeprefix(prefix) for path in paths if path.startswith(prefix)}


def linears_of(layer: nn.Module) -> list[nn.Module]:
    """The modules of `linear_names`, fused: four or, without an MLP, two. Raises `UnsuitableModel`."""
    try:
        return [_fused_linear([layer.get_submodule(name) for name in names]) for names in linear_names(layer) if names]
    except AttributeError as error:
        raise UnsuitableModel(str(error)) from error


def _fused_linear(parts: Sequence[nn.Module]) -> nn.Module:
    if len(parts) == 1:
        return parts[0]
    wholes = {part.fused for part in parts if isinstance(part, FusedPart)}
    if len(wholes) != 1 or not all(isinstance(part, FusedPart) for part in parts):
        raise UnsuitableModel("its projections are not fused")
    return wholes.pop().linear


def read_linear(linear: nn.Module) -> LinearForm:
    """Raises `UnsuitableModel` for one whose weight the kernels do not read."""
    if isinstance(linear, QuantizedLinear) and (linear.bias is None or linear.bias.dtype == torch.bfloat16):
        blocks = [weight.blocks for weight in linear.packed]
        return LinearForm(linear.in_features, linear.out_features, blocks, linear.native_parts(), linear.bias, linear.order)
    if isinstance(linear, Float8Linear) and (linear.bias is None or linear.bias.dtype == torch.bfloat16):
        weight = linear.weight
        return LinearForm(linear.in_features, linear.out_features, [weight.codes, weight.scales], weight.native(), linear.bias)
    if isinstance(linear, PackedLinear) and not packed_weight(linear).is_mkldnn:
        return LinearForm(linear.in_features, linear.out_features, [packed_weight(linear)], None, linear.bias)
    raise UnsuitableModel(f"{type(linear).__name__} is a linear layer of another kind")


def _require_sizes(layers: list[LayerForm]) -> None:
    # The native code allocates for one size of MLPs and of mixtures, and processes rows in whole vectors.
    attention = {_sizes(layer.query_key_value, layer.output) for layer in layers}
    dense = {_sizes(layer.gate_up, layer.down) for layer in layers if layer.gate_up is not None and layer.down is not None}
    mixtures = [layer.mixture for layer in layers if layer.mixture is not None]
    experts = {_sizes(mixture.gate_up, mixture.down) for mixture in mixtures}
    kinds = {(mixture.num_experts, mixture.num_chosen) for mixture in mixtures}
    require(len(attention) == 1 and len(dense) <= 1 and len(experts) <= 1 and len(kinds) <= 1, "its layers differ in size")
    (hidden_size, _), (_, output_size) = attention.pop()
    require(output_size == hidden_size and hidden_size % LANES == 0, f"its sizes are no multiples of {LANES}, or do not fit each other")
    for (gate_inputs, gate_outputs), (inner_size, down_outputs) in dense | experts:
        require({gate_inputs, down_outputs} == {hidden_size} and gate_outputs == 2 * inner_size, "its sizes do not fit each other")
        require(inner_size % LANES == 0, f"its sizes are no multiples of {LANES}")


def _sizes(*linears: LinearForm) -> tuple[tuple[int, int], ...]:
    return tuple((linear.inputs, linear.outputs) for linear in linears)


@torch.inference_mode()
def _weight_of(norm: Any, size: int | None = None) -> Tensor:
    """What a norm multiplies by: its weight or, in some models, 1 more."""
    weight = getattr(norm, "weight", None)
    if not isinstance(weight, Tensor) or weight.dim() != 1 or size not in (None, len(weight)):
        raise UnsuitableModel(f"{type(norm).__name__} is a norm of another kind")
    plain = weight.detach().float()
    given = norm(torch.ones_like(weight)[None])[0].float()  # whose root mean square is 1
    return min((plain, 1.0 + plain), key=lambda candidate: float((given - candidate).norm())).contiguous()


def _require_parts(module: nn.Module, names: set[str]) -> None:
    parts = {**module._modules, **module._parameters}
    found = {name for name, part in parts.items() if part is not None}
    require(found == names, f"{type(module).__name__} has other parts: {', '.join(sorted(found ^ names))}")


def require(is_so: bool, otherwise: str) -> None:
    if not is_so:
        raise UnsuitableModel(otherwise)
