import random

import pytest
import torch

from penstock.plugins.manager import Plugins
from penstock.plugins.processors import NoRepeatNgram


def generate(size: int, prompt: list[int], logits: torch.Tensor, num_tokens: int) -> list[int]:
    """Greedy decoding with the same logits at each step."""
    process = NoRepeatNgram(size=size)
    token_ids = list(prompt)
    for _ in range(num_tokens):
        token_ids.append(int(process(token_ids, logits.clone()).argmax()))
    return token_ids[len(prompt) :]


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("seed", range(5))
def test_no_ngram_of_the_output_comes_twice(size: int, seed: int) -> None:
    logits = torch.randn(40, generator=torch.Generator().manual_seed(seed))
    output = generate(size, [0, 0, 0, 0], logits, 30)
    ngrams = [tuple(output[i : i + size]) for i in range(len(output) - size + 1)]
    assert len(set(ngrams)) == len(ngrams)


@pytest.mark.parametrize("seed", range(10))
def test_exactly_the_tokens_that_would_repeat_are_masked(seed: int) -> None:
    rng = random.Random(seed)
    size = rng.randint(2, 4)
    prompt, output = [[rng.randrange(4) for _ in range(length)] for length in (5, 20)]
    process = NoRepeatNgram(size=size)
    for end in range(len(output) + 1):
        before = output[:end]
        seen = {tuple(before[i : i + size]) for i in range(end - size + 1)}
        context = tuple(before[end - size + 1 :]) if end >= size - 1 else None
        masked = process(prompt + before, torch.zeros(4)).isinf().tolist()
        assert masked == [context is not None and (*context, token_id) in seen for token_id in range(4)]


def test_the_prompt_may_be_repeated() -> None:
    assert generate(2, [3, 3, 3, 3], torch.tensor([0.0, 0.0, 0.0, 1.0]), 2) == [3, 3]


def test_logits_are_copied_where_they_change() -> None:
    process = NoRepeatNgram(size=2)
    process([], torch.zeros(3))
    logits = torch.zeros(3)
    assert process([1, 1], logits) is not logits
    assert logits.isfinite().all()


@pytest.mark.parametrize("size", [1, 0, -3, 257, 2.0, "3", True, None])
def test_a_size_that_makes_no_sense_is_refused(size: object) -> None:
    with pytest.raises(ValueError, match="`size` must be an integer from 2 to 256"):
        NoRepeatNgram(size=size)  # type: ignore[arg-type]


def test_it_is_registered_under_its_name() -> None:
    processor = Plugins.start(["none"]).logits_processors["no_repeat_ngram"]
    assert isinstance(processor.begin(size=3), NoRepeatNgram)
