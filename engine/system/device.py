"""Copies to the device, and copies of results back while it goes on computing."""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copies a CPU tensor to the device, through pinned memory so that the copy does not wait for work in flight."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def index_on(device: torch.device, rows: Sequence[int]) -> Tensor:
    """An index tensor, int64. Indexing a tensor on a GPU by a list would wait for the device."""
    return to_device(torch.tensor(rows, dtype=torch.int64), device)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a GPU has too little memory for what was asked of it, as torch, CUDA and its libraries report it. Later work may well fit."""
    is_from_cuda = "CUDA" in str(error) and any(words in str(error) for words in ("out of memory", "ALLOC_FAILED"))
    return isinstance(error, torch.OutOfMemoryError) or is_from_cuda


def is_device_lost(error: BaseException) -> bool:
    """Whether CUDA has reported an error that stays: all that the process asks of the device from then on fails with it."""
    is_from_cuda = isinstance(error, torch.AcceleratorError) or any(words in str(error) for words in ("CUDA error", "Triton Error [CUDA]"))
    return is_from_cuda and not is_out_of_memory(error)


class HostCopies(Protocol):
    """Copies results to the host: CUDA, or a fake of it."""

    def begin(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Starts a copy and returns at once. The function that it returns waits, in any thread, for the copy and returns it."""
        ...


class CudaHostCopies:
    """Copies after the work queued on the current stream so far, and concurrently with later work."""

    def begin(self, tensor: Tensor) -> Callable[[], Tensor]:
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        host.copy_(tensor, non_blocking=True)
        # A waiting thread sleeps: by default CUDA would spin on a core.
        is_there = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        is_there.record()

        def wait() -> Tensor:
            is_there.synchronize()
            return host

        return wait
