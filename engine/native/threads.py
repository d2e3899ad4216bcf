"""The threads of a model on the CPU: how many its loops get, which CPUs they run on, and what they do while it is loaded."""

import contextlib
import ctypes
import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar

import torch
from torch import Tensor

from penstock.engine.config import EngineConfig, PinThreads
from penstock.engine.native.library import native_library
from penstock.engine.system.cpus import Placement, default_num_threads, memory_on, placement

PART_ELEMENTS = 2**18  # a megabyte of float32
_NUM_LOADING_THREADS: ContextVar[int] = ContextVar("num_loading_threads", default=1)

logger = logging.getLogger(__name__)


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


def by_rows(compute: Callable[..., tuple[Tensor, ...]], matrices: Sequence[Tensor], rows_per_result: int = 1) -> tuple[Tensor, ...]:
    """What `compute` makes of matrices with the same number of rows, where so many rows each give one row of every result.

    It is called for some rows at a time, which stay in a core's cache, and within `loading_threads` in as many threads.
    """
    num_rows, num_columns = matrices[0].shape
    step = max(1, PART_ELEMENTS // max(1, num_columns * rows_per_result)) * rows_per_result

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
