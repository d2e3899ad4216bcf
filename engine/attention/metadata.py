"""The metadata of attention: a flat batch in one tensor, and the options that differ from layer to layer."""

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from penstock.engine.system.device import to_device

NUM_HEADER_FIELDS = 6


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """T tokens of B sequences, flat; sequences with one new token (decodes) come first.

    `packed` is int64 and holds the header, then `slot_mapping_T` (block * block_size + offset; negative for padding),
    `query_start_loc` [B + 1], `context_lens_B` (keys per sequence, the new ones included) and `block_table_BN`.
    One tensor because it is one copy to the device, and because a compiled layer then sees one input whose length is dynamic
    instead of many whose sizes it would specialise on. The other fields are views of it.
    """

    packed: Tensor
    slot_mapping_T: Tensor
    query_start_loc: Tensor
    context_lens_B: Tensor
    block_table_BN: Tensor
    num_decodes: int
    max_query_len: int
    max_context_len: int

    @property
    def num_sequences(self) -> int:
        return self.context_lens_B.shape[0]

    @property
    def num_real_tokens(self) -> int:
        """Those that are not padding. On a device other than the CPU this waits for it."""
        return int(self.query_start_loc[-1])

    @classmethod
    def pack(
        cls,
        slot_mapping: list[int],
        query_start_loc: list[int],
        context_lens: list[int],
        block_tables: list[list[int]],
        *,
        num_decodes: int,
    ) -> "AttentionMetadata":
        """On the CPU."""
        width = max((len(table) for table in block_tables), default=0)
        max_query_len = max((end - start for start, end in pairwise(query_start_loc)), default=0)
        header = [len(slot_mapping), len(context_lens), width, num_decodes, max_query_len, max(context_lens, default=0)]
        flat = header + slot_mapping + query_start_loc + context_lens
        for table in block_tables:
            flat += table
            flat += [0] * (width - len(table))
        return cls._view(torch.tensor(flat, dtype=torch.int64), header)

    def on(self, device: torch.device) -> "AttentionMetadata":
        """The same on another device. Does not wait for what that has to do before."""
        num_sequences, width = self.block_table_BN.shape
        header = [len(self.slot_mapping_T), num_sequences, width, self.num_decodes, self.max_query_len, self.max_context_len]
        return self._view(to_device(self.packed, device), header)

    @classmethod
    def unpack(cls, packed: Tensor) -> "AttentionMetadata":
        """The metadata whose `packed` this is. On a device other than the CPU this waits for it."""
        return cls._view(packed, packed[:NUM_HEADER_FIELDS].tolist())

    @classmethod
    def _view(cls, packed: Tensor, header: list[int]) -> "AttentionMetadata":
        num_tokens, num_sequences, width, num_decodes, max_query_len, max_context_len = header
        sizes = [num_tokens, num_sequences + 1, num_sequences, num_sequences * width]
        slots, starts, lens, table = torch.split(packed[NUM_HEADER_FIELDS:], sizes)
        return cls(packed, slots, starts, lens, table.view(num_sequences, width), num_decodes, max_query_len, max_context_len)


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """What varies from layer to layer. `sinks_H` are logits that take part in the softmax's denominator only (gpt-oss)."""

    scaling: float
    sliding_window: int | None = None
    softcap: float | None = None
    sinks_H: Tensor | None = None
