"""Masks for the tokens of a draft: as far as the grammar goes along, and with nothing left of it in the matcher."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from penstock.engine.constraints import masks
from penstock.engine.constraints.masks import MaskJob, MaskState, allocate_bitmask
from penstock.engine.constraints.state import ConstraintState
from penstock.engine.text.answer import Answer
from penstock.engine.text.streaming import Detokenizer
from tests.fakes import EOS, LETTERS, TOKENIZER, VOCAB_SIZE, ids
from tests.matchers import Matcher, Spelling, Walk


def run(matcher: Matcher, draft: list[int], draft_time: float = 60.0, **options: Any) -> MaskJob:
    job = job_of(ConstraintState(matcher, None, stop_token_ids=frozenset({EOS}), **options), draft, draft_time)
    assert matcher.path == []
    return job


def job_of(constraint: ConstraintState, draft: list[int], draft_time: float = 60.0) -> MaskJob:
    answer = Answer(Detokenizer(TOKENIZER), None, None, (), False, True)
    job = MaskJob(constraint, answer, allocate_bitmask(1 + len(draft), VOCAB_SIZE).fill_(-1), draft)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(masks, "DRAFT_TIME", draft_time)
        job.queue()
        job.run()
    assert job.is_done
    assert job.error is None
    return job


@given(seed=st.integers(0, 99), choices=st.lists(st.integers(0, 9), max_size=6), wrong_at=st.integers(0, 9))
def test_every_row_is_what_the_grammar_says_after_the_tokens_before_it(seed: int, choices: list[int], wrong_at: int) -> None:
    walk = Walk(seed, forces=False)
    draft: list[int] = []
    for choice in choices:
        allowed = [token_id for token_id in walk.allowed(draft) if token_id != EOS]
        if not allowed:
            break
        draft.append(allowed[choice % len(allowed)])
    num_right = len(draft)
    if wrong_at < len(draft):
        wrong = [token_id for token_id in LETTERS if token_id not in walk.allowed(draft[:wrong_at])]
        draft[wrong_at] = wrong[0]
        num_right = wrong_at
    job = run(walk, draft)
    assert job.num_to_sample == 1 + num_right or walk.allowed(draft[:num_right]) == [EOS]
    for place in range(job.num_to_sample):
        alone = run(Reached(seed, draft[:place]), [])
        assert torch.equal(job.rows_DW[place], alone.rows_DW[0])


class Reached(Walk):
    """A walk that begins after some tokens."""

    def __init__(self, seed: int, beginning: list[int]) -> None:
        super().__init__(seed, forces=False)
        self.beginning = beginning

    def allowed(self, path: list[int]) -> list[int]:
        return super().allowed(self.beginning + path)


def test_a_draft_goes_no_further_than_the_grammars_end() -> None:
    assert run(Spelling("abc"), ids("abc")).num_to_sample == 3
    assert run(Spelling("abc", may_go_on=True), [*ids("abc"), EOS]).num_to_sample == 4


def test_no_mask_is_begun_for_a_draft_once_time_is_up() -> None:
    assert run(Spelling("abc"), ids("abc"), draft_time=-1.0).num_to_sample == 1


class Fragile(Spelling):
    """Fails, in one of its methods, once it has taken `num_good` letters."""

    def __init__(self, text: str, method: str, num_good: int) -> None:
        super().__init__(text)
        self.method = method
        self.num_good = num_good

    def fail(self, method: str) -> None:
        if method == self.method and len(self.path) >= self.num_good:
            raise RuntimeError("too slow")

    def fill_bitmask(self, row: Tensor) -> None:
        self.fail("fill_bitmask")
        super().fill_bitmask(row)

    def advance(self, token_id: int) -> bool:
        self.fail("advance")
        return super().advance(token_id)

    @property
    def finished(self) -> bool:
        self.fail("finished")
        return super().finished


@pytest.mark.parametrize(("method", "num_good", "num_filled"), [("fill_bitmask", 2, 2), ("advance", 2, 3), ("finished", 2, 2)])
def test_a_grammar_that_fails_at_a_guess_ends_the_guess_and_guesses_no_more(method: str, num_good: int, num_filled: int) -> None:
    fragile = Fragile("abcde", method, num_good)
    constraint = ConstraintState(fragile, None, stop_token_ids=frozenset({EOS}))
    assert job_of(constraint, ids("abcd")).num_to_sample == num_filled
    assert fragile.path == []
    answer = Answer(Detokenizer(TOKENIZER), None, None, (), False, True)
    fragile.method = ""
    assert constraint.advance(answer, ids("a")[0])
    assert job_of(constraint, ids("bcd")).num_to_sample == 1


def test_a_grammar_that_fails_at_what_comes_next_ends_its_request() -> None:
    job = MaskJob(
        ConstraintState(Fragile("abc", "fill_bitmask", 0), None),
        Answer(Detokenizer(TOKENIZER), None, None, (), False, True),
        allocate_bitmask(1, VOCAB_SIZE),
    )
    job.queue()
    job.run()
    assert job.state is MaskState.FAILED
    assert job.error == "the grammar raised RuntimeError: too slow"


def test_what_is_forced_is_not_sampled_whatever_was_drafted() -> None:
    job = run(Spelling("abc", forces=True), ids("abc"), may_force=True)
    assert job.forced == ids("abc")
    assert job.num_to_sample == 0
