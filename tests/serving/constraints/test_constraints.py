import json
from typing import Any

import pytest

from penstock.engine.constraints.limits import MAX_GRAMMAR
from penstock.engine.contracts.grammar import AdditionalProperties, GrammarKind, GrammarSpec
from penstock.engine.errors import InvalidRequest
from penstock.serving.endpoints.bodies import decode
from penstock.serving.requests import ChatCompletionRequest
from penstock.serving.structured_outputs import grammar_spec, possible_choices

SCHEMA = {"type": "object", "properties": {"z": {}, "a": {"const": "ü"}}}
GBNF = 'root ::= "a" word\nword ::= [b-c]+  # a: b'
LARK = 'start: "a" word  // root ::= b\n?word.2: /[b-c:]+/\n%ignore " "'
TAG: dict[str, Any] = {"type": "structural_tag", "format": {"type": "const_string", "value": "a"}}
CLOSED = "guidance:no-additional-properties"
WHITESPACE = "structured_outputs.whitespace_pattern"
NO_TEXT = GrammarKind.STRUCTURE, ""
TEXT = '{"type": "object", "properties": {"z": {}, "a": {"const": "ü"}}}'
CLOSED_TEXT = TEXT[:-1] + ', "additionalProperties": false}'


def spec_of(additional_properties: AdditionalProperties = "open", **fields: Any) -> GrammarSpec | None:
    body, _ = decode(json.dumps({"messages": []} | fields).encode(), ChatCompletionRequest)
    return grammar_spec(body, additional_properties)


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
        {"guided_json": SCHEMA, "guided_additional_properties": "closed"},
        {"structured_outputs": {"json": SCHEMA, "additional_properties": "closed"}},
    ],
)
def test_objects_are_closed_where_that_is_asked_for(fields: dict[str, Any]) -> None:
    spec = spec_of(**fields)
    assert spec is not None
    assert spec.text == CLOSED_TEXT
    assert spec.as_written is None


@pytest.mark.parametrize(
    "fields",
    [
        {"guided_json": SCHEMA},
        {"structured_outputs": {"json": SCHEMA}},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA, "strict": True}}},
        {"response_format": {"type": "json_object", "schema": SCHEMA}},
        {"json_schema": json.dumps(SCHEMA)},
    ],
)
def test_by_default_objects_are_closed_and_a_request_may_have_them_open(fields: dict[str, Any]) -> None:
    spec = spec_of("closed", **fields)
    assert spec is not None
    assert spec.text == CLOSED_TEXT
    written = spec_of("open", **fields)
    assert spec.as_written == written == spec_of("closed", **fields, guided_additional_properties="open")
    assert written is not None
    assert written.text == TEXT


def test_schemas_in_structural_tags_are_closed_too() -> None:
    tag = {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": SCHEMA}}
    spec = spec_of("closed", structural_tag=tag)
    assert spec is not None
    assert spec.structure is not None
    assert CLOSED_TEXT in repr(spec.structure)
    assert spec.as_written == spec_of("open", structural_tag=tag)


def test_what_has_nothing_to_close_has_one_reading() -> None:
    for fields in ({"guided_json": {"type": "object"}}, {"guided_regex": "a"}, {"guided_json": json.loads(CLOSED_TEXT)}):
        assert spec_of("closed", **fields) == spec_of("open", **fields)


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
            {"guided_json": {}, "guided_additional_properties": "open", "structured_outputs": {"disable_additional_properties": True}},
            "structured_outputs.disable_additional_properties",
        ),
        ({"guided_json": {}, "guided_additional_properties": "open", "guided_decoding_backend": CLOSED}, "guided_decoding_backend"),
        ({"guided_json": {}, "guided_additional_properties": "none"}, "guided_additional_properties"),
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


def test_choices_that_hold_the_tokens_of_a_bad_word_are_left_out() -> None:
    words = ["yes", "no", "un", "known", " no", "way"]

    def encode(text: str) -> list[int]:
        ids = []
        while text:
            word = next((word for word in words if text.startswith(word)), text[0])
            ids.append(words.index(word) if word in words else 100 + ord(word))
            text = text[len(word) :]
        return ids

    spec = spec_of(guided_choice=["yes", "no", "unknown", "yes no", "no?"])
    assert spec is not None
    for bad_words, left in (([], ["yes", "no", "unknown", "yes no", "no?"]), (["no"], ["yes", "unknown"]), (["un", ""], None)):
        possible = possible_choices(spec, bad_words, encode)
        assert possible is not None
        assert json.loads(possible.text) == (left or ["yes", "no", "yes no", "no?"])
    with pytest.raises(InvalidRequest, match="`bad_words` leave none of the texts of `guided_choice`") as caught:
        possible_choices(spec, ["yes", "no", "known"], encode)
    assert caught.value.param == "bad_words"
    regex = spec_of(guided_regex="no")
    assert possible_choices(regex, ["no"], encode) is regex
    assert possible_choices(None, ["no"], encode) is None
