"""Attention of one layer over a flat batch on CUDA, by the Triton kernels."""

from functools import cache

import torch
from torch import Tensor

from penstock.engine.attention.metadata import AttentionMetadata, AttentionOptions
from penstock.engine.kernels.launch import choose_num_splits, kv_write, paged_decode, varlen_prefill


def paged_attention_cuda(
    query_THD: Tensor,
    key_THD: Tensor,
    value_THD: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    metadata: AttentionMetadata,
    options: AttentionOptions,
) -> Tensor:
    """Writes the new keys and values to the caches and attends each new token to its sequence's keys; returns [T, H, Dv].

    The caches are [num_blocks, block_size, KV heads, Dk or Dv]. The first `num_decodes` rows go to the decode kernel, the sequences after
    them to the prefill kernel. Padding gets zeros: decodes whose context length is 0, and rows past the last sequence. Never waits for
    the device, so that a step can be captured in a CUDA graph.
    """
    query_THD, key_THD, value_THD = (_with_dense_heads(states) for states in (query_THD, key_THD, value_THD))
    kv_write(key_THD, value_THD, key_cache, value_cache, metadata.slot_mapping_T)
    num_tokens, num_heads, _ = query_THD.shape
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
        num_splits=_num_splits(metadata, options, key_cache),
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
            scaling=options.scaling,
            sliding_window=options.sliding_window,
            softcap=options.softcap,
            sinks=options.sinks_H,
            first_sequence=num_decodes,
            out=out,
        )
    return out


def _with_dense_heads(states_THD: Tensor) -> Tensor:
    return states_THD if states_THD.stride(-1) == 1 else states_THD.contiguous()


def _num_splits(metadata: AttentionMetadata, options: AttentionOptions, key_cache: Tensor) -> int:
    max_num_keys = metadata.max_context_len
    if options.sliding_window is not None:
        max_num_keys = min(max_num_keys, options.sliding_window)
    return choose_num_splits(metadata.num_decodes * key_cache.shape[2], max_num_keys, num_multiprocessors(key_cache.device))


@cache
def num_multiprocessors(device: torch.device) -> int:
    """How many programs the device runs at the same time, at least. One off the GPU: Triton's interpreter runs them one by one."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if device.type == "cuda" else 1
