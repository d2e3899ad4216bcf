"""Results on their way back from the device, which goes on computing meanwhile."""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor


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
