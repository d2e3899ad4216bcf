"""The whole distribution of a row, as exact sampling draws from it, against the plain reference of the sampler's own tests."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engine.sampling.distribution import Distribution, MaskPlace
from penstock.engine.sampling.params import SamplingParams
from penstock.engine.sampling.sampler import NO_TOKEN_LEFT, Sampler
from tests.engine.sampling.test_sampler import VOCAB, make_state, pack, reference_distribution, some_logits

PROMPT, OUTPUT = [1, 5, 9], [5, 12, 3]


def found(params: SamplingParams, place: MaskPlace, legal: frozenset[int] | None, seed: int = 0) -> Distribution:
    state = make_state(params, PROMPT, OUTPUT)
    state.mask_place = place
    output = Sampler(VOCAB, "cpu").sample(some_logits(seed=seed), [state], None if legal is None else pack(legal)[None])
    assert not output.failures
    return output.distributions[0]


FIELDS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.5, 1.0, 1.7]),
        "top_k": st.sampled_from([0, 2, 7]),
        "top_p": st.sampled_from([0.3, 0.9, 1.0]),
        "min_p": st.sampled_from([0.0, 0.2]),
        "repetition_penalty": st.sampled_from([1.0, 1.3]),
        "presence_penalty": st.sampled_from([0.0, 0.5]),
        "logit_bias": st.dictionaries(st.integers(0, VOCAB - 1), st.sampled_from([-2.0, 3.0]), max_size=2),
    }
)


@given(fields=FIELDS, legal=st.frozensets(st.integers(0, VOCAB - 1), min_size=1), seed=st.integers(0, 20), place=st.sampled_from(MaskPlace))
@settings(max_examples=40)
def test_the_distribution_is_the_plain_references_with_the_mask_after_or_before(
    fields: dict[str, Any], legal: frozenset[int], seed: int, place: MaskPlace
) -> None:
    params = SamplingParams(**fields)
    logits = some_logits(seed=seed)[0].tolist()
    if place is MaskPlace.BEFORE:
        expected = reference_distribution(logits, params, PROMPT, OUTPUT, legal=legal)
    else:
        whole = reference_distribution(logits, params, PROMPT, OUTPUT)
        expected = [share if token_id in legal else 0.0 for token_id, share in enumerate(whole)]
    got = found(params, place, legal, seed)
    dense = np.zeros(VOCAB)
    dense[got.token_ids] = got.probs
    np.testing.assert_allclose(dense, expected, atol=1e-5)
    assert (got.probs > 0).all()
    assert got.mass == pytest.approx(sum(expected), abs=1e-5)


def test_a_mask_may_leave_nothing_that_the_parameters_leave() -> None:
    best = int(some_logits()[0].argmax())
    got = found(SamplingParams(temperature=1.0, top_p=1e-6), MaskPlace.AFTER, frozenset(range(VOCAB)) - {best})
    assert got.mass == 0


def test_logits_that_are_not_finite_and_masks_without_a_token_fail_the_row_alone() -> None:
    bad, states = some_logits(3), [make_state(SamplingParams(temperature=1.0)) for _ in range(3)]
    bad[0, 4] = math.nan
    for state in states[:2]:
        state.mask_place = MaskPlace.AFTER
    masks = torch.stack([pack(frozenset(range(VOCAB))), pack(frozenset()), pack(frozenset({3}))])
    output = Sampler(VOCAB, "cpu").sample(bad, states, masks)
    assert "not finite" in output.failures[0]
    assert output.failures[1] == NO_TOKEN_LEFT
    assert output.distributions == {}
    assert output.token_ids[2] == 3
