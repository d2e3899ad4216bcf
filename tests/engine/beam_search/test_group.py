"""Beam search over a language small enough to know every answer in it."""

import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import pytest

from penstock.engine.beam_search import BeamGroup, Candidate, Ending
from penstock.engine.deltas import FinishReason

VOCAB = range(4)
EOS = 3


def logprob_of(token_ids: Sequence[int], token_id: int) -> float:
    """Of a language in which every next token depends on all before."""
    weights = [random.Random(repr((list(token_ids), token))).random() ** 2 for token in VOCAB]
    return math.log(weights[token_id] / sum(weights))


def candidates_of(token_ids: Sequence[int]) -> list[Candidate]:
    return sorted(((token, logprob_of(token_ids, token)) for token in VOCAB), key=lambda pair: -pair[1])


def search(
    width: int, max_tokens: int, ends: Callable[[list[int]], Ending | None] | None = None, **rules: float | bool | Literal["never"]
) -> BeamGroup:
    group = BeamGroup(width=width, max_tokens=max_tokens, num_candidates=2 * width, **rules)  # type: ignore[arg-type]
    while not group.is_done:
        beams = group.beams

        def ending_of(parent: int, token_id: int, beams: list = beams) -> Ending | None:  # type: ignore[type-arg]
            said = [*beams[parent].token_ids, token_id]
            if ends is not None:
                return ends(said)
            return Ending(FinishReason.STOP) if token_id == EOS else None

        continuations = group.advance([candidates_of(beam.token_ids) for beam in beams], ending_of)
        assert [[*beams[step.parent].token_ids, step.token_id] for step in continuations] == [beam.token_ids for beam in group.beams]
    return group


def all_answers(max_tokens: int) -> list[list[int]]:
    letters = [token for token in VOCAB if token != EOS]
    ended = [[*said, EOS] for length in range(max_tokens) for said in itertools.product(letters, repeat=length)]
    return [*ended, *map(list, itertools.product(letters, repeat=max_tokens))]


def total(token_ids: list[int]) -> float:
    return sum(logprob_of(token_ids[:place], token) for place, token in enumerate(token_ids))


@pytest.mark.parametrize("length_penalty", [0.0, 1.0, -0.5, 2.0])
def test_a_search_that_is_wide_enough_finds_the_best_of_all_answers(length_penalty: float) -> None:
    group = search(400, 4, length_penalty=length_penalty, early_stopping="never")
    best = sorted(((total(answer) / len(answer) ** length_penalty, answer) for answer in all_answers(4)), reverse=True)
    assert [hypothesis.token_ids for hypothesis in group.hypotheses] == [answer for _, answer in best]
    assert [hypothesis.score for hypothesis in group.hypotheses] == pytest.approx([score for score, _ in best])


@pytest.mark.parametrize("width", [1, 2, 3, 5])
def test_every_answer_is_what_it_is_scored_for(width: int) -> None:
    group = search(width, 6)
    assert 1 <= len(group.hypotheses) <= width
    for hypothesis in group.hypotheses:
        assert hypothesis.cumulative_logprob == pytest.approx(total(hypothesis.token_ids))
        assert hypothesis.score == pytest.approx(hypothesis.cumulative_logprob / len(hypothesis.token_ids))
        is_ended = hypothesis.token_ids[-1] == EOS
        assert hypothesis.ending.reason is (FinishReason.STOP if is_ended else FinishReason.LENGTH)
        assert is_ended or len(hypothesis.token_ids) == 6


def test_a_width_of_one_takes_the_likeliest_token_until_one_ends_it() -> None:
    said: list[int] = []
    while EOS not in said and len(said) < 8:
        said.append(candidates_of(said)[0][0] or 0)
    assert [hypothesis.token_ids for hypothesis in search(1, 8).hypotheses] == [said]


def test_early_stopping_ends_sooner_the_less_patient_it_is() -> None:
    modes: list[bool | Literal["never"]] = [True, False, "never"]
    lengths = [search(3, 12, early_stopping=mode, length_penalty=1.0).num_tokens for mode in modes]
    assert lengths == sorted(lengths)
    assert lengths[0] < lengths[-1]


def test_an_ending_that_is_not_among_the_best_is_dropped() -> None:
    group = BeamGroup(width=1, max_tokens=5, num_candidates=2)
    continuations = group.advance([[(0, -0.1), (EOS, -2.0)]], lambda _, token_id: Ending(FinishReason.STOP) if token_id == EOS else None)
    assert [step.token_id for step in continuations] == [0]
    assert not group.hypotheses


def test_what_cannot_matter_is_not_asked_about() -> None:
    asked = []
    group = BeamGroup(width=2, max_tokens=5, num_candidates=4)

    def ending_of(parent: int, token_id: int) -> None:
        asked.append((parent, token_id))

    group.advance([[(0, -0.1), (1, -0.2), (2, -0.3), (3, -0.4)]], ending_of)
    assert asked == [(0, 0), (0, 1)]


def test_a_beam_may_end_as_it_is() -> None:
    group = BeamGroup(width=2, max_tokens=5, num_candidates=4)
    group.advance([[(0, -0.1), (1, -0.2)]], lambda *_: None)
    group.advance([[(None, 0.0)], [(1, -0.2)]], lambda *_: None)
    assert [hypothesis.token_ids for hypothesis in group.hypotheses] == [[0]]
    assert [beam.token_ids for beam in group.beams] == [[1, 1]]


def test_a_search_whose_beams_all_end_is_over_with_what_it_has() -> None:
    group = search(3, 5, lambda said: Ending(FinishReason.STOP, "x"))
    assert group.is_done
    assert len(group.hypotheses) == 3
    assert {hypothesis.ending.stop_reason for hypothesis in group.hypotheses} == {"x"}


def test_of_the_candidates_only_as_many_are_looked_at_as_matter() -> None:
    read: list[Candidate] = []

    class Watched(list[Candidate]):
        def __iter__(self) -> Iterator[Candidate]:
            for candidate in super().__iter__():
                read.append(candidate)
                yield candidate

    group = BeamGroup(width=8, max_tokens=9, num_candidates=24)
    dice = random.Random(1)
    for _ in range(4):
        read.clear()
        candidates = [sorted(((token, -dice.random()) for token in range(24)), key=lambda pair: -pair[1]) for _ in group.beams]
        sums = [
            (beam.cumulative_logprob + logprob, parent, token)
            for parent, (beam, own) in enumerate(zip(group.beams, candidates, strict=True))
            for token, logprob in own
        ]
        continuations = group.advance([Watched(own) for own in candidates], lambda parent, token_id: None)
        assert [(step.parent, step.token_id) for step in continuations] == [
            (parent, token) for _, parent, token in sorted(sums, reverse=True)[:8]
        ]
        assert len(read) <= 2 * 8
