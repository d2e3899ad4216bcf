"""How many images the vision tower computes in a step."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.engine.deltas import SequenceDelta
from penstock.engine.errors import ConfigurationError
from penstock.engine.multimodal.inputs import PromptImage
from penstock.engine.scheduling.step import Step, TokenBudget
from penstock.engine.text.tokenizer import Tokenizer
from tests.engine.multimodal.test_image_equivalence import NUM_NEW_TOKENS, assert_same, engine, subject
from tests.engines import core_over, run
from tests.tiny_multimodal import byte_backend

IMAGE_TOKENS = 16  # of one image


@dataclass
class ImagesBegun:
    """Sees how many images begin in each step."""

    numbers: list[int] = field(default_factory=list)

    def begin(self, step: Step) -> None:
        starts = [
            sequence.num_computed_tokens <= source.positions[0] < sequence.num_computed_tokens + num_tokens
            for sequence, num_tokens in step.num_tokens.items()
            for source in sequence.request.embeds
        ]
        self.numbers.append(sum(starts))

    def end(self, step: Step, deltas: dict[str, list[SequenceDelta]]) -> None:
        """Nothing is counted there."""


def test_a_step_begins_no_more_images_than_its_budget_has_tokens() -> None:
    model = subject("llava")
    places = [2, 3, 5, 6, 4]  # one of them has two images, one none
    for budget, at_most in ((2 * IMAGE_TOKENS - 1, 1), (3 * IMAGE_TOKENS - 1, 2), (256, 5)):
        with engine(model, max_num_batched_tokens=budget, max_num_seqs=5, enable_prefix_caching=False) as core:
            core.observer = seen = ImagesBegun()
            runs = run(core, [model.prompts[place] for place in places], max_tokens=NUM_NEW_TOKENS)
        assert_same(runs, [model.references[place] for place in places])
        assert max(seen.numbers) == at_most
        assert sum(seen.numbers) == 5


@pytest.mark.parametrize(
    ("budget", "first", "granted", "num_tokens", "left"),
    [
        (100, 0, 10, 10, 90),  # before the image
        (100, 0, 15, 30, 70),  # the rest of the image fits
        (25, 0, 25, 10, 15),  # it does not, and waits
        (15, 10, 15, 20, 0),  # it is larger than any step
        (100, 17, 5, 13, 87),  # its beginning was cached
        (12, 17, 12, 13, 0),  # and the rest is still too much, of an image larger than any step
        (25, 17, 12, 13, 12),
        (100, 30, 5, 5, 95),  # behind it
    ],
)
def test_an_image_whose_tokens_attend_in_both_directions_is_not_cut(
    budget: int, first: int, granted: int, num_tokens: int, left: int
) -> None:
    image = PromptImage(range(10, 30), b"", {}, spans=((10, 30),))
    sequence: Any = SimpleNamespace(num_computed_tokens=first, request=SimpleNamespace(embeds=(image,)))
    tokens = TokenBudget(budget)
    assert tokens.take(granted, 0) == granted
    assert tokens.fit_images(sequence, granted) == num_tokens
    assert tokens.left == left


def test_a_step_has_room_for_an_image_beside_all_sequences() -> None:
    loaded = subject("gemma3").loaded
    with pytest.raises(ConfigurationError, match=r"--max-num-batched-tokens 30: an image of this model takes 16 tokens.* give 80 or more"):
        core_over(loaded, Tokenizer(byte_backend(), {}, {}), max_num_batched_tokens=30)


def test_an_image_larger_than_the_budget_is_computed_alone() -> None:
    model = subject("llava")
    with engine(model, max_num_batched_tokens=7, max_num_seqs=4, enable_prefix_caching=False) as core:
        core.observer = seen = ImagesBegun()
        run(core, model.prompts, max_tokens=1)
    assert max(seen.numbers) == 1
