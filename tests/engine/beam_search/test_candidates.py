"""What beam search chooses among: the sampler's candidates against a plain reference, and against processors of transformers."""

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import LogitsProcessorList, MinLengthLogitsProcessor, RepetitionPenaltyLogitsProcessor

from penstock.engine.sampling.params import SamplingParams
from penstock.engine.sampling.rows import SamplingState
from penstock.engine.sampling.sampler import NO_TOKEN_LEFT, Sampler
from tests.engine.sampling.test_sampler import STOP_IDS, VOCAB, make_state, pack, some_logits

Pairs = list[tuple[int, float]]


def searching(num_candidates: int, prompt: Sequence[int] = (), output: Sequence[int] = (), **options: Any) -> SamplingState:
    processors = options.pop("processors", ())
    bad_words = options.pop("bad_words_ids", ())
    state = make_state(SamplingParams(**({"temperature": 0.0} | options)), prompt, output, processors=processors, bad_words=bad_words)
    state.num_candidates = num_candidates
    return state


def candidates(logits_V: Tensor, state: SamplingState, legal: frozenset[int] | None = None) -> Pairs:
    bitmask_BW = None if legal is None else pack(legal)[None]
    output = Sampler(VOCAB, "cpu").sample(logits_V[None], [state], bitmask_BW)
    assert not output.failures
    return output.candidates[0]


def plainly(scores_V: Tensor, num_candidates: int) -> Pairs:
    """All tokens sorted in Python, ties by id, the impossible ones left out."""
    pairs = [(token_id, score) for token_id, score in enumerate(scores_V.tolist()) if score > -math.inf]
    return sorted(pairs, key=lambda pair: (-pair[1], pair[0]))[:num_candidates]


@given(
    seed=st.integers(0, 50),
    num_candidates=st.integers(1, 2 * VOCAB),
    temperature=st.sampled_from([0.0, 0.5, 1.0, 1.7]),
    legal=st.none() | st.frozensets(st.integers(0, VOCAB - 1), min_size=1),
    bias=st.dictionaries(st.integers(0, VOCAB - 1), st.sampled_from([-2.0, 3.0])),
    bfloat16=st.booleans(),
)
@settings(max_examples=60)
def test_candidates_are_the_best_log_probabilities_among_those_allowed(
    seed: int, num_candidates: int, temperature: float, legal: frozenset[int] | None, bias: dict[int, float], bfloat16: bool
) -> None:
    logits_V = some_logits(seed=seed)[0]
    logits_V = logits_V.bfloat16() if bfloat16 else logits_V
    scores_V = (logits_V.float() / (temperature or 1.0)).log_softmax(-1)
    for token_id, value in bias.items():
        scores_V[token_id] += value
    if legal is not None:
        scores_V[[token_id for token_id in range(VOCAB) if token_id not in legal]] = -math.inf
    got = candidates(logits_V, searching(num_candidates, temperature=temperature, logit_bias=bias), legal)
    expected = plainly(scores_V, num_candidates)
    assert [token_id for token_id, _ in got] == [token_id for token_id, _ in expected]
    assert [score for _, score in got] == pytest.approx([score for _, score in expected], abs=1e-5)


def test_penalties_and_least_lengths_work_on_log_probabilities_as_in_transformers() -> None:
    prompt, output = [1, 5, 9], [5, 12, 3]
    logits_V = some_logits(seed=3)[0]
    stops = sorted(STOP_IDS)
    processors = LogitsProcessorList(
        [RepetitionPenaltyLogitsProcessor(1.4), MinLengthLogitsProcessor(len(prompt) + 5, stops, device="cpu")],
    )
    scores_BV = processors(torch.tensor([prompt + output]), logits_V[None].float().log_softmax(-1))  # type: ignore[arg-type]
    got = candidates(logits_V, searching(20, prompt, output, repetition_penalty=1.4, min_tokens=5, max_tokens=9))
    assert dict(got) == pytest.approx(dict(plainly(scores_BV[0], 20)), abs=1e-5)


def test_bad_words_and_allowed_ids_leave_tokens_out() -> None:
    state = searching(VOCAB, output=[4], allowed_token_ids=(2, 3, 7), bad_words_ids=[[4, 3]])
    assert {token_id for token_id, _ in candidates(some_logits()[0], state)} == {2, 7}


def test_logits_processors_of_candidates_get_log_probabilities() -> None:
    seen: list[Tensor] = []

    def boost(token_ids: list[int], logits: Tensor) -> Tensor:
        seen.append(logits.clone())
        logits[11] = 0.5
        return logits

    logits_V = some_logits()[0]
    got = candidates(logits_V, searching(2, processors=[boost]))
    torch.testing.assert_close(seen[0], logits_V.log_softmax(-1))
    assert got[0] == (11, 0.5)


def test_rows_with_and_without_candidates_share_a_batch_and_a_pass_of_few_rows() -> None:
    sampler = Sampler(VOCAB, "cpu")
    sampler._rows_per_pass = 2
    logits_BV = some_logits(5)
    states = [searching(3 + row) if row % 2 else make_state(SamplingParams(temperature=0, logprobs=1)) for row in range(5)]
    output = sampler.sample(logits_BV, states, None)
    assert set(output.candidates) == {1, 3}
    for row in (1, 3):
        assert [token_id for token_id, _ in output.candidates[row]] == [
            token_id for token_id, _ in plainly(logits_BV[row].log_softmax(-1), 3 + row)
        ]
        assert output.logprobs[row] is None
    for row in (0, 2, 4):
        assert output.token_ids[row] == int(logits_BV[row].argmax())
        assert output.logprobs[row] is not None


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_logits_that_are_not_finite_fail_the_row(value: float) -> None:
    logits_V = some_logits()[0]
    logits_V[7] = value
    output = Sampler(VOCAB, "cpu").sample(torch.stack([logits_V, some_logits()[0]]), [searching(3), searching(3)], None)
    assert "not finite" in output.failures[0]
    assert set(output.candidates) == {1}


def test_a_row_with_nothing_left_fails_with_that_reason() -> None:
    output = Sampler(VOCAB, "cpu").sample(some_logits(), [searching(3, allowed_token_ids=(2,), bad_words_ids=[[2]])], None)
    assert output.failures == {0: NO_TOKEN_LEFT}
    assert output.candidates == {}
