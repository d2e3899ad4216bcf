"""How many images the vision tower computes in a step."""

from dataclasses import dataclass, field

from penstock.engine.deltas import SequenceDelta
from penstock.engine.scheduling.step import Step
from tests.engine.multimodal.test_image_equivalence import NUM_NEW_TOKENS, assert_same, engine, subject
from tests.engines import run

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


def test_an_image_larger_than_the_budget_is_computed_alone() -> None:
    model = subject("llava")
    with engine(model, max_num_batched_tokens=7, max_num_seqs=4, enable_prefix_caching=False) as core:
        core.observer = seen = ImagesBegun()
        run(core, model.prompts, max_tokens=1)
    assert max(seen.numbers) == 1
