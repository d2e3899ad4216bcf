"""Paged attention on the CPU: a C++ kernel (or grouped torch operations) for decodes, SDPA per sequence for prefills."""

import math
from dataclasses import dataclass

import torch
from penstock.engine.attention_metadata import AttentionMetadata
from penstock.engine.native_library import native_library
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """What varies from layer to layer. `sinks_H` are logits that take part in the softmax's denominator only (gpt-oss)."""

    scaling: float
    sliding_window: int | None = None
    softcap: float | None = None
    sinks_H: Tensor | None = None


def write_kv(cache: Tensor, rows_THD: Tensor, slot_mapping_T: Tensor) -> None:
    """Writes row t to slot `slot_mapping_T[t]` of a [num_blocks, block_size, H, D] cache; negative slots are skipped."""
    library = native_library()
    row_bytes = rows_THD.shape[1] * rows_THD.shape[2] * rows_THD.element_size()
    if library is not None and rows_THD[0].is_contiguous():
        stride = rows_THD.stride(0) * rows_THD.element_size()
        library.penstock_write_rows(cache.data_ptr(), rows_THD.data_ptr(), slot_mapping_T.data_ptr(), len(rows_THD), row_bytes, stride)
        return
    is_real = slot_mapping_T >= 0
    cache.view(-1, *cache.shape[2:])[slot_mapping_T[is_real]] = rows_THD[is_real]


def paged_attention_cpu(
    query_THD: Tensor, key_cache: Tensor, value_cache: Tensor, metadata: AttentionMetadata, options: AttentionOptions
) -> Tensor:
    """Attends each new token to its sequence's keys, its own included, which are in the cache already. Returns [T, H, value size]."""
    num_tokens, num_heads, _ = query_THD.shape
    out = query_THD.new_empty(num_tokens, num_heads, value_cache.shape[3])
    decodes = metadata.num_decodes
    if decodes:
        decode = _decode_torch if native_library() is None else _decode_native
        decode(out[:decodes], query_THD[:decodes], key_cache, value_cache, metadata, options)
    starts = metadata.query_start_loc.tolist()
    context_lens = metadata.context_lens_B.tolist()
    for i in range(decodes, metadata.num_sequences):
        rows = slice(starts[i], starts[i + 1])
        out[rows] = _prefill(query_THD[rows], key_cache, value_cache, metadata.block_table_BN[i], context_lens[i], options)
    out[starts[-1] :] = 0
    return out


def _decode_native(
    out_BHD: Tensor, query_BHD: Tensor, key_cache: Tensor, value_cache: Tensor, metadata: AttentionMetadata, options: AttentionOptions
) -> None:
    library = native_library()
    assert library is not None
    query_BHD = query_BHD.contiguous()
    sinks = None if options.sinks_H is None else options.sinks_H.float().contiguous()
    library.penstock_paged_decode(
        out_BHD.data_ptr(),
        query_BHD.data_ptr(),
        key_cache.data_ptr(),
        value_cache.data_ptr(),
        metadata.block_table_BN.data_ptr(),
        metadata.context_lens_B.data_ptr(),
        *query_BHD.shape[:2],
        key_cache.shape[2],
        key_cache.shape[3],
        value_cache.shape[3],
        key_cache.shape[1],
        metadata.block_table_BN.shape[1],
        query_BHD.dtype == torch.bfloat16,
        options.scaling,
        options.sliding_window or 0,
        options.softcap or 0.0,
        None if sinks is None else sinks.data_ptr(),
    )


def _decode_torch(
    out_BHD: Tensor, query_BHD: Tensor, key_cache: Tensor, value_cache: Tensor, metadata: AttentionMetadata, options: AttentionOptions
) -> None:
    lens_B = metadata.context_lens_B[: len(query_BHD)]
    width = math.ceil(int(lens_B.max()) / key_cache.shape[1])
    table_BN = metadata.block_table_BN[: len(query_BHD), :width]
    positions_S = torch.arange(width * key_cache.shape[1])
    is_hidden_BS = positions_S >= lens_B[:, None]
    if options.sliding_window is not None:
        is_hidden_BS = is_hidden_BS | (positions_S < lens_B[:, None] - options.sliding_window)
    keys_BSKD, values_BSKD = key_cache[table_BN].flatten(1, 2), value_cache[table_BN].flatten(1, 2)
    out_BHD.copy_(attend(query_BHD[:, None], keys_BSKD, values_BSKD, is_hidden_BS[:, None], options)[:, 0])


def _prefill(
    query_THD: Tensor, key_cache: Tensor, value_cache: Tensor, block_table_N: Tensor, context_len: int, options: AttentionOptions
) -> Tensor:
    num_queries, num_heads, key_size = query_THD.shape
    num_blocks = math.ceil(context_len / key_cache.shape[1])
    keys_SKD = key_cache[block_table_N[:num_blocks]].flatten(0, 1)[:context_len]
    values_SKD = value_cache[block_table_N[:num_blocks]].flatten(0, 1)[:context_len]
    is_whole = num_queries == context_len and (options.sliding_window is None or options.sliding_window >= context_len)
    is_fused = options.softcap is None and options.sinks_H is None and key_size == values_SKD.shape[2]
    is_hidden_TS = None if is_whole and is_fused else _hidden(num_queries, context_len, options.sliding_window)
    if not is_fused:
        assert is_hidden_TS is not None
        return attend(query_THD[None], keys_SKD[None], values_SKD[None], is_hidden_TS[None], options)[0]
    group = num_heads // keys_SKD.shape[1]
    keys_HSD, values_HSD = (states_SKD.transpose(0, 1).repeat_interleave(group, dim=0) for states_SKD in (keys_SKD, values_SKD))
    mask = None if is_hidden_TS is None else ~is_hidden_TS
    out_1HTD = scaled_dot_product_attention(
        query_THD.transpose(0, 1)[None], keys_HSD[None], values_HSD[None], attn_mask=mask, is_causal=mask is None, scale=options.scaling
    )
    return out_1HTD[0].transpose(0, 1)


def _hidden(num_queries: int, context_len: int, window: int | None) -> Tensor:
    """Bool [T, S]: True where the key lies after the query, or further back than the window."""
    positions_T1 = torch.arange(context_len - num_queries, context_len)[:, None]
    positions_S = torch.arange(context_len)
    is_hidden_TS = positions_S > positions_T1
    return is_hidden_TS if window is None else is_hidden_TS | (positions_S <= positions_T1 - window)


def attend(query_BTHD: Tensor, keys_BSKD: Tensor, values_BSKD: Tensor, is_hidden_BTS: Tensor, options: AttentionOptions) -> Tensor:
    """Grouped attention in plain torch, with everything that `AttentionOptions` can ask for. Returns [B, T, H, value size]."""
    batch, num_queries, num_heads, key_size = query_BTHD.shape
    num_kv_heads = keys_BSKD.shape[2]
    query_BKGTD = query_BTHD.reshape(batch, num_queries, num_kv_heads, -1, key_size).permute(0, 2, 3, 1, 4)
    scores_BKGTS = torch.matmul(query_BKGTD, keys_BSKD.permute(0, 2, 3, 1)[:, :, None]).float() * options.scaling
    if options.softcap is not None:
        scores_BKGTS = options.softcap * torch.tanh(scores_BKGTS / options.softcap)
    scores_BKGTS = scores_BKGTS.masked_fill(is_hidden_BTS[:, None, None], -torch.inf)
    if options.sinks_H is not None:
        sinks = options.sinks_H.float().view(1, num_kv_heads, -1, 1, 1).expand(batch, -1, -1, num_queries, 1)
        scores_BKGTS = torch.cat([scores_BKGTS, sinks], dim=-1)
    weights_BKGTS = scores_BKGTS.softmax(dim=-1)[..., : keys_BSKD.shape[1]].to(values_BSKD.dtype)
    out_BKGTD = torch.matmul(weights_BKGTS, values_BSKD.permute(0, 2, 1, 3)[:, :, None])
    return out_BKGTD.permute(0, 3, 1, 2, 4).reshape(batch, num_queries, num_heads, -1)
