"""The blocks of the KV cache: one pool of them, and over it the block tables of sequences, one for each group of layers.

Prefix caching is by chained hashes, forks copy on write, and blocks are evicted by retention priority and age.
"""

import hashlib
import heapq
import time
from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from penstock.engine.kv_cache.events import KVEvents

HASH_BYTES = 16
HASHED_AT_ONCE = 4096  # tokens
DEFAULT_RETENTION = 35
MAX_RETENTION = 100


@dataclass(frozen=True, slots=True)
class RetentionRule:
    """Blocks of a lower priority, from 0 to 100, are evicted first. After `seconds`, if any, the priority is the default one again."""

    priority: int = DEFAULT_RETENTION
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Retention:
    """Rules for ranges (first token, end or None, rule) of the prompt, the first that touches a block, and one for the blocks after it.

    Blocks that no rule is for keep the priority that they have: requests without any do not take it from those that share their blocks.
    """

    ranges: tuple[tuple[int, int | None, RetentionRule], ...] = ()
    output: RetentionRule | None = None

    def rule_of(self, block: int, block_size: int, num_prompt_tokens: int) -> RetentionRule | None:
        """The rule for the sequence's block of that number."""
        first, end = block * block_size, (block + 1) * block_size
        if first >= num_prompt_tokens:
            return self.output
        touching = (rule for start, stop, rule in self.ranges if start < end and (stop is None or stop > first))
        return next(touching, None)


@dataclass(frozen=True, slots=True)
class PrefixKey:
    """What blocks depend on beside their tokens: a salt of the client's choice, and the digest of the adapter, empty without one."""

    salt: str = ""
    adapter: bytes = b""

    @property
    def root(self) -> bytes:
        """The parent of a sequence's first block. No salt gives that of another adapter."""
        salt = self.salt.encode(errors="surrogatepass")
        return hashlib.blake2b(salt, key=self.adapter, digest_size=HASH_BYTES).digest()


NO_KEY = PrefixKey()


def chain_hashes(
    token_ids: Sequence[int], block_size: int, known: list[bytes], key: PrefixKey = NO_KEY, max_tokens: int | None = None
) -> None:
    """Extends `known` to one hash per full block of `token_ids`: each covers its own tokens, all before them, and the key.

    `max_tokens` bounds how many tokens are hashed by this call.
    """
    first, stop = len(known) * block_size, len(token_ids) // block_size * block_size
    if max_tokens is not None:
        stop = min(stop, first + max_tokens // block_size * block_size)
    if first >= stop:
        return
    parent = known[-1] if known else key.root
    tokens = array("q", token_ids[first:stop])
    width = block_size * tokens.itemsize
    data = tokens.tobytes()
    for start in range(0, len(data), width):
        parent = hashlib.blake2b(parent + data[start : start + width], digest_size=HASH_BYTES).digest()
        known.append(parent)


def hash_prompt(token_ids: Sequence[int], block_size: int, known: list[bytes], key: PrefixKey = NO_KEY) -> None:
    """As `chain_hashes`, in a thread that lets others run often: while hashing, Python's lock would be held for milliseconds at a time."""
    while len(known) < len(token_ids) // block_size:
        chain_hashes(token_ids, block_size, known, key, max_tokens=max(HASHED_AT_ONCE, block_size))
        time.sleep(0)


class BlockPool:
    """Reference-counted blocks. A block that is free but still valid can be found by its hash until it is evicted.

    Free blocks without a hash are handed out first, then the least recently freed of those with the lowest retention priority.

    `undrafted` are blocks that a drafter has not computed, as those that were loaded from files. It is kept without one as well.
    """

    def __init__(self, num_blocks: int, *, enable_prefix_caching: bool = True) -> None:
        self.num_blocks = num_blocks
        self.undrafted: set[int] = set()
        self.enable_prefix_caching = enable_prefix_caching
        self.events: KVEvents | None = None
        self._num_references = [0] * num_blocks
        self._hash_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}
        self._blank = list(range(num_blocks - 1, -1, -1))
        self._evictable: dict[int, OrderedDict[int, None]] = {}  # by retention priority; none of them is empty
        self._retained: dict[int, tuple[int, float | None]] = {}  # by block: another priority than the default one, and until when
        self._generations = [0] * num_blocks
        self._expiries: list[tuple[float, int]] = []  # a heap of the times in `_retained`; some are no longer there

    @property
    def num_free(self) -> int:
        return len(self._blank) + sum(map(len, self._evictable.values()))

    @property
    def usage(self) -> float:
        """Share of the blocks that sequences hold, from 0 to 1."""
        return 1 - self.num_free / self.num_blocks

    @property
    def num_cached(self) -> int:
        """Blocks that can be found by their hash."""
        return len(self._hash_of)

    def allocate(self) -> int:
        """A block with one reference and unspecified contents. The caller has checked `num_free`."""
        if self._blank:
            block = self._blank.pop()
        else:
            self._expire()
            block = next(iter(self._evictable[min(self._evictable)]))
            self._take_out(block)
            self._unpublish(block)
        self._num_references[block] = 1
        self.undrafted.discard(block)
        return block

    def are_drafted(self, blocks: Iterable[int]) -> bool:
        """Whether a drafter has computed all of these."""
        return not self.undrafted or self.undrafted.isdisjoint(blocks)

    def share(self, blocks: Iterable[int]) -> None:
        """One more reference to each, free ones with valid contents included."""
        for block in blocks:
            if self._num_references[block] == 0:
                self._take_out(block)
            self._num_references[block] += 1

    def free(self, blocks: Sequence[int]) -> None:
        """One reference less to each. A sequence's last blocks are evicted before its first, which others are likelier to share."""
        for block in reversed(blocks):
            self._num_references[block] -= 1
            if self._num_references[block] > 0:
                continue
            if block in self._hash_of:
                self._put_in(block)
            else:
                self._blank.append(block)

    def is_shared(self, block: int) -> bool:
        return self._num_references[block] > 1

    def num_unreferenced(self, blocks: Iterable[int]) -> int:
        """How many of them are free, which `share` would take."""
        return sum(self._num_references[block] == 0 for block in blocks)

    def publish(self, block: int, block_hash: bytes) -> bool:
        """Makes the block findable by its hash; False where it or an equal one is already."""
        if not self.enable_prefix_caching or block in self._hash_of or block_hash in self._block_of:
            return False
        self._hash_of[block] = block_hash
        self._block_of[block_hash] = block
        return True

    def unpublish(self, blocks: Iterable[int]) -> None:
        """Makes these blocks unfindable. Sequences that hold them keep them."""
        for block in blocks:
            if block not in self._hash_of:
                continue
            if self._num_references[block] == 0:
                self._take_out(block)
                self._blank.append(block)
            self._unpublish(block)

    def clear(self) -> None:
        """Makes all blocks unfindable."""
        events, self.events = self.events, None
        self.unpublish(range(self.num_blocks))
        self.events = events
        if events is not None:
            events.clear()

    def retain(self, block: int, rule: RetentionRule) -> None:
        """Sets the eviction priority of a block that can be found; does nothing for others."""
        if block not in self._hash_of:
            return
        is_free = self._num_references[block] == 0
        if is_free:
            self._take_out(block)
        until = None if rule.seconds is None else time.monotonic() + rule.seconds
        self._retained[block] = (rule.priority, until)
        if until is not None:
            self._expire_at(until, block)
        if is_free:
            self._put_in(block)

    def has(self, block_hash: bytes) -> bool:
        """Whether a block with this hash is cached."""
        return block_hash in self._block_of

    def hash_of(self, block: int) -> bytes | None:
        """The hash that the block can be found by; None where it cannot be found."""
        return self._hash_of.get(block)

    def generation(self, block: int) -> int:
        """A number that changes before other contents are written to a published block. May be read in any thread."""
        return self._generations[block]

    def retention_priority(self, block: int) -> int:
        """Of a block that can be found."""
        self._expire()
        return self._priority(block)

    def find(self, hashes: Iterable[bytes]) -> list[int]:
        """The blocks of the longest cached prefix. They are not referenced yet."""
        found = []
        for block_hash in hashes:
            block = self._block_of.get(block_hash)
            if block is None:
                break
            found.append(block)
        return found

    def _expire_at(self, until: float, block: int) -> None:
        heapq.heappush(self._expiries, (until, block))
        if len(self._expiries) > 2 * self.num_blocks:  # mostly of blocks that have been retained anew
            self._expiries = [(until, block) for block, (_, until) in self._retained.items() if until is not None]
            heapq.heapify(self._expiries)

    def _expire(self) -> None:
        """Gives blocks whose retention has expired the default priority."""
        while self._expiries and self._expiries[0][0] <= time.monotonic():
            until, block = heapq.heappop(self._expiries)
            if block not in self._retained or self._retained[block][1] != until:
                continue
            is_free = self._num_references[block] == 0
            if is_free:
                self._take_out(block)
            del self._retained[block]
            if is_free:
                self._put_in(block)

    def _priority(self, block: int) -> int:
        return self._retained[block][0] if block in self._retained else DEFAULT_RETENTION

    def _put_in(self, block: int) -> None:
        self._evictable.setdefault(self._priority(block), OrderedDict())[block] = None

    def _take_out(self, block: int) -> None:
        priority = self._priority(block)
        del self._evictable[priority][block]
        if not self._evictable[priority]:
            del self._evictable[priority]

    def _unpublish(self, block: int) -> None:
        block_hash = self._hash_of.pop(block)
        del self._block_of[block_hash]
        if self.events is not None:
            self.events.remove(block_hash)
        self._retained.pop(block, None)
        self._generations[block] += 1

    def check_integrity(self, tables: Iterable[Sequence[int]]) -> None:
        """Asserts that the counts are what these block tables, all there are, add up to."""
        held = Counter(block for table in tables for block in table)
        evictable = [block for blocks in self._evictable.values() for block in blocks]
        free = [*self._blank, *evictable]
        assert len(free) == len(set(free)), "a block is free twice"
        assert not held.keys() & set(free), "a block is free and in use"
        assert len(free) + len(held) == self.num_blocks, f"{self.num_blocks - len(free) - len(held)} blocks are lost"
        for block in range(self.num_blocks):
            count = self._num_references[block]
            assert count == held[block], f"block {block}: {count} references, {held[block]} holders"
        assert {block: block_hash for block_hash, block in self._block_of.items()} == self._hash_of
        assert all(block in self._hash_of for block in (*evictable, *self._retained))
        assert all(blocks and {self._priority(block) for block in blocks} == {priority} for priority, blocks in self._evictable.items())
        assert not any(block in self._hash_of for block in self._blank)


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
