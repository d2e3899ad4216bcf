import heapq

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.kernels.references import plan_splits
from penstock.engine.kernels.tuning import decode_tuning, next_power_of_two, padded, padded_parts, prefill_tuning, split_sizes

group_sizes = st.integers(1, 128)
head_sizes = st.integers(8, 256)
itemsizes = st.sampled_from([2, 4])


def is_power_of_two(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0


@given(size=st.integers(1, 10**6))
def test_padding_is_the_smallest_power_of_two_that_holds_the_size(size: int) -> None:
    power = next_power_of_two(size)
    assert is_power_of_two(power)
    assert power // 2 < size <= power
    assert padded(size) == max(16, power)


@given(size=st.integers(8, 1024))
def test_long_keys_are_padded_in_two_parts(size: int) -> None:
    main, rest = padded_parts(size)
    assert main + rest >= size
    assert main == padded(size) if size <= 256 else main + rest < 1.5 * size + 16
    assert padded_parts(576) == (512, 64)


@given(group_size=group_sizes, key_size=head_sizes, value_size=head_sizes, itemsize=itemsizes)
def test_a_decode_tile_holds_the_group_and_what_is_in_flight_fits_shared_memory(
    group_size: int, key_size: int, value_size: int, itemsize: int
) -> None:
    tuning = decode_tuning(group_size, key_size, value_size, itemsize)
    assert tuning.tile_rows >= max(16, group_size)
    assert is_power_of_two(tuning.tile_rows)
    assert is_power_of_two(tuning.tile_keys)
    assert tuning.tile_keys >= 16
    num_buffers = (tuning.num_stages - 1) // 2
    assert num_buffers * tuning.tile_keys * (padded(key_size) + padded(value_size)) * itemsize <= 64 * 1024


@given(
    group_size=group_sizes,
    key_size=head_sizes,
    value_size=head_sizes,
    itemsize=itemsizes,
    max_query_len=st.integers(1, 10**5),
    capability=st.integers(8, 12),
)
def test_a_prefill_tile_holds_at_least_one_query_with_all_its_heads(
    group_size: int, key_size: int, value_size: int, itemsize: int, max_query_len: int, capability: int
) -> None:
    tuning = prefill_tuning(group_size, key_size, value_size, itemsize, max_query_len, capability)
    assert tuning.tile_rows // group_size >= 1
    assert is_power_of_two(tuning.tile_rows)
    assert tuning.tile_rows >= 16
    assert tuning.tile_keys >= 16
    assert tuning.tile_rows < 2 * max(16, max_query_len * group_size)


NUM_MULTIPROCESSORS = 132
NUM_KV_HEADS = 8
TILE_KEYS = 64


def tiles_of_items(context_lens: list[int]) -> list[int]:
    """How many tiles of keys each program of a KV head reads, where an H200 decodes Llama-3.1-8B."""
    num_wanted, min_tiles = split_sizes(NUM_KV_HEADS, 4, TILE_KEYS, NUM_MULTIPROCESSORS)
    items, _ = plan_splits(context_lens, num_wanted=num_wanted, min_tiles=min_tiles, tile_keys=TILE_KEYS)
    sizes = []
    for sequence, num_splits, _, split in items:
        num_tiles = -(-context_lens[sequence] // TILE_KEYS)
        per_split = -(-num_tiles // num_splits)
        sizes.append(min(per_split, num_tiles - split * per_split))
    return sizes


def unevenness(context_lens: list[int]) -> float:
    """The tiles of the multiprocessor that reads most, over those of the average one; each program goes to whichever has least to do."""
    loads = [0] * NUM_MULTIPROCESSORS
    for size in tiles_of_items(context_lens):
        for _ in range(NUM_KV_HEADS):
            heapq.heapreplace(loads, loads[0] + size)
    return max(loads) * NUM_MULTIPROCESSORS / sum(loads)


@given(
    context_lens=st.lists(st.integers(0, 10**5), max_size=300),
    num_wanted=st.integers(1, 600),
    min_tiles=st.integers(1, 16),
    sliding_window=st.none() | st.integers(1, 5000),
)
def test_splits_cover_all_keys_within_their_bounds(
    context_lens: list[int], num_wanted: int, min_tiles: int, sliding_window: int | None
) -> None:
    items, merges = plan_splits(
        context_lens, num_wanted=num_wanted, min_tiles=min_tiles, tile_keys=TILE_KEYS, sliding_window=sliding_window
    )
    assert len(items) <= len(context_lens) + num_wanted
    assert len(merges) < max(2, num_wanted)
    assert sum(num_splits for _, num_splits, *_ in merges) <= 2 * num_wanted
    assert [(sequence, split) for sequence, num_splits, _, split in items if split == 0] == [(n, 0) for n in range(len(context_lens))]
    partials = [first_partial + split for _, num_splits, first_partial, split in items if num_splits > 1]
    assert partials == list(range(len(partials)))


def test_a_long_sequence_among_short_ones_is_read_by_programs_that_read_about_as_much_as_theirs() -> None:
    sizes = tiles_of_items([1000] * 31 + [100_000])
    assert max(sizes) <= 2 * min(sizes)
    assert len(sizes) * NUM_KV_HEADS < 5 * NUM_MULTIPROCESSORS


@pytest.mark.parametrize("context_len", [1000, 4000, 16_000])
@pytest.mark.parametrize("num_sequences", [4, 12, *range(17, 33), 48, 64, 256])
def test_no_multiprocessor_reads_much_more_than_another(num_sequences: int, context_len: int) -> None:
    assert unevenness([context_len] * num_sequences) < 1.25
    assert unevenness([context_len] * num_sequences + [100_000]) < 1.25


def test_short_sequences_and_full_batches_are_not_split() -> None:
    assert len(tiles_of_items([256] * 4)) == 4
    assert len(tiles_of_items([1000] * 256)) == 256


def test_groups_of_many_heads_have_longer_splits() -> None:
    assert split_sizes(1, 16, TILE_KEYS, NUM_MULTIPROCESSORS) == (528, 4)
    assert split_sizes(1, 128, TILE_KEYS, NUM_MULTIPROCESSORS) == (528, 32)
