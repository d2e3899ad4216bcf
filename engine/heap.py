"""The C library's heap: how much of it is in use, and giving freed memory back. Imports nothing heavy."""

import ctypes
import sys


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
