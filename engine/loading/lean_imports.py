"""Keeps libraries from importing optional packages that the engine does not use."""

import contextlib
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def triton_left_out(device: str) -> Iterator[None]:
    """Lets torch and transformers be imported as if triton, of no use to a model on the CPU, were not installed: 70 MB of memory.

    `device` is the operator's choice. Nothing happens where the model goes to a GPU, or triton is imported already.
    """
    import torch

    if "triton" in sys.modules or device.startswith("cuda") or (device == "auto" and torch.cuda.is_available()):
        yield
        return
    sys.modules["triton"] = None  # type: ignore[assignment]  # Python's own way to say that a module cannot be imported
    try:
        yield
    finally:
        del sys.modules["triton"]
