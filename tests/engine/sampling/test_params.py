import dataclasses
import math
from typing import Any

import pytest

from penstock.engine.errors import InvalidRequest
from penstock.engine.sampling.params import MIN_TEMPERATURE, BeamSearchParams, SamplingParams, parameters_of

HUGE = 10**400


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("n", [0, -1, 129, HUGE]),
        ("temperature", [-0.1, 2.1, math.nan, math.inf, HUGE]),
        ("top_p", [0, -1, 1.01, math.nan, HUGE]),
        ("top_k", [-2]),
        ("min_p", [-0.1, 1.1, math.nan]),
        ("presence_penalty", [-2.1, 2.1, math.nan, -HUGE]),
        ("frequency_penalty", [-2.1, 2.1, math.inf]),
        ("repetition_penalty", [0, -1, 1e-300, 101, math.nan, HUGE]),
        ("seed", [2**63, -(2**63) - 1]),
        ("max_tokens", [-1]),
        ("min_tokens", [-1]),
        ("stop", [("",)]),
        ("bad_words", [("x", "")]),
        ("logprobs", [-1, 21]),
        ("prompt_logprobs", [-1, 21]),
        ("logit_bias", [{1: math.nan}, {1: math.inf}, {1: HUGE}]),
        ("thinking_token_budget", [-1]),
    ],
)
def test_values_out_of_range_are_refused_by_name(name: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(InvalidRequest, match=f"`{name}` must be") as caught:
            SamplingParams(**{name: value})
        assert caught.value.param == name


def test_min_tokens_beyond_max_tokens_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="at most max_tokens"):
        SamplingParams(max_tokens=3, min_tokens=4)
    SamplingParams(max_tokens=3, min_tokens=3)


def test_tiny_temperature_is_raised_and_none_is_greedy() -> None:
    assert SamplingParams(temperature=1e-9).temperature == MIN_TEMPERATURE
    assert SamplingParams(temperature=0).is_greedy
    assert SamplingParams(top_k=1).is_greedy
    assert not SamplingParams(top_k=-1).is_greedy


@pytest.mark.parametrize("name", ["stop_token_ids", "allowed_token_ids", "logit_bias"])
@pytest.mark.parametrize("token_id", [-1, 100])
def test_token_ids_outside_the_vocabulary_are_refused_by_name(name: str, token_id: int) -> None:
    ids: Any = {token_id: 1.0} if name == "logit_bias" else (5, token_id)
    with pytest.raises(InvalidRequest, match=f"`{name}` holds token id {token_id}, outside the vocabulary of 100 tokens") as caught:
        SamplingParams(**{name: ids}).check_token_ids(100)
    assert caught.value.param == name


def test_token_ids_inside_the_vocabulary_pass() -> None:
    SamplingParams(stop_token_ids=(0, 99), allowed_token_ids=(0, 99), logit_bias={0: 1.0, 99: -1.0}).check_token_ids(100)


def test_every_field_is_declared_but_the_one_that_no_client_gives() -> None:
    assert {field.name for field in dataclasses.fields(SamplingParams)} - set(parameters_of(SamplingParams)) == {"length_stop_reason"}


def test_defaults_are_of_their_type_and_in_range() -> None:
    for declared in parameters_of(SamplingParams).values():
        assert declared.meaning
        assert declared.has_type(declared.default)
        assert declared.is_in_range(declared.default)
        assert not declared.has_effect(declared.default)


def test_bounds_are_in_range_and_what_is_beyond_is_not() -> None:
    for declared in parameters_of(SamplingParams).values():
        if declared.low is not None:
            assert declared.is_in_range(declared.low) != declared.is_above
            assert not declared.is_in_range(math.nextafter(declared.low, -math.inf))
        if declared.high is not None:
            assert declared.is_in_range(declared.high)
            assert not declared.is_in_range(declared.high + 1)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("beam_width", 0),
        ("beam_width", 129),
        ("beam_width", "2"),
        ("beam_width", 2.5),
        ("beam_width", True),
        ("length_penalty", "long"),
        ("early_stopping", 1),
        ("stop", 5),
        ("stop", [5]),
        ("stop_token_ids", ["a"]),
        ("max_tokens", 1.5),
        ("min_tokens", None),
        ("temperature", None),
        ("length_penalty", float("nan")),
        ("length_penalty", 11.0),
        ("early_stopping", "sometimes"),
        ("n", 0),
        ("n", 4),
        ("temperature", -0.1),
        ("temperature", float("inf")),
        ("max_tokens", 0),
    ],
)
def test_what_cannot_be_served_is_refused_by_the_name_of_its_field(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        BeamSearchParams(**{"beam_width": 3, name: value})
    assert refusal.value.param == name


def test_what_goes_beside_it_in_a_request_says_the_same() -> None:
    beam = BeamSearchParams(4, 20, ignore_eos=True, stop="END", stop_token_ids=[7], min_tokens=2, n=3)
    params = beam.sampling_params(repetition_penalty=1.5)
    assert (params.n, params.max_tokens, params.min_tokens, params.ignore_eos) == (3, 20, 2, True)
    assert (params.stop, params.stop_token_ids, params.repetition_penalty, params.temperature) == (("END",), (7,), 1.5, 0.0)
    assert BeamSearchParams(4).sampling_params().n == 4
