"""Tensors on their way to the device, and results on their way back while it goes on computing."""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor, from the CPU, on the device. Does not wait for what the device has to do before: that takes pinned memory."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


class HostCopies(Protocol):
    """What copies results: CUDA, or a stand-in for it."""

    def begin(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Begins to copy and returns at once. What it returns waits, in any thread, until the copy is whole, and gives it."""
        ...


class CudaHostCopies:
    """Copies behind what the current stream has to do so far, and beside all that comes later."""

    def begin(self, tensor: Tensor) -> Callable[[], Tensor]:
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        host.copy_(tensor, non_blocking=True)
        # Whoever waits for it sleeps: by default CUDA would keep a core busy with looking.
        is_there = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        is_there.record()

        def wait() -> Tensor:
            is_there.synchronize()
            return host

        return wait
