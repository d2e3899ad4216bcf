"""What becomes of a tiny model whose norms are fused, as a call that can be sent to the interpreter's process."""

import torch
from torch import Tensor

from penstock.engine.fused_norm import fuse_norms
from tests.tiny_models import tiny_model


def with_fused_norms(name: str) -> tuple[int, Tensor, Tensor]:
    """How many were fused, and the logits of a prompt before and after."""
    model = tiny_model(name)
    for parameter_name, parameter in model.named_parameters():
        if "norm" in parameter_name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    input_ids = torch.tensor([[5, 6, 7]])
    with torch.inference_mode():
        before = model(input_ids).logits
        num_fused = fuse_norms(model)
        return num_fused, before, model(input_ids).logits
