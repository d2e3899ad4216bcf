import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from penstock.engine.kv_cache import BlockPool, chain_hashes

NUM_BLOCKS = 6


def hashes(token_ids: list[int], block_size: int = 2, salt: str = "") -> list[bytes]:
    known: list[bytes] = []
    chain_hashes(token_ids, block_size, known, salt)
    return known


@given(token_ids=st.lists(st.integers(0, 3), max_size=20), cut=st.integers(0, 20), block_size=st.integers(1, 5))
def test_hashes_extended_bit_by_bit_are_those_of_the_whole(token_ids: list[int], cut: int, block_size: int) -> None:
    known: list[bytes] = []
    chain_hashes(token_ids[:cut], block_size, known)
    chain_hashes(token_ids, block_size, known)
    assert known == hashes(token_ids, block_size)
    assert len(known) == len(token_ids) // block_size


@given(one=st.lists(st.integers(0, 1), max_size=8), other=st.lists(st.integers(0, 1), max_size=8))
def test_hashes_agree_exactly_as_far_as_the_tokens_do(one: list[int], other: list[int]) -> None:
    for position, (mine, yours) in enumerate(zip(hashes(one), hashes(other), strict=False)):
        stop = (position + 1) * 2
        assert (mine == yours) == (one[:stop] == other[:stop])


@pytest.mark.parametrize("salt", ["mine", "\ud800"])
def test_the_salt_changes_every_hash(salt: str) -> None:
    assert not set(hashes([1] * 8)) & set(hashes([1] * 8, salt=salt))


class Pool(RuleBasedStateMachine):
    """Tables are allocated, shared and freed as sequences do; contents are remembered under numbers that stand for hashes."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.tables: list[list[int]] = []
        self.contents: dict[int, bytes] = {}  # what each block was last remembered to hold

    @precondition(lambda self: self.pool.num_free)
    @rule(data=st.data())
    def allocate(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(1, self.pool.num_free))
        is_findable = {block for block_hash in self.contents.values() for block in self.pool.find([block_hash])}
        table = [self.pool.allocate() for _ in range(count)]
        held = {block for other in self.tables for block in other}
        assert not held & set(table)
        if count <= NUM_BLOCKS - len(held | is_findable):
            assert not is_findable & set(table), "what can be found was thrown away while other blocks were free"
        for block in table:
            self.contents.pop(block, None)
        self.tables.append(table)

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), number=st.integers(0, 3))
    def remember(self, data: st.DataObject, number: int) -> None:
        table = data.draw(st.sampled_from(self.tables))
        block_hash = bytes([number])
        is_known = bool(self.pool.find([block_hash])) or table[-1] in self.contents
        self.pool.publish(table[-1], block_hash)
        if not is_known:
            self.contents[table[-1]] = block_hash

    @precondition(lambda self: self.contents)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        block, block_hash = data.draw(st.sampled_from(sorted(self.contents.items())))
        assert self.pool.find([block_hash, b"unknown", block_hash]) == [block]
        num_free, num_unreferenced = self.pool.num_free, self.pool.num_unreferenced([block])
        self.pool.share([block])
        assert self.pool.num_free == num_free - num_unreferenced
        self.tables.append([block])

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        self.pool.free(table)

    @invariant()
    def counts_add_up_and_contents_are_found(self) -> None:
        self.pool.check_integrity(self.tables)
        held = {block for table in self.tables for block in table}
        assert self.pool.num_free == NUM_BLOCKS - len(held)
        assert self.pool.usage == pytest.approx(len(held) / NUM_BLOCKS)
        for block in held:
            assert self.pool.is_shared(block) == (sum(block in table for table in self.tables) > 1)
        for block, block_hash in self.contents.items():
            assert self.pool.find([block_hash]) == [block]


TestPool = Pool.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=25)


def test_the_least_recently_freed_goes_first_and_of_one_table_the_last_block() -> None:
    pool = BlockPool(4)
    tables = [[pool.allocate(), pool.allocate()] for _ in range(2)]
    for number, block in enumerate(tables[0] + tables[1]):
        pool.publish(block, bytes([number]))
    pool.free(tables[1])
    pool.free(tables[0])
    assert [pool.allocate() for _ in range(4)] == [*reversed(tables[1]), *reversed(tables[0])]


def test_without_prefix_caching_nothing_is_found() -> None:
    pool = BlockPool(2, enable_prefix_caching=False)
    pool.publish(pool.allocate(), b"hash")
    assert pool.find([b"hash"]) == []


def test_integrity_names_what_is_wrong() -> None:
    pool = BlockPool(2)
    block = pool.allocate()
    pool.check_integrity([[block]])
    with pytest.raises(AssertionError, match="1 blocks are lost"):
        pool.check_integrity([])
    with pytest.raises(AssertionError, match="1 references, 2 holders"):
        pool.check_integrity([[block], [block]])
    pool.free([block])
    with pytest.raises(AssertionError, match="free and in use"):
        pool.check_integrity([[block]])
