"""The threads of a model on the CPU: how many its loops get, which CPUs they run on, and what they do while it is loaded."""

import contextlib
import ctypes
import logging
import os
import sys
from collections.abc import Iterator

import torch

from penstock.engine.config import EngineConfig, PinThreads
from penstock.engine.native.library import native_library
from penstock.engine.system.cpus import Placement, default_num_threads, memory_on, placement

logger = logging.getLogger(__name__)


def num_model_threads(config: EngineConfig) -> int:
    return config.num_threads or default_num_threads()


@contextlib.contextmanager
def loading_threads(config: EngineConfig) -> Iterator[None]:
    """Gives a model's loading, packing and quantizing as many threads as the model will have, and memory on the nodes where those run.

    Leaves this thread one.
    """
    num_threads = num_model_threads(config)
    torch.set_num_threads(num_threads)
    try:
        with memory_on(placement(num_threads, config.pin_threads).nodes):
            yield
    finally:
        # Two OpenMP pools on the same cores put each other's threads to sleep: a step takes twice as long. Only the model's thread has one.
        torch.set_num_threads(1)


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
