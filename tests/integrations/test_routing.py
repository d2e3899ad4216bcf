"""Routers, without replicas."""

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.integrations.routing import (
    BALANCE,
    CHUNK_BYTES,
    MAX_CHUNKS,
    ROUTING_NAMES,
    SLACK,
    PrefixAffinityRouter,
    Router,
    RoutingName,
    build_router,
    prefix_hashes,
)

IDLE = dict.fromkeys("abcd", 0)
TEXTS = st.binary(max_size=40)


@given(TEXTS, TEXTS, TEXTS)
def test_prompts_share_as_many_hashes_as_whole_chunks(common: bytes, first: bytes, second: bytes) -> None:
    one, other = (prefix_hashes(common + rest, chunk_bytes=4) for rest in (first, second))
    shared = next((place for place, pair in enumerate(zip(common + first, common + second, strict=False)) if len(set(pair)) > 1), None)
    num_shared = min(len(common + first), len(common + second)) if shared is None else shared
    assert [a == b for a, b in zip(one, other, strict=False)] == [place < num_shared // 4 for place in range(min(len(one), len(other)))]


def test_a_long_prompt_has_no_more_hashes_than_the_bound() -> None:
    text = bytes(CHUNK_BYTES * (MAX_CHUNKS + 9))
    assert len(prefix_hashes(text)) == len(set(prefix_hashes(text))) == MAX_CHUNKS


def test_the_adapter_counts_as_part_of_the_prefix() -> None:
    text = bytes(CHUNK_BYTES)
    assert prefix_hashes(text, "one") != prefix_hashes(text, "other")
    assert prefix_hashes(text, "one") == prefix_hashes(text, "one")


@pytest.mark.parametrize("name", ROUTING_NAMES)
def test_every_router_uses_all_replicas_and_only_those_that_are_there(name: RoutingName) -> None:
    router: Router[str] = build_router(name, 0)
    loads = dict(IDLE)
    chosen: Counter[str] = Counter()
    for number in range(400):
        replica = router.choose((number,), loads)
        router.routed((number,), replica)
        loads[replica] += 1
        chosen[replica] += 1
    assert set(chosen) == set(IDLE)
    assert min(chosen.values()) > 50
    del loads["a"]
    router.forget("a")
    assert "a" not in {router.choose((number,), loads) for number in range(400)}


def test_a_prompt_goes_where_the_longest_beginning_of_it_went() -> None:
    router = PrefixAffinityRouter[str](seed=0)
    router.routed((1, 2), "a")
    router.routed((1, 2, 3), "b")
    router.routed((1, 9), "c")
    assert router.choose((1, 2, 3, 4), IDLE) == "b"
    assert router.choose((1, 9, 10), IDLE) == "c"
    assert {router.choose((1, 5), IDLE) for _ in range(50)} <= {"a", "b", "c"}


def test_of_several_with_the_beginning_the_least_loaded_is_chosen() -> None:
    router = PrefixAffinityRouter[str](seed=0)
    for replica in "ab":
        router.routed((1,), replica)
    assert router.choose((1,), IDLE | {"a": 2, "b": 1}) == "b"


def test_a_replica_with_much_more_to_do_than_the_others_is_passed_over() -> None:
    router = PrefixAffinityRouter[str](seed=0)
    router.routed((1,), "a")
    router.routed((1, 2), "b")
    assert router.choose((1, 2), IDLE | {"b": SLACK}) == "b"
    busy = IDLE | {"b": 40, "c": 20, "d": 20}
    assert router.choose((1, 2), busy) == "a", "the next shorter beginning"
    assert router.choose((1, 2), busy | {"a": 60, "b": 60}) in ("c", "d")


@given(st.lists(st.tuples(st.integers(0, 9), st.booleans()), max_size=200), st.integers(0, 9))
def test_no_replica_gets_more_than_its_share_of_what_is_open(requests: list[tuple[int, bool]], seed: int) -> None:
    """Whatever the prompts: each is within the bound when it is chosen, as in the paper on hashing with bounded loads."""
    router, chance = PrefixAffinityRouter[str](seed=seed), random.Random(seed)
    loads = dict(IDLE)
    for prefix, ends_one in requests:
        total = sum(loads.values())
        replica = router.choose((prefix,), loads)
        assert loads[replica] < BALANCE * total / len(loads) + SLACK
        router.routed((prefix,), replica)
        loads[replica] += 1
        if ends_one and (busy := [name for name, load in loads.items() if load]):
            loads[chance.choice(busy)] -= 1


def test_what_was_least_recently_used_is_forgotten() -> None:
    router = PrefixAffinityRouter[str](capacity=3, seed=0)
    router.routed((1, 2), "a")
    router.routed((3,), "b")
    router.routed((1,), "a")
    router.routed((4,), "c")
    assert len(router) == 3
    assert router.choose((1,), IDLE) == "a"
    assert router.choose((3,), IDLE) == "b"
    assert router.choose((4,), IDLE) == "c"


def test_of_a_prompt_the_longest_beginnings_are_forgotten_first() -> None:
    router = PrefixAffinityRouter[str](capacity=2, seed=0)
    router.routed((1, 2, 3), "a")
    assert router.choose((1,), IDLE) == "a"
    assert len(router) == 2
