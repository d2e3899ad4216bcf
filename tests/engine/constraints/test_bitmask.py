import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.constraints.masks import allocate_bitmask, num_words
from penstock.engine.sampling.rows import apply_bitmask, apply_bitmask_with_torch


def packed(allowed: list[set[int]], width: int) -> torch.Tensor:
    mask_BW = allocate_bitmask(len(allowed), width)
    for row, token_ids in zip(mask_BW, allowed, strict=True):
        for token_id in token_ids:
            word, bit = divmod(token_id, 32)
            row[word] |= 1 << bit if bit < 31 else -(1 << 31)
    return mask_BW


@given(st.integers(1, 200), st.integers(1, 4), st.randoms(use_true_random=False))
def test_exactly_the_tokens_whose_bits_are_set_keep_their_logits(vocab_size: int, batch_size: int, rng: random.Random) -> None:
    allowed = [set(rng.sample(range(vocab_size), rng.randint(0, vocab_size))) for _ in range(batch_size)]
    logits_BV = torch.randn(batch_size, vocab_size)
    expected_BV = torch.full_like(logits_BV, -torch.inf)
    for row, token_ids in enumerate(allowed):
        expected_BV[row, sorted(token_ids)] = logits_BV[row, sorted(token_ids)]
    apply_bitmask(logits_BV, packed(allowed, vocab_size))
    assert torch.equal(logits_BV, expected_BV)


def test_only_the_named_rows_are_masked() -> None:
    logits_BV = torch.zeros(4, 40)
    apply_bitmask(logits_BV, packed([{0}, {39}], 40), rows=[3, 1])
    assert logits_BV.isfinite().sum(-1).tolist() == [40, 1, 40, 1]
    assert logits_BV[3, 0] == logits_BV[1, 39] == 0


@pytest.mark.parametrize("vocab_size", [40, 64, 70, 200])
def test_padding_beyond_the_mask_is_masked_and_bits_beyond_the_vocabulary_are_ignored(vocab_size: int) -> None:
    logits_BV = torch.zeros(1, vocab_size)
    apply_bitmask(logits_BV, torch.full((1, 2), -1, dtype=torch.int32))
    assert logits_BV.isfinite().sum() == min(vocab_size, 64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_infinite_logits_and_every_float_type_are_masked_alike(dtype: torch.dtype) -> None:
    logits_BV = torch.tensor([[torch.inf, torch.inf, -torch.inf, 1.0]], dtype=dtype)
    apply_bitmask(logits_BV, packed([{0, 2, 3}], 4))
    assert logits_BV.tolist() == [[torch.inf, -torch.inf, -torch.inf, 1.0]]


def test_a_view_of_the_logits_is_masked_in_place() -> None:
    logits_BV = torch.zeros(2, 48)
    apply_bitmask(logits_BV[:, :40], packed([{1}, {2}], 64)[:, : num_words(40)])
    assert logits_BV[:, :40].isfinite().sum() == 2
    assert logits_BV[:, 40:].isfinite().all()


@given(st.integers(1, 300), st.integers(1, 10), st.integers(0, 2), st.integers(0, 2**32))
def test_the_kernel_and_torch_mask_alike(vocab_size: int, num_words: int, num_others: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    mask_BW = torch.randint(-(2**31), 2**31, (3, num_words), dtype=torch.int32, generator=generator)
    mask_BW[:, ::2] |= -torch.randint(2, mask_BW[:, ::2].shape, dtype=torch.int32, generator=generator)  # some words are all ones
    logits_BV = torch.randn(3 + num_others, vocab_size + 5, generator=generator)
    rows = torch.randperm(len(logits_BV), generator=generator)[:3].tolist()
    expected_BV = logits_BV.clone()
    apply_bitmask_with_torch(expected_BV[:, :vocab_size], mask_BW, rows)
    apply_bitmask(logits_BV[:, :vocab_size], mask_BW, rows)
    assert torch.equal(logits_BV, expected_BV)


def test_a_fresh_bitmask_allows_nothing() -> None:
    mask_BW = allocate_bitmask(3, 33)
    assert mask_BW.shape == (3, 2)
    assert not mask_BW.any()
