"""Tensors on their way to the device."""

import torch
from torch import Tensor


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor, from the CPU, on the device. Does not wait for what the device has to do before: that takes pinned memory."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
