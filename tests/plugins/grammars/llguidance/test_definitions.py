import json
from typing import Any

import pytest

from penstock.engine.contracts.grammar import GrammarKind, GrammarSpec
from penstock.engine.errors import UnsupportedGrammar
from penstock.plugins.grammars.llguidance.backend import LlguidanceBackend
from penstock.plugins.grammars.llguidance.exact_schema import ExactSchema, read_schema
from tests.plugins.grammars.grammar_walks import VOCABULARY
from tests.plugins.grammars.llguidance.test_backend import accepts, schema_grammar


def read(schema: Any, **options: Any) -> ExactSchema:
    return read_schema(GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(schema), "p"), **options)


def test_what_stands_in_several_places_is_one_definition() -> None:
    item = {"type": "object", "title": "A", "properties": {"b": {"type": "string"}, "c": {"type": "array", "items": {"type": "string"}}}}
    content = read({"properties": {name: {**item, "description": name} for name in "xyz"}}).content
    assert len({json.dumps(member) for member in content["properties"].values()}) == 1
    assert json.dumps(content).count('"object"') == json.dumps(content).count('"array"') == json.dumps(content).count('"string"') == 1


def test_what_stands_in_one_place_stays_there() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "array", "items": {"type": "integer"}}}}
    assert read(schema).content == schema


@pytest.mark.parametrize(
    "nothing",
    [
        {"enum": []},
        {"type": "string", "enum": [1]},
        {"type": "string", "minLength": 2, "maxLength": 1},
        {"type": "array", "items": False, "minItems": 1},
        {"type": "object", "properties": {"c": False}, "required": ["c"]},
        {"type": "object", "properties": {}, "additionalProperties": False, "required": ["c"]},
        {"anyOf": [False, False]},
    ],
)
def test_members_without_values_are_left_out_wherever_they_stand(nothing: dict[str, Any]) -> None:
    schema = {"type": "object", "properties": {"a": nothing, "b": nothing, "d": {"type": "null"}}, "additionalProperties": False}
    grammar = schema_grammar(schema)
    assert accepts(grammar, '{"d": null}')
    assert not accepts(grammar, '{"a": null}')


def test_definitions_that_nothing_refers_to_are_not_read() -> None:
    schema = {"$defs": {"a": {"not": {"pattern": "b"}}, "b": {"$ref": "#/nowhere"}, "c": {"type": "null"}}, "items": {"$ref": "#/$defs/c"}}
    assert accepts(schema_grammar(schema), "[null]")


@pytest.mark.parametrize("name", ["https://example.com/a.json", "urn:a"])
def test_references_by_the_documents_own_name_lead_into_it(name: str) -> None:
    schema = {"$id": name, "$defs": {"a": {"type": "null"}}, "type": "array", "items": {"$ref": f"{name}#/$defs/a"}}
    grammar = schema_grammar(schema)
    assert accepts(grammar, "[null]")
    assert not accepts(grammar, "[1]")


def test_what_compiling_finds_in_a_definition_is_named_by_the_clients_path() -> None:
    schemas: list[tuple[Any, str]] = [
        (
            {"definitions": {"a": {"items": {"pattern": "("}}}, "properties": {"b": {"$ref": "#/definitions/a"}}},
            ".definitions.a.items.pattern",
        ),
        ({"properties": {"a": {"type": "string", "pattern": "("}, "b": {"type": "string", "pattern": "("}}}, ".properties.a.pattern"),
    ]
    for schema, place in schemas:
        with pytest.raises(UnsupportedGrammar) as caught:
            schema_grammar(schema, param="p")
        assert caught.value.param == f"p{place}"


def test_a_number_out_of_range_is_refused_where_it_stands() -> None:
    backend = LlguidanceBackend(VOCABULARY)
    with pytest.raises(UnsupportedGrammar, match="out of range") as caught:
        backend.compile(GrammarSpec(GrammarKind.JSON_SCHEMA, '{"properties": {"a": {"minimum": 1e999}}}', "p"))
    assert caught.value.param == "p.properties.a.minimum"


NODE = {
    "$defs": {
        "base": {"properties": {"name": {"type": "string"}, "children": {"type": "array", "items": {"$ref": "#/$defs/node"}}}},
        "node": {"allOf": [{"$ref": "#/$defs/base"}, {"required": ["name"]}]},
    }
}


@pytest.mark.parametrize("start", ["base", "node"])
def test_a_circle_through_what_is_joined_is_compiled_with_its_references_inlined(start: str) -> None:
    schema = {**NODE, "$ref": f"#/$defs/{start}"}
    grammar = schema_grammar(schema)
    assert accepts(grammar, '{"name": "a", "children": [{"name": "b", "children": []}]}')
    assert not accepts(grammar, '{"name": "a", "children": [{"children": []}]}')
