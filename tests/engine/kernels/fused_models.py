"""What becomes of tiny models whose parts are fused, as calls that can be sent to the interpreter's process."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from penstock.engine.model.fused import fuse_norms, fuse_rotary
from tests.tiny_models import tiny_model

# Rotates half of each head.
PARTIAL: dict[str, Any] = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}}


def with_fused_norms(name: str) -> tuple[int, Tensor, Tensor]:
    """How many were fused, and the logits of a prompt before and after."""
    return _fused(name, fuse_norms)


def with_fused_rotary(name: str) -> tuple[int, Tensor, Tensor]:
    return _fused(name, fuse_rotary)


def _fused(name: str, fuse: Callable[[nn.Module], int]) -> tuple[int, Tensor, Tensor]:
    model = tiny_model(name, **PARTIAL if name == "phi3" else {})
    for parameter_name, parameter in model.named_parameters():
        if "norm" in parameter_name:
            nn.init.uniform_(parameter, 0.5, 1.5)
    input_ids = torch.tensor([[5, 6, 7]])
    with torch.inference_mode():
        before = model(input_ids).logits
        num_fused = fuse(model)
        return num_fused, before, model(input_ids).logits
