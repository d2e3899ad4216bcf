import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engine.sampling import sampler
from penstock.engine.sampling.sampler import prompt_logprobs, token_logprobs


def tied_logits(rows: int, vocab_size: int, seed: int) -> torch.Tensor:
    return torch.randint(-6, 6, (rows, vocab_size), generator=torch.Generator().manual_seed(seed)).float()


@settings(max_examples=50)
@given(st.integers(0, 10**6), st.lists(st.integers(0, 20), min_size=1, max_size=6), st.sampled_from([torch.float32, torch.bfloat16]))
def test_entries_equal_a_plain_log_softmax_with_ties_by_id(seed: int, num_top: list[int], dtype: torch.dtype) -> None:
    vocab_size = 30
    logits_TV = tied_logits(len(num_top), vocab_size, seed).to(dtype)
    tokens = [seed % (row + 7) for row in range(len(num_top))]
    for row, entry in enumerate(token_logprobs(logits_TV, tokens, num_top)):
        logits = logits_TV[row].tolist()
        total = math.log(sum(math.exp(logit) for logit in logits))
        assert entry.token_id == tokens[row]
        assert entry.logprob == pytest.approx(logits[tokens[row]] - total, abs=1e-5)
        assert entry.rank == 1 + sum(logit > logits[tokens[row]] for logit in logits)
        order = sorted(range(vocab_size), key=lambda token: (-logits[token], token))
        assert [token for token, _ in entry.top] == order[: num_top[row]]
        assert [logprob for _, logprob in entry.top] == pytest.approx([logits[token] - total for token in order[: num_top[row]]], abs=1e-5)


def test_more_alternatives_than_tokens_give_every_token() -> None:
    (entry,) = token_logprobs(torch.tensor([[0.0, 1.0, 1.0]]), [0], [20])
    assert [token for token, _ in entry.top] == [1, 2, 0]
    assert entry.rank == 3


def test_impossible_token_has_logprob_minus_infinity() -> None:
    (entry,) = token_logprobs(torch.tensor([[0.0, -math.inf, -math.inf, 1.0]]), [2], [3])
    assert (entry.logprob, entry.rank) == (-math.inf, 3)
    assert [token for token, _ in entry.top] == [3, 0, 1]


def test_chunks_of_a_long_prompt_give_what_the_whole_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    logits_TV = tied_logits(11, 50, 3)
    tokens = list(range(11))
    whole = token_logprobs(logits_TV, tokens, [4] * 11)
    for elements in (1, 150, 10_000):
        monkeypatch.setattr(sampler, "LOGPROBS_CHUNK_ELEMENTS", elements)
        assert prompt_logprobs(logits_TV, tokens, 4) == whole


def test_nothing_asked_gives_nothing() -> None:
    assert prompt_logprobs(torch.zeros(0, 5), [], 3) == []


def test_input_is_left_alone() -> None:
    logits_TV = tied_logits(3, 20, 1)
    before = logits_TV.clone()
    prompt_logprobs(logits_TV, [1, 2, 3], 5)
    assert torch.equal(logits_TV, before)
