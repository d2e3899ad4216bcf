"""A step as tensors, with placeholders for tokens that the step before it is still sampling."""

import sys
from array import array
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from penstock.engine.adapters.registry import NO_SLOT, AdapterRows, AdapterSlots
from penstock.engine.attention.interface import NUM_HEADER_FIELDS, AttentionMetadata, flatten
from penstock.engine.constraints.masks import ConstrainedRows, MaskPool, StepMasks
from penstock.engine.kv_cache.blocks import BlockPool
from penstock.engine.multimodal.inputs import EmbeddedRows, embedded_rows, spans_within
from penstock.engine.recurrent.states import StateRows
from penstock.engine.scheduling.step import Step, is_chunk
from penstock.engine.sequence import LOGITS, SamplerRow, Sequence, sampler_row_of, sampler_rows_of
from penstock.engine.speculation.proposers import draft_of
from penstock.engine.system.memory import index_on, to_device

if TYPE_CHECKING:
    from penstock.engine.scheduling.scheduler import Scheduler


def placeholder(row: int) -> int:
    """The input id that is replaced by the token that the previous step samples in this row. No token has such an id."""
    return -1 - row


class PendingTokens:
    """The tokens that the previous step sampled. Belongs to the thread that runs the model."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._token_ids: list[int] | Tensor | None = None

    def clear(self) -> None:
        """Called when a step begins, since that may fail."""
        self._token_ids = None

    def keep(self, token_ids: list[int] | Tensor, rows: list[int] | None = None, num_rows: int = 0) -> None:
        """A token for each of `num_rows` rows, or for the given ones of them: the others are computed all the same, with any number.

        So are those of which sampling failed.
        """
        if rows is not None and len(rows) < num_rows:
            known = token_ids if isinstance(token_ids, Tensor) else index_on(self._device, token_ids)
            token_ids = known.new_zeros(num_rows).index_copy_(0, index_on(self._device, rows), known)
        self._token_ids = token_ids

    def fill_in(self, input_ids_1T: Tensor) -> Tensor:
        """Replaces the placeholders, and returns the tokens that the previous step sampled. Never waits for the device.

        Raises `RuntimeError` where the previous step failed.
        """
        if self._token_ids is None:
            raise RuntimeError("the previous step failed, which was to sample this step's tokens")
        known = self._token_ids
        token_ids_B = (known if isinstance(known, Tensor) else index_on(self._device, known)).clamp(0, self._vocab_size - 1)
        sampled_1T = token_ids_B[(-1 - input_ids_1T).clamp(min=0)]
        input_ids_1T.copy_(torch.where(input_ids_1T < 0, sampled_1T, input_ids_1T))
        return token_ids_B


_NONE = range(0)
CATCH_UP_TOKENS = 512  # of a sequence that a drafter computes in a step, where the model computes fewer


@dataclass(frozen=True, slots=True)
class PromptRows:
    """Rows [start, stop) of the kept logits that score the sequence's tokens from `first_token` on."""

    sequence: Sequence
    start: int
    stop: int
    first_token: int


@dataclass(frozen=True, slots=True)
class OutputRows:
    """Flat rows [start, stop) hold the outputs that these sequences want, of their tokens from `first_token` on.

    Where they want logits, these begin at the kept row `first_kept`.
    """

    sequences: list[Sequence]
    start: int
    stop: int
    first_token: int
    first_kept: int

    @property
    def names(self) -> tuple[str, ...]:
        return self.sequences[0].request.outputs


@dataclass(frozen=True, slots=True)
class StepInputs:
    """What crosses to the device for one step, as one int64 tensor: T flat tokens, and which of their rows are turned into logits.

    The others are views of `packed`, in this order. `kept_T` are the flat rows whose logits are computed. `table_updates_3U` are the
    entries of the block tables that are new in this step: their rows, positions and blocks.
    """

    packed: Tensor
    attention: AttentionMetadata
    input_ids_1T: Tensor
    positions_1T: Tensor
    kept_T: Tensor
    table_updates_3U: Tensor

    @classmethod
    def pack(
        cls,
        attention: list[int],
        input_ids: list[int],
        positions: list[int],
        kept: list[int],
        table_updates: list[int],
        block_tables_PN: Tensor,
    ) -> "StepInputs":
        """On the CPU. `attention` is what `flatten` gives; of the updates come all rows, then all positions, then all blocks."""
        flat = array("q", attention + input_ids + positions + kept + table_updates)  # three times as fast as to a tensor from the list
        sizes = [len(attention), len(input_ids), len(positions), len(kept), len(table_updates)]
        return cls._view(torch.frombuffer(flat, dtype=torch.int64), sizes, attention[:NUM_HEADER_FIELDS], block_tables_PN)

    @classmethod
    def unpack(cls, packed: Tensor, sizes: list[int], block_tables_PN: Tensor) -> "StepInputs":
        """On the CPU: what has these `packed` numbers and `sizes`."""
        return cls._view(packed, sizes, packed[:NUM_HEADER_FIELDS].tolist(), block_tables_PN)

    @property
    def sizes(self) -> list[int]:
        """Of the parts of `packed`."""
        own = self.attention.packed
        return [len(own), self.input_ids_1T.numel(), self.positions_1T.numel(), len(self.kept_T), self.table_updates_3U.numel()]

    def on(self, device: torch.device) -> "StepInputs":
        """The same on another device, by one copy. Does not wait for what that has to do before."""
        if self.packed.device.type == device.type:
            return self
        own = self.attention
        num_tokens, num_groups = len(own.slot_mapping_T), len(own.groups)
        header = [num_tokens, own.num_sequences, own.num_decodes, num_groups, own.max_query_len, own.max_context_len]
        return self._view(to_device(self.packed, device), self.sizes, header, own.block_tables_PN)

    @classmethod
    def _view(cls, packed: Tensor, sizes: list[int], header: list[int], block_tables_PN: Tensor) -> "StepInputs":
        attention, input_ids, positions, kept, updates = torch.split(packed, sizes)
        metadata = AttentionMetadata.view(attention, header, block_tables_PN)
        return cls(packed, metadata, input_ids[None], positions[None], kept, updates.view(3, -1))


@dataclass(frozen=True, slots=True)
class DraftRows:
    """One sequence of a step as the draft model gets it: a copy, since the loop goes on with the sequence.

    `token_ids`, from position `first` on, are those that the step computes, and those before that the draft model lacks. `draft` are the
    step's draft tokens, `row` is that of the sampler for the next token, and `num_wanted` how many to propose. `slots` are those of all.
    """

    sequence: Sequence
    first: int
    token_ids: list[int]
    draft: list[int]
    row: int | None
    num_wanted: int
    slots: list[int]
    table_row: int

    def fed(self, sampled: Mapping[int, int]) -> list[int]:
        """The tokens that the draft model computes first: those of the step, the accepted ones of its draft, and the one after these.

        `sampled` are tokens by rows of the sampler. Only tokens of the step where the next one was not sampled.
        """
        said: list[int] = []
        if self.row is not None and self.num_wanted:
            for place in range(len(self.draft) + 1):
                token_id = sampled.get(self.row + place)
                if token_id is None:
                    break
                said.append(token_id)
                if place == len(self.draft) or token_id != self.draft[place]:
                    break
        return self.token_ids + said


@dataclass(frozen=True, slots=True)
class Batch:
    """One step: the tensors that it reads, built on the CPU, and what is done with its results.

    Row b of the sampler's input is row `logits_rows[b]` of the logits: several rows of the sampler may share one where sequences fork.
    `masks` is None where no row is constrained; it is still being filled.

    To attention each draft token, and each of a few known tokens (`is_chunk`), is a sequence of its own with one new token, on shared
    blocks: all keys are written before any token attends, and decoding is what its kernels do best.

    `has_unmasked` says that some constrained rows have no mask: the grammar checks what they sample. `adapters` is None where no row has
    one.

    `num_pending` of the input ids are placeholders for what the step before this one samples. Rows of the sampler whose sequence is
    `dropped` in the meantime count for nothing. The rows of `embeds` hold vectors, whatever their input ids are.
    `rope_rows` are rows with the three parts of their positions, where these differ. `drafting` are the sequences that a draft
    model computes, and `states` the rows of each sequence as recurrent layers compute them.
    """

    inputs: StepInputs
    logits_rows: list[int]
    sampler_rows: list[SamplerRow]
    prompts: list[PromptRows]
    masks: StepMasks | None
    copies: list[tuple[int, int]]
    num_pending: int = 0
    has_unmasked: bool = False
    outputs: list[OutputRows] = field(default_factory=list)
    dropped: AbstractSet[Sequence] = frozenset()
    adapters: AdapterRows | None = None
    embeds: list[EmbeddedRows] = field(default_factory=list)
    rope_rows: list[tuple[int, int, int, int]] = field(default_factory=list)
    drafting: list[DraftRows] = field(default_factory=list)
    states: list[StateRows] = field(default_factory=list)

    def on(self, device: torch.device) -> "Batch":
        """The same batch on the device of the model, for the thread that runs it. Does not wait for what that has to do before."""
        inputs = self.inputs.on(device)
        return self if inputs is self.inputs else replace(self, inputs=inputs)


def slots_of(block_table: list[int], start: int, stop: int, block_size: int) -> list[int]:
    """Where the positions [start, stop) of a sequence lie in the cache."""
    if stop - start == 1:  # as most have
        return [block_table[start // block_size] * block_size + start % block_size]
    return [block_table[position // block_size] * block_size + position % block_size for position in range(start, stop)]


def other_groups(
    step: Step, table_rows: list[int], *, num_rows: int, num_padding: int, num_groups: int, block_size: int
) -> tuple[list[int], list[int]]:
    """Slots, and rows of the block tables, for the layers of all groups but the first, one group after another.

    `table_rows` are those of the first group; of `num_rows` in all, each group has its part.
    """
    slots: list[int] = []
    rows: list[int] = []
    if num_groups == 1:
        return slots, rows
    places = []
    for sequence, num_tokens in step.num_tokens.items():
        first = sequence.num_computed_tokens
        stop = first + num_tokens + len(step.drafts.get(sequence, ()))
        places += [(sequence.other_tables, position // block_size, position % block_size) for position in range(first, stop)]
    for group in range(num_groups - 1):
        slots += [tables[group][place] * block_size + offset for tables, place, offset in places]
        slots += [-1] * num_padding
        first_row = (group + 1) * num_rows // num_groups
        rows += [first_row + row for row in table_rows]
    return slots, rows


@dataclass(slots=True)
class TableUpdates:
    """The entries of the block tables that a step adds. Of `num_rows` rows in all, each group of layers has its part."""

    num_rows: int
    rows: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)

    def add_new(self, sequence: Sequence) -> None:
        """Adds the sequence's blocks that the model's thread does not know of."""
        first, stop = sequence.num_blocks_sent, len(sequence.block_table)
        if first == stop:
            return
        assert sequence.table_row is not None
        for group, table in enumerate(sequence.block_tables):
            start = max(first, table.num_freed)
            self.rows += [group * self.num_rows // len(sequence.block_tables) + sequence.table_row] * (stop - start)
            self.positions += range(start, stop)
            self.blocks += table[start:]
        sequence.num_blocks_sent = stop


@dataclass(slots=True)
class _Columns:
    """A batch while it is built: what its tensors will hold. Sequences are added in the order of the step."""

    block_size: int
    updates: TableUpdates
    input_ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=lambda: [0])
    kept: list[int] = field(default_factory=list)
    context_lens: list[int] = field(default_factory=list)
    table_rows: list[int] = field(default_factory=list)
    num_decodes: int = 0
    num_pending: int = 0
    logits_rows: list[int] = field(default_factory=list)
    sampler_rows: list[SamplerRow] = field(default_factory=list)
    prompts: list[PromptRows] = field(default_factory=list)
    outputs: list[OutputRows] = field(default_factory=list)
    embeds: list[EmbeddedRows] = field(default_factory=list)
    rope_rows: list[tuple[int, int, int, int]] = field(default_factory=list)
    key_stops: dict[int, int] = field(default_factory=dict)

    def add_decodes(self, sequences: list[Sequence]) -> None:
        """Adds sequences of which each computes its last token, and is sampled from and nothing else."""
        # Most rows of most steps are such: one comprehension a column takes a fifth of what one call a row does.
        size, num_rows, first_row, first_kept = self.block_size, len(sequences), self.starts[-1], len(self.kept)
        positions = [sequence.num_computed_tokens for sequence in sequences]
        self.positions += [sequence.num_computed_tokens + sequence.rope_delta for sequence in sequences]
        self.input_ids += [
            sequence.token_ids[-1] if sequence.pending_row is None else placeholder(sequence.pending_row) for sequence in sequences
        ]
        self.slots += [
            sequence.block_table[position // size] * size + position % size for sequence, position in zip(sequences, positions, strict=True)
        ]
        self.context_lens += [position + 1 for position in positions]
        self.table_rows += [sequence.table_row for sequence in sequences]  # type: ignore[misc]  # all of them run
        for sequence in sequences:
            if sequence.num_blocks_sent < len(sequence.block_table):
                self.updates.add_new(sequence)
        self.sampler_rows += [
            sequence.sampler_row if sequence.sampling.is_stationary else sampler_row_of(sequence) for sequence in sequences
        ]
        self.starts += range(first_row + 1, first_row + num_rows + 1)
        self.kept += range(first_row, first_row + num_rows)
        self.logits_rows += range(first_kept, first_kept + num_rows)
        self.num_decodes += num_rows
        self.num_pending += num_rows - [sequence.pending_row for sequence in sequences].count(None)

    def add(self, sequence: Sequence, num_tokens: int, draft: list[int]) -> None:
        """Adds a sequence of any kind."""
        first = sequence.num_computed_tokens
        last = first + num_tokens
        self.input_ids += sequence.token_ids[first:last] + draft
        if sequence.pending_row is not None:
            self.input_ids.append(placeholder(sequence.pending_row))
            self.num_pending += 1
        if sequence.request.rope is None:
            self.positions += range(first, last + len(draft))
        else:
            self._add_rope(sequence.request.rope.of(first, last + len(draft)))
        self.slots += slots_of(sequence.block_table, first, last + len(draft), self.block_size)
        starts = self.starts
        is_prefill = is_chunk(sequence, num_tokens)
        first_row, num_alone = starts[-1], 1 if is_prefill else num_tokens
        starts += range(first_row + 1 + num_tokens - num_alone, first_row + num_tokens + 1)
        self.context_lens += range(last - num_alone + 1, last + len(draft) + 1)
        assert sequence.table_row is not None
        self.table_rows += [sequence.table_row] * (num_alone + len(draft))
        self.num_decodes += (0 if is_prefill else num_alone) + len(draft)
        self.updates.add_new(sequence)
        self._keep(sequence, first, num_tokens, draft, first_row)
        if sequence.request.embeds:
            self._add_embeds(sequence, first, last, first_row)
        starts += range(starts[-1] + 1, starts[-1] + len(draft) + 1)

    def _add_embeds(self, sequence: Sequence, first: int, last: int, first_row: int) -> None:
        """What the positions [first, last) of the prompt have in place of tokens."""
        for embedded in embedded_rows(sequence.request.embeds, first, last, first_row):
            self.embeds.append(embedded)
            for row in embedded.rows:
                self.input_ids[row] = 0  # which every vocabulary has
        for start, stop in spans_within(sequence.request.embeds, first, last):
            assert stop <= last, "an image whose tokens attend in both directions is cut"
            self.key_stops |= dict.fromkeys(range(first_row + max(start, first) - first, first_row + stop - first), stop)

    def _add_rope(self, positions: list[tuple[int, int, int]]) -> None:
        for time, row, column in positions:
            if not time == row == column:
                self.rope_rows.append((len(self.positions), time, row, column))
            self.positions.append(time)

    def _keep(self, sequence: Sequence, first: int, num_tokens: int, draft: list[int], first_row: int) -> None:
        """Notes which rows are turned into logits, and what becomes of them."""
        last, stop = first + num_tokens, self.starts[-1]
        scored = sampled = wanted = _NONE
        if sequence.prompt_logprobs is not None and first < sequence.num_prompt_tokens - 1:
            scored = range(first_row, first_row + min(last, sequence.num_prompt_tokens - 1) - first)
        if num_tokens == sequence.num_uncomputed_tokens:
            sampled = range(stop - 1, stop + len(draft))
        if sequence.outputs is not None:
            wanted = range(first_row + max(sequence.outputs.next_position - first, 0), stop)
        own = _kept_rows(scored, sampled, wanted if LOGITS in sequence.request.outputs else _NONE)
        if scored:
            start = len(self.kept) + own.index(scored.start)
            self.prompts.append(PromptRows(sequence, start, start + len(scored), first + 1))
        if sampled:
            first_sampled = len(self.kept) + own.index(sampled.start)
            for row in sampler_rows_of(sequence, draft):
                self.sampler_rows.append(row)
                self.logits_rows.append(first_sampled + row.num_drafted)
        if wanted:
            first_kept = len(self.kept) + (own.index(wanted.start) if wanted.start in own else 0)
            first_wanted = first + wanted.start - first_row
            self.outputs.append(OutputRows(sequence.sampling_sequences, wanted.start, wanted.stop, first_wanted, first_kept))
        self.kept += own


def build_batch(
    step: Step,
    masks: MaskPool,
    block_tables_PN: Tensor,
    *,
    block_size: int,
    vocab_size: int,
    min_tokens: int,
    pin_masks: bool,
    is_ahead: bool = False,
    adapters: AdapterSlots | None = None,
) -> Batch:
    """Pads to `min_tokens` with tokens that belong to no sequence. `masks` begins to fill those of the step.

    With `is_ahead`, the step before is in flight: `masks` begins once it knows the tokens of that.

    The block tables, which belong to the thread that runs the model, are not looked at. What they lack goes with the batch, so batches are
    run in the order in which they are built.
    """
    columns, drafts = _Columns(block_size, TableUpdates(len(block_tables_PN))), step.drafts

    def is_decode(item: tuple[Sequence, int]) -> bool:
        """Whether nothing is wanted of a sequence but to compute its last token and to sample once from that."""
        sequence, num_tokens = item
        num_known = len(sequence.token_ids) + (sequence.pending_row is not None)
        is_last = num_tokens == 1 and num_known - sequence.num_computed_tokens == 1
        if sequence.request.embeds and sequence.num_computed_tokens < sequence.num_prompt_tokens:
            return False
        return is_last and not (sequence.forks or sequence.outputs is not None or (drafts and sequence in drafts))

    for are_decodes, items in groupby(step.num_tokens.items(), is_decode):
        if are_decodes:
            columns.add_decodes([sequence for sequence, _ in items])
        else:
            for sequence, num_tokens in items:
                columns.add(sequence, num_tokens, drafts.get(sequence, []))
    padding = [0] * max(0, min_tokens - len(columns.input_ids))
    num_rows, num_groups = len(block_tables_PN), len(next(iter(step.num_tokens)).block_tables)
    other_slots, other_rows = other_groups(
        step, columns.table_rows, num_rows=num_rows, num_padding=len(padding), num_groups=num_groups, block_size=block_size
    )
    attention = flatten(
        columns.slots + [-1] * len(padding) + other_slots,
        columns.starts,
        columns.context_lens,
        columns.table_rows + other_rows,
        num_decodes=columns.num_decodes,
        num_groups=num_groups,
        key_stops=columns.key_stops,
    )
    updates = columns.updates
    constrained = constrained_rows(columns.sampler_rows, drafts, is_ahead=is_ahead)
    step_masks = masks.begin(constrained, len(columns.sampler_rows), vocab_size, pin_memory=pin_masks, is_ahead=is_ahead)
    return Batch(
        inputs=StepInputs.pack(
            attention,
            columns.input_ids + padding,
            columns.positions + padding,
            columns.kept,
            updates.rows + updates.positions + updates.blocks,
            block_tables_PN,
        ),
        logits_rows=columns.logits_rows,
        sampler_rows=columns.sampler_rows,
        prompts=columns.prompts,
        masks=step_masks,
        copies=step.copies,
        num_pending=columns.num_pending,
        has_unmasked=not is_ahead and any(rows.constraint.mask is None for rows in constrained),
        outputs=columns.outputs,
        dropped=step.dropped,
        adapters=None if adapters is None else adapter_rows(step, adapters, len(padding)),
        embeds=columns.embeds,
        rope_rows=columns.rope_rows,
        states=state_rows(step),
    )


def adapter_rows(step: Step, slots: AdapterSlots, num_padding: int) -> AdapterRows | None:
    """The adapter of each row, in the order in which a batch has the step's sequences and their drafts. None where no row has one."""
    if slots.is_idle or all(sequence.request.adapter is None for sequence in step.num_tokens):
        return None
    rows = AdapterRows([], {})
    for sequence, num_tokens in step.num_tokens.items():
        adapter, slot = sequence.request.adapter, NO_SLOT
        if adapter is not None:
            slot = slots.slot_of(adapter)
            rows.adapters[slot] = adapter
        rows.slots.extend([slot] * (num_tokens + len(step.drafts.get(sequence, ()))))
    rows.slots.extend([NO_SLOT] * num_padding)
    return rows


def state_rows(step: Step) -> list[StateRows]:
    """The rows of each sequence, in the order in which a batch has them; empty where the model has no recurrent layers."""
    if next(iter(step.num_tokens)).state_slot is None:
        return []
    by_sequence: dict[Sequence, list[tuple[int, int]]] = {}
    for snapshot in step.snapshots:
        number = snapshot.position - snapshot.sequence.num_computed_tokens
        by_sequence.setdefault(snapshot.sequence, []).append((number, snapshot.slot))
    rows, start = [], 0
    for sequence, number in step.num_tokens.items():
        assert sequence.state_slot is not None
        rows.append(StateRows(start, number, sequence.state_slot, tuple(by_sequence.get(sequence, ()))))
        start += number
    return rows


def constrained_rows(
    sampler_rows: list[SamplerRow], drafts: Mapping[Sequence, list[int]], *, is_ahead: bool = False
) -> list[ConstrainedRows]:
    """The rows of each constrained sequence, which one mask job fills. With `is_ahead` each that a pending token may yet constrain."""
    constrained = []
    for row, sampler in enumerate(sampler_rows):
        sequence = sampler.sequence
        if sequence.constraint is not None and (is_ahead or sampler.sampling.is_constrained) and sampler.num_drafted == 0:
            constrained.append(ConstrainedRows(sequence.constraint, sequence.answer, row, drafts.get(sequence, ())))
    return constrained


def _kept_rows(scored: range, sampled: range, wanted: range) -> list[int] | range:
    """Their union, in order."""
    return sorted({*scored, *sampled, *wanted}) if scored or wanted else sampled


def draft_rows(
    step: Step,
    sampler_rows: list[SamplerRow],
    block_size: int,
    pool: BlockPool,
    context: int = sys.maxsize,
    computes_alone: bool = True,
) -> list[DraftRows]:
    """The sequences of a step that a drafter computes: those that it is to propose for, and full blocks, which others may share.

    Of each at most the first `context` tokens, and of prompts with vectors, such as those of images, only what comes before these.

    Where blocks of a sequence are `undrafted` in the pool, a drafter that `computes_alone` computes them now, some in each step. Another
    one cannot, and what follows on them is undrafted as well.
    """
    computed: set[int] = set()
    rows = {sampler.sequence: row for row, sampler in reversed(list(enumerate(sampler_rows)))}
    drafting = []
    for sequence, num_tokens in step.num_tokens.items():
        draft, num_wanted = step.drafts.get(sequence, []), step.num_wanted.get(sequence, 0)
        first, stop, state = sequence.num_computed_tokens, sequence.num_computed_tokens + num_tokens, draft_of(sequence.proposer)
        if state is not None:
            first = state.num_computed = min(state.num_computed, first)
        table = sequence.block_table
        if not pool.are_drafted(table):
            if state is None or not computes_alone:
                pool.undrafted.update(table[first // block_size :])
                continue
            place = next(place for place, block in enumerate(table) if block in pool.undrafted)
            first = state.num_computed = min(first, place * block_size)
        if not num_wanted and num_tokens == 1 and (state is None or first // block_size == stop // block_size):
            # A full block, which others may share, is computed where the sequence has a draft, and known as undrafted where it has none.
            if state is None:
                pool.undrafted.add(table[first // block_size])
            continue
        stop = min([stop, context, *(source.positions[0] for source in sequence.request.embeds)])
        if first >= stop:
            continue
        if stop - first > (most := max(num_tokens + block_size, CATCH_UP_TOKENS)):
            stop, num_wanted = first + most, 0
        if state is not None:
            state.num_computed = stop
        computed.update(table[first // block_size : stop // block_size])
        assert sequence.table_row is not None
        slots = slots_of(table, first, stop + (len(draft) + num_wanted if num_wanted else 0), block_size)
        known = sequence.token_ids[first:stop]
        drafting.append(DraftRows(sequence, first, known, draft, rows.get(sequence), num_wanted, slots, sequence.table_row))
    pool.undrafted -= computed
    return drafting


def is_predictable(scheduler: "Scheduler", batch: Batch) -> bool:
    """Whether the forward pass after this batch, which is in flight, needs no more of it than the ids that it samples, but for drafts.

    All running sequences are scheduled ahead or none: in two halves, each waiting for its own results, they would read the weights twice.
    Where one sequence's next step depends on the pending token, the results are waited for. Masks do not: sampling waits for them alone.
    """
    if batch.has_unmasked:
        return False
    if scheduler.states is not None and any(one.constraint is not None or one.thinking is not None for one in scheduler.active):
        return False  # what was sampled may be replaced, and the states would be those after another token
    others = [sequence for sequence in scheduler.active if sequence.search is not None or sequence.forks or sequence.sampling.processors]
    if not others:
        return True
    sampling = {sampler.sequence for sampler in batch.sampler_rows}
    return all(sequence.search is None and (sequence not in sampling or sequence.ends_with_next_token) for sequence in others)
