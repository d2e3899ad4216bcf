"""What becomes of tiny models whose parts are fused, as calls that can be sent to the interpreter's process."""

from typing import Any

import torch
from torch import Tensor, nn

from penstock.engine.model.fused import fuse_gates, fuse_norms, fuse_residuals, fuse_rotary
from tests.tiny_models import tiny_model

# Rotates half of each head.
PARTIAL: dict[str, Any] = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}}
KINDS = {"norms": fuse_norms, "residuals": fuse_residuals, "gates": fuse_gates, "rotary": fuse_rotary}


def with_fused(name: str) -> tuple[dict[str, int], Tensor, Tensor]:
    """How many of each kind were fused, and the logits of a prompt before and after."""
    return _fused(tiny_model(name, **PARTIAL if name == "phi3" else {}))


def with_fused_oddities(name: str) -> tuple[dict[str, int], Tensor, Tensor]:
    """The same of a model whose layers have the names and modules of others, and compute something else."""
    model: Any = tiny_model(name)
    for layer in model.model.layers:
        layer.__class__ = _subclass(type(layer), lambda states, result: result + 0.1 * states)
        layer.mlp.__class__ = _subclass(type(layer.mlp), lambda states, result: result.clamp(max=0.1))
    return _fused(model)


def _subclass(own: type[nn.Module], change: Any) -> type[nn.Module]:
    class Odd(own):  # type: ignore[valid-type, misc]
        def forward(self, hidden_states: Tensor, **kwargs: Any) -> Any:
            return change(hidden_states, super().forward(hidden_states, **kwargs))

    return Odd


def _fused(model: nn.Module) -> tuple[dict[str, int], Tensor, Tensor]:
    for parameter_name, parameter in model.named_parameters():
        if "norm" in parameter_name:
            nn.init.uniform_(parameter, 0.5, 1.5)
    input_ids = torch.tensor([[5, 6, 7]])
    with torch.inference_mode():
        before = model(input_ids).logits
        num_fused = {kind: fuse(model) for kind, fuse in KINDS.items()}
        return num_fused, before, model(input_ids).logits
