"""The block tables of sequences, one for each group of layers, over one pool of blocks: what they take from it, share and free."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from penstock.engine.kv_cache.block_pool import HASH_BYTES, BlockPool, RetentionRule


class BlockTable(list[int]):
    """The blocks of one sequence in one group of layers, in order.

    The first `num_freed` have left the sliding window and are freed: nothing is known of the blocks that these entries name.
    """

    __slots__ = ("num_freed",)

    def __init__(self, blocks: Iterable[int] = (), num_freed: int = 0) -> None:
        super().__init__(blocks)
        self.num_freed = num_freed

    @property
    def held(self) -> list[int]:
        """The blocks that are not freed."""
        return self[self.num_freed :] if self.num_freed else self


def span(num_tokens: int, block_size: int) -> int:
    """The most blocks that so many consecutive tokens touch, wherever they begin."""
    return (num_tokens + block_size - 2) // block_size + 1


def max_blocks_held(windows: Sequence[int | None], num_tokens: int, max_step: int, block_size: int) -> int:
    """The most blocks that a sequence of so many tokens holds at once, if a step computes at most `max_step` of them.

    `windows` are the sliding windows of the groups of layers. The last token before a step is among those that may be computed again.
    """
    num_blocks = -(-num_tokens // block_size)
    return sum(num_blocks if window is None else min(num_blocks, span(window + max_step, block_size)) for window in windows)


@dataclass(frozen=True, slots=True)
class CacheInfo:
    """What does not change while the engine runs. A block holds `block_size` tokens in the layers of one group, in numbers of a `dtype`."""

    block_size: int
    num_blocks: int
    dtype: str
    has_prefix_caching: bool


class KVCacheManager:
    """Takes blocks from the pool for sequences, and frees those that have left the sliding windows.

    `windows` has the sliding window of each group of layers, None for full attention, which comes first. Tables are always those of all
    groups, and equally long.

    Where the pool has several groups, the hash of a block is published once for each. A cached beginning is found if it is cached in all
    groups, of which one with a window needs only the blocks that the next token sees.
    """

    def __init__(self, pool: BlockPool, block_size: int, windows: Sequence[int | None] = (None,)) -> None:
        assert windows, "a model has layers"
        self.pool = pool
        self.block_size = block_size
        self.windows = tuple(windows)
        self.num_groups = len(windows)
        self.num_full_groups = self.windows.count(None)
        self._sliding = {window: [g for g, own in enumerate(windows) if own == window] for window in windows if window is not None}
        assert self.windows[: self.num_full_groups] == (None,) * self.num_full_groups, "groups with full attention come first"

    @property
    def has_windows(self) -> bool:
        return bool(self._sliding)

    def info(self, dtype: object) -> CacheInfo:
        """`dtype` is torch's name of the type that the cache holds."""
        return CacheInfo(self.block_size, self.pool.num_blocks, str(dtype).removeprefix("torch."), self.pool.enable_prefix_caching)

    def max_blocks_held(self, num_tokens: int, max_step: int) -> int:
        """The most blocks that a sequence of so many tokens holds at once, if a step computes at most `max_step` of them."""
        return max_blocks_held(self.windows, num_tokens, max_step, self.block_size)

    def num_sliding_blocks(self, num_tokens: int) -> int:
        """The most blocks that a sequence of so many tokens holds in groups with a window while it decodes."""
        return max_blocks_held(self.windows[self.num_full_groups :], num_tokens, 1, self.block_size)

    def num_tokens(self, max_model_len: int) -> int:
        """How many tokens the pool has blocks for, in contexts of this length."""
        num_blocks = -(-max_model_len // self.block_size)
        return self.pool.num_blocks * self.block_size * num_blocks // self.max_blocks_held(max_model_len, 1)

    def extend(self, tables: Sequence[BlockTable], num_blocks: int) -> None:
        """Takes blocks until the tables have so many. The caller has checked that there are enough."""
        for table in tables:
            while len(table) < num_blocks:
                table.append(self.pool.allocate())

    def share(self, tables: Sequence[BlockTable], num_blocks: int) -> list[BlockTable]:
        """Tables of another sequence that begin with the first blocks of these."""
        shared = [BlockTable(table[:num_blocks], table.num_freed) for table in tables]
        for table in shared:
            self.pool.share(table.held)
        return shared

    def copy_on_write(self, tables: Sequence[BlockTable], place: int) -> list[tuple[int, int]]:
        """Replaces the shared blocks at this place by others; returns what is to be copied, (source, target) pairs."""
        copies = []
        for table in tables:
            source, target = table[place], self.pool.allocate()
            self.pool.free([source])
            table[place] = target
            copies.append((source, target))
        return copies

    def free(self, tables: Sequence[BlockTable], rule_of: Callable[[int], RetentionRule | None] | None = None) -> None:
        """Frees all blocks. `rule_of` says by what rule the block at a place is retained, if by any."""
        for table in tables:
            self._free(table, table.num_freed, len(table), rule_of)
            table.clear()
            table.num_freed = 0

    def shorten(self, tables: Sequence[BlockTable], num_tokens: int, rule_of: Callable[[int], RetentionRule | None] | None = None) -> None:
        """Frees the blocks behind the first `num_tokens` tokens, as `free` does: others are to follow on these.

        None of the blocks before has left its window. The last one may be shared: it is to be copied then before it is written to.
        """
        num_full, num_more = divmod(num_tokens, self.block_size)
        stop = num_full + (num_more > 0)
        for table in tables:
            assert table.num_freed <= num_full
            if num_more and num_full < len(table) and not self.pool.is_shared(table[num_full]):
                self.pool.unpublish([table[num_full]])
            self._free(table, stop, len(table), rule_of)
            del table[stop:]

    def free_outside_windows(
        self, tables: Sequence[BlockTable], position: int, rule_of: Callable[[int], RetentionRule | None] | None = None
    ) -> int:
        """Frees the blocks that no token from this position on sees. Returns the first position that sees still fewer of them."""
        for window, groups in self._sliding.items():
            num_outside = (position - window + 1) // self.block_size
            for group in groups:
                table = tables[group]
                if table.num_freed < num_outside:
                    self._free(table, table.num_freed, num_outside, rule_of)
                    table.num_freed = num_outside
        return min((tables[groups[0]].num_freed + 1) * self.block_size + window - 1 for window, groups in self._sliding.items())

    def _free(self, table: BlockTable, first: int, stop: int, rule_of: Callable[[int], RetentionRule | None] | None) -> None:
        self.retain([table], first, stop, rule_of)
        self.pool.free(table[first:stop])

    def retain(self, tables: Sequence[BlockTable], first: int, stop: int, rule_of: Callable[[int], RetentionRule | None] | None) -> None:
        """Sets the priorities of the blocks [first, stop) of each table by the rules for their places, if there are any."""
        if rule_of is None:
            return
        for place in range(first, stop):
            rule = rule_of(place)
            if rule is not None:
                for table in tables:
                    if place >= table.num_freed:
                        self.pool.retain(table[place], rule)

    def publish(self, tables: Sequence[BlockTable], hashes: Sequence[bytes], first: int, stop: int) -> list[int]:
        """Publishes the blocks [first, stop) of each table; returns those that were not before."""
        return [
            table[place]
            for group, table in enumerate(tables)
            for place in range(max(first, table.num_freed), stop)
            if self.pool.publish(table[place], _key(hashes[place], group))
        ]

    def record_stored(
        self, published: list[int], tables: Sequence[BlockTable], hashes: Sequence[bytes], token_ids: list[int], adapter: str | None
    ) -> None:
        """Adds the blocks that `publish` has returned to the KV events. `token_ids` are those of their sequence."""
        events, new = self.pool.events, set(published)
        assert events is not None
        for group, table in enumerate(tables):
            for first, stop in runs([place for place in range(table.num_freed, len(table)) if table[place] in new]):
                keys = [_key(hashes[place], group) for place in range(first, stop)]
                parent = _key(hashes[first - 1], group) if first else None
                events.store(keys, parent, token_ids[first * self.block_size : stop * self.block_size], adapter, group)

    def find(self, hashes: Sequence[bytes], num_usable: int) -> list[BlockTable]:
        """Tables of the longest cached beginning of at most `num_usable` blocks. They are not referenced yet."""
        if self.windows == (None,):
            return [BlockTable(self.pool.find(islice(hashes, num_usable)))]
        num_found = self.longest_prefix(hashes, num_usable, self.pool.has)
        tables = []
        for group, window in enumerate(self.windows):
            num_freed = 0 if window is None else self._first_visible(num_found, window)
            tables.append(BlockTable([0] * num_freed + self._blocks_of(hashes, num_freed, num_found, group), num_freed))
        return tables

    def longest_prefix(self, hashes: Sequence[bytes], num_usable: int, has: Callable[[bytes], bool]) -> int:
        """How many blocks, `num_usable` at most, the longest prefix has whose keys `has` knows in all groups."""
        num_found = num_usable
        for group in range(self.num_full_groups):
            num_found = next((place for place in range(num_found) if not has(_key(hashes[place], group))), num_found)
        while (
            shorter := min((self._end_of_run(hashes, num_found, window, has) for window in self._sliding), default=num_found)
        ) < num_found:
            num_found = shorter
        return num_found

    def keys_of_prefix(self, hashes: Sequence[bytes], num_blocks: int) -> list[bytes]:
        """The keys of all blocks, of all groups, that the token behind so many blocks sees."""
        firsts = (0 if window is None else self._first_visible(num_blocks, window) for window in self.windows)
        return [_key(hashes[place], group) for group, first in enumerate(firsts) for place in range(first, num_blocks)]

    def _blocks_of(self, hashes: Sequence[bytes], first: int, stop: int, group: int) -> list[int]:
        return self.pool.find(_key(hashes[place], group) for place in range(first, stop))

    def _first_visible(self, num_blocks: int, window: int) -> int:
        """The first block that the token behind so many blocks sees."""
        return max(0, num_blocks * self.block_size - window + 1) // self.block_size

    def _end_of_run(self, hashes: Sequence[bytes], num_blocks: int, window: int, has: Callable[[bytes], bool]) -> int:
        """The longest beginning of at most so many blocks, of which the next token finds all that it sees."""
        stop = place = num_blocks
        while place > self._first_visible(stop, window):
            place -= 1
            if not all(has(_key(hashes[place], group)) for group in self._sliding[window]):
                stop = place
        return stop

    def check_integrity(self, sequences: Iterable[tuple[Sequence[BlockTable], int]], others: Sequence[int] = ()) -> None:
        """Asserts that no block is lost. Of each sequence come the tables and the number of its computed tokens. `others` are held too."""
        held: list[Sequence[int]] = [others]
        for tables, num_tokens in sequences:
            assert len(tables) == self.num_groups
            assert len({len(table) for table in tables}) == 1, "a group of layers has more blocks than another"
            for table, window in zip(tables, self.windows, strict=True):
                num_outside = 0 if window is None else max(0, num_tokens - window + 1) // self.block_size
                assert table.num_freed <= num_outside, "a block was freed that is still seen"
                held.append(table.held)
        self.pool.check_integrity(held)


def runs(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """First and end of each run of numbers that follow each other; the numbers are in their order."""
    for place, number in enumerate(numbers):
        if not place or numbers[place - 1] != number - 1:
            first = number
        if place + 1 == len(numbers) or numbers[place + 1] != number + 1:
            yield first, number + 1


def _key(block_hash: bytes, group: int) -> bytes:
    """What the pool finds the block of this group by."""
    return block_hash + bytes((group,)) if group else block_hash


def group_of_key(key: bytes) -> int:
    """The group whose block has this key."""
    return key[HASH_BYTES] if len(key) > HASH_BYTES else 0
