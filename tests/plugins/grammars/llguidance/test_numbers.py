import pytest

from penstock.plugins.grammars.llguidance.exact_schema import LARGEST_EXACT, nearest_bound


@pytest.mark.parametrize("bound", [LARGEST_EXACT + 1, LARGEST_EXACT + 2, 2**60 + 1, 2**62 - 1, -(2**60) - 1, -(2**62) + 1])
def test_a_bound_that_is_no_double_moves_inwards_to_the_next(bound: int) -> None:
    lower, upper = nearest_bound(bound, is_lower=True), nearest_bound(bound, is_lower=False)
    assert lower is not None
    assert upper is not None
    assert upper <= bound <= lower
    assert int(float(lower)) == lower
    assert int(float(upper)) == upper
    assert not any(int(float(number)) == number for number in range(upper + 1, min(lower, upper + 500)))


@pytest.mark.parametrize("bound", [0, 7, -7, LARGEST_EXACT, -LARGEST_EXACT])
def test_a_bound_that_is_a_double_stays(bound: int) -> None:
    assert nearest_bound(bound, is_lower=True) == nearest_bound(bound, is_lower=False) == bound


def test_beyond_64_bits_a_bound_may_only_leave_more() -> None:
    lowest, largest = nearest_bound(-(2**70), is_lower=True), nearest_bound(2**70, is_lower=False)
    assert lowest is not None
    assert largest is not None
    assert -(2**63) <= lowest < 0 < largest < 2**63
    assert nearest_bound(2**70, is_lower=True) is None
    assert nearest_bound(-(2**70), is_lower=False) is None
