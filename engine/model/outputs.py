"""Named outputs of a model on its way to the logits, and where in its modules each of them is captured.

hidden_states.N     what decoder layer N reads, N from 0; hidden_states.L, of L layers, is what the last of them gives
hidden_states.last  the same after the final norm, which is what the head reads
attention_input.N, attention_output.N, mlp_input.N, mlp_output.N    into and out of these parts of layer N
logits              float32, before everything that a request has done to them

Beside these, the path of any module within the decoder, such as model.layers.3.mlp.gate_proj, is the name of what comes out of it.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from penstock.engine.errors import ConfigurationError, InvalidRequest
from penstock.engine.model.compiled_layers import CompiledLayer, decoder_layers
from penstock.engine.model.fused import FusedLayer, FusedMlp
from penstock.engine.model.native import NativeDecoder
from penstock.engine.sequence import LOGITS

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ATTENTION_PARTS = ("self_attn", "attn", "attention")
MLP_PARTS = ("mlp", "feed_forward", "block_sparse_moe")


@dataclass(frozen=True, slots=True)
class Place:
    """Where an output is captured: a module's input, or its output."""

    module: nn.Module
    is_input: bool


@dataclass(slots=True)
class Capture:
    """The rows `rows_R` of the flat batch of everything that was asked for, [R, ...] on the device, once the model has run.

    `failures` says of the other names why they have no rows.
    """

    rows_R: Tensor
    num_tokens: int
    rows: dict[str, Tensor] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)

    def take(self, name: str, states: Tensor) -> None:
        """`states` are [1, T, ...], or [T, H] where a module flattens its input."""
        is_flat = states.ndim == 2 and len(states) == self.num_tokens
        if not is_flat and (states.ndim < 3 or states.shape[:2] != (1, self.num_tokens)):
            self.failures[name] = f"{name!r} has no row for each token: its shape is {list(states.shape)} for {self.num_tokens} tokens"
            return
        self.rows[name] = (states if is_flat else states[0]).index_select(0, self.rows_R)  # a copy: what follows may write over it


class ModelOutputs:
    """The named outputs of one model. It has no hooks while none is captured."""

    def __init__(self, model: "PreTrainedModel", num_layers: int, *, is_sharded: bool = False, is_staged: bool = False) -> None:
        self._model = model
        # Of a model in stages, only the logits come out here.
        self._places = {} if is_staged else _places(model, decoder_layers(model, num_layers))
        # What comes out of a module of one rank may be a part of the whole.
        self._paths = {} if is_sharded else {path: Place(module, is_input=False) for path, module in _paths(model)}
        self._without_rows: dict[str, str] = {}  # paths that turned out to have none, each with the reason

    @property
    def names(self) -> list[str]:
        """Without the paths of modules."""
        return [*self._places, LOGITS]

    def check(self, names: tuple[str, ...]) -> None:
        """Raises `InvalidRequest` for the first that this model does not have."""
        for name in names:
            if name in self._without_rows:
                raise InvalidRequest(self._without_rows[name], "outputs")
            if name != LOGITS and name not in self._places and name not in self._paths:
                known = f"it has {', '.join(_summary(self.names))}"
                known += ", and what comes out of a module of the decoder by the module's path" if self._paths else ""
                raise InvalidRequest(f"the model has no output {name[:100]!r}: {known}", "outputs")

    @contextmanager
    def capturing(self, names: set[str], rows_R: Tensor, num_tokens: int) -> Iterator[Capture]:
        """Within the context the model's own modules run, rather than compiled, native or fused code, with hooks that capture outputs."""
        capture = Capture(rows_R, num_tokens)
        with ExitStack() as undo:
            for module in self._model.modules():
                undo.callback(vars(module).update, _without_replacement(module))
            for name in names - {LOGITS}:
                place = self._places.get(name) or self._paths[name]
                if place.is_input:
                    undo.callback(place.module.register_forward_pre_hook(_seeing_input(capture, name), with_kwargs=True).remove)
                else:
                    undo.callback(place.module.register_forward_hook(_seeing_output(capture, name)).remove)
            yield capture
        for name in names - {LOGITS} - capture.rows.keys() - capture.failures.keys():
            capture.failures[name] = f"{name!r} has no rows: the model does not call this module"
        self._without_rows |= capture.failures


@dataclass(slots=True)
class StepStates:
    """Hidden states of all rows of the latest step, [T, H], as a draft head reads them.

    Of `layers`, which ascend, what layer N reads, `hidden_states.N`; and with `reads_last` also `hidden_states.last`, under None.
    """

    layers: tuple[int, ...]
    reads_last: bool = False
    states: dict[int | None, Tensor] = field(default_factory=dict)
    _hooks: ExitStack = field(default_factory=ExitStack)

    def attach(self, model: "PreTrainedModel", num_layers: int) -> None:
        """Reads them from now on, in native code and in the model's own modules."""
        forward = vars(model).get("forward")
        if isinstance(forward, NativeDecoder):
            forward.reader = self
        places = _places(model, decoder_layers(model, num_layers))
        wanted = {f"hidden_states.{layer}": layer for layer in self.layers} | ({"hidden_states.last": None} if self.reads_last else {})
        for name, layer in wanted.items():
            if name not in places:
                raise ConfigurationError(f"the model has no output {name!r}, which the draft head reads")
            place = places[name]
            if place.is_input:
                hook = place.module.register_forward_pre_hook(functools.partial(self._see_input, layer), with_kwargs=True)
            else:
                hook = place.module.register_forward_hook(functools.partial(self._see_output, layer))
            self._hooks.callback(hook.remove)

    def detach(self) -> None:
        self._hooks.close()

    def read(self, layer: int | None, states_TH: Tensor) -> None:
        self.states[layer] = states_TH.clone()

    def _see_input(self, layer: int | None, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.read(layer, (args[0] if args else kwargs["hidden_states"])[0])

    def _see_output(self, layer: int | None, _: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self.read(layer, (output if isinstance(output, Tensor) else output[0])[0])


def owned_rows(rows: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """A copy that is like any other tensor: one that is made in inference mode stays forbidden to autograd and to most changes."""
    with torch.inference_mode(False):
        copy = torch.empty(rows.shape, dtype=dtype or rows.dtype)
    return copy.copy_(rows)


def _places(model: Any, layers: list[nn.Module]) -> dict[str, Place]:
    places: dict[str, Place] = {}
    for number, layer in enumerate(layers):
        places[f"hidden_states.{number}"] = Place(layer, is_input=True)
    if layers:
        places[f"hidden_states.{len(layers)}"] = Place(layers[-1], is_input=False)
    if model.base_model is not model:  # whose head would come out with it
        places["hidden_states.last"] = Place(model.base_model, is_input=False)
    for kind, parts in (("attention", ATTENTION_PARTS), ("mlp", MLP_PARTS)):
        found = [next((layer._modules[part] for part in parts if layer._modules.get(part) is not None), None) for layer in layers]
        for side, is_input in (("input", True), ("output", False)):
            places |= {f"{kind}_{side}.{number}": Place(part, is_input) for number, part in enumerate(found) if part is not None}
    return places


def _paths(model: Any) -> Iterator[tuple[str, nn.Module]]:
    # The modules within the decoder, by their names in the whole model. The head is not among them: it sees some tokens only.
    inside = set(model.base_model.modules()) - {model.base_model}
    return ((path, module) for path, module in model.named_modules() if module in inside)


def _without_replacement(module: nn.Module) -> dict[str, Any]:
    """Restores the module's own `forward`, and returns what undoes that."""
    forward = vars(module).get("forward")
    if not isinstance(forward, NativeDecoder | CompiledLayer | FusedLayer | FusedMlp):
        return {}
    del module.forward
    return {"forward": forward}


def _seeing_input(capture: Capture, name: str) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
    def see(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        capture.take(name, args[0] if args else kwargs["hidden_states"])

    return see


def _seeing_output(capture: Capture, name: str) -> Callable[[nn.Module, tuple[Any, ...], Any], None]:
    from transformers.utils.generic import ModelOutput

    def see(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if isinstance(output, tuple | list | ModelOutput) and output:
            output = output[0]  # the states come first
        if isinstance(output, Tensor):
            capture.take(name, output)
        else:
            capture.failures[name] = f"{name!r} has no rows: its module gives no tensor"

    return see


def _summary(names: list[str]) -> list[str]:
    """Names that differ in their number as one."""
    numbers: dict[str, list[int]] = {}
    for name in names:
        kind, _, number = name.rpartition(".")
        if number.isdigit():
            numbers.setdefault(kind, []).append(int(number))
    others = [name for name in names if not name.rpartition(".")[2].isdigit()]
    return [*(f"{kind}.{min(found)} to {kind}.{max(found)}" for kind, found in numbers.items()), *others]
