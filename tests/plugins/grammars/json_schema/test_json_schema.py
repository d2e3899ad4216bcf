import json
import random
import re
from datetime import date
from enum import Enum
from typing import Any, Literal
from uuid import UUID

import jsonschema  # type: ignore[import-untyped]
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, Field

from penstock.engine.errors import UnsupportedGrammar
from tests.plugins.grammars.grammar_walks import (
    PERSON,
    accepts,
    patterns,
    random_answer,
    schema_grammar,
    subjects,
)


@settings(max_examples=25)
@given(patterns, st.sampled_from(["", "^"]), st.sampled_from(["", "$"]), st.lists(subjects, max_size=8), st.randoms(use_true_random=False))
def test_a_schemas_pattern_is_searched_for_in_the_decoded_string(
    pattern: str, start: str, end: str, texts: list[str], rng: random.Random
) -> None:
    try:
        grammar = schema_grammar({"type": "string", "pattern": f"{start}(?:{pattern}){end}"})
    except UnsupportedGrammar as refusal:  # choices that begin alike are many states where they are searched for
        if "more states than can be searched" not in str(refusal):
            raise
        return
    expected = re.compile(f"{start}(?:{pattern}){end.replace('$', chr(92) + 'Z')}", re.ASCII)
    for text in texts:
        assert accepts(grammar, json.dumps(text, ensure_ascii=False), rng) == bool(expected.search(text)), text


PETS = {
    "$defs": {
        "Cat": {"type": "object", "properties": {"kind": {"const": "cat"}, "lives": {"type": "integer"}}, "required": ["kind", "lives"]},
        "Dog": {"type": "object", "properties": {"kind": {"enum": ["dog", "wolf"]}}, "required": ["kind"]},
    },
    "oneOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}],
    "discriminator": {"propertyName": "kind"},
}
SCHEMAS = [
    PETS,
    PERSON,
    {"type": "object", "properties": {name: {"type": "boolean"} for name in "abcde"}},
    {"type": "object", "additionalProperties": {"type": "array", "items": {"type": "integer"}, "minItems": 1}},
    {"type": "object", "properties": {}, "additionalProperties": False},
    {"type": "array", "items": {"type": "string", "pattern": "a|^b"}, "minItems": 2, "maxItems": 3},
    {"type": "array", "prefixItems": [{"type": "boolean"}, {"type": "null"}], "items": {"type": "integer"}, "minItems": 1},
    {"type": "string", "pattern": r'^["\\/\n\x01]+$'},
    {"type": "string", "format": "date"},
    {"oneOf": [{"type": "integer"}, {"type": "string"}, {"type": "object", "properties": {"t": {"const": 1}}, "required": ["t"]}]},
    {"enum": [{"a": [1, 2.5, {"b": None}]}, [], {}, 'é"\\', True]},
    {"allOf": [{"$ref": "#/definitions/n"}], "definitions": {"n": {"type": "number"}}},
    {"properties": {"a b~/": {"type": "null"}}, "required": ["a b~/"]},
    {"type": "array", "items": {"type": "number", "minimum": 0, "maximum": 1}, "minItems": 4, "maxItems": 4},
    {"type": "integer", "minimum": 18},
]


@pytest.mark.parametrize("schema", SCHEMAS, ids=range(len(SCHEMAS)))
def test_every_random_walk_is_json_that_the_schema_validates(schema: Any) -> None:
    grammar = schema_grammar(schema)
    for seed in range(30):
        text = random_answer(grammar, random.Random(seed))
        jsonschema.Draft202012Validator(schema).validate(json.loads(text))


class Color(Enum):
    RED = "red"
    BLUE = "blau"


class Author(BaseModel):
    name: str = Field(min_length=1, max_length=4, description="as on the cover")
    born: date | None = None


class Book(BaseModel):
    """Everything that people put into their models."""

    title: str
    authors: list[Author] = Field(max_length=2)
    color: Color = Color.RED
    language: Literal["de", "en"] = "en"
    rating: float = Field(ge=0, le=5)
    pages: int = Field(gt=0)
    size: tuple[int, int]
    tags: dict[str, bool] = {}
    isbn: UUID | None = None


def test_what_pydantic_generates_validates_as_its_model() -> None:
    grammar = schema_grammar(Book.model_json_schema())
    for seed in range(30):
        Book.model_validate_json(random_answer(grammar, random.Random(seed)))


@pytest.mark.parametrize("layout", [{"separators": (",", ":")}, {}, {"indent": 2}, {"indent": 4}])
def test_compact_plain_and_indented_json_are_all_accepted(layout: dict[str, Any]) -> None:
    person = {
        "name": "Ann é字\n",
        "kind": "b\n",
        "addresses": [{"city": "x"}, {"city": "", "zip": "123"}],
        "score": -1.5e-07,
        "pair": [True, "x"],
    }
    rng = random.Random(0)
    assert accepts(schema_grammar(PERSON), json.dumps(person, ensure_ascii=False, **layout), rng)
    assert accepts(schema_grammar({"type": "object", "properties": {}, "additionalProperties": False}), "{}", rng)


def test_white_space_is_bounded_and_follows_the_clients_own_pattern() -> None:
    schema = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}
    rng = random.Random(0)
    free = schema_grammar(schema)
    unwritten = ('{\n\n"a":1}', '{   "a":1}', '{"a":1} ', ' {"a":1}', "{\n" + " " * 41 + '"a":1}', '{"a" :1}', '{"a":\n1}', '{\n \t"a":1}')
    assert not any(accepts(free, text, rng) for text in unwritten)
    compact = schema_grammar(schema, whitespace_pattern="")
    assert accepts(compact, '{"a":1}', rng)
    assert not accepts(compact, '{"a": 1}', rng)


def test_properties_keep_the_schemas_order() -> None:
    grammar = schema_grammar({"type": "object", "properties": {"z": {"const": 1}, "a": {"const": 2}}})
    rng = random.Random(0)
    assert [accepts(grammar, text, rng) for text in ('{"z":1,"a":2}', '{"a":2,"z":1}', '{"a":2}', "{}")] == [True, False, True, True]


@pytest.mark.parametrize(
    ("schema", "path"),
    [
        ({"type": "object", "properties": {"a": {"type": "number", "minimum": 0.5}}}, ".properties.a.minimum"),
        ({"type": "array", "items": {"type": "number", "multipleOf": 2}}, ".items.multipleOf"),
        ({"type": "array", "items": {"type": "null"}, "uniqueItems": True}, ".uniqueItems"),
        ({"type": "object", "properties": {"a": {"type": "null"}}, "additionalProperties": True}, ".additionalProperties"),
        ({"type": "object", "properties": {"a": {"type": "null"}}, "patternProperties": {}}, ".patternProperties"),
        ({"type": "object", "properties": {"a": {"type": "null"}}, "required": ["b"]}, ".required"),
        ({"type": "object", "properties": {"a": {}}}, ".properties.a"),
        ({"type": "object"}, ""),
        ({"anyOf": [{"type": "null"}, {"not": {}, "type": "null"}]}, ".anyOf[1].not"),
        ({"anyOf": [{"type": "null"}], "type": "object"}, ".type"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, ".oneOf"),
        ({"type": "string", "pattern": "a(?=b)c"}, ".pattern"),
        ({"type": "string", "pattern": "a", "maxLength": 3}, ".maxLength"),
        ({"type": "string", "format": "email"}, ".format"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"type": "array", "items": {"$ref": "#/$defs/a"}}}}, ".$defs.a.items.$ref"),
        ({"$ref": "other.json"}, ".$ref"),
        ({"type": "string", "surprise": 1}, ".surprise"),
        ({"type": "array", "items": {"type": "string"}, "minItems": -1}, ".minItems"),
        (True, ""),
    ],
)
def test_what_cannot_be_said_exactly_is_refused_with_its_path(schema: Any, path: str) -> None:
    with pytest.raises(UnsupportedGrammar) as caught:
        schema_grammar(schema, param="response_format.json_schema.schema")
    assert caught.value.param == f"response_format.json_schema.schema{path}"


def test_forty_optional_properties_compile() -> None:
    names = [f"p{i}" for i in range(40)]
    grammar = schema_grammar({"type": "object", "properties": {name: {"type": "boolean"} for name in names}})
    rng = random.Random(0)
    assert accepts(grammar, json.dumps({names[3]: True, names[30]: False}), rng)
    assert not accepts(grammar, json.dumps({names[30]: True, names[3]: False}), rng)
