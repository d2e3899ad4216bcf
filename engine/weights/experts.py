"""Experts of a mixture: rows are grouped by expert, and each expert's weight is multiplied by its own rows alone."""

import ctypes
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from penstock.engine.errors import ConfigurationError
from penstock.engine.kernels import quantized as cuda
from penstock.engine.native.runtime import native_library
from penstock.engine.weights.float8 import Float8Weight, GroupedFloat8Linear, can_join_float8, joined_float8
from penstock.engine.weights.linear import QuantizedPart, can_panel, native_parts, panels, torch_linear
from penstock.engine.weights.packed import GROUP_SIZE, TYPES, PackedWeight, pack, quantized

_library = torch.library.Library("penstock", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(  # type: ignore[no-untyped-call]
    "grouped_linear(Tensor x, Tensor starts, Tensor[] blocks, int[] types, SymInt[] out_features, Tensor? bias) -> Tensor"
)


@torch.library.impl(_library, "grouped_linear", "CPU")
def _grouped_linear(
    x_SI: Tensor, starts_E: Tensor, blocks: Sequence[Tensor], types: Sequence[int], out_features: Sequence[int], bias_EO: Tensor | None
) -> Tensor:
    library = native_library()
    if library is None:
        return _torch_grouped_linear(x_SI, starts_E, blocks, types, out_features, bias_EO)
    if x_SI.dtype not in (torch.bfloat16, torch.float32):
        bias_EO = None if bias_EO is None else bias_EO.float()
        return _grouped_linear(x_SI.float(), starts_E, blocks, types, out_features, bias_EO).to(x_SI.dtype)
    assert all(each.is_contiguous() for each in blocks)
    assert bias_EO is None or (bias_EO.dtype == x_SI.dtype and bias_EO.is_contiguous())
    x_SI = x_SI.contiguous()
    out_SO = x_SI.new_empty(len(x_SI), sum(out_features))
    parts = native_parts(blocks, types, out_features)
    strides = (ctypes.c_int64 * len(parts))(*(each[0].nbytes for each in blocks))
    library.penstock_grouped_linear(
        out_SO.data_ptr(),
        x_SI.data_ptr(),
        ctypes.addressof(parts),
        ctypes.addressof(strides),
        len(parts),
        None if bias_EO is None else bias_EO.data_ptr(),
        starts_E.data_ptr(),
        len(starts_E) - 1,
        x_SI.shape[1],
        x_SI.dtype == torch.bfloat16,
    )
    return out_SO


@torch.library.register_fake("penstock::grouped_linear", lib=_library)  # type: ignore[untyped-decorator]
def _grouped_linear_shape(
    x_SI: Tensor, starts_E: Tensor, blocks: Sequence[Tensor], types: Sequence[int], out_features: Sequence[int], bias_EO: Tensor | None
) -> Tensor:
    return x_SI.new_empty(x_SI.shape[0], sum(out_features))


def _torch_grouped_linear(
    x_SI: Tensor, starts_E: Tensor, blocks: Sequence[Tensor], types: Sequence[int], out_features: Sequence[int], bias_EO: Tensor | None
) -> Tensor:
    out_SO = x_SI.new_empty(len(x_SI), sum(out_features))
    starts = starts_E.tolist()
    for expert, (first, end) in enumerate(itertools.pairwise(starts)):
        if first < end:
            bias_O = None if bias_EO is None else bias_EO[expert]
            own = [each[expert] for each in blocks]
            out_SO[first:end] = torch_linear(x_SI[first:end], own, types, out_features, bias_O)
    return out_SO


class GroupedWeight(nn.Module):
    """A weight of one type for each expert: what `PackedWeight` has for one, `blocks` is for all, uint8 [E, T, K, B]."""

    blocks: Tensor

    def __init__(self, type_name: str, out_features: int, blocks_ETKB: Tensor) -> None:
        super().__init__()
        self.type_name = type_name
        self.out_features = out_features
        self.register_buffer("blocks", blocks_ETKB, persistent=False)

    @classmethod
    def rounded(cls, weight_EOI: Tensor, bits: int) -> "GroupedWeight":
        """Each expert's weight, rounded to so many bits."""
        return cls.stacked([pack(quantized(weight_OI, bits)) for weight_OI in weight_EOI])

    @classmethod
    def stacked(cls, packed: Sequence[PackedWeight]) -> "GroupedWeight":
        """Of all experts' weights. Raises `ConfigurationError` where they differ in size or type."""
        kinds = {(each.type_name, each.out_features, each.in_features) for each in packed}
        if len(kinds) > 1:
            raise ConfigurationError(f"the weights of a layer's experts differ in size or type: {sorted(kinds)[:3]}")
        return cls(packed[0].type_name, packed[0].out_features, torch.stack([each.blocks for each in packed]))

    @property
    def in_features(self) -> int:
        return self.blocks.shape[2] * TYPES[self.type_name].columns

    def of_expert(self, expert: int) -> PackedWeight:
        return PackedWeight(self.type_name, self.out_features, self.blocks[expert])


class GroupedLinear(nn.Module):
    """A linear layer of each expert. Rows [S, in_features] are in the order of experts: those of expert e begin at `starts_E[e]`.

    Each of the `weights` gives some of the outputs; `bias` is [E, out_features].
    """

    def __init__(self, weights: Sequence[GroupedWeight], bias_EO: Tensor | None) -> None:
        super().__init__()
        self.weights = nn.ModuleList(weights)
        self.in_features = weights[0].in_features
        self.bias = None if bias_EO is None else nn.Parameter(bias_EO.detach().contiguous(), requires_grad=False)
        assert all(weight.in_features == self.in_features for weight in weights)

    @property
    def grouped(self) -> list[GroupedWeight]:
        return list(self.weights)  # type: ignore[arg-type]

    def native_parts(self) -> "ctypes.Array[QuantizedPart]":
        """Of the first expert, for as long as the layer lives."""
        weights = self.grouped
        types = [TYPES[each.type_name].number for each in weights]
        return native_parts([each.blocks for each in weights], types, [each.out_features for each in weights])

    def forward(self, x_SI: Tensor, starts_E: Tensor) -> Tensor:
        weights = self.grouped
        blocks, types = [each.blocks for each in weights], [TYPES[each.type_name] for each in weights]
        out_features = [each.out_features for each in weights]
        if x_SI.device.type == "cuda":
            return cuda.grouped_linear(x_SI, starts_E, blocks, types, out_features, self.bias)
        numbers = [type_.number for type_ in types]
        return torch.ops.penstock.grouped_linear(x_SI, starts_E, blocks, numbers, out_features, self.bias)  # type: ignore[no-any-return]


_library.define("grouped_panel_linear(Tensor x, Tensor starts, Tensor weights, Tensor? bias, SymInt out_features) -> Tensor")  # type: ignore[no-untyped-call]


@torch.library.impl(_library, "grouped_panel_linear", "CPU")
def _grouped_panel_linear(x_SI: Tensor, starts_E: Tensor, panels: Tensor, bias_EO: Tensor | None, out_features: int) -> Tensor:
    library = native_library()
    assert library is not None
    assert x_SI.dtype == panels.dtype
    x_SI = x_SI.contiguous()
    out_SO = x_SI.new_empty(len(x_SI), out_features)
    library.penstock_grouped_panel_linear(
        out_SO.data_ptr(),
        x_SI.data_ptr(),
        panels.data_ptr(),
        None if bias_EO is None else bias_EO.data_ptr(),
        starts_E.data_ptr(),
        len(starts_E) - 1,
        x_SI.shape[1],
        out_features,
    )
    return out_SO


@torch.library.register_fake("penstock::grouped_panel_linear", lib=_library)  # type: ignore[untyped-decorator]
def _grouped_panel_linear_shape(x_SI: Tensor, starts_E: Tensor, panels: Tensor, bias_EO: Tensor | None, out_features: int) -> Tensor:
    return x_SI.new_empty(x_SI.shape[0], out_features)


class GroupedPanelLinear(nn.Module):
    """As `GroupedLinear`, by weights of bfloat16, [E, out_features, in_features], in panels (`panels` in `linear.py`)."""

    panels: Tensor

    def __init__(self, weight_EOI: Tensor, bias_EO: Tensor | None) -> None:
        super().__init__()
        self.in_features, self.out_features = weight_EOI.shape[2], weight_EOI.shape[1]
        self.register_buffer("panels", torch.stack([panels(weight_OI.contiguous()) for weight_OI in weight_EOI]), persistent=False)
        self.bias = None if bias_EO is None else nn.Parameter(bias_EO.detach().contiguous(), requires_grad=False)

    def forward(self, x_SI: Tensor, starts_E: Tensor) -> Tensor:
        return torch.ops.penstock.grouped_panel_linear(x_SI, starts_E, self.panels, self.bias, self.out_features)  # type: ignore[no-any-return]


ExpertLinear = GroupedLinear | GroupedPanelLinear | GroupedFloat8Linear


class GroupedExperts(nn.Module):
    """In place of a model's own experts, whose activation it uses: rows [T, I] and the experts of each [T, K] to rows [T, I]."""

    def __init__(self, own: Any, up: ExpertLinear, down: ExpertLinear) -> None:
        super().__init__()
        self.own, self.up, self.down = own, up, down
        self.num_experts = int(own.num_experts)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        num_chosen = top_k_index.shape[1]
        experts_S, order_S = top_k_index.flatten().sort(stable=True)
        starts_E = torch.searchsorted(experts_S, torch.arange(self.num_experts + 1, device=experts_S.device))
        inner_SJ = self._activated(self.up(hidden_states[order_S // num_chosen], starts_E))
        sorted_SI = self.down(inner_SJ, starts_E) * top_k_weights.flatten()[order_S, None]
        rows_SI = torch.empty_like(sorted_SI).index_copy_(0, order_S, sorted_SI)
        return rows_SI.unflatten(0, (-1, num_chosen)).sum(1, dtype=torch.float32).to(hidden_states.dtype)  # type: ignore[no-untyped-call, no-any-return]

    def _activated(self, up_SJ: Tensor) -> Tensor:
        own: Any = self.own
        activated: Tensor = own._apply_gate(up_SJ) if own.has_gate else own.act_fn(up_SJ)
        return activated


def has_experts(module: Any) -> bool:
    """Whether a module is one of transformers' that hold experts as one tensor for all."""
    return all(hasattr(module, name) for name in ("has_gate", "has_bias", "is_transposed", "num_experts")) and hasattr(module, "down_proj")


def _plain_experts(model: nn.Module) -> list[tuple[str, Any]]:
    """By their paths, those that have weights of their own."""
    return [(path, module) for path, module in model.named_modules() if has_experts(module) and module.down_proj is not None]


def up_name(experts: Any) -> str:
    """The parameter of the projection before the activation."""
    return "gate_up_proj" if experts.has_gate else "up_proj"


def quantize_experts(model: nn.Module, bits: int) -> int:
    """Rounds the experts of every layer on the CPU, or on the meta device, and returns of how many layers that was.

    Those stay as they are whose inputs are no multiples of 32, and those that normalize what an expert gives.
    """
    num_replaced = 0
    for path, experts in _plain_experts(model):
        weights = [_weights_of(experts, name) for name in (up_name(experts), "down_proj")]
        if experts.has_post_expert_norm or any(weight_EOI.shape[2] % GROUP_SIZE for weight_EOI in weights):
            continue
        layers = [GroupedLinear([GroupedWeight.rounded(own, bits)], bias) for own, bias in zip(weights, _biases_of(experts), strict=True)]
        _replace_experts(model, path, *layers)
        num_replaced += 1
    return num_replaced


def pack_experts(model: nn.Module) -> int:
    """Has the native kernels for bfloat16 compute the experts on the CPU that have such weights; returns of how many layers that was."""
    num_replaced = 0
    for path, experts in _plain_experts(model):
        weights, biases = [_weights_of(experts, name) for name in (up_name(experts), "down_proj")], _biases_of(experts)
        is_on_cpu = all(weight_EOI.device.type in ("cpu", "meta") for weight_EOI in weights)
        if experts.has_post_expert_norm or not is_on_cpu or not all(map(can_panel, (own[0] for own in weights), biases)):
            continue
        _replace_experts(model, path, *(GroupedPanelLinear(own, bias) for own, bias in zip(weights, biases, strict=True)))
        num_replaced += 1
    return num_replaced


def _replace_experts(model: nn.Module, path: str, up: ExpertLinear, down: ExpertLinear) -> None:
    # Their own weights are dropped.
    experts: Any = model.get_submodule(path)
    replaced = GroupedExperts(experts, up, down)
    for name in (up_name(experts), "down_proj"):
        setattr(experts, name, None)
        if experts.has_bias:
            setattr(experts, f"{name}_bias", None)
    model.set_submodule(path, replaced)


def _biases_of(experts: Any) -> list[Tensor | None]:
    """Of the projections before and after the activation."""
    return [getattr(experts, f"{name}_bias") if experts.has_bias else None for name in (up_name(experts), "down_proj")]


def _weights_of(experts: Any, name: str) -> Tensor:
    """[E, outputs, inputs]"""
    weight: Tensor = getattr(experts, name).detach()
    return weight.transpose(1, 2) if experts.is_transposed else weight


# What checkpoints call an expert's matrices: those before the activation, in the order of the model's own outputs, and that after it.
UP_PARTS = (("gate_up_proj",), ("gate_proj", "up_proj"), ("w1", "w3"), ("up_proj",))
DOWN_PARTS = ("down_proj", "w2")
_OF_AN_EXPERT = re.compile(r"(?P<path>.+)\.(?P<expert>\d+)\.(?P<part>\w+)\.weight")


@dataclass(frozen=True, slots=True)
class StoredExperts:
    """The experts at `path`, of which a directory holds each one's matrices by the names `PATH.EXPERT.PART.weight`.

    `up` and `down` are these names, those of all experts for each part.
    """

    path: str
    up: list[list[str]]
    down: list[list[str]]

    @property
    def names(self) -> list[str]:
        return [name for part in (*self.up, *self.down) for name in part]

    def leave_out(self, model: nn.Module) -> None:
        """Takes the model's own weights away."""
        experts: Any = model.get_submodule(self.path)
        experts.size_before = tuple(_weights_of(experts, "down_proj").shape[1:])
        for name in (up_name(experts), "down_proj"):
            setattr(experts, name, None)
        experts._is_hf_initialized = True  # else transformers fills what it expects there with random numbers

    def put_in(self, model: nn.Module, weights: Mapping[str, PackedWeight | Float8Weight | Tensor], dtype: torch.dtype) -> None:
        """By their names: packed, in FP8, or [outputs, inputs] and of `dtype` in the model.

        Raises `ConfigurationError` where one has another shape than what `leave_out` took away.
        """
        experts: Any = model.get_submodule(self.path)
        self._check_sizes(weights, experts.size_before, 2 if experts.has_gate else 1)
        packed = {name: weight for name, weight in weights.items() if isinstance(weight, PackedWeight)}
        if len(packed) == len(weights) and not experts.has_post_expert_norm:
            weights_of = ([GroupedWeight.stacked([packed[name] for name in part]) for part in parts] for parts in (self.up, self.down))
            layers = [GroupedLinear(own, bias) for own, bias in zip(weights_of, _biases_of(experts), strict=True)]
            _replace_experts(model, self.path, *layers)
            return
        in_float8 = [self._in_float8(weights, parts) for parts in (self.up, self.down)]
        if all(in_float8) and not experts.has_post_expert_norm:
            float8 = [GroupedFloat8Linear(own, bias) for own, bias in zip(in_float8, _biases_of(experts), strict=True)]
            _replace_experts(model, self.path, *float8)
            return
        device = next(model.parameters()).device
        plain = {
            name: (weight if isinstance(weight, Tensor) else weight.dequantized()).to(device, dtype) for name, weight in weights.items()
        }
        for name, parts in ((up_name(experts), self.up), ("down_proj", self.down)):
            weight_EOI = torch.cat([torch.stack([plain[name] for name in part]) for part in parts], dim=1)
            own = weight_EOI.transpose(1, 2).contiguous() if experts.is_transposed else weight_EOI
            setattr(experts, name, nn.Parameter(own, requires_grad=False))

    def _in_float8(self, weights: Mapping[str, PackedWeight | Float8Weight | Tensor], parts: Sequence[Sequence[str]]) -> list[Float8Weight]:
        """Each expert's weight of these parts; none where they are stored otherwise, or cannot be one."""
        joined = []
        for names in zip(*parts, strict=True):
            own = [weight for weight in map(weights.__getitem__, names) if isinstance(weight, Float8Weight)]
            if len(own) < len(names) or not can_join_float8(own):
                return []
            joined.append(joined_float8(own))
        return joined if len({(weight.out_features, weight.in_features, weight.scale_columns) for weight in joined}) == 1 else []

    def _check_sizes(self, weights: Mapping[str, PackedWeight | Float8Weight | Tensor], of_down: tuple[int, int], num_halves: int) -> None:
        outer, inner = of_down
        sizes = dict.fromkeys(itertools.chain(*self.up), (num_halves * inner // len(self.up), outer))
        sizes |= dict.fromkeys(itertools.chain(*self.down), (outer, inner))
        for name, size in sizes.items():
            if (own := _size(weights[name])) != size:
                raise ConfigurationError(f"{name}: there is a quantized weight of shape {own} for an expert's of shape {size}")


def _size(weight: PackedWeight | Float8Weight | Tensor) -> tuple[int, int]:
    """Outputs and inputs."""
    return (weight.shape[0], weight.shape[1]) if isinstance(weight, Tensor) else (weight.out_features, weight.in_features)


def stored_experts(model: nn.Module, names: Iterable[str]) -> list[StoredExperts]:
    """Those of the names that are of experts. Raises `ConfigurationError` where others of the same layer are missing."""
    layers: dict[str, dict[tuple[str, int], str]] = {}
    modules = dict(model.named_modules())
    for name in names:
        place = _OF_AN_EXPERT.fullmatch(name)
        if place and has_experts(modules.get(place["path"])):
            layers.setdefault(place["path"], {})[place["part"], int(place["expert"])] = name
    return [_stored_experts(path, found, modules[path]) for path, found in layers.items()]


def _stored_experts(path: str, found: Mapping[tuple[str, int], str], experts: Any) -> StoredExperts:
    parts = {part for part, _ in found}
    up = next((names for names in UP_PARTS if parts - {*DOWN_PARTS} == {*names}), None)
    down = [part for part in DOWN_PARTS if part in parts]
    num_experts = int(experts.num_experts)
    if up is None or len(down) != 1 or found.keys() != {(part, expert) for part in (*up, *down) for expert in range(num_experts)}:
        raise ConfigurationError(f"{path}: not all of its {num_experts} experts have quantized weights, or they have others than the model")
    return StoredExperts(path, *([[found[part, expert] for expert in range(num_experts)] for part in own] for own in (up, down)))


def expert_matrices(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """For each layer, the matrices [outputs, inputs] of all its experts, by the names that `StoredExperts` goes by."""
    for path, experts in _plain_experts(model):
        if not experts.has_gate or not experts.is_concatenated:
            continue
        gate_EOI, up_EOI = _weights_of(experts, "gate_up_proj").chunk(2, dim=1)
        parts = {"gate_proj": gate_EOI, "up_proj": up_EOI, "down_proj": _weights_of(experts, "down_proj")}
        yield {
            f"{path}.{expert}.{part}.weight": weight_EOI[expert] for part, weight_EOI in parts.items() for expert in range(len(weight_EOI))
        }
