"""The attention function that transformers' models call, over the paged KV cache.

The cache of a layer is a buffer of its attention module and everything about the batch travels in one tensor beside the block
tables, so that layers of one kind share one compiled graph. To the compiler the whole of attention is one opaque operator.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from penstock.engine.attention.cpu import paged_attention_cpu, write_kv
from penstock.engine.attention.latent import latent_projection
from penstock.engine.attention.metadata import AttentionMetadata, AttentionOptions

IMPLEMENTATION = "penstock_paged"

# The caches are written in place, and the schema does not say so on purpose: declared mutations make the compiler functionalise the
# operator around copies of the whole cache. It is sound because nothing else in a layer touches them, and the output depends on the write.
_library = torch.library.Library("penstock", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(  # type: ignore[no-untyped-call]
    "paged_attention(Tensor query, Tensor key, Tensor value, Tensor key_cache, Tensor? value_cache, Tensor packed,"
    " Tensor block_tables, Tensor kv_group, float scaling, int sliding_window, float softcap, Tensor? sinks) -> Tensor"
)


@dataclass(slots=True)
class _LastUnpacked:
    """All layers of a step get the same tensor: it is taken apart once."""

    metadata: AttentionMetadata | None = None

    def __call__(self, packed: Tensor, block_tables_PN: Tensor) -> AttentionMetadata:
        metadata = self.metadata  # read once: another engine's thread may replace it at any time
        if metadata is None or metadata.packed is not packed:
            self.metadata = metadata = AttentionMetadata.unpack(packed, block_tables_PN)
        return metadata


_unpack = _LastUnpacked()


@torch.library.impl(_library, "paged_attention", "CPU")
def _paged_attention_cpu(
    query_THD: Tensor,
    key_THD: Tensor,
    value_THD: Tensor,
    key_cache: Tensor,
    value_cache: Tensor | None,
    packed: Tensor,
    block_tables_PN: Tensor,
    kv_group: Tensor,
    scaling: float,
    sliding_window: int,
    softcap: float,
    sinks_H: Tensor | None,
) -> Tensor:
    metadata = _unpack(packed, block_tables_PN).of_group(int(kv_group))
    write_kv(key_cache, key_THD, metadata.slot_mapping_T)
    if value_cache is None:  # latents
        value_cache = key_cache[..., : value_THD.shape[2]]
    else:
        write_kv(value_cache, value_THD, metadata.slot_mapping_T)
    options = AttentionOptions(scaling, sliding_window or None, softcap or None, sinks_H)
    return paged_attention_cpu(query_THD, key_cache, value_cache, metadata, options)


@torch.library.register_fake("penstock::paged_attention", lib=_library)  # type: ignore[untyped-decorator]
def _paged_attention_shape(query_THD: Tensor, key_THD: Tensor, value_THD: Tensor, *_: Any) -> Tensor:
    return query_THD.new_empty(query_THD.shape[0], query_THD.shape[1], value_THD.shape[2])


def paged_attention(
    module: nn.Module,
    query_1HTD: Tensor,
    key_1HTD: Tensor,
    value_1HTD: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    attention_metadata: AttentionMetadata | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """What `attn_implementation="penstock_paged"` calls in every layer: [1, H, T, D] in, [1, T, H, D] out."""
    assert attention_metadata is not None, "the model was called without attention_metadata"
    latent = latent_projection(module)
    if latent is not None:
        assert scaling is not None, "it is that of the expanded heads"
        query_1HTD = latent.project_query(query_1HTD)
    query_THD, key_THD, value_THD = (states[0].transpose(0, 1) for states in (query_1HTD, key_1HTD, value_1HTD))
    caches: Any = module  # registered by `KVCache.attach`
    key_cache, value_cache = caches.key_cache, caches.value_cache
    if scaling is None:
        scaling = query_THD.shape[-1] ** -0.5
    if query_THD.device.type != "cuda":
        out_THD = torch.ops.penstock.paged_attention(
            query_THD,
            key_THD,
            value_THD,
            key_cache,
            value_cache,
            attention_metadata.packed,
            attention_metadata.block_tables_PN,
            caches.kv_group,
            scaling,
            sliding_window or 0,
            softcap or 0.0,
            s_aux,
        )
    else:
        from penstock.engine.attention.cuda import paged_attention_cuda  # needs triton

        out_THD = paged_attention_cuda(
            query_THD,
            key_THD,
            value_THD,
            key_cache,
            value_cache,
            attention_metadata.of_group(int(caches.kv_group)) if attention_metadata.others else attention_metadata,
            AttentionOptions(scaling, sliding_window, softcap, s_aux),
        )
    return out_THD[None] if latent is None else latent.project_values(out_THD[None]), None


def register() -> None:
    """Makes `penstock_paged` known to transformers. No mask function goes with it, so no model builds a dense mask."""
    from transformers import AttentionInterface  # as in all modules that a start from stored weights imports: takes seconds

    AttentionInterface.register(IMPLEMENTATION, paged_attention)
