"""Attention of one layer over a flat batch on CUDA, by the Triton kernels."""

from functools import cache

import torch
from torch import Tensor

from penstock.engine.attention.interface import AttentionMetadata, AttentionOptions
from penstock.engine.kernels.launch import SplitPlan, kv_write, paged_decode, plan_splits, varlen_prefill
from penstock.engine.kernels.tuning import decode_tuning, split_sizes


def paged_attention_cuda(
    query_THD: Tensor,
    key_THD: Tensor,
    value_THD: Tensor,
    key_cache: Tensor,
    value_cache: Tensor | None,
    metadata: AttentionMetadata,
    options: AttentionOptions,
) -> Tensor:
    """Writes the new keys and values to the caches and attends each new token to its sequence's keys; returns [T, H, Dv].

    The caches are [num_blocks, block_size, KV heads, Dk or Dv]; without one for values, these are the beginnings of keys. The first
    `num_decodes` rows go to the decode kernel, the sequences after them to the prefill kernel. Padding gets zeros: decodes whose context
    length is 0, and rows past the last sequence. Never waits for the device, so that a step can be captured in a CUDA graph.
    """
    query_THD, key_THD, value_THD = (_with_dense_heads(states) for states in (query_THD, key_THD, value_THD))
    kv_write(key_THD, None if value_cache is None else value_THD, key_cache, value_cache, metadata.slot_mapping_T)
    num_tokens, num_heads, _ = query_THD.shape
    layer, shares_keys = key_cache, value_cache is None
    if value_cache is None:
        # Programs that share a tile of keys in memory have some of the query heads each, as if these had KV heads of their own.
        key_cache = key_cache.expand(-1, -1, num_heads // heads_per_tile(num_heads), -1)
        value_cache = key_cache[..., : value_THD.shape[2]]
    num_decodes = metadata.num_decodes
    empty = query_THD.new_empty if num_tokens == num_decodes else query_THD.new_zeros
    out = empty(num_tokens, num_heads, value_cache.shape[3])
    # First, since a graph has room for more decodes than a batch may have: their zeros lie where the prompts' results belong.
    paged_decode(
        query_THD[:num_decodes],
        key_cache,
        value_cache,
        metadata.block_tables_PN,
        metadata.table_rows_B,
        metadata.context_lens_B,
        scaling=options.scaling,
        sliding_window=options.sliding_window,
        softcap=options.softcap,
        sinks=options.sinks_H,
        shares_keys=shares_keys,
        splits=_splits(metadata, options, layer, query_THD, key_cache, value_cache),
        out=out[:num_decodes],
    )
    if num_decodes < metadata.num_sequences:
        varlen_prefill(
            query_THD,
            key_cache,
            value_cache,
            metadata.block_tables_PN,
            metadata.table_rows_B,
            metadata.query_start_loc,
            metadata.context_lens_B,
            max_query_len=metadata.max_query_len,
            key_stops_T=metadata.key_stops_T,
            scaling=options.scaling,
            sliding_window=options.sliding_window,
            softcap=options.softcap,
            sinks=options.sinks_H,
            shares_keys=shares_keys,
            first_sequence=num_decodes,
            out=out,
        )
    return out


MOST_HEADS = 16  # query heads of a tile over latents, whose sums of 512 numbers take as many registers as there are


def heads_per_tile(num_heads: int) -> int:
    """The greatest divisor that is not above `MOST_HEADS`."""
    return next(size for size in range(min(num_heads, MOST_HEADS), 0, -1) if num_heads % size == 0)


def _with_dense_heads(states_THD: Tensor) -> Tensor:
    return states_THD if states_THD.stride(-1) == 1 else states_THD.contiguous()


def _splits(
    metadata: AttentionMetadata, options: AttentionOptions, layer: Tensor, query_THD: Tensor, key_cache: Tensor, value_cache: Tensor
) -> SplitPlan | None:
    """The plan of this pass, which layers of one shape and window share; `layer` is the tensor that tells them apart."""
    num_kv_heads, key_size = key_cache.shape[2:]
    group_size = query_THD.shape[1] // num_kv_heads
    tile_keys = decode_tuning(group_size, key_size, value_cache.shape[3], query_THD.element_size()).tile_keys
    kind = (num_kv_heads, group_size, tile_keys, options.sliding_window)
    planned = metadata.split_plans.get(kind)
    # The layer that made it is called again: a new pass, which may be over other lengths, or the one that a CUDA graph records.
    if planned is None or planned[0] is layer:
        num_wanted, min_tiles = split_sizes(num_kv_heads, group_size, tile_keys, num_multiprocessors(key_cache.device))
        splits = plan_splits(
            metadata.context_lens_B[: metadata.num_decodes],
            num_wanted=num_wanted,
            min_tiles=min_tiles,
            tile_keys=tile_keys,
            max_context_len=metadata.max_context_len,
            sliding_window=options.sliding_window,
        )
        metadata.split_plans[kind] = planned = (layer, splits)
    return planned[1]


@cache
def num_multiprocessors(device: torch.device) -> int:
    """How many programs the device runs at the same time, at least. One off the GPU: Triton's interpreter runs them one by one."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if device.type == "cuda" else 1
