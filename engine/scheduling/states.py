"""The states of recurrent layers: a slot for each running sequence, and snapshots that sequences with the same beginning go on from."""

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from penstock.engine.kv_cache.blocks import BlockPool, BlockTable, KVCacheManager
from penstock.engine.scheduling.step import Snapshot
from penstock.engine.sequence import Sequence as RunningSequence
from penstock.engine.sequence import Status

GRID = 256  # tokens between two snapshots of a prompt
MAX_ON_GRID = 8  # snapshots of a prompt: in longer ones they are twice as far apart, four times, ...
WORTH_WAITING = 128  # tokens that need not be computed


@dataclass(slots=True)
class _Plan:
    """Where in its prompt a sequence is to leave snapshots: on a grid, and at `others`. `hashes` are those that are still to come."""

    spacing: int
    others: list[int]
    hashes: set[bytes] = field(default_factory=set)

    def positions(self, first: int, stop: int) -> list[int]:
        """Those behind `first` and up to `stop`, in order."""
        on_grid = range(first // self.spacing * self.spacing + self.spacing, stop + 1, self.spacing)
        return sorted({*on_grid, *(position for position in self.others if first < position <= stop)})


class StateScheduler:
    """Decides which slots of the state pool hold what.

    The slot of a running sequence holds the states after its computed tokens. Those that part from one another share a slot until one of
    them is computed on (copy-on-write). A snapshot holds the states at the end of a block and is found by that block's hash; all that no
    step in flight writes may be overwritten, the least recently used first, so that each of `max_num_seqs` sequences always finds a slot.
    No layer can return to earlier states: a sequence whose last token is to be computed again goes on from a snapshot.

    `copy(source, target)` is carried out between two steps, in order; from None it gives the states before the first token.
    """

    def __init__(
        self,
        num_slots: int,
        block_size: int,
        max_num_seqs: int,
        copy: Callable[[int | None, int], object],
        *,
        enable_prefix_caching: bool = True,
        grid: int = GRID,
    ) -> None:
        assert num_slots >= max_num_seqs, "a running sequence may find no slot"
        self.pool = BlockPool(num_slots, enable_prefix_caching=enable_prefix_caching)
        self._block_size = block_size
        self._grid = -(-grid // block_size) * block_size
        self._max_in_flight = num_slots - max_num_seqs
        self._copy = copy
        self._plans: dict[RunningSequence, _Plan] = {}
        self._positions: dict[int, int] = {}  # by slot of running sequences: of how many tokens it has the states
        self._in_flight: set[int] = set()  # slots of snapshots

    def num_blocks(self, hashes: Sequence[bytes], num_usable: int) -> int:
        """How many blocks the longest beginning has that ends at a snapshot."""
        return next((place for place in range(num_usable, 0, -1) if self.pool.has(hashes[place - 1])), 0)

    def up_to_snapshot(self, sequence: RunningSequence, cached: list[BlockTable], blocks: KVCacheManager) -> list[BlockTable]:
        """Of the cached blocks of a waiting sequence those that it can go on from."""
        sequence.num_blocks_found = len(cached[0])
        while len(cached[0]) > (num_blocks := self.num_blocks(sequence.block_hashes, len(cached[0]))):
            cached = blocks.find(sequence.block_hashes, num_blocks)  # perhaps fewer: sliding windows may need blocks that are gone
        return cached

    def awaits(self, sequence: RunningSequence, num_usable: int) -> bool:
        """Whether a running sequence is to leave a snapshot that saves the waiting one enough to wait for it."""
        planned = [plan.hashes for plan in self._plans.values() if plan.hashes]
        if not planned:
            return False
        first = self.num_blocks(sequence.block_hashes, num_usable) + WORTH_WAITING // self._block_size
        return any(not hashes.isdisjoint(sequence.block_hashes[first:num_usable]) for hashes in planned)

    def begin(self, sequence: RunningSequence, num_found: int) -> None:
        """Gives a sequence that is admitted the states after its computed tokens. Of its blocks, `num_found` are cached."""
        self._start(sequence)
        if self._max_in_flight and self.pool.enable_prefix_caching:
            self._plan(sequence, num_found * self._block_size)

    def share(self, parent: RunningSequence, sequence: RunningSequence) -> None:
        """The sequence runs on from where the parent is."""
        assert parent.state_slot is not None
        assert self._positions[parent.state_slot] == sequence.num_computed_tokens, "the states are those after another token"
        self.pool.share([parent.state_slot])
        sequence.state_slot = parent.state_slot
        if sequence.search is None and parent in self._plans:
            self._plans[sequence] = _Plan(self._plans[parent].spacing, [])

    def release(self, sequence: RunningSequence) -> None:
        """The sequence runs no longer."""
        self._plans.pop(sequence, None)
        if sequence.state_slot is not None:
            self._free(sequence.state_slot)
            sequence.state_slot = None

    def advance(self, num_tokens: Mapping[RunningSequence, int]) -> list[Snapshot]:
        """Gives the sequences of a step, of which it computes so many tokens, slots of their own; returns the snapshots that it takes."""
        snapshots: list[Snapshot] = []
        for sequence, number in num_tokens.items():
            slot = sequence.state_slot
            assert slot is not None
            if self.pool.is_shared(slot):
                slot = sequence.state_slot = self._split(slot)
            first = sequence.num_computed_tokens
            assert self._positions[slot] == first, "the states are those after another token"
            self._positions[slot] = first + number
            plan = self._plans.get(sequence)
            if plan is not None and first // self._block_size < (first + number) // self._block_size:
                snapshots += self._snapshots(sequence, plan, first, first + number)
        return snapshots

    def publish(self, snapshots: list[Snapshot], dropped: AbstractSet[RunningSequence]) -> None:
        """The snapshots of a step have been taken. Those of sequences that have ended are given up."""
        for snapshot in snapshots:
            sequence, place = snapshot.sequence, snapshot.position // self._block_size
            if sequence.status is Status.RUNNING and sequence not in dropped:
                sequence.hash_blocks(self._block_size)
                self.pool.publish(snapshot.slot, sequence.block_hashes[place - 1])
            self._end(snapshot)
        snapshots.clear()

    def discard(self, snapshots: list[Snapshot]) -> None:
        """The step failed, or was cancelled."""
        for snapshot in snapshots:
            self._end(snapshot)
        snapshots.clear()

    def check_integrity(self, running: Sequence[RunningSequence]) -> None:
        """Asserts that no slot is lost."""
        slots = [sequence.state_slot for sequence in running]
        assert None not in slots, "a running sequence has no states"
        self.pool.check_integrity([[slot for slot in slots if slot is not None], list(self._in_flight)])
        assert set(self._positions) == set(slots)
        assert self._plans.keys() <= set(running)

    def _start(self, sequence: RunningSequence) -> None:
        """Gives the sequence a slot with the states after its computed tokens, of which there is a snapshot if there are any."""
        position = sequence.num_computed_tokens
        found = self.pool.find([sequence.block_hashes[position // self._block_size - 1]]) if position else []
        assert bool(found) == bool(position), "there is no snapshot"
        self.pool.share(found)
        if found and not self.pool.num_free:
            slot = found[0]  # the last one that was free
            self.pool.unpublish(found)
        else:
            slot = self.pool.allocate()
            self._copy(found[0] if found else None, slot)
            self.pool.free(found)
        self._positions[slot] = position
        sequence.state_slot = slot

    def _split(self, slot: int) -> int:
        """Another slot with the same states."""
        own = self.pool.allocate()
        self._copy(slot, own)
        self._positions[own] = self._positions[slot]
        self._free(slot)
        return own

    def _free(self, slot: int) -> None:
        if not self.pool.is_shared(slot):
            del self._positions[slot]
        self.pool.free([slot])

    def _plan(self, sequence: RunningSequence, parting: int) -> None:
        """On a grid, at the end of the prompt, and where it parted from an earlier sequence, as others may."""
        sequence.hash_blocks(self._block_size)
        spacing = self._grid
        while len(sequence.token_ids) > spacing * MAX_ON_GRID:
            spacing *= 2
        end = (len(sequence.token_ids) - 1) // self._block_size * self._block_size
        plan = _Plan(spacing, [parting, end])
        places = (position // self._block_size for position in plan.positions(sequence.num_computed_tokens, end))
        plan.hashes.update(sequence.block_hashes[place - 1] for place in places)
        self._plans[sequence] = plan

    def _snapshots(self, sequence: RunningSequence, plan: _Plan, first: int, stop: int) -> list[Snapshot]:
        taken = []
        for position in plan.positions(first, stop):
            place = position // self._block_size
            known = sequence.block_hashes[place - 1] if place <= len(sequence.block_hashes) else b""
            if self.pool.has(known) or len(self._in_flight) >= self._max_in_flight:
                plan.hashes.discard(known)
                continue
            slot = self.pool.allocate()
            self._in_flight.add(slot)
            taken.append(Snapshot(sequence, position, slot))
        return taken

    def _end(self, snapshot: Snapshot) -> None:
        self._in_flight.discard(snapshot.slot)
        plan, place = self._plans.get(snapshot.sequence), snapshot.position // self._block_size
        if plan is not None and place <= len(snapshot.sequence.block_hashes):
            plan.hashes.discard(snapshot.sequence.block_hashes[place - 1])
        self.pool.free([snapshot.slot])
