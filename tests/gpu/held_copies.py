"""A stand-in for a device that is behind: what was computed is there for the device, and for nothing else before it is released."""

import threading
from collections.abc import Callable

from torch import Tensor

from penstock.engine.system.memory import HostCopies


class HeldCopies(HostCopies):
    """Gives no copy before `release`. With `fail_at`, that copy fails, as one does behind a kernel that did."""

    def __init__(self, *, is_held: bool = False, fail_at: int | None = None) -> None:
        self.num_begun = 0
        self.fail_at = fail_at
        self._is_let_go = threading.Event()
        if not is_held:
            self.release()

    def release(self) -> None:
        self._is_let_go.set()

    def begin(self, tensor: Tensor) -> Callable[[], Tensor]:
        number, self.num_begun = self.num_begun, self.num_begun + 1
        copy = tensor.clone()  # the device may overwrite the tensor with its next step

        def wait() -> Tensor:
            assert self._is_let_go.wait(timeout=60)
            if number == self.fail_at:
                raise RuntimeError("the copy failed")
            return copy

        return wait
