"""The C library's heap: how much of it is in use, returning freed memory, and recognising its exhaustion. Imports nothing heavy."""

import contextlib
import ctypes
import sys
from collections.abc import Iterator

from penstock.engine.errors import ConfigurationError

# As torch, the loader of libraries, Python and the operating system report it, in exceptions of many types.
OUT_OF_MEMORY = ("can't allocate memory", "cannot allocate memory", "out of memory", "failed to map segment", "can't start new thread")


class _Mallinfo2(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
    ]


def heap_bytes() -> int:
    """What all threads of the process have allocated of the C heap and not freed; 0 where the C library does not say."""
    mallinfo = getattr(ctypes.CDLL(None), "mallinfo2", None) if sys.platform == "linux" else None
    if mallinfo is None:
        return 0
    mallinfo.restype = _Mallinfo2
    info = mallinfo()
    return int(info.uordblks + info.hblkhd)


def release_heap() -> None:
    """Gives memory back to the operating system that was freed and kept for later."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's own
        if trim is not None:
            trim(0)


@contextlib.contextmanager
def memory_shortage_refused() -> Iterator[None]:
    """Raises `ConfigurationError` where a model's loading runs out of memory."""
    try:
        yield
    except Exception as error:
        if not isinstance(error, MemoryError) and not any(words in str(error).lower() for words in OUT_OF_MEMORY):
            raise
        detail = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigurationError(
            "there is not enough memory to load the model: raise the process's limit (ulimit -v, or the container's), choose a smaller "
            f"model or --quantization int4, or lower --max-model-len or --kv-cache-memory ({detail})"
        ) from error
