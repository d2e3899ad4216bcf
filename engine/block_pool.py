"""Who holds which block of the KV cache, and which blocks can be used again by what is in them."""

import hashlib
from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence


def chain_hashes(token_ids: Sequence[int], block_size: int, known: list[bytes], salt: str = "") -> None:
    """Extends `known` to one hash per full block of `token_ids`: each covers its own tokens, all before them, and the salt."""
    for start in range(len(known) * block_size, len(token_ids) - block_size + 1, block_size):
        parent = known[-1] if known else hashlib.blake2b(salt.encode(errors="surrogatepass"), digest_size=16).digest()
        tokens = array("q", token_ids[start : start + block_size]).tobytes()
        known.append(hashlib.blake2b(parent + tokens, digest_size=16).digest())


class BlockPool:
    """Reference-counted blocks. A block that is free but still valid stays findable by its hash until its memory is needed.

    Free blocks that nobody can find are handed out first, then the least recently freed of the others.
    """

    def __init__(self, num_blocks: int, *, enable_prefix_caching: bool = True) -> None:
        self.num_blocks = num_blocks
        self.enable_prefix_caching = enable_prefix_caching
        self._num_references = [0] * num_blocks
        self._hash_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}
        self._blank = list(range(num_blocks - 1, -1, -1))
        self._evictable: OrderedDict[int, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        return len(self._blank) + len(self._evictable)

    @property
    def usage(self) -> float:
        """Share of the blocks that sequences hold, from 0 to 1."""
        return 1 - self.num_free / self.num_blocks

    def allocate(self) -> int:
        """A block with one reference and unspecified contents. The caller has checked `num_free`."""
        if self._blank:
            block = self._blank.pop()
        else:
            block, _ = self._evictable.popitem(last=False)
            del self._block_of[self._hash_of.pop(block)]
        self._num_references[block] = 1
        return block

    def share(self, blocks: Iterable[int]) -> None:
        """One more reference to each, free ones with valid contents included."""
        for block in blocks:
            if self._num_references[block] == 0:
                del self._evictable[block]
            self._num_references[block] += 1

    def free(self, blocks: Sequence[int]) -> None:
        """One reference less to each. A sequence's last blocks are evicted before its first, which others are likelier to share."""
        for block in reversed(blocks):
            self._num_references[block] -= 1
            if self._num_references[block] > 0:
                continue
            if block in self._hash_of:
                self._evictable[block] = None
            else:
                self._blank.append(block)

    def is_shared(self, block: int) -> bool:
        return self._num_references[block] > 1

    def num_unreferenced(self, blocks: Iterable[int]) -> int:
        """How many of them `share` would take from the free ones."""
        return sum(self._num_references[block] == 0 for block in blocks)

    def remember(self, block: int, block_hash: bytes) -> bool:
        """The block can be found from now on, unless it or an equal one can be already: then False."""
        if not self.enable_prefix_caching or block in self._hash_of or block_hash in self._block_of:
            return False
        self._hash_of[block] = block_hash
        self._block_of[block_hash] = block
        return True

    def forget(self, blocks: Iterable[int]) -> None:
        """These can no longer be found. Whoever holds them keeps them."""
        for block in blocks:
            block_hash = self._hash_of.pop(block, None)
            if block_hash is None:
                continue
            del self._block_of[block_hash]
            if block in self._evictable:
                del self._evictable[block]
                self._blank.append(block)

    def find(self, hashes: Iterable[bytes]) -> list[int]:
        """The blocks of the longest prefix that is there. They are not referenced yet."""
        found = []
        for block_hash in hashes:
            block = self._block_of.get(block_hash)
            if block is None:
                break
            found.append(block)
        return found

    def check_integrity(self, tables: Iterable[Sequence[int]]) -> None:
        """Asserts that the counts are what these block tables, all there are, add up to."""
        held = Counter(block for table in tables for block in table)
        free = [*self._blank, *self._evictable]
        assert len(free) == len(set(free)), "a block is free twice"
        assert not held.keys() & set(free), "a block is free and in use"
        assert len(free) + len(held) == self.num_blocks, f"{self.num_blocks - len(free) - len(held)} blocks are lost"
        for block in range(self.num_blocks):
            count = self._num_references[block]
            assert count == held[block], f"block {block}: {count} references, {held[block]} holders"
        assert {block: block_hash for block_hash, block in self._block_of.items()} == self._hash_of
        assert all(block in self._hash_of for block in self._evictable)
        assert not any(block in self._hash_of for block in self._blank)
