"""Paged attention on the CPU: C++ kernels or, without a compiler, grouped torch operations."""

import functools
import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from penstock.engine.native.runtime import native_library

if TYPE_CHECKING:
    from penstock.engine.attention.interface import AttentionMetadata, AttentionOptions

QUERY_BLOCK = 64
MAX_NATIVE_PREFILL_SIZE = 256  # of a head: what a tile has room for on the stack
NATIVE_DTYPES = (torch.float32, torch.bfloat16)
SCALE_BYTES = 4  # of a row in a cache of 8 bits, beside a byte for each number: engine/native/quantized_cache.h


def row_size(head_size: int, dtype: torch.dtype) -> int:
    """Elements of a key or value in a cache of this type."""
    return head_size + SCALE_BYTES if dtype == torch.int8 else head_size


def head_size(cache: Tensor) -> int:
    """The reverse of `row_size`, of a layer's keys or values."""
    return cache.shape[3] - SCALE_BYTES if cache.dtype == torch.int8 else cache.shape[3]


def write_kv(cache: Tensor, rows_THD: Tensor, slot_mapping_T: Tensor) -> None:
    """Writes row t to slot `slot_mapping_T[t]` of a [num_blocks, block_size, H, D] cache; negative slots are skipped.

    bfloat16 rows for a cache of int8 are quantized: each head by its own largest number.
    """
    library = native_library()
    if cache.dtype == torch.int8:
        assert library is not None
        assert rows_THD.dtype == torch.bfloat16
        rows_THD = rows_THD if rows_THD[:1].is_contiguous() else rows_THD.contiguous()
        size = (rows_THD.shape[1], rows_THD.shape[2], cache.shape[1], rows_THD.stride(0))
        library.penstock_quantize_rows(cache.data_ptr(), rows_THD.data_ptr(), slot_mapping_T.data_ptr(), len(rows_THD), *size)
        return
    assert cache.dtype == rows_THD.dtype, f"{rows_THD.dtype} rows for a cache of {cache.dtype}"
    row_bytes = rows_THD.shape[1] * rows_THD.shape[2] * rows_THD.element_size()
    if library is not None and len(rows_THD) and rows_THD[0].is_contiguous():
        stride = rows_THD.stride(0) * rows_THD.element_size()
        library.penstock_write_rows(cache.data_ptr(), rows_THD.data_ptr(), slot_mapping_T.data_ptr(), len(rows_THD), row_bytes, stride)
        return
    is_real = slot_mapping_T >= 0
    cache.view(-1, *cache.shape[2:])[slot_mapping_T[is_real]] = rows_THD[is_real]


def paged_attention_cpu(
    query_THD: Tensor, key_cache: Tensor, value_cache: Tensor, metadata: "AttentionMetadata", options: "AttentionOptions"
) -> Tensor:
    """Attends each new token to its sequence's keys, its own included, which are in the cache already. Returns [T, H, value size]."""
    assert key_cache.dtype == value_cache.dtype
    assert key_cache.dtype in (query_THD.dtype, torch.int8), "the kernels read the caches as the query's type, or as codes"
    num_tokens, num_heads, _ = query_THD.shape
    out = query_THD.new_empty(num_tokens, num_heads, head_size(value_cache))
    decodes = metadata.num_decodes
    is_native = query_THD.dtype in NATIVE_DTYPES and native_library() is not None and not options.first_key
    if decodes:
        decode = _decode_native if is_native else _decode_torch
        decode(out[:decodes], query_THD[:decodes], key_cache, value_cache, metadata, options)
    if decodes < metadata.num_sequences:
        prefill = _prefill_native if is_native and _can_prefill_natively(key_cache, value_cache) else _prefill_torch
        prefill(out, query_THD, key_cache, value_cache, metadata, options)
    out[metadata.num_real_tokens :] = 0
    return out


def _shape_and_options(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    metadata: "AttentionMetadata",
    options: "AttentionOptions",
    sinks_H: Tensor | None,
) -> tuple[int | float | None, ...]:
    """The last arguments of both kernels. `sinks_H`, float32 and contiguous, has to outlive the call: only its address is passed on."""
    return (
        query.shape[1],
        key_cache.shape[2],
        head_size(key_cache),
        head_size(value_cache),
        key_cache.shape[1],
        metadata.block_tables_PN.shape[1],
        query.dtype == torch.bfloat16,
        key_cache.dtype == torch.int8,
        options.scaling,
        options.sliding_window or 0,
        options.softcap or 0.0,
        None if sinks_H is None else sinks_H.data_ptr(),
    )


def _decode_native(
    out_BHD: Tensor, query_BHD: Tensor, key_cache: Tensor, value_cache: Tensor, metadata: "AttentionMetadata", options: "AttentionOptions"
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
        metadata.block_tables_PN.data_ptr(),
        metadata.table_rows_B.data_ptr(),
        metadata.context_lens_B.data_ptr(),
        len(query_BHD),
        *_shape_and_options(query_BHD, key_cache, value_cache, metadata, options, sinks),
    )


def _decode_torch(
    out_BHD: Tensor, query_BHD: Tensor, key_cache: Tensor, value_cache: Tensor, metadata: "AttentionMetadata", options: "AttentionOptions"
) -> None:
    batch = len(query_BHD)
    num_kv_heads = key_cache.shape[2]
    lens_B1 = metadata.context_lens_B[:batch, None]
    table_BN = metadata.block_tables_PN[metadata.table_rows_B[:batch], : math.ceil(metadata.max_context_len / key_cache.shape[1])]
    keys_BKDS = key_cache[table_BN].flatten(1, 2).permute(0, 2, 3, 1)
    values_BKSD = value_cache[table_BN].flatten(1, 2).permute(0, 2, 1, 3)
    positions_S = torch.arange(keys_BKDS.shape[3])
    is_hidden_BS = positions_S >= lens_B1
    is_hidden_BS |= positions_S < options.first_key
    if options.sliding_window is not None:
        is_hidden_BS |= positions_S < lens_B1 - options.sliding_window
    # Nothing is known of what lies there, and 0 times what is not a number is not a number.
    values_BKSD = values_BKSD.masked_fill(is_hidden_BS[:, None, :, None], 0.0)
    query_BKGD = query_BHD.unflatten(1, (num_kv_heads, -1))  # type: ignore[no-untyped-call]
    sinks = None if options.sinks_H is None else options.sinks_H.view(1, num_kv_heads, -1, 1).expand(batch, -1, -1, -1)
    out_BKGD = attend(query_BKGD, keys_BKDS, values_BKSD, is_hidden_BS[:, None, None], sinks, options)
    out_BHD.copy_(out_BKGD.flatten(1, 2))


def _can_prefill_natively(key_cache: Tensor, value_cache: Tensor) -> bool:
    return max(head_size(key_cache), head_size(value_cache)) <= MAX_NATIVE_PREFILL_SIZE and not _is_latent(key_cache, value_cache)


def _is_latent(key_cache: Tensor, value_cache: Tensor) -> bool:
    """Whether values are the first numbers of the keys."""
    return key_cache.data_ptr() == value_cache.data_ptr()


def _prefill_native(
    out_THD: Tensor, query_THD: Tensor, key_cache: Tensor, value_cache: Tensor, metadata: "AttentionMetadata", options: "AttentionOptions"
) -> None:
    library = native_library()
    assert library is not None
    query_THD = query_THD.contiguous()
    sinks = None if options.sinks_H is None else options.sinks_H.float().contiguous()
    decodes = metadata.num_decodes
    library.penstock_paged_prefill(
        out_THD.data_ptr(),
        query_THD.data_ptr(),
        key_cache.data_ptr(),
        value_cache.data_ptr(),
        metadata.block_tables_PN.data_ptr(),
        metadata.table_rows_B[decodes:].data_ptr(),
        metadata.query_start_loc[decodes:].data_ptr(),
        metadata.context_lens_B[decodes:].data_ptr(),
        None if metadata.key_stops_T is None else metadata.key_stops_T.data_ptr(),
        metadata.num_sequences - decodes,
        *_shape_and_options(query_THD, key_cache, value_cache, metadata, options, sinks),
    )


def _prefill_torch(
    out_THD: Tensor, query_THD: Tensor, key_cache: Tensor, value_cache: Tensor, metadata: "AttentionMetadata", options: "AttentionOptions"
) -> None:
    starts = metadata.query_start_loc.tolist()
    context_lens = metadata.context_lens_B.tolist()
    for i in range(metadata.num_decodes, metadata.num_sequences):
        rows = slice(starts[i], starts[i + 1])
        key_stops_T = None if metadata.key_stops_T is None else metadata.key_stops_T[rows]
        _prefill_sequence(
            out_THD[rows], query_THD[rows], key_cache, value_cache, metadata.blocks_of(i), context_lens[i], key_stops_T, options
        )


def _prefill_sequence(
    out_THD: Tensor,
    query_THD: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table_N: Tensor,
    context_len: int,
    key_stops_T: Tensor | None,
    options: "AttentionOptions",
) -> None:
    # Blocks of queries, so that keys after them are never touched and the scores stay in the processor's cache.
    #
    # Several times as fast in bfloat16 as `scaled_dot_product_attention`, whose CPU kernel does without the processor's bfloat16 products.
    num_queries, num_heads, _ = query_THD.shape
    num_kv_heads = key_cache.shape[2]
    group = num_heads // num_kv_heads
    blocks = block_table_N[: math.ceil(context_len / key_cache.shape[1])]
    keys_SKD = key_cache[blocks].flatten(0, 1)[:context_len]
    if _is_latent(key_cache, value_cache):
        keys_KDS, values_KSD = keys_SKD.permute(1, 2, 0), keys_SKD[..., : value_cache.shape[3]].transpose(0, 1)
    else:
        keys_KDS = keys_SKD.permute(1, 2, 0).contiguous()
        values_KSD = value_cache[blocks].flatten(0, 1)[:context_len].transpose(0, 1).contiguous()
    sinks_KG1 = None if options.sinks_H is None else options.sinks_H.view(num_kv_heads, group, 1)
    for start in range(0, num_queries, QUERY_BLOCK):
        query_THD_block = query_THD[start : start + QUERY_BLOCK]
        num_rows = len(query_THD_block)
        last = context_len - num_queries + start + num_rows
        stops_T = None if key_stops_T is None else key_stops_T[start : start + num_rows]
        end = last if stops_T is None else max(last, int(stops_T.max()))
        # A window that reaches back to the first key hides nothing, so before that one mask does for all blocks, and after it another.
        window = None if options.sliding_window is None or last <= options.sliding_window else options.sliding_window
        first = options.first_key if window is None else max(options.first_key, last - num_rows - window + 1)
        # Without a window only the square that ends at the last query hides anything.
        num_masked = num_rows if window is None else last - first
        if stops_T is None:
            is_hidden_MS = _hidden(num_rows, num_masked, window, group)
        else:
            is_hidden_MS = _hidden_but(stops_T, last - num_rows, torch.arange(first, end), window).repeat(group, 1)
        query_KMD = query_THD_block.unflatten(1, (num_kv_heads, group)).permute(1, 2, 0, 3).flatten(1, 2)  # type: ignore[no-untyped-call]
        sinks = None if sinks_KG1 is None else sinks_KG1.repeat_interleave(num_rows, dim=1)
        out_KMD = attend(query_KMD, keys_KDS[..., first:end], values_KSD[:, first:end], is_hidden_MS, sinks, options)
        out_THD[start : start + num_rows] = out_KMD.unflatten(1, (group, num_rows)).permute(2, 0, 1, 3).flatten(1, 2)  # type: ignore[no-untyped-call]


@functools.lru_cache(maxsize=16)  # every layer asks for the same ones
def _hidden(num_queries: int, num_keys: int, window: int | None, group: int) -> Tensor:
    """Bool [group * T, S] for queries at the last positions: True where the key lies after the query, or further back than the window."""
    positions_T1 = torch.arange(num_keys - num_queries, num_keys)[:, None]
    positions_S = torch.arange(num_keys)
    is_hidden_TS = positions_S > positions_T1
    if window is not None:
        is_hidden_TS |= positions_S <= positions_T1 - window
    return is_hidden_TS.repeat(group, 1)


def _hidden_but(stops_T: Tensor, first_position: int, positions_S: Tensor, window: int | None) -> Tensor:
    """As `_hidden`, bool [T, S], for queries from `first_position` on that see the keys before their stops, too."""
    positions_T1 = torch.arange(first_position, first_position + len(stops_T))[:, None]
    is_hidden_TS = positions_S >= torch.maximum(positions_T1 + 1, stops_T[:, None])
    if window is not None:
        is_hidden_TS |= positions_S <= positions_T1 - window
    return is_hidden_TS


def attend(query: Tensor, keys: Tensor, values: Tensor, is_hidden: Tensor, sinks: Tensor | None, options: "AttentionOptions") -> Tensor:
    """Softmax attention with everything that `AttentionOptions` can ask for.

    Query [..., M, D], keys [..., D, S], values [..., S, Dv], `sinks` [..., M, 1]; `is_hidden` broadcasts to the scores' last columns.
    Returns [..., M, Dv].
    """
    scores = torch.matmul(query * options.scaling, keys)
    if options.softcap is not None:
        scores = options.softcap * torch.tanh(scores.float() / options.softcap)
    num_keys = scores.shape[-1]
    scores[..., num_keys - is_hidden.shape[-1] :].masked_fill_(is_hidden, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(scores.dtype)], dim=-1)
    # torch adds up the exponentials in float32 whatever the type of the scores.
    weights = scores.softmax(dim=-1)[..., :num_keys].to(values.dtype)
    return torch.matmul(weights, values)
