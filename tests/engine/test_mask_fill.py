"""Masks for the tokens of a draft: as far as the grammar goes along, and with nothing left of it in the matcher."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.engine import mask_fill
from penstock.engine.answer import Answer
from penstock.engine.bitmask import allocate_bitmask
from penstock.engine.detokenizer import Detokenizer
from penstock.engine.grammar_gate import GrammarGate
from penstock.engine.mask_fill import MaskFill
from tests.fakes import EOS, LETTERS, TOKENIZER, VOCAB_SIZE, ids
from tests.matchers import Matcher, Spelling, Walk


def run(matcher: Matcher, draft: list[int], draft_time: float = 60.0, **options: Any) -> MaskFill:
    gate = GrammarGate(matcher, None, stop_token_ids=frozenset({EOS}), **options)
    answer = Answer(Detokenizer(TOKENIZER), None, None, (), False, True)
    fill = MaskFill(gate, answer, allocate_bitmask(1 + len(draft), VOCAB_SIZE).fill_(-1), draft)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mask_fill, "DRAFT_TIME", draft_time)
        fill.run()
    assert fill.is_done
    assert fill.error is None
    assert matcher.path == []
    return fill


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
    fill = run(walk, draft)
    assert fill.num_to_sample == 1 + num_right or walk.allowed(draft[:num_right]) == [EOS]
    for place in range(fill.num_to_sample):
        alone = run(Reached(seed, draft[:place]), [])
        assert torch.equal(fill.rows_DW[place], alone.rows_DW[0])


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


def test_what_is_forced_is_not_sampled_whatever_was_drafted() -> None:
    fill = run(Spelling("abc", forces=True), ids("abc"), may_force=True)
    assert fill.forced == ids("abc")
    assert fill.num_to_sample == 0
