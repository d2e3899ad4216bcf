"""What may be asked of beam search."""

from typing import Any

import pytest

from penstock.engine.errors import InvalidRequest
from penstock.engine.sampling.params import BeamSearchParams


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
