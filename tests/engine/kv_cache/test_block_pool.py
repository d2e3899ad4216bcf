import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from penstock.engine.kv_cache.blocks import BlockPool, PrefixKey, Retention, RetentionRule, chain_hashes
from tests.fakes import generate, make_core, make_request

NUM_BLOCKS = 6


def hashes(token_ids: list[int], block_size: int = 2, salt: str = "") -> list[bytes]:
    known: list[bytes] = []
    chain_hashes(token_ids, block_size, known, PrefixKey(salt))
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


HIGH, LOW = RetentionRule(90), RetentionRule(10)


def remembered(pool: BlockPool, count: int) -> list[int]:
    """Blocks that are in use and can be found."""
    blocks = [pool.allocate() for _ in range(count)]
    for block in blocks:
        assert pool.publish(block, bytes([block]))
    return blocks


def evicted(pool: BlockPool) -> list[int]:
    """All blocks in the order in which they are evicted."""
    order = [pool.allocate() for _ in range(pool.num_free)]
    pool.check_integrity([order])
    return order


def test_lower_priorities_go_first_and_equal_ones_by_when_they_were_freed() -> None:
    pool = BlockPool(4)
    first, second, third, fourth = remembered(pool, 4)
    pool.retain(first, HIGH)
    pool.retain(fourth, LOW)
    for block in (first, second, third, fourth):
        pool.free([block])
    pool.check_integrity([])
    assert evicted(pool) == [fourth, second, third, first]


def test_a_free_block_moves_when_its_rule_changes() -> None:
    pool = BlockPool(3)
    blocks = remembered(pool, 3)
    for block in blocks:
        pool.free([block])
    pool.retain(blocks[0], HIGH)
    pool.check_integrity([])
    pool.retain(blocks[1], LOW)
    pool.check_integrity([])
    pool.share([blocks[0]])
    pool.check_integrity([[blocks[0]]])
    pool.free([blocks[0]])
    assert evicted(pool) == [blocks[1], blocks[2], blocks[0]]


def test_a_rule_ends_with_its_time_or_with_the_blocks_contents() -> None:
    pool = BlockPool(2)
    first, second = remembered(pool, 2)
    pool.retain(first, RetentionRule(95, seconds=0.0))
    pool.retain(second, HIGH)
    pool.free([first])
    pool.free([second])
    time.sleep(0.001)
    assert pool.allocate() == first
    pool.unpublish([second])
    pool.check_integrity([[first]])
    pool.free([first])
    pool.check_integrity([])


def test_a_rule_given_anew_starts_anew() -> None:
    pool = BlockPool(2)
    first, second = remembered(pool, 2)
    pool.retain(first, RetentionRule(90, seconds=0.0))
    pool.retain(first, RetentionRule(90, seconds=1000.0))
    for _ in range(10):
        pool.retain(second, RetentionRule(80, seconds=1000.0))
    time.sleep(0.001)
    pool.free([first])
    pool.free([second])
    assert evicted(pool) == [second, first]


def test_the_first_range_that_touches_a_block_is_for_it() -> None:
    retention = Retention(((0, 17, HIGH), (0, 40, LOW)), output=RetentionRule(1))
    rules = [retention.rule_of(block, 16, 50) for block in range(5)]
    assert rules == [HIGH, HIGH, LOW, None, RetentionRule(1)]
    assert Retention(((8, None, LOW),)).rule_of(9, 16, 1000) is LOW


def test_a_retained_prompt_is_found_after_others_have_filled_the_cache() -> None:
    def cached_after_others(retention: Retention | None) -> int:
        core = make_core(num_blocks=16, max_model_len=60)
        system = list(range(97, 113))
        generate(core, make_request("first", system, max_tokens=1, retention=retention))
        for number in range(8):
            generate(core, make_request(f"other {number}", [65 + number] * 30, max_tokens=2))
        info = generate(core, make_request("again", [*system, 97], max_tokens=1))[0].prompt
        assert info is not None
        return info.num_cached_tokens

    assert cached_after_others(None) == 0
    assert cached_after_others(Retention(((0, None, HIGH),))) == 16
    assert cached_after_others(Retention(((0, 8, HIGH),))) == 8
