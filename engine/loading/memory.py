"""Memory of the device: how much the KV cache may use, and what is freed after loading a model."""

import os

import torch
from torch import nn

from penstock.engine.errors import ConfigurationError
from penstock.engine.heap import release_heap

CUDA_SHARE = 0.9  # of what is free once the weights are loaded; the rest is for activations
CPU_SHARE = 0.5
CPU_CACHE = 2**29  # on a CPU the cache is no faster for being large, and the memory is the user's


def free_memory(device: torch.device) -> int:
    """Bytes that are free on the device now; on the CPU, those that the operating system can make available."""
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what fusing the weights has left in torch's own cache does not count as free
        return torch.cuda.mem_get_info(device)[0]
    try:
        with open("/proc/meminfo") as lines:
            return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def num_cache_blocks(wanted: int | None, *, block_bytes: int, blocks_per_sequence: int, device: torch.device) -> int:
    """How many blocks to reserve: `wanted` bytes' worth, or a default for the device.

    Raises `ConfigurationError` where not even one sequence of the full length fits.
    """
    free = free_memory(device)
    if wanted is None:
        wanted = int(free * CUDA_SHARE)
        if device.type == "cpu":
            wanted = int(min(free * CPU_SHARE, max(CPU_CACHE, blocks_per_sequence * block_bytes)))
    elif wanted > free:
        raise ConfigurationError(f"--kv-cache-memory asks for {wanted / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB are free")
    num_blocks = wanted // block_bytes
    if num_blocks < blocks_per_sequence:
        needed = blocks_per_sequence * block_bytes / 2**30
        raise ConfigurationError(
            f"the KV cache ({wanted / 2**30:.2f} GiB) cannot hold one sequence of the full length, which takes {needed:.2f} GiB:"
            " lower --max-model-len or raise --kv-cache-memory"
        )
    return num_blocks


def settle_memory(model: nn.Module) -> None:
    """Frees what loading leaves behind: the mapped weight file, which its smallest unpacked tensor keeps in memory, and freed heap."""
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    release_heap()
