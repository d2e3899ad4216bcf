"""What is asked of CUDA, by stand-ins for it."""

from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.engine.system.memory import CudaHostCopies, is_device_lost, is_out_of_memory


class FakeCuda:
    """Pinned memory and events, and the order in which they are used."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        cuda, empty = self, torch.empty

        class Pinned(Tensor):
            def copy_(self, source: Tensor, non_blocking: bool = False) -> Tensor:
                assert non_blocking
                cuda.calls.append("copy")
                return super().copy_(source)

        class Event:
            def __init__(self, *, blocking: bool) -> None:
                assert blocking, "a core would be busy with looking"

            def record(self) -> None:
                cuda.calls.append("record")

            def synchronize(self) -> None:
                cuda.calls.append("synchronize")

        def pinned(size: Any, *, dtype: torch.dtype, pin_memory: bool) -> Tensor:
            assert pin_memory, "the copy would wait for the device"
            return empty(size, dtype=dtype).as_subclass(Pinned)

        monkeypatch.setattr(torch, "empty", pinned)
        monkeypatch.setattr(torch.cuda, "Event", Event)


@pytest.mark.parametrize(
    ("error", "is_memory", "is_lost"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), True, False),
        (torch.AcceleratorError("CUDA error: out of memory"), True, False),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True, False),
        (torch.AcceleratorError("CUDA error: an illegal memory access was encountered"), False, True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx`"), False, True),
        (RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"), False, True),
        (RuntimeError("out of memory"), False, False),
        (ValueError("broken"), False, False),
    ],
)
def test_errors_of_a_gpu_pass_or_stay(error: Exception, is_memory: bool, is_lost: bool) -> None:
    assert (is_out_of_memory(error), is_device_lost(error)) == (is_memory, is_lost)


def test_the_copy_is_begun_at_once_and_waited_for_by_its_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(monkeypatch)
    wait = CudaHostCopies().begin(torch.tensor([[5, 6], [1, 1]]))
    assert cuda.calls == ["copy", "record"]
    assert wait().tolist() == [[5, 6], [1, 1]]
    assert cuda.calls == ["copy", "record", "synchronize"]
