"""Times on a device, and what the device can do at best, measured rather than looked up."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

COPY_BYTES = 2**31  # many times any cache
MATMUL_SIZE = 8192
REPEATS = 20


@dataclass(frozen=True, slots=True)
class Clock:
    """Times by CUDA events on a GPU, by the processor's clock elsewhere."""

    device: torch.device

    def median_s(self, run: Callable[[], Any], repeats: int = REPEATS, warmup: int = 3) -> float:
        """The median time of one run. Runs follow each other without a wait in between."""
        for _ in range(warmup):
            run()
        times = self._events(run, repeats) if self.device.type == "cuda" else self._ticks(run, repeats)
        return statistics.median(times)

    def _events(self, run: Callable[[], Any], repeats: int) -> list[float]:
        marks: list[Any] = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]  # type: ignore[no-untyped-call]
        marks[0].record()
        for mark in marks[1:]:
            run()
            mark.record()
        torch.cuda.synchronize()
        return [before.elapsed_time(after) / 1e3 for before, after in pairwise(marks)]

    def _ticks(self, run: Callable[[], Any], repeats: int) -> list[float]:
        marks = [time.perf_counter()]
        for _ in range(repeats):
            run()
            marks.append(time.perf_counter())
        return [after - before for before, after in pairwise(marks)]


@dataclass(frozen=True, slots=True)
class Ceilings:
    """`bandwidth` in bytes/s of a copy on the device, read and written bytes both counted; `matmul` in operations/s in bfloat16."""

    bandwidth: float
    matmul: float


def measure_ceilings(clock: Clock, copy_bytes: int = COPY_BYTES, matmul_size: int = MATMUL_SIZE) -> Ceilings:
    """On random numbers: on zeros, matrix products run faster than on any real data."""
    copied_s = _copy_s(clock, copy_bytes)
    left, right = (torch.randn(matmul_size, matmul_size, device=clock.device, dtype=torch.bfloat16) for _ in range(2))
    multiplied_s = clock.median_s(lambda: left @ right)
    return Ceilings(bandwidth=2 * copy_bytes / copied_s, matmul=2.0 * matmul_size**3 / multiplied_s)


def _copy_s(clock: Clock, num_bytes: int) -> float:
    source = torch.randint(-128, 128, (num_bytes,), dtype=torch.int8, device=clock.device)
    target = torch.empty_like(source)
    return clock.median_s(lambda: target.copy_(source))
