"""What is evicted first from the prefix cache where requests have said how long their blocks are to stay."""

import time

from penstock.engine.kv_cache import BlockPool, Retention, RetentionRule
from tests.fakes import generate, make_core, make_request

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
