"""Draft tokens by a head of the model, such as EAGLE-3's or MTP: what a head is, its attention, and its passes behind each step."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from penstock.engine.attention.cpu import paged_attention_cpu, write_kv
from penstock.engine.attention.interface import AttentionMetadata, AttentionOptions
from penstock.engine.batch import StepInputs
from penstock.engine.kv_cache.tensors import LayerKV
from penstock.engine.model.drafters.drafter import Drafter, Feed
from penstock.engine.model.outputs import StepStates

IMPLEMENTATION = "penstock_head"
FIRST_POSITION = 1  # there are no hidden states before the first token


class DraftHead(ABC):
    """Guesses at the token after a given one, by the model's hidden states of the token before that.

    It turns those into one vector for each token, its feature, of `width` numbers. For later draft tokens, which the model has not
    computed, the head's own result takes the place of the feature. Its one layer of attention, with `layer_idx` 0 among the modules of
    `module`, keeps `kv`: for the token at position q, of the feature at q - 1 and the token's embedding. So it depends on the same tokens
    as the model's keys and values at q do, and is shared, copied and freed with them.
    """

    module: nn.Module
    kv: LayerKV
    width: int
    layers: tuple[int, ...] = ()  # whose inputs it reads, in the order in which `features` has them
    reads_last: bool = False  # what the model's own head reads
    num_weights: int

    @abstractmethod
    def features(self, states: list[Tensor]) -> Tensor:
        """[T, width], of the model's hidden states of these tokens, [T, H] each, those of `layers` first."""

    @abstractmethod
    def run(self, features_TH: Tensor, input_ids_1T: Tensor, positions_1T: Tensor, attention: AttentionMetadata | list[LayerKV]) -> Tensor:
        """Features of these tokens, of those of the tokens before them."""

    @abstractmethod
    def next_ids(self, features_KH: Tensor, vocab_size: int) -> list[int]:
        """The most probable token below `vocab_size` after each of these."""

    @torch.inference_mode()
    def kv_by_trial(self) -> LayerKV:
        """What its layer turns out to keep, for one token."""
        found: list[LayerKV] = []
        dtype = next(self.module.parameters()).dtype
        self.run(torch.zeros(1, self.width, dtype=dtype), torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1, dtype=torch.int64), found)
        (kv,) = found
        return kv

    def cache_layout(self) -> list[LayerKV]:
        """What is kept for each token: keys and values, and the feature as a key of a layer of its own."""
        return [self.kv, LayerKV(1, self.width, 0)]


def head_attention(
    module: nn.Module,
    query_1HTD: Tensor,
    key_1HTD: Tensor,
    value_1HTD: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    attention_metadata: AttentionMetadata | list[LayerKV] | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """What `attn_implementation="penstock_head"` calls: [1, H, T, D] in, [1, T, H, D] out.

    A list in place of metadata takes what the layer keeps, and nothing is computed.
    """
    assert attention_metadata is not None, "the head was called without attention_metadata"
    if isinstance(attention_metadata, list):
        attention_metadata.append(LayerKV(key_1HTD.shape[1], key_1HTD.shape[3], value_1HTD.shape[3]))
        return query_1HTD.new_zeros(1, query_1HTD.shape[2], query_1HTD.shape[1], value_1HTD.shape[3]), None
    query_THD, key_THD, value_THD = (states[0].transpose(0, 1) for states in (query_1HTD, key_1HTD, value_1HTD))
    caches: Any = module  # registered by `KVCache.attach`
    write_kv(caches.key_cache, key_THD, attention_metadata.slot_mapping_T)
    write_kv(caches.value_cache, value_THD, attention_metadata.slot_mapping_T)
    scaling = query_THD.shape[-1] ** -0.5 if scaling is None else scaling
    options = AttentionOptions(scaling, first_key=FIRST_POSITION)
    return paged_attention_cpu(query_THD, caches.key_cache, caches.value_cache, attention_metadata, options)[None], None


def register() -> None:
    """Makes `penstock_head` known to transformers."""
    from transformers import AttentionInterface

    AttentionInterface.register(IMPLEMENTATION, head_attention)


@dataclass(slots=True)
class HeadDrafter(Drafter):
    """Proposes what a head guesses. The features of all tokens are kept, so that tokens may be computed later, or for other sequences."""

    computes_alone = False

    head: DraftHead
    states: StepStates
    vocab_size: int

    @property
    def module(self) -> nn.Module:
        return self.head.module

    @property
    def _features_SH(self) -> Tensor:
        return self.cache.keys[1].flatten(0, 2)

    def release(self) -> None:
        self.states.detach()
        self.cache.detach(self.head.module)

    def see(self, inputs: StepInputs) -> None:
        read = [self.states.states[layer] for layer in self.head.layers]
        if self.head.reads_last:
            read.append(self.states.states[None])
        features_TH = self.head.features(read).to(self.cache.dtype)
        write_kv(self.cache.keys[1], features_TH[:, None].contiguous(), inputs.attention.slot_mapping_T)

    def _run(self, feeds: list[Feed]) -> list[int]:
        input_ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        features: list[Tensor] = []
        starts, context_lens, table_rows = [0], list[int](), list[int]()
        for feed in feeds:
            first = max(feed.first, FIRST_POSITION)
            if first >= feed.stop:
                continue
            input_ids += feed.token_ids[first - feed.first :]
            positions += range(first, feed.stop)
            slots += feed.slots(first)
            features.append(self._features_before(feed, first) if feed.hidden_1H is None else feed.hidden_1H)
            starts.append(len(input_ids))
            context_lens.append(feed.stop)
            table_rows.append(feed.rows.table_row)
        if not features:
            return [0] * len(feeds)
        attention = AttentionMetadata.pack(slots, starts, context_lens, table_rows, self.block_tables_PN, num_decodes=0)
        ids_1T, positions_1T = torch.tensor([input_ids]), torch.tensor([positions])
        last_KH = self.head.run(torch.cat(features), ids_1T, positions_1T, attention)[torch.tensor(starts[1:]) - 1]
        next_ids = iter(zip(self.head.next_ids(last_KH, self.vocab_size), torch.split(last_KH, 1), strict=True))
        found = []
        for feed in feeds:
            token_id = 0
            if feed.stop > FIRST_POSITION:
                token_id, feed.hidden_1H = next(next_ids)
            found.append(token_id)
        return found

    def _features_before(self, feed: Feed, first: int) -> Tensor:
        """Those of the tokens at positions [first - 1, stop - 1)."""
        size = self.cache.block_size
        block = int(self.block_tables_PN[feed.rows.table_row, (first - 1) // size])
        before = [block * size + (first - 1) % size, *feed.slots(first)[:-1]]
        return self._features_SH[torch.tensor(before)]
