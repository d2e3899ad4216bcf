"""Sampling parameters as a caller of the library writes them."""

import dataclasses
import pickle
from typing import Any

import pytest

from penstock import GuidedDecodingParams, InvalidRequest, RequestOutputKind, SamplingParams, StructuredOutputsParams
from penstock.serving.structured_outputs import grammar_spec


def test_lists_and_single_strings_are_taken() -> None:
    params = SamplingParams(temperature=0.8, stop="end", stop_token_ids=[1, 2], bad_words=["no"], allowed_token_ids=[3], max_tokens=10)
    assert (params.stop, params.stop_token_ids, params.bad_words, params.allowed_token_ids) == (("end",), (1, 2), ("no",), (3,))
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")
    assert dataclasses.replace(params, n=2).stop == ("end",)
    assert pickle.loads(pickle.dumps(params)) == params


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": True}, "top_p"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"n": None}, "n"),
        ({"ignore_eos": "yes"}, "ignore_eos"),
        ({"detokenize": 1}, "detokenize"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"logits_processors": 3}, "logits_processors"),
        ({"logits_processors": len}, "logits_processors[0]"),
        ({"stop": [1]}, "stop"),
        ({"stop": [""]}, "stop"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"logits_processors": [{"name": 3}]}, "logits_processors[0]"),
        ({"logits_processors": [len]}, "logits_processors[0]"),
        ({"structured_outputs": {"json": {}}}, "structured_outputs"),
        ({"structured_outputs": StructuredOutputsParams(regex=3)}, "structured_outputs"),  # type: ignore[arg-type]
        ({"structured_outputs": StructuredOutputsParams(regex="a"), "guided_decoding": GuidedDecodingParams(regex="a")}, "guided_decoding"),
        ({"output_kind": 1}, "output_kind"),
        ({"detokenize": False, "stop": "x"}, "detokenize"),
    ],
)
def test_what_cannot_be_is_refused_by_name(given: dict[str, Any], field: str) -> None:
    with pytest.raises(ValueError, match=field.partition("[")[0]) as refused:  # what vLLM's callers catch
        SamplingParams(**given)
    assert isinstance(refused.value, InvalidRequest)
    assert refused.value.param == field


def test_single_names_are_lists_of_one() -> None:
    assert [choice.name for choice in SamplingParams(logits_processors="shout").processor_choices()] == ["shout"]
    (choice,) = SamplingParams(logits_processors={"name": "shout", "arguments": {"by": 2}}).processor_choices()
    assert (choice.name, choice.arguments) == ("shout", {"by": 2})
    assert SamplingParams(additional_outputs="logits").additional_outputs == ("logits",)


def test_a_whole_number_is_said_to_be_wanted_where_one_is() -> None:
    with pytest.raises(InvalidRequest, match=r"`max_tokens` must be an integer, got 1\.5"):
        SamplingParams(max_tokens=1.5)  # type: ignore[arg-type]


def test_none_is_no_bias() -> None:
    nothing: Any = None
    assert SamplingParams(logit_bias=nothing) == SamplingParams()


def test_fields_that_there_are_not_are_refused() -> None:
    given: Any = {"best_of": 3}
    with pytest.raises(TypeError, match="best_of"):
        SamplingParams(**given)


def test_kinds_of_outputs_have_vllms_names() -> None:
    assert [kind.name for kind in RequestOutputKind] == ["CUMULATIVE", "DELTA", "FINAL_ONLY"]


def test_a_schema_may_be_read_as_open() -> None:
    params = SamplingParams(structured_outputs=StructuredOutputsParams(json={"properties": {"a": {}}}, additional_properties="open"))
    spec = grammar_spec(params.constraint_fields(), "closed")
    assert spec == grammar_spec(params.constraint_fields(), "open")
    assert spec is not None
    assert spec.text == '{"properties": {"a": {}}}'
