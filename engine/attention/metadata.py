"""The metadata of attention: a flat batch in one tensor, and the options that differ from layer to layer."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from operator import sub
from typing import Any

import torch
from torch import Tensor

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
