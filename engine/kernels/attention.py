"""Paged attention and the writes to its caches: the launchers of the kernels in `attention_triton.py`."""

import torch
from torch import Tensor

from penstock.engine.kernels.tuning import COMPILER_OPTIONS, decode_tuning, next_power_of_two, padded, prefill_tuning

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


def varlen_prefill(
    query_THD: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table_BN: Tensor,
    query_start_loc: Tensor,
    context_lens_B: Tensor,
    *,
    max_query_len: int,
    scaling: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    first_sequence: int = 0,
    out: Tensor | None = None,
) -> Tensor:
    """Causal attention of a flat batch; returns [T, H, Dv].

    Rows query_start_loc[i]:query_start_loc[i + 1] (int32 or int64 [B + 1]) are the last tokens of sequence i, whose keys and values up to
    context_lens_B[i] are in the cache already: chunks of a prompt and prefix-cache hits need nothing of their own. No sequence may have
    more than `max_query_len` rows. Only the sequences from `first_sequence` on are computed; the other rows of the result are left as
    they are in `out`, and undefined without one. The rest is as in `paged_decode`. Never waits for the device.
    Source: FlashAttention-2 (Dao 2023), all query heads of a KV head in one tile.
    """
    from penstock.engine.kernels.attention_triton import varlen_prefill_kernel

    num_tokens, num_heads, key_size = query_THD.shape
    _, block_size, num_kv_heads, value_size = value_cache.shape
    assert num_heads % num_kv_heads == 0
    assert query_THD.stride(-1) == key_cache.stride(-1) == value_cache.stride(-1) == block_table_BN.stride(-1) == 1
    if out is None:
        out = query_THD.new_empty(num_tokens, num_heads, value_size)
    num_sequences = context_lens_B.shape[0] - first_sequence
    if num_tokens == 0 or num_sequences <= 0:
        return out
    group_size = num_heads // num_kv_heads
    tuning = prefill_tuning(group_size, key_size, value_size, query_THD.element_size(), max_query_len)
    num_tiles = -(-max_query_len // (tuning.tile_rows // group_size))
    varlen_prefill_kernel[(num_tiles, num_kv_heads, num_sequences)](
        out,
        query_THD,
        key_cache,
        value_cache,
        block_table_BN,
        query_start_loc,
        context_lens_B,
        sinks,
        first_sequence,
        scaling,
        sliding_window,
        softcap,
        *out.stride()[:2],
        *query_THD.stride()[:2],
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
        num_warps=tuning.num_warps,
        num_stages=tuning.num_stages,
        **COMPILER_OPTIONS,
    )
    return out
