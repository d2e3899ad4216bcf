"""The memory that keys and values live in, and how it hangs on the model."""

import torch
from torch import Tensor, nn

from penstock.engine.config import KVCacheDtype
from penstock.engine.device import sent
from penstock.engine.errors import ConfigurationError
from penstock.engine.kv_cache import LayerKV

FP8_CAPABILITY = (8, 9)


class KVCache:
    """One key and one value tensor [num_blocks, block_size, num_kv_heads, head_size] per layer.

    The memory is reserved at once but, on the CPU, only becomes resident as blocks are first written.
    """

    def __init__(self, layout: list[LayerKV], num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device) -> None:
        def reserve(num_heads: int, size: int) -> Tensor:
            return torch.empty(num_blocks, block_size, num_heads, size, dtype=dtype, device=device)

        self.dtype = dtype
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.keys = [reserve(layer.num_kv_heads, layer.key_size) for layer in layout]
        self.values = [reserve(layer.num_kv_heads, layer.value_size) for layer in layout]

    def attach(self, model: nn.Module) -> None:
        """Hangs each layer's tensors on the modules that know its number, where the attention function finds them."""
        for module in model.modules():
            layer_idx = getattr(module, "layer_idx", None)
            if isinstance(layer_idx, int):
                module.register_buffer("key_cache", self.keys[layer_idx], persistent=False)
                module.register_buffer("value_cache", self.values[layer_idx], persistent=False)

    def detach(self, model: nn.Module) -> None:
        """Takes the tensors off the modules again, which then hold nothing of the memory."""
        for module in model.modules():
            if getattr(module, "key_cache", None) is self.keys[getattr(module, "layer_idx", 0)]:
                del module.key_cache, module.value_cache

    def copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        """Copies whole blocks, (source, target) pairs, in every layer."""
        if not copies:
            return
        sources, targets = sent(torch.tensor(copies), self.keys[0].device).unbind(1)
        for cache in (*self.keys, *self.values):
            cache[targets] = cache[sources]


def cache_dtype(wanted: KVCacheDtype, model_dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The type of keys and values. Raises `ConfigurationError` where the device has no kernels for it."""
    if wanted == "auto":
        return model_dtype
    if device.type != "cuda":
        raise ConfigurationError(f"--kv-cache-dtype {wanted}: only on a CUDA GPU, and the model runs on {device.type}")
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) < FP8_CAPABILITY:
        needed = ".".join(map(str, FP8_CAPABILITY))
        raise ConfigurationError(f"--kv-cache-dtype {wanted}: it takes compute capability {needed}, and this GPU has {major}.{minor}")
    return torch.float8_e4m3fn


def block_bytes(layout: list[LayerKV], block_size: int, dtype: torch.dtype) -> int:
    """Bytes that one block takes over all layers."""
    return sum(layer.num_elements for layer in layout) * block_size * dtype.itemsize
