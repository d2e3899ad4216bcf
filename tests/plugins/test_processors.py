import random
from typing import Any

import pytest
import torch

from penstock import LogitsProcessor, LogitsRow, per_row, per_sequence
from penstock.engine.contracts.logits_processor import chosen_processors
from penstock.engine.errors import InvalidRequest
from penstock.plugins.decoding import NoRepeatNgram
from penstock.plugins.manager import Plugins


class Batched(LogitsProcessor):
    def begin(self, by: float) -> float:
        if by < 0:
            raise ValueError("`by` must not be negative")
        return by

    def process(self, rows: Any, logits: Any) -> None: ...


def of_row(row: LogitsRow, logits: Any, *, size: int = 1) -> None: ...


def made(size: int) -> Any:
    return lambda token_ids, logits: logits


REGISTERED: dict[str, Any] = {"batched": Batched(), "of_row": per_row(of_row), "made": per_sequence(made)}


def test_names_are_chosen_in_order() -> None:
    chosen = chosen_processors(REGISTERED, [("made", {"size": 1}), ("batched", {"by": 2.0}), ("of_row", {}), ("batched", {"by": 3.0})])
    assert [choice.processor for choice in chosen] == [REGISTERED[name] for name in ("made", "batched", "of_row", "batched")]
    assert [choice.begin(LogitsRow("r")).row.state for choice in (chosen[1], chosen[3])] == [2.0, 3.0]


@pytest.mark.parametrize(
    ("choices", "path", "message"),
    [
        ([("other", {})], "logits_processors[0].name", "there are batched, of_row, made"),
        ([("of_row", {}), ("batched", {"by": -1})], "logits_processors[1].arguments", "must not be negative"),
        ([("batched", {})], "logits_processors[0].arguments", "by"),
        ([("of_row", {"logits": [1]})], "logits_processors[0].arguments", "logits"),
        ([("of_row", {"width": 1})], "logits_processors[0].arguments", "width"),
        ([("made", {})], "logits_processors[0].arguments", "size"),
    ],
)
def test_what_does_not_fit_is_refused_by_its_place(choices: Any, path: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as caught:
        chosen_processors(REGISTERED, choices)
    assert caught.value.param == path


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
