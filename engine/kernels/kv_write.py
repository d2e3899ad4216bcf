"""Writing new keys and values to their slots of the paged cache."""

import torch
from torch import Tensor

from penstock.engine.kernels.tuning import COMPILER_OPTIONS, next_power_of_two

ELEMENTS_PER_WARP = 256  # 16 bytes for each of 32 lanes, at 2 bytes an element


def kv_write(key_THD: Tensor, value_THD: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping_T: Tensor) -> None:
    """Writes keys [T, KV heads, Dk] and values [T, KV heads, Dv] to the caches, converted to their type, in one launch.

    Caches of 8 bits (float8_e4m3fn, on chips of capability 8.9 and later) have no scales: what exceeds their range is cut off at its end.

    Slot s (int64) is token s % block_size of block s // block_size; tokens with a negative slot are padding and are skipped. No two tokens
    may share a slot. Head dimensions are contiguous everywhere. Never waits for the device.
    """
    from penstock.engine.kernels.attention_triton import kv_write_kernel

    assert key_THD.stride(-1) == value_THD.stride(-1) == key_cache.stride(-1) == value_cache.stride(-1) == slot_mapping_T.stride(0) == 1
    num_tokens, num_kv_heads, key_size = key_THD.shape
    value_size = value_THD.shape[-1]
    if num_tokens == 0:
        return
    key_elements = next_power_of_two(num_kv_heads * key_size)
    value_elements = next_power_of_two(num_kv_heads * value_size)
    kv_write_kernel[(num_tokens,)](
        key_THD,
        value_THD,
        key_cache,
        value_cache,
        slot_mapping_T,
        *key_THD.stride()[:2],
        *value_THD.stride()[:2],
        *key_cache.stride()[:3],
        *value_cache.stride()[:3],
        NUM_KV_HEADS=num_kv_heads,
        KEY_SIZE=key_size,
        VALUE_SIZE=value_size,
        BLOCK_SIZE=key_cache.shape[1],
        KEY_ELEMENTS=key_elements,
        VALUE_ELEMENTS=value_elements,
        LARGEST=torch.finfo(key_cache.dtype).max if key_cache.dtype.itemsize == 1 else None,
        num_warps=max(1, min(8, max(key_elements, value_elements) // ELEMENTS_PER_WARP)),
        **COMPILER_OPTIONS,
    )
