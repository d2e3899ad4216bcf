import math
import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engine.constraints.masks import allocate_bitmask
from penstock.engine.native.runtime import native_library
from penstock.engine.sampling.rows import (
    BLOCK,
    apply_bitmask_with_torch,
    draw,
    most_probable,
    most_probable_k,
    padded_width,
)
from penstock.engine.sampling.sampler import NATIVE_DTYPES, greedy_tokens


@pytest.mark.parametrize(
    ("vocab_size", "width"), [(1, BLOCK), (BLOCK, BLOCK), (BLOCK + 1, 2 * BLOCK), (49_152, 49_152), (151_936, 152_064)]
)
def test_width_is_the_next_whole_number_of_blocks(vocab_size: int, width: int) -> None:
    assert padded_width(vocab_size) == width


@settings(max_examples=50)
@given(st.integers(0, 10**6), st.sampled_from([BLOCK, 4 * BLOCK]), st.integers(1, 5))
def test_most_probable_is_the_first_of_the_greatest(seed: int, width: int, rows: int) -> None:
    logits_BV = torch.randint(-5, 5, (rows, width), generator=torch.Generator().manual_seed(seed)).float()
    assert most_probable(logits_BV).tolist() == [row.index(max(row)) for row in logits_BV.tolist()]


def test_most_probable_gives_a_place_of_nan() -> None:
    logits_BV = torch.zeros(1, 4 * BLOCK)
    logits_BV[0, 700] = math.nan
    assert most_probable(logits_BV).tolist() == [700]


@settings(max_examples=50)
@given(st.integers(0, 10**6), st.lists(st.integers(1, 5 * BLOCK - 1), min_size=1, max_size=4), st.sampled_from([1, 4, 1000]))
def test_most_probable_k_are_the_tokens_at_least_as_great_as_the_kth(seed: int, ks: list[int], levels: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits_BV = torch.randint(0, levels, (len(ks), 5 * BLOCK), generator=generator).float()
    logits_BV[:, ::7] = -math.inf
    logits_BK, ids_BK = most_probable_k(logits_BV, ks)
    assert logits_BK.shape[1] % BLOCK == 0
    for row, k in enumerate(ks):
        logits = logits_BV[row].tolist()
        kth = sorted(logits, reverse=True)[k - 1]
        kept = {token: logit for token, logit in zip(ids_BK[row].tolist(), logits_BK[row].tolist(), strict=True) if logit > -math.inf}
        assert kept == {token: logit for token, logit in enumerate(logits) if logit >= kth and logit > -math.inf}
        assert ids_BK[row].tolist() == sorted(ids_BK[row].tolist())


def always(value: float) -> Callable[[], float]:
    return lambda: value


@pytest.mark.parametrize("uniform", [0.0, 1e-12, 0.5, 1 - 2**-24, 1 - 2**-53])
def test_tokens_without_probability_are_never_drawn(uniform: float) -> None:
    """Few tokens have any, at the blocks' edges, so that rounding at either end would show."""
    for support in ([0], [BLOCK - 1], [BLOCK], [3 * BLOCK - 1], [1, BLOCK, 3 * BLOCK - 2], [5, 6, 7]):
        probs_BV = torch.zeros(1, 4 * BLOCK)
        probs_BV[0, support] = torch.rand(len(support), generator=torch.Generator().manual_seed(1)) + 1e-3
        probs_BV /= probs_BV.sum()
        for top_p in (0.2, 1.0):
            assert draw(probs_BV, [top_p], [always(uniform)])[0].item() in support


def test_uniform_number_picks_by_the_running_sum() -> None:
    probs_BV = torch.zeros(1, 2 * BLOCK)
    probs_BV[0, [3, BLOCK - 1, BLOCK + 9]] = torch.tensor([0.25, 0.5, 0.25])
    grid = [(step + 0.5) / 400 for step in range(400)]
    tokens = draw(probs_BV.expand(400, -1).contiguous(), [1.0] * 400, [always(uniform) for uniform in grid]).tolist()
    assert tokens == [3] * 100 + [BLOCK - 1] * 200 + [BLOCK + 9] * 100


@pytest.mark.parametrize("top_p", [0.3, 0.5001, 0.75])
def test_tokens_that_tie_with_the_nucleus_stay_in_it(top_p: float) -> None:
    probs_BV = torch.zeros(1, BLOCK)
    probs_BV[0, :5] = torch.tensor([0.05, 0.3, 0.05, 0.3, 0.3])
    rng = random.Random(0)
    tokens = draw(probs_BV.expand(600, -1).contiguous(), [top_p] * 600, [rng.random] * 600)
    assert set(tokens.tolist()) == {1, 3, 4}


def test_row_draws_as_many_numbers_as_it_needs_whatever_its_neighbours_do() -> None:
    """A row that is rejected takes its next number, and only its own."""
    generator = torch.Generator().manual_seed(4)
    probs_BV = torch.randn(50, 3 * BLOCK, generator=generator).softmax(-1)
    top_ps = [0.02 + 0.98 * row / 49 for row in range(50)]
    together, alone = [random.Random(row) for row in range(50)], [random.Random(row) for row in range(50)]
    batch = draw(probs_BV, top_ps, [rng.random for rng in together]).tolist()
    assert batch == [draw(probs_BV[row : row + 1], [top_ps[row]], [alone[row].random]).item() for row in range(50)]
    assert [rng.random() for rng in together] == [rng.random() for rng in alone]


def test_row_of_nan_ends() -> None:
    draw(torch.full((1, BLOCK), math.nan), [0.5], [always(0.5)])


needs_kernels = pytest.mark.skipif(native_library() is None, reason="there is no C++ compiler here")


@needs_kernels
@pytest.mark.parametrize("dtype", NATIVE_DTYPES)
@pytest.mark.parametrize(("num_rows", "vocab_size"), [(0, 5), (1, 1), (3, 255), (9, 256), (5, 49_152), (40, 1000)])
def test_it_is_the_first_of_the_greatest(num_rows: int, vocab_size: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    logits_BV = torch.randn(num_rows, vocab_size + 7).mul(4).round().to(dtype)  # many ties
    expected = [int((row == row.max()).nonzero()[0, 0]) for row in logits_BV[:, :vocab_size]]
    assert greedy_tokens(logits_BV, vocab_size) == expected
    assert greedy_tokens(logits_BV[::2], vocab_size) == expected[::2]


@needs_kernels
@pytest.mark.parametrize("dtype", NATIVE_DTYPES)
@pytest.mark.parametrize("position", [0, 300, 29_999])
@pytest.mark.parametrize("odd", [torch.nan, torch.inf])
def test_what_is_not_finite_is_left_to_others(dtype: torch.dtype, position: int, odd: float) -> None:
    logits_BV = torch.randn(3, 30_000).to(dtype)
    logits_BV[1, position] = odd
    assert greedy_tokens(logits_BV, 30_000) is None
    assert greedy_tokens(logits_BV[:1], 30_000) is not None
    logits_BV[1] = -torch.inf
    assert greedy_tokens(logits_BV, 30_000) is None


@needs_kernels
@pytest.mark.parametrize("dtype", NATIVE_DTYPES)
def test_minus_infinity_beside_numbers_is_no_matter(dtype: torch.dtype) -> None:
    logits_BV = torch.full((1, 600), -torch.inf, dtype=dtype)
    logits_BV[0, 577] = -3e38
    assert greedy_tokens(logits_BV, 600) == [577]


@needs_kernels
def test_other_types_and_layouts_are_left_to_others() -> None:
    assert greedy_tokens(torch.zeros(2, 8, dtype=torch.float16), 8) is None
    assert greedy_tokens(torch.zeros(8, 2).T, 8) is None


@needs_kernels
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
    is_allowed = torch.rand(num_rows, width, generator=generator) < share
    is_allowed[torch.arange(num_rows), torch.arange(num_rows) % min(width, vocab_size)] = True
    bitmask_BW = allocate_bitmask(num_rows, width)
    packed = np.packbits(is_allowed.numpy(), axis=1, bitorder="little")
    bitmask_BW.view(torch.uint8)[:, : packed.shape[1]] = torch.from_numpy(packed)
    masked_BV = logits_BV.clone()
    apply_bitmask_with_torch(masked_BV, bitmask_BW, range(num_rows))
    expected = [int((row == row.max()).nonzero()[0, 0]) for row in masked_BV]
    assert greedy_tokens(logits_BV, vocab_size, bitmask_BW) == expected
    assert greedy_tokens(logits_BV[::2], vocab_size, bitmask_BW[::2]) == expected[::2]


@needs_kernels
def test_what_is_not_allowed_may_be_no_number_and_what_is_allowed_may_not() -> None:
    logits_BV = torch.zeros(1, 600)
    logits_BV[0, 5], logits_BV[0, 599] = torch.nan, 2.0
    bitmask_BW = allocate_bitmask(1, 600).fill_(-1)
    assert greedy_tokens(logits_BV, 600, bitmask_BW) is None
    bitmask_BW[0, 0] = 0
    assert greedy_tokens(logits_BV, 600, bitmask_BW) == [599]
    assert greedy_tokens(logits_BV, 600, bitmask_BW.zero_()) is None
