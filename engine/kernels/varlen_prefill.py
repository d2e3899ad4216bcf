"""Prefill attention: runs of new tokens of several sequences, each against its keys and values in the paged cache."""

from torch import Tensor

from penstock.engine.kernels.tuning import COMPILER_OPTIONS, padded, prefill_tuning


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
