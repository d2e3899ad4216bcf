from collections.abc import Callable
from typing import Any

import pytest
import torch

from penstock.engine.kernels import references
from penstock.engine.kernels.launch import bitmask_apply

Launch = Callable[..., Any]


def make_arguments(vocab_size: int, rows: list[int], dtype: torch.dtype = torch.float32, num_words: int | None = None) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(vocab_size)
    num_words = num_words or -(-vocab_size // 32)
    return {
        "logits_BV": torch.randn(4, vocab_size, generator=generator).to(dtype),
        "bitmask_RW": torch.randint(-(2**31), 2**31, (len(rows), num_words), generator=generator).to(torch.int32),
        "rows_R": torch.tensor(rows, dtype=torch.int64),
    }


def check(launch: Launch, arguments: dict[str, Any]) -> None:
    after = launch(bitmask_apply, **arguments).arguments["logits_BV"]
    references.bitmask_apply(**arguments)
    assert torch.equal(after, arguments["logits_BV"])


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 1000, 4096, 9999])
def test_any_vocabulary_size_gives_the_reference(launch: Launch, vocab_size: int) -> None:
    check(launch, make_arguments(vocab_size, [2, 0]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_gives_the_reference(launch: Launch, dtype: torch.dtype) -> None:
    check(launch, make_arguments(100, [1, 3], dtype))


@pytest.mark.parametrize("rows", [[], [3], [3, 1, 0, 2]])
def test_only_the_rows_that_are_named_change(launch: Launch, rows: list[int]) -> None:
    arguments = make_arguments(100, rows)
    before = arguments["logits_BV"].clone()
    after = launch(bitmask_apply, **arguments).arguments["logits_BV"]
    for row in range(len(before)):
        assert torch.equal(after[row], before[row]) == (row not in rows)
    check(launch, arguments)


def test_a_token_is_allowed_exactly_where_its_bit_is_set(launch: Launch) -> None:
    arguments = make_arguments(70, [1])
    allowed = [0, 31, 32, 63, 64, 69]
    words = [0, 0, 0]
    for token in allowed:
        words[token // 32] |= 1 << token % 32
    arguments["bitmask_RW"] = torch.tensor([words]).to(torch.int32)
    after = launch(bitmask_apply, **arguments).arguments["logits_BV"]
    assert torch.isfinite(after[1]).nonzero().flatten().tolist() == allowed


def test_tokens_beyond_the_bitmask_are_forbidden(launch: Launch) -> None:
    arguments = make_arguments(200, [0], num_words=3)
    arguments["bitmask_RW"].fill_(-1)
    after = launch(bitmask_apply, **arguments).arguments["logits_BV"]
    assert torch.isfinite(after[0]).tolist() == [True] * 96 + [False] * 104
    check(launch, arguments)


def test_logits_may_be_a_slice_of_a_wider_tensor_and_rows_have_32_bits(launch: Launch) -> None:
    arguments = make_arguments(100, [2, 3])
    expected = arguments["logits_BV"].clone()
    references.bitmask_apply(expected, arguments["bitmask_RW"], arguments["rows_R"])
    wide = torch.cat([arguments["logits_BV"], torch.zeros(4, 28)], dim=1)
    arguments |= {"logits_BV": wide[:, :100], "rows_R": arguments["rows_R"].int()}
    after = launch(bitmask_apply, **arguments).arguments["logits_BV"]
    assert torch.equal(after, expected)
