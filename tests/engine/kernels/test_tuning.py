from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.kernels.launch import MAX_SPLITS, choose_num_splits, decode_tuning, next_power_of_two, padded, prefill_tuning

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


@given(group_size=group_sizes, key_size=head_sizes, value_size=head_sizes, itemsize=itemsizes, max_query_len=st.integers(1, 10**5))
def test_a_prefill_tile_holds_at_least_one_query_with_all_its_heads(
    group_size: int, key_size: int, value_size: int, itemsize: int, max_query_len: int
) -> None:
    tuning = prefill_tuning(group_size, key_size, value_size, itemsize, max_query_len)
    assert tuning.tile_rows // group_size >= 1
    assert is_power_of_two(tuning.tile_rows)
    assert tuning.tile_rows >= 16
    assert tuning.tile_keys >= 16
    assert tuning.tile_rows < 2 * max(16, max_query_len * group_size)


@given(num_programs=st.integers(0, 10**4), max_context_len=st.integers(0, 10**6), num_multiprocessors=st.integers(1, 200))
def test_splits_are_few_powers_of_two_and_never_shorter_than_worth_it(
    num_programs: int, max_context_len: int, num_multiprocessors: int
) -> None:
    num_splits = choose_num_splits(num_programs, max_context_len, num_multiprocessors)
    assert is_power_of_two(num_splits)
    assert num_splits <= MAX_SPLITS
    assert num_splits == 1 or max_context_len > 256 * (num_splits - 1)
    assert num_splits == 1 or num_splits * num_programs <= 2 * num_multiprocessors


def test_one_long_sequence_is_split_and_a_full_batch_is_not() -> None:
    assert choose_num_splits(8, 100_000, 132) == 32
    assert choose_num_splits(256 * 8, 100_000, 132) == 1
