import json
from typing import Any

import pytest

from penstock.engine.errors import ContextLengthExceeded, InvalidRequest
from penstock.engine.sampling.params import SamplingParams
from penstock.serving.endpoints.bodies import decode
from penstock.serving.requests import TAKEN_AS_THEY_ARE, ChatCompletionRequest, TokenLimit, sampling_params, token_limit


def params_of(defaults: dict[str, Any] | None = None, **fields: Any) -> SamplingParams:
    body, _ = decode(json.dumps({"messages": []} | fields).encode(), ChatCompletionRequest)
    return sampling_params(
        body, limit=TokenLimit(100, is_default=False), logprobs=None, prompt_logprobs=None, defaults=defaults or {}, vocab_size=50
    )


def test_without_fields_the_defaults_hold() -> None:
    assert params_of() == SamplingParams(max_tokens=100)
    nulls = dict.fromkeys(TAKEN_AS_THEY_ARE)
    assert params_of(**nulls) == SamplingParams(max_tokens=100)


def test_the_models_defaults_hold_where_the_request_says_nothing() -> None:
    defaults = {"temperature": 0.6, "top_k": 20, "max_tokens": 5, "something": 1}
    params = params_of(defaults, temperature=0, top_k=None)
    assert (params.temperature, params.top_k, params.max_tokens) == (0, 20, 100)


def test_one_stop_string_or_several() -> None:
    assert params_of(stop="a").stop == ("a",)
    assert params_of(stop=["a", "b"]).stop == ("a", "b")
    assert params_of(stop=[]).stop == ()


def test_bias_has_string_keys() -> None:
    assert params_of(logit_bias={"3": 7, "4": -1000, "5": 1e300}).logit_bias == {3: 7, 4: -1000, 5: 1e300}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logit_bias": {"50": 1}}, "logit_bias"),
        ({"stop_token_ids": [50]}, "stop_token_ids"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"min_tokens": 101}, "min_tokens"),
        ({"bad_words": [""]}, "bad_words"),
        ({"top_p": 0}, "top_p"),
        ({"n": 129}, "n"),
    ],
)
def test_what_is_out_of_range_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        params_of(**fields)
    assert caught.value.param == param


def limit(requested: int | None, num_prompt_tokens: int, default: int | None = None) -> TokenLimit:
    return token_limit(
        requested, "max_tokens", prompt_param="prompt", default=default, num_prompt_tokens=num_prompt_tokens, max_model_len=100
    )


def test_an_answer_gets_what_it_asked_for_else_the_default_else_the_rest_of_the_context() -> None:
    assert limit(7, 90) == TokenLimit(7, is_default=False)
    assert limit(10, 90, default=3) == TokenLimit(10, is_default=False)
    assert limit(None, 90, default=3) == TokenLimit(3, is_default=True)
    assert limit(None, 90, default=50) == TokenLimit(10, is_default=False)
    assert limit(None, 90) == TokenLimit(10, is_default=False)
    assert limit(0, 100) == TokenLimit(0, is_default=False)


@pytest.mark.parametrize(
    ("requested", "num_prompt_tokens", "param"), [(11, 90, "max_tokens"), (1, 100, "prompt"), (None, 100, "prompt"), (0, 101, "prompt")]
)
def test_what_does_not_fit_the_context_is_refused(requested: int | None, num_prompt_tokens: int, param: str) -> None:
    with pytest.raises(ContextLengthExceeded, match="100 tokens") as caught:
        limit(requested, num_prompt_tokens)
    assert caught.value.param == param
