"""Several operations of a model's own code in one: projections of one input, norms, residual connections, gates, rotary embeddings.

One matrix multiplication replaces those of query, key and value, or of gate and up; on a GPU, one kernel replaces the seven of a norm and
the addition before it, the two of a gate, and the ten of a rotation. Each is first compared with the model's own code on random numbers.
"""

import copy
from collections.abc import Callable, Sequence
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from penstock.engine.kernels.launch import ACTIVATIONS, GPT_NEOX, RotaryForm, add_rms_norm, gated, rms_norm, rotate
from penstock.engine.weights.float8 import Float8Linear
from penstock.engine.weights.linear import QuantizedLinear, can_join, reads_weight

# What architectures call projections of one and the same input.
FUSED_PROJECTIONS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
MAX_ROUNDINGS = 4  # that a result may differ by: some models round once, others twice
ROTATION_FUNCTION = "apply_rotary_pos_emb"  # what transformers calls the function, in every module of a model that has one
ROTARY_FORMS = (
    GPT_NEOX,  # Llama and most others
    RotaryForm(cosines="once", per_cosine=2),  # gpt-oss
    RotaryForm(is_interleaved=True, cosines="once"),  # GLM-4
    RotaryForm(is_interleaved=True, cosines="pairs"),  # Cohere
)
FLOAT32_TOLERANCE = 1e-5
# The norms of a decoder layer before and after its attention, and before and after its MLP.
LAYER_NORMS: tuple[tuple[str | None, str | None, str | None, str | None], ...] = (
    ("input_layernorm", None, "post_attention_layernorm", None),  # Llama and most others
    ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"),  # Gemma
    ("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"),  # GLM-4
    (None, "post_attention_layernorm", None, "post_feedforward_layernorm"),  # OLMo
)


class FusedLinear(nn.Module):
    """Several linear layers as one. Parts are views of one result, so they are valid until it is dropped, like any tensor."""

    def __init__(self, whole: nn.Module, sizes: Sequence[int]) -> None:
        super().__init__()
        self.sizes = list(sizes)
        self.linear = whole
        self._input: Tensor | None = None
        self._parts: list[Tensor] = []

    def take(self, x: Tensor, position: int) -> Tensor:
        """What the linear layer at `position` makes of `x`, [..., in_features]."""
        if self._input is not x:
            self._input, self._parts = x, list(self.linear(x).split(self.sizes, dim=-1))
        part = self._parts[position]
        if position == len(self.sizes) - 1:
            self._input, self._parts = None, []
        return part


class FusedPart(nn.Module):
    """Takes the place of one of the linear layers."""

    def __init__(self, fused: FusedLinear, position: int) -> None:
        super().__init__()
        self.fused = fused
        self.position = position

    def forward(self, x: Tensor) -> Tensor:
        return self.fused.take(x, self.position)


def fuse_linears(model: nn.Module) -> int:
    """Fuses in place what can be, and returns how many groups that was.

    Layers are fused that are all `nn.Linear` of one type, all `QuantizedLinear`, of any types, or all `Float8Linear`, and agree on having a
    bias.
    """
    num_fused = 0
    for parent in list(model.modules()):
        for names in FUSED_PROJECTIONS:
            layers = [getattr(parent, name, None) for name in names]
            if any(reads_weight(type(parent), name) for name in names):  # type: ignore[arg-type]
                continue
            fused = _fused(layers)
            if fused is None:
                continue
            for position, name in enumerate(names):
                setattr(parent, name, FusedPart(fused, position))
            num_fused += 1
    return num_fused


def _fused(layers: Sequence[nn.Module | None]) -> FusedLinear | None:
    """The layers as one; None where they are not of one kind."""
    quantized = [layer for layer in layers if isinstance(layer, QuantizedLinear)]
    if len(quantized) == len(layers):
        sizes = [layer.out_features for layer in quantized]
        return FusedLinear(QuantizedLinear.joined(quantized), sizes) if can_join(quantized) else None
    of_float8 = [layer for layer in layers if isinstance(layer, Float8Linear)]
    if len(of_float8) == len(layers):
        whole = Float8Linear.joined(of_float8)
        return None if whole is None else FusedLinear(whole, [layer.out_features for layer in of_float8])
    linears = [layer for layer in layers if type(layer) is nn.Linear]
    if len(linears) < len(layers) or len({(linear.in_features, linear.bias is None, linear.weight.dtype) for linear in linears}) > 1:
        return None
    first, sizes = linears[0], [linear.out_features for linear in linears]
    joined = nn.Linear(first.in_features, sum(sizes), bias=first.bias is not None, device="meta")
    joined.weight = _joined([linear.weight for linear in linears])
    if first.bias is not None:
        joined.bias = _joined([linear.bias for linear in linears])
    return FusedLinear(joined, sizes)


def _joined(parameters: Sequence[Tensor]) -> nn.Parameter:
    return nn.Parameter(torch.cat([parameter.detach() for parameter in parameters]), requires_grad=False)


class FusedNorm:
    """In place of a norm's `forward`. What a residual connection has normalized beside its sum is the result for that sum."""

    def __init__(self, weight: Tensor, epsilon: float, adds_one: bool) -> None:
        self.parameters = (weight, epsilon)
        self.adds_one = adds_one
        self._known: tuple[Tensor, Tensor] | None = None

    def __call__(self, states: Tensor) -> Tensor:
        known, self._known = self._known, None
        return known[1] if known is not None and known[0] is states else rms_norm(states, *self.parameters, self.adds_one)

    def keep(self, states: Tensor, normed: Tensor) -> None:
        """`normed` is the result for `states`, which come next."""
        self._known = (states, normed)


def fuse_norms(model: nn.Module) -> int:
    """Replaces in place what normalizes by root mean square, and returns how many modules that were.

    Which modules do is tested: of each class, one of each size computes random numbers both ways. The others stay as they are.
    """
    kinds: dict[tuple[type[nn.Module], int], bool | None] = {}
    num_fused = 0
    for module in model.modules():
        weight, epsilon = getattr(module, "weight", None), getattr(module, "variance_epsilon", getattr(module, "eps", None))
        if not type(module).__name__.endswith("RMSNorm") or not isinstance(weight, Tensor) or weight.dim() != 1 or epsilon is None:
            continue
        kind = (type(module), len(weight))
        if kind not in kinds:
            kinds[kind] = next((adds_one for adds_one in (False, True) if _norms_agree(module, FusedNorm(weight, epsilon, adds_one))), None)
        adds_one = kinds[kind]
        if adds_one is not None:
            module.forward = FusedNorm(weight, float(epsilon), adds_one)
            num_fused += 1
    return num_fused


@torch.inference_mode()
def _norms_agree(module: nn.Module, fused: FusedNorm) -> bool:
    weight, _ = fused.parameters
    return _is_close(fused(states := _random(weight, 2, 3, len(weight))), module(states))


def _random(like: Tensor, *shape: int) -> Tensor:
    """The same numbers each time, of which most are greater than one."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(like.device, like.dtype) * 3


def _is_close(got: Tensor, expected: Any) -> bool:
    if not isinstance(expected, Tensor) or expected.shape != got.shape or expected.dtype != got.dtype:
        return False
    bound = MAX_ROUNDINGS * torch.finfo(got.dtype).eps
    return bool(((got.float() - expected.float()).abs() <= bound * expected.float().abs() + bound).all())


class FusedLayer:
    """In place of a decoder layer's `forward`: each addition to the residual stream is one kernel with the norms around it.

    `norms` are those before and after attention, and before and after the MLP; `next_norm` is what the layer's result goes to.
    """

    def __init__(self, layer: Any, norms: Sequence[FusedNorm | None], next_norm: FusedNorm | None) -> None:
        self._layer = layer
        self._before_attention, self._after_attention, self._before_mlp, self._after_mlp = norms
        self._next_norm = next_norm
        self._scale: float = getattr(layer, "residual_multiplier", 1.0)  # Granite's
        self._adds_one = next(norm.adds_one for norm in norms if norm is not None)

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if args:  # whose names are the layer's own
            own: Tensor = type(self._layer).forward(self._layer, hidden_states, *args, **kwargs)
            return own
        before = hidden_states if self._before_attention is None else self._before_attention(hidden_states)
        attended = _states(self._layer.self_attn(hidden_states=before, **kwargs))
        states = self._add(hidden_states, attended, self._after_attention, self._before_mlp)
        before = states if self._before_mlp is None else self._before_mlp(states)
        return self._add(states, _states(self._layer.mlp(before)), self._after_mlp, self._next_norm)

    def _add(self, residual: Tensor, states: Tensor, before: FusedNorm | None, after: FusedNorm | None) -> Tensor:
        parameters = [None if norm is None else norm.parameters for norm in (before, after)]
        total, normed = add_rms_norm(residual, states, *parameters, scale=self._scale, adds_one=self._adds_one)
        if after is not None and normed is not None:
            after.keep(total, normed)
        return total


def _states(output: Any) -> Tensor:
    states: Tensor = output[0] if isinstance(output, tuple) else output
    return states


def fuse_residuals(model: nn.Module) -> int:
    """Replaces in place the decoder layers of the forms in `LAYER_NORMS` whose norms are fused, and returns how many that were.

    One layer of each class computes random numbers both ways, around an attention and an MLP that only reorder them. Where the results
    differ, or what attention is called with, layers stay as they are.
    """
    is_alike: dict[type[nn.Module], bool] = {}
    num_fused = 0
    for parent in list(model.modules()):
        layers = next((child for child in parent.children() if isinstance(child, nn.ModuleList)), ())
        norms = [_layer_norms(layer) for layer in layers]
        for index, (layer, own) in enumerate(zip(layers, norms, strict=True)):
            if own is None:
                continue
            if type(layer) not in is_alike:
                is_alike[type(layer)] = _layers_agree(layer, own)
            if is_alike[type(layer)]:
                following = norms[index + 1] if index + 1 < len(norms) else (_fused_norm(getattr(parent, "norm", None)),)
                layer.forward = FusedLayer(layer, own, None if following is None else following[0])
                num_fused += 1
    return num_fused


def _layer_norms(layer: nn.Module) -> list[FusedNorm | None] | None:
    """Those of `FusedLayer`; None where the layer is of no form that is known, or has a norm that is not fused."""
    children = {name: child for name, child in layer.named_children() if not isinstance(child, nn.Dropout | nn.Identity)}
    for form in LAYER_NORMS:
        names = {name for name in form if name is not None}
        norms = [None if name is None else _fused_norm(children.get(name)) for name in form]
        found = {norm.adds_one for norm in norms if norm is not None}
        if children.keys() == names | {"self_attn", "mlp"} and len(found) == 1 and len(names) == len(norms) - norms.count(None):
            return norms
    return None


def _fused_norm(module: nn.Module | None) -> FusedNorm | None:
    forward = None if module is None else vars(module).get("forward")
    return forward if isinstance(forward, FusedNorm) else None


class _Reordering(nn.Module):
    """For attention or an MLP: reorders its input, and notes what else it is given."""

    def __init__(self, gives_tuple: bool) -> None:
        super().__init__()
        self.calls: list[dict[str, Any]] = []
        self.gives_tuple = gives_tuple

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Any:
        self.calls.append(kwargs)
        return (hidden_states.flip(-1), None) if self.gives_tuple else hidden_states.flip(-1)


@torch.inference_mode()
def _layers_agree(layer: nn.Module, norms: Sequence[FusedNorm | None]) -> bool:
    weight, _ = next(norm.parameters for norm in norms if norm is not None)
    states = _random(weight, 1, 3, len(weight))
    names = ("attention_mask", "position_ids", "past_key_values", "use_cache", "position_embeddings", "attention_metadata")
    given = {name: object() for name in names}
    for gives_tuple in (False, True):  # some MLPs give scores of their experts as well
        attention, mlp = _Reordering(gives_tuple=True), _Reordering(gives_tuple)
        trial: Any = _with_modules(layer, {"self_attn": attention, "mlp": mlp})
        try:
            expected = trial.forward(states, **given)
        except (TypeError, ValueError, RuntimeError):
            continue
        got = FusedLayer(trial, norms, None)(states, **given)
        if _is_close(got, expected) and attention.calls[0] == attention.calls[1] and mlp.calls == [{}, {}]:
            return True
    return False


def _with_modules(module: nn.Module, others: dict[str, nn.Module]) -> nn.Module:
    """A copy of the module alone, with other modules in it."""
    copied = copy.copy(module)
    vars(copied)["_modules"] = module._modules | others
    return copied


class FusedMlp:
    """In place of an MLP's `forward`: its activation and the product that follows are one kernel."""

    def __init__(self, mlp: Any, activation: str) -> None:
        self._mlp = mlp
        self._activation = activation

    def __call__(self, x: Tensor) -> Tensor:
        mlp = self._mlp
        gate, up = mlp.gate_up_proj(x).chunk(2, dim=-1) if hasattr(mlp, "gate_up_proj") else (mlp.gate_proj(x), mlp.up_proj(x))
        result: Tensor = mlp.down_proj(gated(gate, up, self._activation))
        return result


def fuse_gates(model: nn.Module) -> int:
    """Replaces in place MLPs with a gate, and returns how many that were.

    One of each class and activation computes random numbers both ways, around projections that give them.
    """
    device = next(model.parameters()).device
    kinds: dict[tuple[type[nn.Module], ...], str | None] = {}
    num_fused = 0
    for module in list(model.modules()):
        children = dict(module.named_children())
        if "down_proj" not in children or not ("gate_up_proj" in children or {"gate_proj", "up_proj"} <= children.keys()):
            continue
        kind = (type(module), *(type(child) for name, child in children.items() if not name.endswith("_proj")))
        if kind not in kinds:
            kinds[kind] = next((name for name in ACTIVATIONS if _gates_agree(module, name, device)), None)
        activation = kinds[kind]
        if activation is not None:
            module.forward = FusedMlp(module, activation)
            num_fused += 1
    return num_fused


class _FixedOutput(nn.Module):
    """For a projection: gives a tensor, whatever it is called with."""

    def __init__(self, result: Tensor) -> None:
        super().__init__()
        self.result = result

    def forward(self, _: Tensor) -> Tensor:
        return self.result


@torch.inference_mode()
def _gates_agree(mlp: nn.Module, activation: str, device: torch.device) -> bool:
    both = _random(torch.empty(0, device=device), 1, 3, 128)  # in float32, so that rounding hides nothing
    gate, up = both.chunk(2, dim=-1)
    others = {"gate_up_proj": _FixedOutput(both), "gate_proj": _FixedOutput(gate), "up_proj": _FixedOutput(up), "down_proj": nn.Identity()}
    trial: Any = _with_modules(mlp, {name: other for name, other in others.items() if name in mlp._modules})
    try:
        expected = trial.forward(both)
    except (TypeError, ValueError, RuntimeError):  # it wants other arguments, or shapes
        return False
    got = FusedMlp(trial, activation)(both)
    return isinstance(expected, Tensor) and torch.allclose(got, expected, atol=FLOAT32_TOLERANCE, rtol=FLOAT32_TOLERANCE)


Rotation = Callable[..., tuple[Tensor, Tensor]]


def fuse_rotary(model: nn.Module) -> int:
    """Replaces in place what rotates queries and keys, and returns in how many modules.

    A module's `forward` is given another function by that name; the model's code and other models keep theirs. Which of `ROTARY_FORMS` it
    computes, if any, is tested on random numbers, for as many cosines as the model's embeddings have.
    """
    num_fused = 0
    device = next(model.parameters()).device
    frequencies = [len(buffer) for name, buffer in model.named_buffers() if name.endswith("inv_freq")]
    sizes = {each for num_pairs in frequencies for each in (num_pairs, 2 * num_pairs)}  # one cosine for a pair, or for each of the two
    known: dict[tuple[Rotation, int], dict[int, RotaryForm]] = {}
    for module in model.modules():
        forward = type(module).forward
        size = getattr(module, "head_dim", None)
        if not isinstance(forward, FunctionType) or ROTATION_FUNCTION not in forward.__code__.co_names or not isinstance(size, int):
            continue
        own = forward.__globals__[ROTATION_FUNCTION]
        if (own, size) not in known:
            known[own, size] = _rotary_forms(own, size, sizes, device)
        if known[own, size]:
            namespace = {**forward.__globals__, ROTATION_FUNCTION: _rotation(own, known[own, size])}
            copied = FunctionType(forward.__code__, namespace, forward.__name__, forward.__defaults__, forward.__closure__)
            copied.__kwdefaults__ = forward.__kwdefaults__
            module.forward = MethodType(copied, module)
            num_fused += 1
    return num_fused


def _rotation(own: Rotation, forms: dict[int, RotaryForm]) -> Rotation:
    """The kernel, or the model's own function for calls that the kernel does not take."""

    def apply(query: Tensor, key: Tensor, cosines: Tensor, sines: Tensor, *rest: Any, **named: Any) -> tuple[Tensor, Tensor]:
        form = forms.get(cosines.shape[-1])
        is_flat = cosines.shape[:-1] == (1, query.shape[2]) and cosines.shape == sines.shape and len(query) == 1
        is_dense = query.stride(-1) == key.stride(-1) == cosines.stride(-1) == sines.stride(-1) == 1
        if form is not None and is_flat and is_dense and not rest and not named:
            return rotate(query, key, cosines, sines, form)
        return own(query, key, cosines, sines, *rest, **named)

    return apply


@torch.inference_mode()
def _rotary_forms(own: Rotation, size: int, numbers: set[int], device: torch.device) -> dict[int, RotaryForm]:
    """The form in which the function rotates heads of a size, for each number of cosines for which it has one."""
    forms = {}
    like = torch.empty(0, device=device)  # float32, so that rounding hides nothing
    query, key = _random(like, 1, 6, 3, size).split([4, 2], dim=1)  # type: ignore[no-untyped-call]
    for num_cosines in sorted(numbers):
        cosines, sines = _random(like, 2, 1, 3, num_cosines).unbind()
        try:
            expected = own(query, key, cosines, sines)
        except (TypeError, RuntimeError):  # it wants other arguments, or shapes
            continue
        for form in ROTARY_FORMS:
            num_rotated = form.per_cosine * num_cosines
            if num_rotated <= size and num_rotated % 2 == 0 and _turn_alike(rotate(query, key, cosines, sines, form), expected):
                forms[num_cosines] = form
                break
    return forms


def _turn_alike(results: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    return all(
        one.shape == other.shape and torch.allclose(one, other, atol=FLOAT32_TOLERANCE, rtol=FLOAT32_TOLERANCE)
        for one, other in zip(results, expected, strict=True)
    )
