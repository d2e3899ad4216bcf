"""Memory of tensors: copies to the device and of results back while it goes on computing, the errors of a device that lacks memory or is
lost, and pages on the host that are returned to the operating system and filled again at the same addresses.
"""

import ctypes
import mmap
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copies a CPU tensor to the device, through pinned memory so that the copy does not wait for work in flight."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def index_on(device: torch.device, rows: Sequence[int]) -> Tensor:
    """An index tensor, int64. Indexing a tensor on a GPU by a list would wait for the device."""
    return to_device(torch.tensor(rows, dtype=torch.int64), device)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a GPU has too little memory for what was asked of it, as torch, CUDA and its libraries report it. Later work may well fit."""
    is_from_cuda = "CUDA" in str(error) and any(words in str(error) for words in ("out of memory", "ALLOC_FAILED"))
    return isinstance(error, torch.OutOfMemoryError) or is_from_cuda


def is_device_lost(error: BaseException) -> bool:
    """Whether CUDA has reported an error that stays: all that the process asks of the device from then on fails with it."""
    is_from_cuda = isinstance(error, torch.AcceleratorError) or any(words in str(error) for words in ("CUDA error", "Triton Error [CUDA]"))
    return is_from_cuda and not is_out_of_memory(error)


class HostCopies(Protocol):
    """Copies results to the host: CUDA, or a fake of it."""

    def begin(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Starts a copy and returns at once. The function that it returns waits, in any thread, for the copy and returns it."""
        ...


class CudaHostCopies:
    """Copies after the work queued on the current stream so far, and concurrently with later work."""

    def begin(self, tensor: Tensor) -> Callable[[], Tensor]:
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        host.copy_(tensor, non_blocking=True)
        # A waiting thread sleeps: by default CUDA would spin on a core.
        is_there = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        is_there.record()

        def wait() -> Tensor:
            is_there.synchronize()
            return host

        return wait


CHUNK = 64 * 2**20  # bytes that are written or read by one system call
PRIVATE_WRITABLE = "rw-p"


@dataclass(frozen=True, slots=True, order=True)
class Region:
    """Whole pages of memory from `start` up to `stop`, which are addresses."""

    start: int
    stop: int

    @property
    def num_bytes(self) -> int:
        return self.stop - self.start


def regions_of(tensors: Iterable[Tensor]) -> list[Region]:
    """The whole pages that these tensors, or others over the same storage, have to themselves.

    Left out are pages that a file is mapped to, which the system can reclaim anyway, and what oneDNN has packed in its own layout.
    """
    found = [Region(*_pages_within(address, address + size)) for address, size in _storages(tensors)]
    anonymous = _anonymous_memory()
    return [region for region in _merged(found) if any(memory.start <= region.start and region.stop <= memory.stop for memory in anonymous)]


def _storages(tensors: Iterable[Tensor]) -> set[tuple[int, int]]:
    """Address and size of each storage on the host."""
    on_host = (tensor for tensor in tensors if tensor.device.type == "cpu" and not tensor.is_mkldnn)
    storages = (tensor.untyped_storage() for tensor in on_host)
    return {(storage.data_ptr(), storage.nbytes()) for storage in storages if storage.nbytes()}


def _pages_within(start: int, stop: int) -> tuple[int, int]:
    first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
    return first, max(first, stop // mmap.PAGESIZE * mmap.PAGESIZE)


def _merged(regions: Iterable[Region]) -> list[Region]:
    """Without empty ones; those that overlap become one, and so each byte is written once."""
    merged: list[Region] = []
    for region in sorted(region for region in regions if region.num_bytes):
        if merged and region.start < merged[-1].stop:
            merged[-1] = Region(merged[-1].start, max(merged[-1].stop, region.stop))
        else:
            merged.append(region)
    return merged


def _anonymous_memory() -> list[Region]:
    """Private memory of this process that is no part of a file, neighbours as one."""
    regions: list[Region] = []
    with open("/proc/self/maps", encoding="utf-8") as lines:
        for line in lines:
            addresses, permissions, _, _, inode, *_ = line.split()
            if permissions == PRIVATE_WRITABLE and inode == "0":
                start, stop = (int(address, 16) for address in addresses.split("-"))
                if regions and regions[-1].stop == start:
                    start = regions.pop().start
                regions.append(Region(start, stop))
    return regions


def advise_huge_pages(tensor: Tensor) -> None:
    """Asks for huge pages under a contiguous tensor on the host, before it is written for the first time.

    It is advice: where it cannot be taken, and at the ends of memory that is not aligned to them, pages stay small.
    """
    if hasattr(mmap, "MADV_HUGEPAGE"):
        start, stop = _pages_within(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes)
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), mmap.MADV_HUGEPAGE)


def can_release() -> bool:
    """Whether the memory of tensors can be returned here while their addresses stay valid."""
    return sys.platform == "linux"


def release(regions: Iterable[Region]) -> None:
    """Returns the pages to the system. They are zeros when they are next read, and take memory from then on."""
    library = ctypes.CDLL(None, use_errno=True)
    for region in regions:
        if library.madvise(ctypes.c_void_p(region.start), ctypes.c_size_t(region.num_bytes), mmap.MADV_DONTNEED):
            raise OSError(ctypes.get_errno(), "madvise failed")


def resident_bytes(regions: Iterable[Region]) -> int:
    """How much of them is in memory, as the kernel counts it."""
    library = ctypes.CDLL(None, use_errno=True)
    num_pages = 0
    for region in regions:
        pages = (ctypes.c_ubyte * (region.num_bytes // mmap.PAGESIZE))()
        if library.mincore(ctypes.c_void_p(region.start), ctypes.c_size_t(region.num_bytes), pages):
            raise OSError(ctypes.get_errno(), "mincore failed")
        num_pages += int((np.frombuffer(bytes(pages), np.uint8) & 1).sum())
    return num_pages * mmap.PAGESIZE


def resident_set_size() -> int:
    """Bytes of this process that are in memory; 0 where the system does not say."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * mmap.PAGESIZE
    except OSError:
        return 0


class SpilledRegions:
    """The contents of regions, in a file that has no name: it is gone with the process, however that ends."""

    def __init__(self, regions: list[Region], directory: Path) -> None:
        """Writes the file, which takes seconds. Raises `OSError` where it cannot be written; nothing is left of it then."""
        self.regions = regions
        self._file = tempfile.TemporaryFile(dir=directory, prefix="weights-")  # noqa: SIM115 - kept for as long as the regions may be read
        try:
            for view in self._views():
                while view:
                    view = view[os.write(self._file.fileno(), view) :]
        except BaseException:
            self._file.close()
            raise

    @property
    def num_bytes(self) -> int:
        return sum(region.num_bytes for region in self.regions)

    def restore(self) -> None:
        """Fills the regions again, which takes seconds. Raises `OSError` where the file cannot be read."""
        position = 0
        for view in self._views():
            while view:
                num_read = os.preadv(self._file.fileno(), [view], position)
                if not num_read:
                    raise OSError("the file of the weights is too short")
                position, view = position + num_read, view[num_read:]

    def close(self) -> None:
        self._file.close()

    def _views(self) -> Iterator[memoryview]:
        for region in self.regions:
            for start in range(region.start, region.stop, CHUNK):
                size = min(CHUNK, region.stop - start)
                yield memoryview((ctypes.c_ubyte * size).from_address(start)).cast("B")
