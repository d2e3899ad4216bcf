"""The block pool: allocation, prefix caching by chained hashes, copy-on-write, and eviction by retention priority and age."""

import hashlib
import heapq
import time
from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

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
    """

    def __init__(self, num_blocks: int, *, enable_prefix_caching: bool = True) -> None:
        self.num_blocks = num_blocks
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
        return block

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
