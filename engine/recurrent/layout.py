"""The states that a model's recurrent layers keep of a sequence, found by a trial run, and the options that exclude such models."""

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from penstock.engine.config import EngineConfig
from penstock.engine.errors import ConfigurationError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# Model types whose recurrent layers are compared with transformers in tests/engine/recurrent.
FAMILIES = (
    *("bamba", "falcon_h1", "granitemoehybrid", "lfm2", "lfm2_moe", "mamba2", "nemotron_h", "olmo_hybrid"),
    *("qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"),
)
ATTENTION = frozenset({"full_attention", "sliding_attention"})
CACHE_NAMES = ("cache_params", "past_key_values")  # what transformers calls the cache, as an argument of models and layers


def is_recurrent(config: "PretrainedConfig") -> bool:
    """Whether the model is of a served family and has layers that keep a state."""
    return config.model_type in FAMILIES and not ATTENTION.issuperset(getattr(config, "layer_types", None) or ())


@dataclass(frozen=True, slots=True)
class StateShape:
    """One state of a layer: the last inputs of a convolution, in the type of activations, or what a recurrence carries on, in float32.

    `number` tells those of one kind apart.
    """

    kind: Literal["convolution", "recurrence"]
    number: int
    shape: tuple[int, ...]

    def dtype(self, activations: torch.dtype) -> torch.dtype:
        return activations if self.kind == "convolution" else torch.float32


@dataclass(frozen=True, slots=True)
class RecurrentLayer:
    """The states of one layer, and the path of the module in the model that advances them."""

    mixer: str
    states: tuple[StateShape, ...]

    def num_bytes(self, activations: torch.dtype) -> int:
        """Bytes per sequence."""
        return sum(math.prod(state.shape) * state.dtype(activations).itemsize for state in self.states)


@dataclass(slots=True)
class StateProbe:
    """In place of transformers' cache in a trial run: notes the states that are written, by layer. Nothing is known of earlier tokens."""

    objections: list[str] = field(default_factory=list)
    _states: dict[int, dict[StateShape, str]] = field(default_factory=dict)
    _running: list[str] = field(default_factory=list)

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """Knows meanwhile which of the modules with a layer's number is running."""

        def entering(path: str) -> Callable[..., None]:
            return lambda *_: self._running.append(path)

        def leave(*_: object) -> None:
            self._running.pop()

        # On a CPU, the packages that it advises to install do not help.
        logging.getLogger("transformers.integrations.hub_kernels").addFilter(_is_no_advice)
        hooks = []
        for path, module in model.named_modules():
            if isinstance(getattr(module, "layer_idx", None), int):
                hooks += [module.register_forward_pre_hook(entering(path)), module.register_forward_hook(leave)]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def layers(self) -> dict[int, RecurrentLayer]:
        """By number."""
        found = {}
        for number, states in self._states.items():
            mixers = set(states.values())
            if len(mixers) > 1:
                self.objections.append(f"layer {number} keeps states in {len(mixers)} modules")
            found[number] = RecurrentLayer(mixers.pop(), tuple(states))
        return found

    def _see(self, layer_idx: int, state: StateShape) -> None:
        if not self._running:
            self.objections.append(f"layer {layer_idx} keeps a state in a module without layer_idx")
            return
        self._states.setdefault(layer_idx, {})[state] = self._running[-1]

    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        return keys, values

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int | None = None, **_: Any
    ) -> Tensor:
        if conv_kernel_size is None:
            self.objections.append(f"layer {layer_idx} does not say how long its convolution is")
        else:
            self._see(layer_idx, StateShape("convolution", state_idx, (*conv_states.shape[1:-1], conv_kernel_size)))
        return conv_states

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **_: Any) -> Tensor:
        self._see(layer_idx, StateShape("recurrence", state_idx, tuple(recurrent_states.shape[1:])))
        return recurrent_states

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None:
        return None

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> None:
        return None

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return False

    def is_recording_past(self, layer_idx: int) -> bool:
        return False

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0


def _is_no_advice(record: logging.LogRecord) -> bool:
    return "is falling back to its reference PyTorch implementation" not in record.getMessage()


def slot_bytes(layers: Sequence[RecurrentLayer], activations: torch.dtype) -> int:
    """Bytes of the states of one sequence."""
    return sum(layer.num_bytes(activations) for layer in layers)


def check_options(config: EngineConfig) -> None:
    """Raises `ConfigurationError` naming an option that models with recurrent layers are not served with."""
    refused = {
        "--kv-cache-dir: their states are not kept in files": config.kv_cache_dir is not None,
        "--kv-transfer-dir: their states are not handed over": config.kv_transfer_dir is not None,
        f"--kv-cache-dtype {config.kv_cache_dtype}: only auto": config.kv_cache_dtype != "auto",
        "--compile on: their layers are not compiled": config.compile == "on",
        f"--speculation {config.speculation}: they cannot undo a draft token that is rejected; leave it out": (
            config.speculation not in ("none", EngineConfig().speculation)
        ),
    }
    for reason, applies in refused.items():
        if applies:
            raise ConfigurationError(f"models with recurrent layers are not served with {reason}")
