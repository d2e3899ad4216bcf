import pytest
import torch

from penstock.engine.greedy import NATIVE_DTYPES, greedy_tokens
from penstock.engine.native_library import native_library

pytestmark = pytest.mark.skipif(native_library() is None, reason="there is no C++ compiler here")


@pytest.mark.parametrize("dtype", NATIVE_DTYPES)
@pytest.mark.parametrize(("num_rows", "vocab_size"), [(0, 5), (1, 1), (3, 255), (9, 256), (5, 49_152), (40, 1000)])
def test_it_is_the_first_of_the_greatest(num_rows: int, vocab_size: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    logits_BV = torch.randn(num_rows, vocab_size + 7).mul(4).round().to(dtype)  # many ties
    expected = [int((row == row.max()).nonzero()[0, 0]) for row in logits_BV[:, :vocab_size]]
    assert greedy_tokens(logits_BV, vocab_size) == expected
    assert greedy_tokens(logits_BV[::2], vocab_size) == expected[::2]


@pytest.mark.parametrize("dtype", NATIVE_DTYPES)
@pytest.mark.parametrize("position", [0, 300, 599])
@pytest.mark.parametrize("odd", [torch.nan, torch.inf])
def test_what_is_not_finite_is_left_to_others(dtype: torch.dtype, position: int, odd: float) -> None:
    logits_BV = torch.randn(3, 600).to(dtype)
    logits_BV[1, position] = odd
    assert greedy_tokens(logits_BV, 600) is None
    assert greedy_tokens(logits_BV[:1], 600) is not None
    logits_BV[1] = -torch.inf
    assert greedy_tokens(logits_BV, 600) is None


@pytest.mark.parametrize("dtype", NATIVE_DTYPES)
def test_minus_infinity_beside_numbers_is_no_matter(dtype: torch.dtype) -> None:
    logits_BV = torch.full((1, 600), -torch.inf, dtype=dtype)
    logits_BV[0, 577] = -3e38
    assert greedy_tokens(logits_BV, 600) == [577]


def test_other_types_and_layouts_are_left_to_others() -> None:
    assert greedy_tokens(torch.zeros(2, 8, dtype=torch.float16), 8) is None
    assert greedy_tokens(torch.zeros(8, 2).T, 8) is None
