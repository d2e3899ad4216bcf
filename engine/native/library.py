"""Builds the C++ kernels once with the machine's own compiler and loads them. Where there is no compiler, callers take their torch path."""

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

from penstock.engine.cache_directory import cache_directory

logger = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("kernels.cpp")
# The parts of -ffast-math that vectorising a sum takes. The whole of it would be wrong: the softmax starts from minus infinity, and merely
# loading a library linked with -ffast-math makes every other computation take subnormal numbers for zero.
FLAGS = (
    *("-O3", "-march=native", "-fopenmp", "-std=c++17", "-shared", "-fPIC"),
    *("-fassociative-math", "-freciprocal-math", "-fno-signed-zeros", "-fno-trapping-math", "-fno-math-errno"),
)
# It takes 15 s on an idle machine. To give up on a busy one would leave the slower path until the server ends.
BUILD_SECONDS = 900


def find_compiler() -> str | None:
    """The C++ compiler: `$CXX`, else g++ or clang++ on the path."""
    return shutil.which(os.environ.get("CXX") or "g++") or shutil.which("clang++")


@functools.cache
def native_library() -> ctypes.CDLL | None:
    """The loaded library, built on first use and kept in the user's cache directory; None where it cannot be built."""
    compiler = find_compiler()
    if compiler is None:
        logger.info("No C++ compiler found: attention takes its slower torch path.")
        return None
    try:
        library = ctypes.CDLL(str(_build(compiler)))
    except (OSError, subprocess.SubprocessError) as error:
        detail = getattr(error, "stderr", None) or error
        logger.warning("The C++ kernels could not be built, attention takes its slower torch path: %s", detail)
        return None
    pointer, integer, number = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
    library.penstock_write_rows.argtypes = [pointer, pointer, pointer, integer, integer, integer]
    library.penstock_write_rows.restype = None
    library.penstock_paged_decode.argtypes = [pointer] * 6 + [integer] * 8 + [number, integer, number, pointer]
    library.penstock_paged_decode.restype = None
    library.penstock_paged_prefill.argtypes = [pointer] * 7 + [integer] * 8 + [number, integer, number, pointer]
    library.penstock_paged_prefill.restype = None
    library.penstock_apply_bitmask.argtypes = [pointer] * 3 + [integer] * 5
    library.penstock_apply_bitmask.restype = None
    library.penstock_most_probable.argtypes = [pointer] * 2 + [integer] * 4 + [pointer] + [integer] * 2
    library.penstock_most_probable.restype = None
    library.penstock_quantized_rows.argtypes = [pointer] * 3 + [integer] * 3
    library.penstock_quantized_rows.restype = None
    library.penstock_panel_linear.argtypes = [pointer] * 4 + [integer] * 3
    library.penstock_panel_linear.restype = None
    library.penstock_has_bfloat16_products.argtypes = []
    library.penstock_has_bfloat16_products.restype = integer
    library.penstock_quantized_linear.argtypes = [pointer] * 4 + [integer] * 5
    library.penstock_quantized_linear.restype = None
    library.penstock_run_decoder.argtypes = [pointer] * 6 + [integer]
    library.penstock_run_decoder.restype = None
    library.penstock_has_prefill.argtypes = []
    library.penstock_has_prefill.restype = integer
    return library


def _build(compiler: str) -> Path:
    # -march=native ties the result to this processor, so its name and features are part of the key.
    sources = [path.read_bytes() for path in sorted(SOURCE.parent.glob("*.[ch]*"))]
    parts = [*sources, *map(str.encode, (compiler, *FLAGS, processor_features()))]
    key = hashlib.sha256(b"\0".join(parts)).hexdigest()[:20]
    target = cache_directory() / "native" / f"kernels-{key}.so"
    if not _is_whole(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
            built = Path(scratch) / target.name
            command = [compiler, *FLAGS, "-o", str(built), str(SOURCE)]
            logger.info("Building the CPU kernels with %s in %s; this happens once, in half a minute or so", compiler, target.parent)
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=BUILD_SECONDS)
            content = built.read_bytes()
            built.write_bytes(content + hashlib.sha256(content).digest())
            built.replace(target)
    return target


def _is_whole(library: Path) -> bool:
    """Whether the file is there and ends with the checksum that `_build` appended, which the loader ignores.

    Loading a file that lost its end, in a power cut or on a full disk, would not fail but kill the process.
    """
    if not library.is_file():
        return False
    content = library.read_bytes()
    size = hashlib.sha256().digest_size
    return content[-size:] == hashlib.sha256(content[:-size]).digest()


def processor_features() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    wanted = ("model name", "flags", "CPU part", "Features")
    return "\n".join(sorted({line for line in lines if line.startswith(wanted)})) or platform.machine()
