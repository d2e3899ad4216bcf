"""What llguidance is given instead of keywords that it does not compile allows nothing that the schema forbids."""

import json
import random
from typing import Any
from urllib.parse import quote

import jsonschema  # type: ignore[import-untyped]
import pytest

from penstock.engine.contracts.grammar import GrammarKind, GrammarSpec
from penstock.engine.errors import UnsupportedGrammar
from penstock.plugins.grammars.llguidance.backend import LlguidanceBackend
from penstock.plugins.grammars.llguidance.exact_schema import read_schema
from penstock.plugins.grammars.llguidance.matcher import LlguidanceGrammar
from tests.plugins.grammars.grammar_walks import STOPS, VOCABULARY

BACKEND = LlguidanceBackend(VOCABULARY)
NAMES = ("a", "b", "c", "d")
STRINGS = ("", "a", "b", "ab", "abc", "x")
LEAVES: tuple[Any, ...] = (
    *(True, False, {"type": "string"}, {"type": "integer"}, {"const": "a"}, {"enum": ["a", "ab"]}, {"enum": [1, 2, "x"]}),
    *({"type": "number", "minimum": 2}, {"maximum": 2}, {"minLength": 2}, {"type": ["string", "null"]}, {"type": "boolean"}),
    *({"type": "string", "pattern": "^a"}, {"$ref": "#/$defs/r"}, {"type": "array", "items": {"enum": ["a", "b"]}, "uniqueItems": True}),
)
DEFINITIONS = {
    "r": {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]},
    "n": {"pattern": "^[a-c]"},
    "s": {"type": "string"},
}
NAMED = (
    {"enum": ["a", "b"]},
    {"pattern": "^[ab]"},
    {"maxLength": 0},
    {"minLength": 2},
    {"$ref": "#/$defs/n"},
    {"$ref": "#/$defs/n", "const": "a"},
)


def compiled(schema: Any) -> LlguidanceGrammar:
    return BACKEND.compile(GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(schema), "guided_json"))


def accepts(grammar: LlguidanceGrammar, value: Any) -> bool:
    matcher = grammar.matcher()
    return all(matcher.advance(byte) for byte in json.dumps(value, ensure_ascii=False).encode()) and matcher.advance(min(STOPS))


def random_value(rng: random.Random, depth: int = 0) -> Any:
    match rng.randrange(8 if depth < 2 else 5):
        case 0:
            return rng.choice((None, True, False))
        case 1:
            return rng.choice((0, 1, 2, 3, 5))
        case 2:
            return rng.choice((0.5, 1.5, 2.5))
        case 3 | 4:
            return rng.choice(STRINGS)
        case 5:
            return [random_value(rng, depth + 1) for _ in range(rng.randrange(3))]
    return random_object(rng, depth)


def random_object(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    return {name: random_value(rng, depth + 1) for name in NAMES if rng.random() < 0.5}


def random_schema(rng: random.Random, depth: int = 0) -> Any:
    if rng.random() < (0.7 if depth > 2 else 0.2):
        return rng.choice(LEAVES)
    names = [name for name in NAMES[:3] if rng.random() < 0.5]
    schema: dict[str, Any] = {"type": rng.choice(("object", ["object", "null"]))} if rng.random() < 0.6 else {}
    schema |= {"properties": {name: random_schema(rng, depth + 2) for name in names}}
    schema |= {"required": [name for name in NAMES[:3] if rng.random() < 0.4]} if rng.random() < 0.5 else {}
    schema |= {"additionalProperties": rng.choice((False, {"type": "integer"}))} if rng.random() < 0.3 else {}
    match rng.randrange(10):
        case 0:
            schema["not"] = random_schema(rng, depth + 1)
        case 1 | 2:
            schema["oneOf"] = [random_schema(rng, depth + 1) for _ in range(rng.randrange(1, 4))]
        case 3:
            schema |= {keyword: random_schema(rng, depth + 1) for keyword in ("if", "then", "else")}
        case 4:
            schema["dependentRequired"] = {rng.choice(NAMES): [name for name in NAMES if rng.random() < 0.4]}
        case 5:
            schema["dependentSchemas"] = {rng.choice(NAMES): random_schema(rng, depth + 1)}
        case 6:
            schema[rng.choice(("minProperties", "maxProperties"))] = rng.randrange(3)
        case 7:
            schema["propertyNames"] = rng.choice(NAMED)
        case 8:
            schema |= {"allOf": [random_schema(rng, depth + 1)], "unevaluatedProperties": rng.choice((False, {"type": "string"}))}
        case 9:
            schema |= {"$ref": f"#/$defs/{rng.choice('rs')}"} | rng.choice(({"unevaluatedProperties": False}, {"required": ["b"]}))
    return schema


def test_no_invalid_value_is_accepted() -> None:
    rng = random.Random(17)
    num_accepted = num_refused = 0
    for _ in range(150):
        schema = {"allOf": [random_schema(rng)], "$defs": DEFINITIONS}
        try:
            grammar = compiled(schema)
        except UnsupportedGrammar:
            continue
        validator = jsonschema.Draft202012Validator(schema)
        for number in range(20):
            value = random_object(rng) if number % 4 else random_value(rng)
            is_valid = validator.is_valid(value)
            if accepts(grammar, value):
                num_accepted += 1
                assert is_valid, (schema, value)
            elif not is_valid:
                num_refused += 1
    assert num_accepted > 100
    assert num_refused > 500


OBJECT = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}, "c": {}}, "additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "values"),
    [
        ({"type": "string", "pattern": "^(?!ab$)(?=.*b|x)[a-x]*$"}, ["ab", "abb", "a", "x", "xb", "bz", ""]),
        (
            {"type": "object", "patternProperties": {"^(?![ab]$).*$": {"type": "string"}}, "additionalProperties": {"type": "integer"}},
            [{"a": 1}, {"a": "x"}, {"ab": "x"}, {"ab": 1}, {"": "x"}, {"b": 2, "c": "d"}, {"a\n": 2}],
        ),
        (
            {"allOf": [{"enum": ["a", 3, {"a": 1}, {"a": "x"}]}, {"not": {"patternProperties": {"a*": {"type": "integer"}}}}]},
            ["a", 3, {"a": 1}, {"a": "x"}, {"b": "x"}],
        ),
        ({"enum": ["a", "bx", "ab", 2], "oneOf": [{"maxLength": 1}, {"pattern": "^b"}]}, ["a", "bx", "ab", 2, "b"]),
        ({"const": {"a": 31}, "not": {"patternProperties": {"a*": {"maximum": 20}}}}, [{"a": 31}, {"a": 3}]),
    ],
)
def test_a_rewritten_schema_accepts_of_given_values_those_that_are_valid(schema: Any, values: list[Any]) -> None:
    grammar = compiled(schema)
    accepted = [value for value in values if accepts(grammar, value)]
    assert accepted == [value for value in values if jsonschema.Draft202012Validator(schema).is_valid(value)]
    assert accepted


@pytest.mark.parametrize(
    "schema",
    [
        {**OBJECT, "dependentRequired": {"a": ["b"], "c": ["a"]}},
        {**OBJECT, "dependencies": {"b": {"required": ["c"]}}, "$schema": "http://json-schema.org/draft-07/schema#"},
        {**OBJECT, "not": {"required": ["a", "c"]}},
        {**OBJECT, "not": {"required": ["b"], "properties": {"b": {"enum": ["a", "ab"]}}}},
        {**OBJECT, "oneOf": [{"required": ["a", "b"]}, {"required": ["c"]}]},
        {
            **OBJECT,
            "if": {"required": ["b"], "properties": {"b": {"const": "a"}}},
            "then": {"required": ["c"]},
            "else": {"required": ["a"]},
        },
        {**OBJECT, "minProperties": 1},
        {**OBJECT, "minProperties": 2, "maxProperties": 2},
        {**OBJECT, "maxProperties": 1},
        {**OBJECT, "propertyNames": {"enum": ["c", "a"]}},
        {"not": {"enum": ["a", "abc", 1, None]}},
        {"not": {"type": "string", "pattern": "^a|b$"}},
        {"type": "string", "not": {"pattern": "b"}, "pattern": "^(?!x)"},
        {"not": {"oneOf": [{"required": ["a"]}, {"required": ["b"]}]}, **OBJECT},
        {"not": {"not": {"type": "array", "items": {"type": "integer"}}}},
        {"not": {"anyOf": [{"type": "string", "minLength": 2}, {"type": "array"}, {"type": "number", "maximum": 2}]}},
        {"oneOf": [{"type": "string"}, {"minLength": 2}]},
        {"oneOf": [{"$ref": "#/$defs/r"}, {"type": "string"}, {"type": "array", "items": {"$ref": "#/$defs/r"}}], "$defs": DEFINITIONS},
        {"type": "array", "items": {"enum": ["a", "b", "x"]}, "uniqueItems": True, "minItems": 1},
        {"type": "array", "uniqueItems": True, "maxItems": 1},
        {"type": ["array", "string"], "contains": {}, "uniqueItems": False},
        {"type": "string", "format": "semver"},
        {"type": "object", "propertyNames": {"minLength": 1, "maxLength": 1}},
        {"oneOf": [{"type": "array", "items": {"type": "string"}}, {"type": "array", "items": {"type": "null"}}, {"type": "string"}]},
        {"oneOf": [{"items": {"type": "string"}, "type": "array", "minItems": 1}, {"type": "array", "items": {"type": "integer"}}]},
        {"type": "array", "prefixItems": [{"enum": ["a", "b"]}], "unevaluatedItems": False},
        {"type": "array", "prefixItems": [{"enum": ["a", "b"]}], "unevaluatedItems": {"const": "x"}},
        {"type": "array", "items": {"type": "string"}, "unevaluatedItems": False},
        {
            "type": "object",
            "allOf": [{"properties": {"a": {"type": "integer"}}}, {"$ref": "#/$defs/b", "required": ["b"]}],
            "properties": {"c": {}},
            "unevaluatedProperties": False,
            "$defs": {"b": {"properties": {"b": {"type": "string"}}}},
        },
        {
            "type": "object",
            "properties": {"a": {}, "b": {}},
            "patternProperties": {"^d": {}},
            "unevaluatedProperties": False,
            "anyOf": [{"required": ["a"]}, {"properties": {"b": {"const": "ab"}}, "required": ["b"]}],
        },
        {"$schema": "http://json-schema.org/draft-07/schema#", "definitions": {"o": OBJECT}, "$ref": "#/definitions/o", "required": ["a"]},
    ],
)
def test_what_is_rewritten_accepts_what_is_valid_and_nothing_else(schema: Any) -> None:
    rng = random.Random(5)
    grammar = compiled(schema)
    validator = jsonschema.validators.validator_for(schema)(schema)
    seen = {True: 0, False: 0}
    for number in range(150):
        value: Any = [rng.choice(STRINGS) for _ in range(rng.randrange(4))] if number % 5 == 0 else random_value(rng)
        if "properties" in schema and number % 3:
            value = {name: member for name, member in (("a", 1), ("b", rng.choice(STRINGS)), ("c", None)) if rng.random() < 0.5}
        is_valid = validator.is_valid(value)
        seen[is_valid] += 1
        assert accepts(grammar, value) == is_valid, value
    assert all(seen.values())


@pytest.mark.parametrize(
    "schema",
    [
        {"anyOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}], "unevaluatedProperties": False},
        {"if": {"properties": {"a": {"const": 1}}, "required": ["a"]}, "unevaluatedProperties": False},
        {"dependentSchemas": {"a": {"additionalProperties": True}}, "unevaluatedProperties": False},
        {"$dynamicRef": "#a", "$dynamicAnchor": "a", "unevaluatedProperties": False},
        {"contains": {}, "unevaluatedItems": False},
        {"not": {"items": {"type": "string"}, "type": "array"}},
        {"if": {"additionalProperties": {"type": "string"}}, "then": {"required": ["a"]}},
        {"oneOf": [{"items": {"pattern": "a"}, "type": "array"}, {"items": {"type": "string"}, "type": "array"}]},
        {"propertyNames": {"$ref": "#/$defs/a", "maxLength": 2}, "$defs": {"a": {"pattern": "^a"}}},
        {"propertyNames": {"pattern": "^a", "maxLength": 2}},
    ],
)
def test_what_depends_on_the_value_or_stands_beside_a_reference_is_refused(schema: Any) -> None:
    with pytest.raises(UnsupportedGrammar):
        compiled({"type": ["object", "array"], **schema})


def test_properties_keep_their_order() -> None:
    schema = {"type": "object", "properties": {"a": {"const": 1}, "b": {"const": 2}}, "allOf": [{"required": ["b"]}]}
    for extra in ({"dependentRequired": {"b": ["a"]}}, {"oneOf": [{"required": ["a"]}, {"required": ["c"]}]}, {"minProperties": 1}):
        grammar = compiled({"allOf": [{}], **schema, **extra})
        assert accepts(grammar, {"a": 1, "b": 2})
        assert not accepts(grammar, {"b": 2, "a": 1})


def test_keywords_that_the_draft_does_not_know_say_nothing() -> None:
    schema = {"$schema": "http://json-schema.org/draft-04/schema#", "type": "string", "if": {"pattern": "a"}, "then": False}
    assert accepts(compiled(schema), "a")
    known = {"type": "array", "contains": True, "minContains": 0, "maxContains": 1}
    for draft, lengths in (("http://json-schema.org/draft-07/schema#", [1, 2]), ("https://json-schema.org/draft/2019-09/schema", [0, 1])):
        grammar = compiled({"$schema": draft, **known})
        assert [length for length in range(3) if accepts(grammar, [0] * length)] == lengths


def test_definitions_that_nothing_refers_to_may_hold_anything() -> None:
    assert accepts(compiled({"type": "string", "$defs": {"a": {"not": {"pattern": "b"}}}}), "b")


def test_a_reference_into_what_was_rewritten_still_leads_there() -> None:
    schema = {
        "if": {"type": "string"},
        "then": {"$defs": {"short": {"maxLength": 2}}, "$ref": "#/then/$defs/short"},
        "else": {"type": "array", "items": {"$ref": "#/then/$defs/short"}},
    }
    grammar = compiled(schema)
    assert accepts(grammar, "ab")
    assert accepts(grammar, ["ab"])
    assert not accepts(grammar, "abc")
    assert not accepts(grammar, ["abc"])


def test_a_keyword_within_an_alternative_is_refused_where_it_stands() -> None:
    with pytest.raises(UnsupportedGrammar) as caught:
        compiled({"oneOf": [{"type": "string"}, {"type": "object", "properties": {"a": {"not": {"format": "date"}}}}]})
    assert caught.value.param == "guided_json.oneOf[1].properties.a.not"


def test_schemas_that_extend_each_other_in_a_circle_are_compiled() -> None:
    base = {"type": "object", "properties": {"child": {"$ref": "#/$defs/node"}}}
    node = {"type": "object", "allOf": [{"$ref": "#/$defs/base"}], "properties": {"name": {"type": "string"}}}
    grammar = compiled({"$ref": "#/$defs/base", "$defs": {"base": base, "node": node}})
    assert accepts(grammar, {"child": {"child": {"name": "a"}, "name": "b"}})
    assert not accepts(grammar, {"child": {"child": {"name": 1}}})
    assert not accepts(grammar, {"child": {"child": []}})


def test_two_names_that_are_not_given_are_not_counted_since_they_may_be_the_same() -> None:
    for schema in ({"minProperties": 2}, {"properties": {"a": {}}, "minProperties": 2}, {"required": ["a"], "minProperties": 3}):
        with pytest.raises(UnsupportedGrammar, match="minProperties"):
            compiled({"type": "object", **schema})
    grammar = compiled({"type": "object", "required": ["a"], "minProperties": 2})
    assert accepts(grammar, {"a": 1, "z": 1})
    assert not accepts(grammar, {"a": 1})


@pytest.mark.parametrize(
    ("name", "valid", "invalid"),
    [
        ("date", ("2024-02-29", "2000-02-29", "2023-12-31"), ("2023-02-29", "1900-02-29", "2024-04-31", "2024-2-1")),
        ("time", ("23:59:59Z", "10:00:00.5+02:00"), ("23:59:60Z", "24:00:00Z", "10:00:00", "10:00:00.Z")),
        ("date-time", ("2024-02-29T10:00:00Z",), ("2023-02-29T10:00:00Z", "2024-02-29 10:00:00Z", "2024-02-29T10:00:60Z")),
    ],
)
def test_dates_and_times_are_those_of_the_calendar(name: str, valid: tuple[str, ...], invalid: tuple[str, ...]) -> None:
    for extra in ({}, {"pattern": "^[12]"}, {"allOf": [{"minLength": 1}]}, {"type": ["string", "null"]}):
        grammar = compiled({"type": "string", "format": name, **extra})
        starts = ("1", "2") if "pattern" in extra else ("",)
        assert all(accepts(grammar, text) for text in valid if text.startswith(starts))
        assert not any(accepts(grammar, text) for text in invalid)


@pytest.mark.parametrize("dialect", ["http://json-schema.org/schema#", "https://json-schema.org/draft-07/schema#", "urn:x", ""])
def test_an_unknown_dialect_is_not_looked_for(dialect: str) -> None:
    part = {"$schema": dialect, "type": "integer"}
    grammar = compiled({"$schema": dialect, "properties": {"a": part}, "anyOf": [{"required": ["a"]}, {"type": "string"}]})
    assert accepts(grammar, {"a": 1, "name": {}})
    assert not accepts(grammar, {"a": "x"})
    assert not accepts(grammar, {})


@pytest.mark.parametrize("name", ["k8s.io|api|core", "a b^", "x/y~z", "%25", "日本"])
def test_a_definition_may_have_any_name(name: str) -> None:
    pointer = name.replace("~", "~0").replace("/", "~1")
    for written in (pointer.replace("%", "%25"), quote(pointer)):
        schema = {
            "type": "object",
            "properties": {"a": {"$ref": f"#/$defs/{written}"}},
            "$defs": {name: {"type": "integer"}},
            "maxProperties": 1,
        }
        grammar = compiled(schema)
        assert accepts(grammar, {"a": 1})
        assert not accepts(grammar, {"a": "x"})


@pytest.mark.parametrize("reference", ["other.json", "https://b.org/x#/$defs/a", "../x.json#/a"])
def test_a_reference_out_of_a_document_with_a_name_is_refused_where_it_stands(reference: str) -> None:
    schema = {
        "$id": "https://a.org/dir/x.json",
        "type": "object",
        "properties": {"a": {"items": {"$ref": reference}}, "b": {"type": "string"}},
    }
    with pytest.raises(UnsupportedGrammar, match="another document") as caught:
        compiled(schema)
    assert caught.value.param == "guided_json.properties.a.items.$ref"


@pytest.mark.parametrize("reference", ["#/$defs/n", "x.json#/$defs/n", "https://a.org/dir/x.json#/$defs/n", "https://a.org/dir/n.json"])
def test_a_reference_by_a_name_in_the_document_is_followed(reference: str) -> None:
    number = {"$id": "n.json", "type": "integer"} if reference.endswith("n.json") else {"type": "integer"}
    schema = {"$id": "https://a.org/dir/x.json", "properties": {"a": {"$ref": reference}}, "$defs": {"n": number}}
    grammar = compiled(schema)
    assert accepts(grammar, {"a": 1})
    assert not accepts(grammar, {"a": "x"})


def test_names_may_be_those_of_an_enumeration_with_a_title() -> None:
    names = {"title": "E", "description": "which", "type": "string", "enum": ["x", "y"]}
    schema = {"type": "object", "additionalProperties": {"type": "integer"}, "propertyNames": {"$ref": "#/$defs/E"}, "$defs": {"E": names}}
    grammar = compiled(schema)
    assert accepts(grammar, {"x": 1, "y": 2})
    assert accepts(grammar, {"y": 2})
    assert not accepts(grammar, {"z": 1})
    assert not accepts(grammar, {"x": "a"})


def test_a_document_reads_the_same_however_often_it_was_read_before() -> None:
    variants = {"oneOf": [{"$ref": "#/$defs/a"}, {"type": "string", "pattern": "^b$"}], "not": {"const": "b"}, "description": "c"}
    definitions = {"a": {"allOf": [{"$ref": "#/$defs/b"}], "format": "date"}, "b": {"type": "object", "minProperties": 1}}
    text = json.dumps(
        {"$defs": definitions, "type": "object", "properties": {"v": variants}, "patternProperties": {"^w": {"format": "regex"}}}
    )

    def read(is_inlined: bool) -> str:
        schema = read_schema(GrammarSpec(GrammarKind.JSON_SCHEMA, text, is_lenient=True), is_inlined=is_inlined)
        return json.dumps([schema.content, schema.warnings])

    first = [read(is_inlined) for is_inlined in (False, True)]
    assert [read(is_inlined) for is_inlined in (False, True)] == first


@pytest.mark.parametrize("parts", [5, {"a": 1}, "b", None])
def test_what_is_no_list_of_demands_is_refused_as_such(parts: Any) -> None:
    with pytest.raises(UnsupportedGrammar, match="allOf"):
        compiled({"type": "object", "properties": {"a": {"type": "string"}}, "minProperties": 1, "allOf": parts})


def test_keywords_that_go_together_may_stand_in_any_order() -> None:
    told = {"type": "object", "properties": {"a": {"type": "null"}, "b": {"type": "null"}}, "additionalProperties": False}
    condition = {"else": {"required": ["b"]}, "if": {"required": ["a"]}, "then": {"properties": {"b": False}}}
    grammar = compiled(told | condition)
    assert [accepts(grammar, value) for value in ({}, {"a": None}, {"b": None}, {"a": None, "b": None})] == [False, True, True, False]
    grammar = compiled({"type": "array", "maxContains": 3, "minContains": 2, "contains": True})
    assert [accepts(grammar, [0] * length) for length in range(5)] == [False, False, True, True, False]
