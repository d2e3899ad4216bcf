"""The C++ kernels, built once with the machine's own compiler, and the threads of a model on the CPU that run them.

Without a compiler, callers use torch. Of the threads: how many a model has, which CPUs they run on, and how they pack its weights.
"""

import contextlib
import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import ContextVar
from pathlib import Path

import torch
from torch import Tensor

from penstock.engine.config import EngineConfig, NativeKernels, PinThreads
from penstock.engine.errors import ConfigurationError
from penstock.engine.system.cache import cache_directory, check_private, make_private
from penstock.engine.system.cpus import Placement, default_num_threads, memory_on, placement

logger = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("kernels.cpp")
# The parts of -ffast-math that vectorising a sum takes. The whole of it would be wrong: the softmax starts from minus infinity, and merely
# loading a library linked with -ffast-math makes every other computation take subnormal numbers for zero.
FLAGS = (
    *("-O3", "-fopenmp", "-std=c++17", "-shared", "-fPIC"),
    *("-fassociative-math", "-freciprocal-math", "-fno-signed-zeros", "-fno-trapping-math", "-fno-math-errno"),
)
# It takes 12 s on an idle machine of two cores. To give up on a busy one would leave the slower path until the server ends.
BUILD_SECONDS = 900
# The values of `$PENSTOCK_TILES`, as `penstock_choose_tiles` numbers them. Emulated tiles exist on any processor, and are slow.
TILE_MODES = {"never": 0, "always": 1, "emulated": 1, "auto": 2}
EMULATED_TILES = "-DPENSTOCK_EMULATED_TILES"
PORTABLE = "The model runs on torch's portable code, which is slower than the native kernels and rounds differently: %s"

_mode: NativeKernels = "auto"
_building = threading.Lock()
PART_BYTES = 2**20
_NUM_LOADING_THREADS: ContextVar[int] = ContextVar("num_loading_threads", default=1)


def instructions_flag() -> str:
    """For which instructions the kernels are compiled: those of `$PENSTOCK_MARCH`, such as x86-64-v3, else all that this processor has."""
    chosen = os.environ.get("PENSTOCK_MARCH")
    if chosen:
        return f"-march={chosen}"
    # Not every clang++ knows -march=native on arm64.
    return "-mcpu=native" if platform.machine() in ("aarch64", "arm64") else "-march=native"


def tile_mode() -> str:
    """Whether products go by the tiles of AMX: `$PENSTOCK_TILES`, else where a trial at the start finds them to be faster.

    Raises `ConfigurationError` where the variable says something else.
    """
    mode = os.environ.get("PENSTOCK_TILES", "auto")
    if mode not in TILE_MODES:
        raise ConfigurationError(f"PENSTOCK_TILES={mode}: it is one of {', '.join(TILE_MODES)}")
    return mode


def find_compiler() -> str | None:
    """The C++ compiler: `$CXX`, else g++ or clang++ on the path."""
    return shutil.which(os.environ.get("CXX") or "g++") or shutil.which("clang++")


def choose_kernels(mode: NativeKernels) -> None:
    """Decides for the whole process, which loads the library once, whether native kernels are used.

    Raises `ConfigurationError` where a model that was loaded before has decided otherwise.
    """
    global _mode
    if mode != _mode and native_library.cache_info().currsize:
        raise ConfigurationError(f"--native-kernels {mode}: this process has loaded a model with --native-kernels {_mode} before")
    _mode = mode


@functools.cache
def native_library() -> ctypes.CDLL | None:
    """The loaded library, built on first use and kept in the user's cache directory; None where it cannot be built or is not wanted.

    Raises `ConfigurationError` where other users could have written the library, and where it has no tiles that `$PENSTOCK_TILES` requires.
    """
    if _mode == "none":
        logger.info(PORTABLE, "--native-kernels none")
        return None
    compiler = find_compiler()
    if compiler is None:
        logger.warning(PORTABLE, "there is no C++ compiler (g++, clang++ or $CXX)")
        return None
    try:
        library = _load(compiler)
    except (OSError, subprocess.SubprocessError) as error:
        logger.warning(PORTABLE, f"the C++ kernels could not be built: {getattr(error, 'stderr', None) or error}")
        return None
    pointer, integer, number = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
    library.penstock_set_num_threads.argtypes = [integer]
    library.penstock_set_num_threads.restype = None
    library.penstock_num_threads.argtypes = []
    library.penstock_num_threads.restype = integer
    library.penstock_place_threads.argtypes = [pointer, integer, integer]
    library.penstock_place_threads.restype = None
    library.penstock_record_loops.argtypes = [pointer, integer]
    library.penstock_record_loops.restype = integer
    library.penstock_write_rows.argtypes = [pointer, pointer, pointer, integer, integer, integer]
    library.penstock_write_rows.restype = None
    library.penstock_quantize_rows.argtypes = [pointer] * 3 + [integer] * 5
    library.penstock_quantize_rows.restype = None
    library.penstock_paged_decode.argtypes = [pointer] * 7 + [integer] * 9 + [number, integer, number, pointer]
    library.penstock_paged_decode.restype = None
    library.penstock_paged_prefill.argtypes = [pointer] * 9 + [integer] * 9 + [number, integer, number, pointer]
    library.penstock_paged_prefill.restype = None
    library.penstock_apply_bitmask.argtypes = [pointer] * 3 + [integer] * 5
    library.penstock_apply_bitmask.restype = None
    library.penstock_most_probable.argtypes = [pointer] * 2 + [integer] * 4 + [pointer] + [integer] * 2
    library.penstock_most_probable.restype = None
    library.penstock_choose.argtypes = (
        [pointer] * 2 + [integer] * 3 + [pointer] + [integer] * 2 + [pointer] * 2 + [integer] * 2 + [pointer] * 3
    )
    library.penstock_choose.restype = None
    library.penstock_most_probable_tokens.argtypes = [pointer] * 3 + [integer, pointer]
    library.penstock_most_probable_tokens.restype = None
    library.penstock_quantized_rows.argtypes = [pointer] * 3 + [integer] * 3
    library.penstock_quantized_rows.restype = None
    library.penstock_panel_linear.argtypes = [pointer] * 4 + [integer] * 3
    library.penstock_panel_linear.restype = None
    library.penstock_float8_linear.argtypes = [pointer] * 4 + [integer] * 3
    library.penstock_float8_linear.restype = None
    library.penstock_grouped_float8_linear.argtypes = [pointer] * 5 + [integer] * 3
    library.penstock_grouped_float8_linear.restype = None
    library.penstock_instructions.argtypes = []
    library.penstock_instructions.restype = ctypes.c_char_p
    library.penstock_quantized_linear.argtypes = [pointer] * 3 + [integer] + [pointer] + [integer] * 3
    library.penstock_quantized_linear.restype = None
    library.penstock_grouped_linear.argtypes = [pointer] * 4 + [integer] + [pointer] * 2 + [integer] * 3
    library.penstock_grouped_linear.restype = None
    library.penstock_grouped_panel_linear.argtypes = [pointer] * 5 + [integer] * 3
    library.penstock_grouped_panel_linear.restype = None
    library.penstock_run_decoder.argtypes = [pointer] * 7 + [integer] * 2
    library.penstock_run_decoder.restype = None
    library.penstock_choose_tiles.argtypes = [integer]
    library.penstock_choose_tiles.restype = integer
    library.penstock_tile_rows.argtypes = [integer]
    library.penstock_tile_rows.restype = integer
    mode = tile_mode()
    has_tiles = library.penstock_choose_tiles(TILE_MODES[mode])
    if mode == "always" and not has_tiles:
        raise ConfigurationError("PENSTOCK_TILES=always: this processor has no tiles of AMX, or the system does not permit them")
    if mode == "auto" and not has_tiles and " amx_tile " in f"{processor_features()} ":
        logger.warning("The processor has tiles of AMX, but the system does not permit them, or the kernels are compiled without them")
    return library


def build_ahead() -> None:
    """Has a thread of its own build the library where it is not in the cache; `native_library` then waits for that."""
    if _mode != "none" and (compiler := find_compiler()) is not None:
        threading.Thread(target=_try_to_build, args=(compiler,), name="kernels", daemon=True).start()


def _try_to_build(compiler: str) -> None:
    with suppress(OSError, subprocess.SubprocessError, ConfigurationError):  # `native_library` has the same, and reports it
        _build(compiler)


def _load(compiler: str) -> ctypes.CDLL:
    path = _build(compiler)
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        logger.warning("The C++ kernels in the cache do not load and are built again: %s", error)
        path.unlink()
        return ctypes.CDLL(str(_build(compiler)))


def _build(compiler: str) -> Path:
    # By default the result is tied to this processor, so its name and features are part of the key.
    flags = (*FLAGS, instructions_flag(), *([EMULATED_TILES] if tile_mode() == "emulated" else []))
    sources = [path.read_bytes() for path in sorted(SOURCE.parent.glob("*.[ch]*"))]
    parts = [*sources, *map(str.encode, (compiler, *flags, processor_features()))]
    key = hashlib.sha256(b"\0".join(parts)).hexdigest()[:20]
    target = cache_directory() / "native" / f"kernels-{key}.so"
    check_private(target)
    with _building:
        if not _is_whole(target):
            _compile(compiler, flags, target)
    return target


def _compile(compiler: str, flags: Sequence[str], target: Path) -> None:
    make_private(target.parent)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        built = Path(scratch) / target.name
        sources = sorted(SOURCE.parent.glob("*.cpp"))  # each takes about as long
        objects = [str(Path(scratch) / f"{source.stem}.o") for source in sources]
        compile_flags = [flag for flag in flags if flag != "-shared"]
        commands = [[compiler, *compile_flags, "-c", "-o", *pair] for pair in zip(objects, map(str, sources), strict=True)]
        logger.info("Building the CPU kernels with %s in %s; this happens once, in half a minute or so", compiler, target.parent)
        _run_compilers(commands)
        _run_compilers([[compiler, *flags, "-o", str(built), *objects]])
        content = built.read_bytes()
        built.write_bytes(content + hashlib.sha256(content).digest())
        built.chmod(0o700)
        if target.is_dir():
            shutil.rmtree(target)
        built.replace(target)


def _run_compilers(commands: Sequence[Sequence[str]]) -> None:
    # Side by side, without a pool of threads: the end of a process would wait for those, and for the compilers.
    running = [subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) for command in commands]
    try:
        for process in running:
            _, errors = process.communicate(timeout=BUILD_SECONDS)
            if process.returncode:
                raise subprocess.CalledProcessError(process.returncode, process.args, stderr=errors)
    finally:
        for process in running:
            process.kill()
            process.wait()
            if process.stderr is not None:
                process.stderr.close()


def _is_whole(library: Path) -> bool:
    """Whether the file is there and ends with the checksum that `_build` appended, which the loader ignores.

    Loading a file that lost its end, in a power cut or on a full disk, would not fail but kill the process.
    """
    if not library.is_file():
        return False
    content = library.read_bytes()
    size = hashlib.sha256().digest_size
    return content[-size:] == hashlib.sha256(content[:-size]).digest()


def kernels_in_use() -> str:
    """Which code computes a model on the CPU, in a word or two."""
    library = native_library()
    if library is None:
        return "portable"
    return f"native, {library.penstock_instructions().decode()}{tiles_in_use(library)}"


def tiles_in_use(library: ctypes.CDLL) -> str:
    """For the end of a list: what goes by the tiles of AMX, and from how many rows on."""
    rows = {name: library.penstock_tile_rows(product) for product, name in enumerate(("bfloat16", "few bits", "attention"))}
    used = [f"{name} from {least} {'row' if least == 1 else 'rows'}" for name, least in rows.items() if least > 0]
    return f", AMX tiles for {', '.join(used)}" if used else ""


def processor_features() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    wanted = ("model name", "flags", "CPU part", "Features")
    return "\n".join(sorted({line for line in lines if line.startswith(wanted)})) or platform.machine()


def num_model_threads(config: EngineConfig) -> int:
    return config.num_threads or default_num_threads()


@contextlib.contextmanager
def loading_threads(config: EngineConfig) -> Iterator[None]:
    """Has this thread pack a model's weights `by_rows` with as many threads as the model will have, in memory on the nodes of those.

    Torch gets one thread here: two OpenMP pools on the same cores put each other's threads to sleep, so that a step takes twice as long.
    Only the model's thread has one.
    """
    num_threads = num_model_threads(config)
    torch.set_num_threads(1)
    reset = _NUM_LOADING_THREADS.set(num_threads)
    try:
        with memory_on(placement(num_threads, config.pin_threads).nodes):
            yield
    finally:
        _NUM_LOADING_THREADS.reset(reset)


def by_rows(
    compute: Callable[..., tuple[Tensor, ...]], matrices: Sequence[Tensor], rows_per_result: int = 1, row_bytes: int | None = None
) -> tuple[Tensor, ...]:
    """What `compute` makes of matrices with the same number of rows, where so many rows each give one row of every result.

    A row has as many bytes as in the first matrix, unless `row_bytes` says how many. `compute` is called for some rows at a time, which
    stay in a core's cache, and within `loading_threads` in as many threads.
    """
    num_rows, num_columns = matrices[0].shape
    row_bytes = num_columns * matrices[0].element_size() if row_bytes is None else row_bytes
    step = max(1, PART_BYTES // max(1, row_bytes * rows_per_result)) * rows_per_result

    def part(first: int) -> tuple[Tensor, ...]:
        return compute(*(matrix[first : first + step] for matrix in matrices))

    def write(first: int, parts: tuple[Tensor, ...]) -> None:
        for result, rows in zip(results, parts, strict=True):
            result[first // rows_per_result :][: len(rows)] = rows

    beginning, rest = part(0), range(step, num_rows, step)
    if not rest:
        return beginning
    results = tuple(rows.new_empty(-(-num_rows // rows_per_result), *rows.shape[1:]) for rows in beginning)
    write(0, beginning)
    num_threads = min(_NUM_LOADING_THREADS.get(), len(rest))
    if num_threads == 1:
        for first in rest:
            write(first, part(first))
    else:
        with ThreadPoolExecutor(num_threads, initializer=torch.set_num_threads, initargs=(1,)) as threads:
            list(threads.map(lambda first: write(first, part(first)), rest))
    return results


def model_thread(device: torch.device, num_threads: int, pin: PinThreads) -> ThreadPoolExecutor:
    """The one thread that runs a model."""

    def prepare() -> None:
        if device.type == "cuda":
            torch.set_num_threads(num_threads)
            torch.cuda.set_device(device)  # Triton launches on the thread's current device
        else:
            prepare_loops(num_threads, pin)

    return ThreadPoolExecutor(1, thread_name_prefix="model", initializer=prepare)


def prepare_loops(num_threads: int, pin: PinThreads) -> None:
    """Has the loops of this thread, which runs a model on the CPU, use so many threads, and places these."""
    if num_threads > 1 and sys.platform == "linux":
        where = placement(num_threads, pin)
        if where.is_pinned or set(where.cpus) != os.sched_getaffinity(0):
            os.sched_setaffinity(0, where.cpus)  # of this thread, and of those that OpenMP starts from it
            _place_workers(where)
            how = "pinned to" if where.is_pinned else "on"
            logger.info("The model's %d threads run %s the CPUs %s", num_threads, how, ", ".join(map(str, where.cpus)))
    torch.set_num_threads(num_threads)  # OpenMP keeps it per thread
    library = native_library()
    if library is not None:
        library.penstock_set_num_threads(num_threads)  # an OpenMP library beside torch's, such as clang's, has a number of its own
        assert library.penstock_num_threads() == torch.get_num_threads() == num_threads


def _place_workers(where: Placement) -> None:
    library = native_library()
    if library is not None:
        cpus = (ctypes.c_int32 * len(where.cpus))(*where.cpus)
        library.penstock_place_threads(cpus, len(cpus), where.is_pinned)
