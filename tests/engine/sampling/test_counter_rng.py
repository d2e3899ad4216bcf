from itertools import islice

from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.sampling.state import CounterRng


def numbers(seed: int, place: int, count: int = 3) -> list[float]:
    generator = CounterRng(seed, place)
    return [generator.random() for _ in range(count)]


@given(st.integers(-(2**63), 2**63), st.integers(0, 2**40))
def test_numbers_depend_on_seed_place_and_order_alone(seed: int, place: int) -> None:
    assert numbers(seed, place) == numbers(seed, place)
    everything = [*numbers(seed, place), *numbers(seed + 1, place), *numbers(seed, place + 1)]
    assert len(set(everything)) == 9
    assert all(0 <= number < 1 for number in everything)


def test_a_place_does_not_depend_on_what_was_drawn_before() -> None:
    drawn, fresh = CounterRng(7), CounterRng(7)
    drawn.random()
    assert drawn.at_next_position().random() == fresh.at_next_position().random() == CounterRng(7, 1).random()


def test_numbers_are_spread_evenly() -> None:
    found = [CounterRng(seed, place).random() for seed in range(40) for place in range(100)]
    shares = [sum(low / 10 <= number < (low + 1) / 10 for number in found) for low in range(10)]
    assert all(330 < share < 470 for share in shares)
    assert abs(sum(found) / len(found) - 0.5) < 0.02
    pairs = sum(first < second for first, second in zip(found, islice(found, 1, None), strict=False))
    assert abs(pairs / len(found) - 0.5) < 0.03
