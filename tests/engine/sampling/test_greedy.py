import pytest
import torch

from penstock.engine.constraints.bitmask import allocate_bitmask, apply_bitmask_with_torch
from penstock.engine.native.library import native_library
from penstock.engine.sampling.choice import NATIVE_DTYPES, greedy_tokens

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


@pytest.mark.parametrize("dtype", NATIVE_DTYPES)
@pytest.mark.parametrize(
    ("num_rows", "vocab_size", "width"), [(1, 1, 1), (3, 255, 255), (7, 1000, 1024), (7, 1000, 700), (5, 49_152, 49_152)]
)
@pytest.mark.parametrize("share", [0.001, 0.5, 1.0])
def test_it_is_the_first_of_the_greatest_that_are_allowed(
    num_rows: int, vocab_size: int, width: int, share: float, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(0)
    logits_BV = torch.randn(num_rows, vocab_size, generator=generator).mul(4).round().to(dtype)
    bitmask_BW = allocate_bitmask(num_rows, width)
    for row in range(num_rows):
        for token_id in {row % min(width, vocab_size), *(torch.rand(width, generator=generator) < share).nonzero()[:, 0].tolist()}:
            bitmask_BW[row, token_id // 32] |= 1 << (token_id % 32) if token_id % 32 < 31 else -(1 << 31)
    masked_BV = logits_BV.clone()
    apply_bitmask_with_torch(masked_BV, bitmask_BW, range(num_rows))
    expected = [int((row == row.max()).nonzero()[0, 0]) for row in masked_BV]
    assert greedy_tokens(logits_BV, vocab_size, bitmask_BW) == expected
    assert greedy_tokens(logits_BV[::2], vocab_size, bitmask_BW[::2]) == expected[::2]


def test_what_is_not_allowed_may_be_no_number_and_what_is_allowed_may_not() -> None:
    logits_BV = torch.zeros(1, 600)
    logits_BV[0, 5], logits_BV[0, 599] = torch.nan, 2.0
    bitmask_BW = allocate_bitmask(1, 600).fill_(-1)
    assert greedy_tokens(logits_BV, 600, bitmask_BW) is None
    bitmask_BW[0, 0] = 0
    assert greedy_tokens(logits_BV, 600, bitmask_BW) == [599]
    assert greedy_tokens(logits_BV, 600, bitmask_BW.zero_()) is None
