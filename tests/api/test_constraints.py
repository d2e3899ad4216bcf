import json
from typing import Any

import pytest

from penstock.api.chat_protocol import ChatCompletionRequest
from penstock.api.constraints import grammar_spec
from penstock.api.decoding import decode
from penstock.engine.errors import InvalidRequest
from penstock.engine.grammar import GrammarKind, GrammarSpec

SCHEMA = {"type": "object", "properties": {"z": {}, "a": {"const": "ü"}}}
TEXT = '{"type": "object", "properties": {"z": {}, "a": {"const": "ü"}}}'


def spec_of(**fields: Any) -> GrammarSpec | None:
    body, _ = decode(json.dumps({"messages": []} | fields).encode(), ChatCompletionRequest)
    return grammar_spec(body)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"guided_json": SCHEMA}, "guided_json"),
        ({"guided_json": json.dumps(SCHEMA)}, "guided_json"),
        ({"structured_outputs": {"json": SCHEMA}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, "structured_outputs.json"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}},
            "response_format.json_schema.schema",
        ),
    ],
)
def test_every_spelling_of_a_schema_is_the_same_text_with_its_keys_in_order(fields: dict[str, Any], param: str) -> None:
    assert spec_of(**fields) == GrammarSpec(GrammarKind.JSON_SCHEMA, TEXT, param)


@pytest.mark.parametrize(
    ("fields", "kind", "text"),
    [
        ({"guided_regex": "a+"}, GrammarKind.REGEX, "a+"),
        ({"structured_outputs": {"regex": "a+"}}, GrammarKind.REGEX, "a+"),
        ({"guided_choice": ["ä", "b"]}, GrammarKind.CHOICE, '["ä", "b"]'),
        ({"structured_outputs": {"choice": ["ä", "b"]}}, GrammarKind.CHOICE, '["ä", "b"]'),
        ({"response_format": {"type": "json_object"}}, GrammarKind.JSON_OBJECT, ""),
        ({"structured_outputs": {"json_object": True}}, GrammarKind.JSON_OBJECT, ""),
    ],
)
def test_the_other_kinds(fields: dict[str, Any], kind: GrammarKind, text: str) -> None:
    spec = spec_of(**fields)
    assert spec is not None
    assert (spec.kind, spec.text) == (kind, text)


def test_a_whitespace_pattern_goes_along() -> None:
    for fields in (
        {"guided_json": {}, "guided_whitespace_pattern": "x?"},
        {"structured_outputs": {"json": {}, "whitespace_pattern": "x?"}},
    ):
        spec = spec_of(**fields)
        assert spec is not None
        assert spec.whitespace_pattern == "x?"


@pytest.mark.parametrize("fields", [{}, {"response_format": {"type": "text"}}, {"guided_json": None}, {"structured_outputs": {}}])
def test_no_constraint_is_none(fields: dict[str, Any]) -> None:
    assert spec_of(**fields) is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"guided_json": SCHEMA, "guided_choice": ["a"]}, "guided_choice"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "response_format"),
        ({"structured_outputs": {"json": SCHEMA, "regex": "a"}}, "structured_outputs.regex"),
        ({"structured_outputs": {"grammar": "x"}}, "structured_outputs.grammar"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": ["a", ""]}, "guided_choice"),
        ({"guided_json": [1]}, "guided_json"),
        ({"guided_json": "[1]"}, "guided_json"),
        ({"guided_json": "NaN"}, "guided_json"),
        ({"guided_json": '{"a": ' * 5000}, "guided_json"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}}, "response_format.json_schema.schema"),
        ({"response_format": {"type": "structural_tag"}}, "response_format.type"),
    ],
)
def test_what_cannot_be_one_constraint_is_refused(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        spec_of(**fields)
    assert caught.value.param == param
