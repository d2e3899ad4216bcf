import json
from typing import Any

import pytest

from penstock.api.chat_protocol import ChatCompletionRequest
from penstock.api.constraints.constraints import grammar_spec
from penstock.api.decoding import decode
from penstock.engine.errors import InvalidRequest
from penstock.engine.grammar import GrammarKind, GrammarSpec
from penstock.engine.grammars.grammar_limits import MAX_GRAMMAR

SCHEMA = {"type": "object", "properties": {"z": {}, "a": {"const": "ü"}}}
GBNF = 'root ::= "a" word\nword ::= [b-c]+  # a: b'
LARK = 'start: "a" word  // root ::= b\n?word.2: /[b-c:]+/\n%ignore " "'
TAG: dict[str, Any] = {"type": "structural_tag", "format": {"type": "const_string", "value": "a"}}
CLOSED = "guidance:no-additional-properties"
WHITESPACE = "structured_outputs.whitespace_pattern"
NO_TEXT = GrammarKind.STRUCTURE, ""
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
        ({"json_schema": SCHEMA}, "json_schema"),
        ({"json_schema": json.dumps(SCHEMA)}, "json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}},
            "response_format.json_schema.schema",
        ),
    ],
)
def test_every_spelling_of_a_schema_is_the_same_text_with_its_keys_in_order(fields: dict[str, Any], param: str) -> None:
    assert spec_of(**fields) == GrammarSpec(GrammarKind.JSON_SCHEMA, TEXT, param)


@pytest.mark.parametrize("strict", [{}, {"strict": None}, {"strict": False}])
def test_a_schema_in_response_format_is_lenient_unless_it_says_strict(strict: dict[str, Any]) -> None:
    for given in ({"type": "json_schema", "json_schema": {"schema": SCHEMA} | strict}, {"type": "json_object", "schema": SCHEMA}):
        spec = spec_of(response_format=given)
        assert spec is not None
        assert spec.is_lenient


@pytest.mark.parametrize(
    ("fields", "kind", "text"),
    [
        ({"guided_regex": "a+"}, GrammarKind.REGEX, "a+"),
        ({"structured_outputs": {"regex": "a+"}}, GrammarKind.REGEX, "a+"),
        ({"guided_choice": ["ä", "b"]}, GrammarKind.CHOICE, '["ä", "b"]'),
        ({"structured_outputs": {"choice": ["ä", "b"]}}, GrammarKind.CHOICE, '["ä", "b"]'),
        ({"response_format": {"type": "json_object"}}, GrammarKind.JSON_OBJECT, ""),
        ({"structured_outputs": {"json_object": True}}, GrammarKind.JSON_OBJECT, ""),
        ({"guided_json": True}, GrammarKind.JSON_SCHEMA, "true"),
        ({"regex": "a+"}, GrammarKind.REGEX, "a+"),
        ({"ebnf": "no root"}, GrammarKind.GBNF, "no root"),
        ({"guided_grammar": GBNF}, GrammarKind.GBNF, GBNF),
        ({"guided_grammar": {"syntax": "lark", "definition": GBNF}}, GrammarKind.LARK, GBNF),
        ({"structured_outputs": {"grammar": LARK}}, GrammarKind.LARK, LARK),
        ({"structured_outputs": {"grammar": {"syntax": "ebnf", "definition": LARK}}}, GrammarKind.GBNF, LARK),
        ({"response_format": {"type": "grammar", "grammar": LARK}}, GrammarKind.LARK, LARK),
        ({"structural_tag": TAG}, GrammarKind.STRUCTURE, ""),
        ({"structured_outputs": {"structural_tag": json.dumps(TAG)}}, GrammarKind.STRUCTURE, ""),
        ({"response_format": TAG}, GrammarKind.STRUCTURE, ""),
        ({"response_format": {"type": "structural_tag", "structures": [{"begin": "<", "end": ">"}], "triggers": ["<"]}}, *NO_TEXT),
    ],
)
def test_the_other_kinds(fields: dict[str, Any], kind: GrammarKind, text: str) -> None:
    spec = spec_of(**fields)
    assert spec is not None
    assert (spec.kind, spec.text) == (kind, text)


def test_a_whitespace_pattern_goes_along() -> None:
    for fields in (
        {"guided_json": {}, "guided_whitespace_pattern": " ?"},
        {"structured_outputs": {"json": {}, "whitespace_pattern": " ?"}},
        {"json_schema": {}, "guided_whitespace_pattern": " ?", "structured_outputs": {"whitespace_pattern": " ?"}},
    ):
        spec = spec_of(**fields)
        assert spec is not None
        assert spec.whitespace_pattern == "(?:[ ]){0,1}"


@pytest.mark.parametrize(
    "fields",
    [
        {"structured_outputs": {"disable_any_whitespace": True}},
        {"structured_outputs": {"disable_any_whitespace": True, "whitespace_pattern": ""}},
        {"structured_outputs": {"backend": "guidance:disable-any-whitespace"}},
        {"guided_decoding_backend": "auto:no_fallback,disable-any-whitespace"},
    ],
)
def test_every_way_to_forbid_whitespace_is_an_empty_pattern(fields: dict[str, Any]) -> None:
    spec = spec_of(guided_json={}, **fields)
    assert spec is not None
    assert spec.whitespace_pattern == ""


@pytest.mark.parametrize(
    "fields",
    [
        {"structured_outputs": {"json": SCHEMA, "disable_additional_properties": True}},
        {"guided_json": json.dumps(SCHEMA), "structured_outputs": {"disable_additional_properties": True}},
        {"guided_json": SCHEMA, "guided_decoding_backend": CLOSED},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}, "structured_outputs": {"backend": CLOSED}},
    ],
)
def test_objects_are_closed_where_that_is_asked_for(fields: dict[str, Any]) -> None:
    spec = spec_of(**fields)
    assert spec is not None
    assert spec.text == TEXT[:-1] + ', "additionalProperties": false}'


OFF: list[dict[str, Any]] = [
    {},
    {"response_format": {"type": "text"}},
    {"guided_json": None},
    {"structured_outputs": None},
    {"json_schema": "", "regex": "", "ebnf": "", "structural_tag": ""},
]


@pytest.mark.parametrize("fields", OFF)
def test_no_constraint_is_none(fields: dict[str, Any]) -> None:
    assert spec_of(**fields) is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"guided_json": SCHEMA, "guided_choice": ["a"]}, "guided_choice"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "response_format"),
        ({"structured_outputs": {"json": SCHEMA, "regex": "a"}}, "structured_outputs.regex"),
        ({"structured_outputs": {"grammar": "x"}}, "structured_outputs.grammar"),
        ({"structured_outputs": {"grammar": {"syntax": "bnf", "definition": "x"}}}, "structured_outputs.grammar.syntax"),
        ({"structured_outputs": {"disable_additional_properties": True}}, "structured_outputs"),
        (
            {"structured_outputs": {"structural_tag": TAG, "disable_additional_properties": True}},
            "structured_outputs.disable_additional_properties",
        ),
        ({"structural_tag": TAG, "guided_decoding_backend": "auto:no-additional-properties"}, "guided_decoding_backend"),
        (
            {"guided_json": {"properties": {"a": {"allOf": [{}, {}]}}, "type": "object"}, "guided_decoding_backend": CLOSED},
            "guided_json.properties.a.allOf",
        ),
        ({"structured_outputs": {"json": {}, "jsn": {}}}, "structured_outputs.jsn"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"json": None, "json_object": False, "whitespace_pattern": ""}}, "structured_outputs"),
        ({"regex": "a", "ebnf": GBNF}, "ebnf"),
        ({"guided_json": "{", "structural_tag": TAG}, "structural_tag"),
        ({"guided_grammar": GBNF + "#" * MAX_GRAMMAR}, "guided_grammar"),
        ({"guided_grammar": LARK + "\nroot ::= a"}, "guided_grammar"),
        ({"guided_grammar": "word: /a/"}, "guided_grammar"),
        ({"guided_grammar": ""}, "guided_grammar"),
        ({"guided_json": '{"a": 1, "b": {"c": 1, "c": 2}}'}, "guided_json"),
        ({"guided_json": '"\\ud800"'}, "guided_json"),
        ({"guided_json": '{"const": "\\ud800"}'}, "guided_json"),
        ({"guided_json": '{"const": 1e999}'}, "guided_json"),
        ({"guided_json": '{"const": 1' + "0" * 5000 + "}"}, "guided_json"),
        ({"guided_json": {}, "guided_whitespace_pattern": " ", "structured_outputs": {"whitespace_pattern": ""}}, WHITESPACE),
        ({"guided_json": {}, "guided_whitespace_pattern": "("}, "guided_whitespace_pattern"),
        ({"structured_outputs": {"json_object": True, "whitespace_pattern": "(?= )"}}, WHITESPACE),
        ({"guided_json": {}, "guided_whitespace_pattern": " " * 1001}, "guided_whitespace_pattern"),
        ({"guided_json": {}, "guided_decoding_backend": "xgrammar:no-whitespace"}, "guided_decoding_backend"),
        (
            {"guided_decoding_backend": "outlines", "structured_outputs": {"regex": "a", "backend": "guidance"}},
            "structured_outputs.backend",
        ),
        ({"response_format": {"type": "json_object", "json_schema": {"schema": {}}}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_object", "scheme": {}}}, "response_format.scheme"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "strct": True}}}, "response_format.json_schema.strct"),
        ({"response_format": {"type": "grammar"}}, "response_format.grammar"),
        ({"response_format": TAG | {"triggers": ["a"]}}, "response_format"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": ["a", ""]}, "guided_choice"),
        ({"guided_json": [1]}, "guided_json"),
        ({"guided_json": "[1]"}, "guided_json"),
        ({"guided_json": "NaN"}, "guided_json"),
        ({"guided_json": '{"a": ' * 5000}, "guided_json"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}}, "response_format.json_schema.schema"),
        ({"response_format": {"type": "structural_tag"}}, "response_format"),
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
    ],
)
def test_what_cannot_be_one_constraint_is_refused(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        spec_of(**fields)
    assert caught.value.param == param
