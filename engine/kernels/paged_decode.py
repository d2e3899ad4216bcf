"""Decode attention: one query per sequence against its keys and values in the paged cache."""

import torch
from torch import Tensor

from penstock.engine.kernels.tuning import COMPILER_OPTIONS, decode_tuning, next_power_of_two, padded


def paged_decode(
    query_BHD: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table_BN: Tensor,
    context_lens_B: Tensor,
    *,
    scaling: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    num_splits: int = 1,
    out: Tensor | None = None,
) -> Tensor:
    """Attention of each sequence's last token over all its keys, in `num_splits` parts that run side by side; returns [B, H, Dv].

    The caches are [num_blocks, block_size, KV heads, Dk or Dv] with contiguous heads, of the query's type or float8_e4m3fn. The table names
    each sequence's blocks in order; entries past its context are never read. `context_lens_B` counts the new token, whose key and value
    are in the cache already; a sequence of length 0 gets zeros. Table and lengths are int32 or int64. `sinks` [H] join the softmax as
    keys without values. Never waits for the device.
    Source: Flash-Decoding (Dao et al. 2023) over vLLM's block tables (Kwon et al. 2023), all query heads of a KV head in one tile.
    """
    from penstock.engine.kernels.attention_triton import merge_splits_kernel, paged_decode_kernel

    num_sequences, num_heads, key_size = query_BHD.shape
    _, block_size, num_kv_heads, value_size = value_cache.shape
    assert num_heads % num_kv_heads == 0
    assert query_BHD.stride(-1) == key_cache.stride(-1) == value_cache.stride(-1) == block_table_BN.stride(-1) == 1
    if out is None:
        out = query_BHD.new_empty(num_sequences, num_heads, value_size)
    if num_sequences == 0:
        return out
    group_size = num_heads // num_kv_heads
    tuning = decode_tuning(group_size, key_size, value_size, query_BHD.element_size())
    is_split = num_splits > 1
    partial_output = partial_log_sum = out
    if is_split:
        partial_output = out.new_empty(num_sequences, num_heads, num_splits, value_size, dtype=torch.float32)
        partial_log_sum = out.new_empty(num_sequences, num_heads, num_splits, dtype=torch.float32)
    paged_decode_kernel[(num_sequences, num_kv_heads, num_splits)](
        out,
        partial_output,
        partial_log_sum,
        query_BHD,
        key_cache,
        value_cache,
        block_table_BN,
        context_lens_B,
        sinks,
        scaling,
        sliding_window,
        softcap,
        *out.stride()[:2],
        *query_BHD.stride()[:2],
        *key_cache.stride()[:3],
        *value_cache.stride()[:3],
        block_table_BN.stride(0),
        GROUP_SIZE=group_size,
        KEY_SIZE=key_size,
        VALUE_SIZE=value_size,
        KEY_PADDED=padded(key_size),
        VALUE_PADDED=padded(value_size),
        BLOCK_SIZE=block_size,
        TILE_ROWS=tuning.tile_rows,
        TILE_KEYS=tuning.tile_keys,
        IS_SPLIT=is_split,
        num_warps=tuning.num_warps,
        num_stages=tuning.num_stages,
        **COMPILER_OPTIONS,
    )
    if is_split:
        merge_splits_kernel[(num_sequences, num_heads)](
            out,
            partial_output,
            partial_log_sum,
            *out.stride()[:2],
            num_splits,
            VALUE_SIZE=value_size,
            VALUE_PADDED=padded(value_size),
            SPLITS_PADDED=next_power_of_two(num_splits),
            num_warps=4,
            **COMPILER_OPTIONS,
        )
    return out
