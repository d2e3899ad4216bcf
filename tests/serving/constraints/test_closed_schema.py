import copy
import json
import random
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from penstock.engine.contracts.grammar import GrammarKind, GrammarSpec
from penstock.engine.errors import UnsupportedGrammar
from penstock.plugins.grammars.llguidance.backend import LlguidanceBackend
from penstock.serving.constraints.schemas import closed
from tests.plugins.grammars.grammar_walks import VOCABULARY, accepts, random_answer

OPEN = {"type": "object", "properties": {"a": {}}}
OTHER = {"type": "object", "properties": {"b": {}}}
SHUT = OPEN | {"additionalProperties": False}
LLGUIDANCE = LlguidanceBackend(VOCABULARY)


def closing(schema: Any) -> Any:
    """Of a document as it comes over the wire, where each subschema is an object of its own."""
    return closed(json.loads(json.dumps(schema)))


def is_valid(schema: Any, value: Any) -> bool:
    return bool(jsonschema.Draft202012Validator(schema).is_valid(value))


@pytest.mark.parametrize(
    "members",
    [{"additionalProperties": True}, {"additionalProperties": {"type": "null"}}, {"unevaluatedProperties": {}}, {"propertyNames": {}}],
)
def test_what_is_said_of_other_properties_stays(members: dict[str, Any]) -> None:
    assert closing(OPEN | members) == OPEN | members


@pytest.mark.parametrize(
    "around",
    [
        lambda schema: schema,
        lambda schema: {"items": schema, "type": "array"},
        lambda schema: {"items": {"prefixItems": [schema]}},
        lambda schema: {"prefixItems": [True, schema]},
        lambda schema: {"anyOf": [schema, {"type": "null"}]},
        lambda schema: {"oneOf": [schema]},
        lambda schema: {"allOf": [schema], "description": "the one"},
        lambda schema: {"type": "object", "additionalProperties": schema},
        lambda schema: {"$ref": "#/$defs/x", "$defs": {"x": schema}},
        lambda schema: {"$ref": "#/components/schemas/x", "components": {"schemas": {"x": schema}}},
        lambda schema: {"$ref": "#/$defs/y/items", "$defs": {"y": {"items": schema}}},
        lambda schema: {"properties": {"b": schema}, "additionalProperties": False},
        lambda schema: {"patternProperties": {"b": schema}, "additionalProperties": False},
        lambda schema: {"$schema": "http://json-schema.org/draft-07/schema#", "$ref": "#/definitions/x", "definitions": {"x": schema}},
    ],
)
def test_an_object_that_one_schema_speaks_of_is_closed_in_it(around: Any) -> None:
    assert closing(around(OPEN)) == around(SHUT)
    assert list(closing(around(OPEN))) == list(around(SHUT))


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {},
        {"type": "object"},
        {"enum": [OPEN]},
        {"not": OPEN},
        {"default": OPEN},
        {"contains": OPEN},
        OPEN | {"enum": [{"a": 1, "z": 2}]},
        OPEN | {"minProperties": 2},
        OPEN | {"$dynamicRef": "#x"},
        {"$ref": "https://example.org/other"} | OPEN,
        {"properties": {"b": {"not": {"$ref": "https://example.org/this#/$defs/x"}}, "c": {"$ref": "#/$defs/x"}}, "$defs": {"x": OPEN}},
        {"properties": {"b": {"not": {"$recursiveRef": "#"}}}},
        {"items": {"$ref": "#nowhere"}} | OPEN,
        {"allOf": [OPEN, OTHER | {"additionalProperties": True}]},
        {"items": OPEN | {"$id": "https://example.org/items"}},
        {"properties": 1, "items": {"properties": []}},
    ],
)
def test_what_is_not_known_to_have_these_names_only_stays_open(schema: Any) -> None:
    assert closing(schema) == schema


@pytest.mark.parametrize(
    ("schema", "names"),
    [
        ({"allOf": [OPEN, OTHER]}, ["a", "b"]),
        (OTHER | {"anyOf": [{"required": ["a"]}, {"required": ["c"]}]}, ["b", "a", "c"]),
        ({"anyOf": [OPEN, {"properties": {"c": {}}}]} | OTHER, ["a", "c", "b"]),
        (OTHER | {"if": OPEN, "then": {"properties": {"c": {}}}, "else": {"required": ["d"]}}, ["b", "a", "c", "d"]),
        (OTHER | {"required": ["c", "b"]}, ["b", "c"]),
        (OTHER | {"dependentRequired": {"b": ["c"]}}, ["b", "c"]),
        (OTHER | {"dependentSchemas": {"b": OPEN}}, ["b", "a"]),
        (OTHER | {"$ref": "#/$defs/x", "$defs": {"x": OPEN}}, ["b", "a"]),
        ({"oneOf": [OPEN, OTHER]}, ["a", "b"]),
    ],
)
def test_an_object_that_several_speak_of_is_closed_around_all_their_names(schema: Any, names: list[str]) -> None:
    whole = closing(schema)
    assert whole["additionalProperties"] is False
    assert sorted(whole["properties"]) == sorted(names)
    assert {keyword: value for keyword, value in whole.items() if keyword not in ("properties", "additionalProperties")} == {
        keyword: value for keyword, value in schema.items() if keyword != "properties"
    }


def test_a_definition_that_is_a_part_elsewhere_is_closed_where_it_stands_for_a_value() -> None:
    schema = {
        "properties": {"own": {"$ref": "#/$defs/x"}, "both": {"allOf": [{"$ref": "#/$defs/x"}, OTHER]}},
        "$defs": {"x": OPEN},
    }
    whole = closing(schema)
    assert whole["$defs"]["x"] == OPEN
    assert whole["properties"]["own"] == {"$ref": "#/$defs/x", "properties": {"a": True}, "additionalProperties": False}
    assert is_valid(whole, {"own": {"a": 1}, "both": {"a": 1, "b": 2}})
    assert not is_valid(whole, {"own": {"a": 1, "b": 2}})
    assert not is_valid(whole, {"both": {"c": 1}})


def test_what_two_schemas_say_of_one_property_is_closed_in_neither() -> None:
    schema = {"allOf": [{"properties": {"x": OPEN, "y": OPEN}}, {"properties": {"x": OTHER}}]}
    parts = closing(schema)["allOf"]
    assert parts[0]["properties"] == {"x": OPEN, "y": SHUT}
    assert parts[1]["properties"] == {"x": OTHER}


def test_alternatives_of_one_of_that_share_values_are_not_narrowed() -> None:
    """Closed one by one, `{"a": 1}` would match the first alone, though it matches both as they are written."""
    schema = {"oneOf": [OPEN, OTHER]}
    assert not is_valid(schema, {"a": 1})
    assert not is_valid(closing(schema), {"a": 1})
    told = [part | {"required": [name]} for part, name in ((OPEN, "a"), (OTHER, "b"))]
    assert closing({"oneOf": told}) == {"oneOf": [part | {"additionalProperties": False} for part in told]}


def test_the_document_as_it_came_is_not_changed() -> None:
    schema = json.loads(json.dumps({"items": {"allOf": [OPEN, OTHER]}}))
    kept = copy.deepcopy(schema)
    assert closed(schema) != kept
    assert schema == kept


def test_a_document_that_names_too_much_stays_as_it_is() -> None:
    names = {f"p{number}": True for number in range(1000)}
    many = {f"q{number}": {"$ref": "#/$defs/x"} for number in range(100)}
    schema = {"properties": many | {"z": {"allOf": [{"$ref": "#/$defs/x"}, OPEN]}}, "$defs": {"x": {"properties": names}}}
    assert closing(schema) == schema


def test_what_nests_too_deeply_is_left_to_the_limits() -> None:
    schema: Any = OPEN
    for _ in range(10_000):
        schema = {"items": schema}
    assert closed(schema) is schema


# Few names and values, so that alternatives overlap, parts name the same properties and random values meet schemas.
NAMES = ("a", "b", "c")
values = st.recursive(
    st.sampled_from([0, "x", None]),
    lambda inner: st.one_of(st.dictionaries(st.sampled_from((*NAMES, "z")), inner, max_size=3), st.lists(inner, max_size=2)),
    max_leaves=5,
)


def objects(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.fixed_dictionaries(
        {"type": st.just("object"), "properties": st.dictionaries(st.sampled_from(NAMES), inner, max_size=2)},
        optional={"required": st.lists(st.sampled_from(NAMES), max_size=1), "additionalProperties": st.booleans()},
    )


def combinations(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    some = st.lists(inner, min_size=1, max_size=2)
    alone = st.sampled_from(["allOf", "anyOf", "oneOf"]).flatmap(lambda keyword: st.fixed_dictionaries({keyword: some}))
    beside = st.tuples(objects(inner), alone).map(lambda pair: pair[0] | pair[1])
    condition = st.tuples(objects(inner), inner, inner).map(lambda three: three[0] | {"if": three[1], "then": three[2]})
    denial = st.tuples(objects(inner), inner).map(lambda pair: pair[0] | {"not": pair[1]})
    return st.one_of(alone, beside, condition, denial, st.fixed_dictionaries({"type": st.just("array"), "items": inner}))


scalars: st.SearchStrategy[Any] = st.sampled_from([{"type": "string", "maxLength": 2}, {"const": 0}, {"type": "null"}, True])
leaves = st.one_of(scalars, st.sampled_from([{"$ref": "#/$defs/x"}, {"$ref": "#/$defs/y"}]))
subschemas = st.recursive(leaves, lambda inner: st.one_of(objects(inner), combinations(inner)), max_leaves=6)
# What `x` and `y` refer to is within a member of theirs, so that no reference leads back to itself for the same value.
documents = st.tuples(
    st.one_of(objects(subschemas), combinations(subschemas)), objects(leaves), st.one_of(objects(leaves), combinations(objects(leaves)))
).map(lambda parts: parts[0] | {"$defs": {"x": parts[1], "y": parts[2]}})


@settings(max_examples=100, deadline=None)
@given(documents, st.lists(values, max_size=12))
def test_whatever_the_closed_schema_allows_the_schema_as_written_allows(schema: Any, instances: list[Any]) -> None:
    whole = closing(schema)
    for instance in instances:
        assert not is_valid(whole, instance) or is_valid(schema, instance)


@settings(max_examples=25, deadline=None)
@given(documents, st.integers(0, 2**16))
def test_whatever_is_generated_in_the_closed_reading_is_valid_as_the_schema_is_written(schema: Any, seed: int) -> None:
    try:
        grammar = LLGUIDANCE.compile(GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(closing(schema))))
    except UnsupportedGrammar:
        assume(False)
    text = random_answer(grammar, random.Random(seed))
    jsonschema.Draft202012Validator(schema).validate(json.loads(text))


KEYWORDS = [
    "properties",
    "required",
    "allOf",
    "oneOf",
    "$ref",
    "if",
    "then",
    "items",
    "minProperties",
    "type",
    "dependencies",
    "enum",
    "const",
]
malformed = st.recursive(
    st.sampled_from([0, "a", None, True, "#", "#/a"]),
    lambda inner: st.one_of(st.lists(inner, max_size=2), st.dictionaries(st.sampled_from(KEYWORDS), inner, max_size=4)),
    max_leaves=8,
)


@settings(max_examples=300, deadline=None)
@given(malformed)
def test_what_is_malformed_is_left_to_the_backends(schema: Any) -> None:
    closing(schema)


class Street(BaseModel):
    name: str
    number: int | None = None


class Home(BaseModel):
    street: Street
    rooms: list[Street] = []


class Work(BaseModel):
    company: str
    at: Street


class Person(BaseModel):
    name: str
    places: list[Home | Work]


NAMED: list[tuple[Any, list[Any]]] = [
    (Person.model_json_schema(), [{"name": "x", "places": [{"street": {"name": "s", "number": 1}, "rooms": [{"name": "r"}]}]}]),
    (Person.model_json_schema(), [{"name": "x", "places": [{"company": "c", "at": {"name": "s"}}]}]),
    ({"allOf": [OPEN, OTHER], "required": ["c"]}, [{"a": 1, "b": 2, "c": 3}, {"c": 0}]),
    ({"oneOf": [OPEN | {"required": ["a"]}, OTHER | {"required": ["b"]}]}, [{"a": 1}, {"b": 1}]),
    (OTHER | {"anyOf": [{"required": ["a"]}, OPEN]}, [{"b": 1, "a": 2}, {"b": 1}, {"a": 2}]),
]


@pytest.mark.parametrize(("schema", "instances"), NAMED)
def test_what_is_named_can_still_come_up(schema: Any, instances: list[Any]) -> None:
    whole = closing(schema)
    grammar = LLGUIDANCE.compile(GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(whole)))
    for instance in instances:
        assert is_valid(whole, instance)
        assert not is_valid(whole, instance | {"unnamed": 1})
        assert accepts(grammar, json.dumps(instance), random.Random(0))


plain = st.recursive(
    scalars,
    lambda inner: st.one_of(objects(inner), st.fixed_dictionaries({"type": st.just("array"), "items": inner})),
    max_leaves=6,
)


def without_unnamed(value: Any, schema: Any) -> Any:
    if isinstance(value, list) and schema is not True and "items" in schema:
        return [without_unnamed(item, schema["items"]) for item in value]
    if not isinstance(value, dict) or schema is True or "properties" not in schema:
        return value
    names = [name for name in value if "additionalProperties" in schema or name in (*schema["properties"], *schema.get("required", ()))]
    return {name: without_unnamed(value[name], schema["properties"].get(name, True)) for name in names}


@settings(max_examples=150, deadline=None)
@given(plain, values)
def test_what_the_schema_allows_the_closed_one_allows_without_what_is_not_named(schema: Any, value: Any) -> None:
    whole = closing(schema)
    if is_valid(schema, value):
        assert is_valid(whole, without_unnamed(value, schema))
    if is_valid(whole, value):
        assert without_unnamed(value, schema) == value
