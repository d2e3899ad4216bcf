"""A stand-in for CUDA graphs: notes what is computed while it records, and later does just that again on the same tensors."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten
# What waits for the device, which no graph can hold. The second and third are what the first is called in inference mode.
WAITING = {aten._local_scalar_dense.default, aten.item.default, aten.is_nonzero.default, aten.nonzero.default, aten.masked_select.default}


class _Recording(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in WAITING:
            raise RuntimeError(f"operation not permitted when stream is capturing: {func}")
        result = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, result))
        return result


class TapeRecorder:
    """Like a graph, what it replays is blind to Python: branches, numbers and the choice of tensors are as they were when it was captured.

    `captured` are the numbers of calls on each tape; with `fail_at`, the capture fails before which so many were begun.
    """

    def __init__(self, fail_at: int | None = None) -> None:
        self.captured: list[int] = []
        self.num_replays: list[int] = []
        self.fail_at = fail_at
        self._num_begun = 0

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        number = len(self.captured)
        self._num_begun += 1
        if self._num_begun - 1 == self.fail_at:
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")
        work()  # what is initialised at the first call is no part of a graph
        with _Recording() as recording:
            work()
        self.captured.append(len(recording.calls))
        self.num_replays.append(0)

        def replay() -> None:
            self.num_replays[number] += 1
            for func, args, kwargs, result in recording.calls:
                _copy(func(*args, **kwargs), result)

        return replay


def _copy(fresh: Any, recorded: Any) -> None:
    """Leaves a call's result where later calls on the tape look for it. Views and what was changed in place are there already."""
    for source, target in zip(tree_leaves(fresh), tree_leaves(recorded), strict=True):
        if isinstance(source, Tensor) and source.data_ptr() != target.data_ptr():
            target.copy_(source)
