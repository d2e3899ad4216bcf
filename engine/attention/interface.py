"""The attention function that transformers' models call, over the paged KV cache, and the metadata that it gets: a flat batch in one
tensor, and the options that differ from layer to layer.

The cache of a layer is a buffer of its attention module and everything about the batch travels in one tensor beside the block
tables, so that layers of one kind share one compiled graph. To the compiler the whole of attention is one opaque operator.

Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434): the KV cache keeps one vector for each token, not one for each head.
That vector is a latent, of which every head's key and value are linear functions, and a rotated part of the key that all heads share. The
product of a query with a key is that of the projected query with the vector itself, so that attention runs over one KV head, and only its
results are projected to the heads' values: `kv_b_proj` is absorbed by both sides.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from operator import sub
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from penstock.engine.attention.cpu import paged_attention_cpu, write_kv
from penstock.engine.weights.float8 import Float8Linear
from penstock.engine.weights.linear import QuantizedLinear

NUM_HEADER_FIELDS = 6
NONE: Mapping[int, int] = {}


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """T tokens of B sequences, flat; sequences with one new token (decodes) come first.

    `packed` is int64 and holds the header, then `query_start_loc` [B + 1], `slot_mapping_T` (block * block_size + offset; negative for
    padding) of each group of layers, `context_lens_B` (keys per sequence, the new ones included) and `table_rows_B` of each group.
    One tensor because it is one copy to the device, and because a compiled layer then sees one input whose length is dynamic
    instead of many whose sizes it would specialise on. The other fields are views of it, but for the block tables.

    `block_tables_PN`, int32, stays on the model's device from step to step (`KVCache.block_tables_PN`). The blocks of sequence i are in its
    row `table_rows_B[i]`: no step copies a table, however long the contexts are.

    Where images attend in both directions, `key_stops_T` comes last in `packed`: a token sees its sequence's keys before that position, or
    up to its own where that is more. None: all attention is causal.

    Slots and rows are those of the first group; `others` are the same step for the layers of the other groups.
    `split_plans` is what the layers of one pass share on a GPU (`attention/cuda.py`).
    """

    packed: Tensor
    query_start_loc: Tensor
    slot_mapping_T: Tensor
    context_lens_B: Tensor
    table_rows_B: Tensor
    block_tables_PN: Tensor
    num_decodes: int
    max_query_len: int
    max_context_len: int
    key_stops_T: Tensor | None = None
    others: tuple["AttentionMetadata", ...] = ()
    split_plans: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)

    @property
    def groups(self) -> tuple["AttentionMetadata", ...]:
        """The step as the layers of each group see it."""
        return (self, *self.others)

    def of_group(self, group: int) -> "AttentionMetadata":
        """The step as the layers of this group see it."""
        return self.others[group - 1] if group else self

    @property
    def num_sequences(self) -> int:
        return self.context_lens_B.shape[0]

    @property
    def num_real_tokens(self) -> int:
        """Those that are not padding. On a device other than the CPU this waits for it."""
        return int(self.query_start_loc[-1])

    def blocks_of(self, sequence: int) -> Tensor:
        """The row of the tables that holds the sequence's blocks."""
        return self.block_tables_PN[self.table_rows_B[sequence]]

    @classmethod
    def pack(
        cls,
        slot_mapping: list[int],
        query_start_loc: list[int],
        context_lens: list[int],
        table_rows: list[int],
        block_tables_PN: Tensor,
        *,
        num_decodes: int,
        num_groups: int = 1,
        key_stops: Mapping[int, int] = NONE,
    ) -> "AttentionMetadata":
        """On the CPU. Slots and rows are those of all groups, one group after another; `key_stops` are by tokens."""
        flat = flatten(
            slot_mapping, query_start_loc, context_lens, table_rows, num_decodes=num_decodes, num_groups=num_groups, key_stops=key_stops
        )
        return cls.view(torch.tensor(flat, dtype=torch.int64), flat[:NUM_HEADER_FIELDS], block_tables_PN)

    @classmethod
    def unpack(cls, packed: Tensor, block_tables_PN: Tensor) -> "AttentionMetadata":
        """The metadata whose `packed` this is. On a device other than the CPU this waits for it."""
        return cls.view(packed, packed[:NUM_HEADER_FIELDS].tolist(), block_tables_PN)

    @classmethod
    def view(cls, packed: Tensor, header: list[int], block_tables_PN: Tensor) -> "AttentionMetadata":
        """The metadata whose `packed` begins with this header."""
        num_tokens, num_sequences, num_decodes, num_groups, max_query_len, max_context_len = header
        sizes = [num_sequences + 1, *[num_tokens] * num_groups, num_sequences, *[num_sequences] * num_groups]
        has_key_stops = len(packed) > NUM_HEADER_FIELDS + sum(sizes)
        starts, *parts = torch.split(packed[NUM_HEADER_FIELDS:], [*sizes, *[num_tokens] * has_key_stops])
        key_stops_T = parts.pop() if has_key_stops else None
        lens = parts[num_groups]
        split_plans: dict[Any, Any] = {}
        shared = (num_decodes, max_query_len, max_context_len, key_stops_T)
        first, *others = (
            cls(packed, starts, slots, lens, rows, block_tables_PN, *shared, split_plans=split_plans)
            for slots, rows in zip(parts[:num_groups], parts[num_groups + 1 :], strict=True)
        )
        return replace(first, others=tuple(others)) if others else first


def flatten(
    slot_mapping: list[int],
    query_start_loc: list[int],
    context_lens: list[int],
    table_rows: list[int],
    *,
    num_decodes: int,
    num_groups: int = 1,
    key_stops: Mapping[int, int] = NONE,
) -> list[int]:
    """The numbers of `AttentionMetadata.packed`. Slots and rows are those of all groups, one group after another."""
    max_query_len = max(map(sub, query_start_loc[1:], query_start_loc), default=0)
    num_tokens = len(slot_mapping) // num_groups
    header = [num_tokens, len(context_lens), num_decodes, num_groups, max_query_len, max(context_lens, default=0)]
    stops = [key_stops.get(token, 0) for token in range(num_tokens)] if key_stops else []
    return header + query_start_loc + slot_mapping + context_lens + table_rows + stops


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """What varies from layer to layer. `sinks_H` are logits that take part in the softmax's denominator only (gpt-oss).

    Keys before position `first_key` do not exist: torch operations alone heed that.
    """

    scaling: float
    sliding_window: int | None = None
    softcap: float | None = None
    sinks_H: Tensor | None = None
    first_key: int = 0


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
    # All layers of a step get the same tensor, which is unpacked once.

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


PROJECTION = "kv_b_proj"  # from latents to all heads' keys and values: what transformers calls it in every model


class LatentProjection(nn.Module):
    """In place of an attention module's `kv_b_proj`: its weight, as the projections of queries and of results."""

    def __init__(self, weight_OL: Tensor, key_size: int, value_size: int) -> None:
        super().__init__()
        heads_HOL: Tensor = weight_OL.unflatten(0, (-1, key_size + value_size))  # type: ignore[no-untyped-call]
        key_HKL, value_HVL = heads_HOL.split([key_size, value_size], dim=1)  # type: ignore[no-untyped-call]
        self.key_HKL = nn.Parameter(key_HKL.contiguous(), requires_grad=False)
        self.value_HLV = nn.Parameter(value_HVL.transpose(1, 2).contiguous(), requires_grad=False)

    def project_query(self, query_1HTD: Tensor) -> Tensor:
        """Queries for the vectors in the cache: [1, H, T, latent and rotated]."""
        plain_1HTK, rotated_1HTR = query_1HTD.tensor_split([self.key_HKL.shape[1]], dim=-1)
        return torch.cat([torch.bmm(plain_1HTK[0], self.key_HKL)[None], rotated_1HTR], dim=-1)

    def project_values(self, latents_1THL: Tensor) -> Tensor:
        """Each head's sum of values, [1, T, H, V], from that of latents."""
        return torch.bmm(latents_1THL[0].transpose(0, 1), self.value_HLV).transpose(0, 1)[None]


def latent_projection(attention: nn.Module) -> LatentProjection | None:
    """That of an attention module whose keys and values are latents."""
    projection = attention._modules.get(PROJECTION)
    return projection if isinstance(projection, LatentProjection) else None


def keep_latents(model: nn.Module) -> int:
    """Has attention modules hand over latents, and not what they expand to, as keys and values; returns how many modules that were.

    The weight of each one's `kv_b_proj` stays in the model's type, whatever the others are rounded to.
    """
    modules: list[Any] = [module for module in model.modules() if _expands_latents(type(module))]  # type: ignore[arg-type]
    for attention in modules:
        weight_OL = _weight_of(attention.kv_b_proj, attention.kv_a_layernorm.weight.dtype)
        attention.kv_b_proj = LatentProjection(weight_OL, attention.qk_nope_head_dim, attention.v_head_dim)
        attention.expand_kv = _latents
    return len(modules)


def _latents(latents_11TL: Tensor, rotated_11TR: Tensor) -> tuple[Tensor, Tensor]:
    """In place of `expand_kv`. Values are the beginnings of keys, so that only their size matters."""
    return torch.cat([latents_11TL, rotated_11TR], dim=-1), latents_11TL


def _weight_of(linear: Any, dtype: torch.dtype) -> Tensor:
    if isinstance(linear, QuantizedLinear):
        return torch.cat([part.dequantized() for part in linear.packed]).to(dtype)
    if isinstance(linear, Float8Linear):
        return linear.weight.dequantized().to(dtype)
    weight: Tensor = linear.weight.detach()
    return weight


@functools.cache
def _expands_latents(attention: type[nn.Module]) -> bool:
    """Whether modules of this class expand latents as `LatentProjection` takes it for granted: a trial on random numbers."""
    expand: Any = getattr(attention, "expand_kv", None)
    if expand is None:
        return False
    heads, key_size, value_size, rotated_size, rank, num_tokens = 2, 3, 5, 4, 7, 3
    draw = functools.partial(torch.randn, generator=torch.Generator().manual_seed(0), device="cpu")
    weight_OL = draw(heads * (key_size + value_size), rank)
    latents, rotated = draw(1, 1, num_tokens, rank), draw(1, 1, num_tokens, rotated_size)
    sizes = {"qk_nope_head_dim": key_size, "v_head_dim": value_size, "qk_rope_head_dim": rotated_size, "num_heads": heads}
    module = SimpleNamespace(kv_b_proj=lambda x: x @ weight_OL.T, **sizes)
    try:
        keys, values = expand(module, latents, rotated)
    except (AttributeError, RuntimeError, TypeError, ValueError):
        return False
    both_1HTO = (latents @ weight_OL.T).view(1, num_tokens, heads, -1).transpose(1, 2)
    expected = torch.cat([both_1HTO[..., :key_size], rotated.expand(-1, heads, -1, -1)], dim=-1), both_1HTO[..., key_size:]
    return all(got.shape == own.shape and torch.allclose(got, own) for got, own in zip((keys, values), expected, strict=True))
