import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cli.grammar.trial import in_schema_order

AB: dict[str, Any] = {"properties": {"a": {}, "b": {}}}
values = st.recursive(
    st.none() | st.integers() | st.text("ab", max_size=2),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abcxy"), inner, max_size=4),
)
schemas = st.recursive(
    st.sampled_from([True, AB, {"$ref": "#"}, {"required": ["y", "x"]}, {"const": {"b": 1}}]),
    lambda inner: st.fixed_dictionaries(
        {},
        optional={
            "properties": st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
            "items": inner,
            **dict.fromkeys(("allOf", "anyOf", "oneOf", "prefixItems"), st.lists(inner, max_size=2)),
            **dict.fromkeys(("then", "additionalProperties"), inner),
            "dependentRequired": st.dictionaries(st.sampled_from("abc"), st.lists(st.sampled_from("abc")), max_size=2),
            "dependentSchemas": st.dictionaries(st.sampled_from("abc"), inner, max_size=2),
            "patternProperties": st.dictionaries(st.sampled_from("abc"), inner, max_size=2),
        },
    ),
)


@given(values, schemas)
def test_the_value_stays_the_same(value: Any, schema: Any) -> None:
    assert in_schema_order(value, schema) == value


@pytest.mark.parametrize(
    "schema",
    [
        AB,
        {"$ref": "#/$defs/x", "$defs": {"x": AB}},
        {"allOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}]},
        {"anyOf": [{"type": "null"}, AB]},
        {"oneOf": [{"properties": {"b": {"const": 7}, "a": {}}}, {"properties": {"b": {"enum": [7, 8]}, "a": {}}}, AB]},
        {"anyOf": [{"properties": {"b": {}, "a": {}}, "required": ["c"]}, AB]},
        {"if": {}, "then": AB},
        {"dependentSchemas": {"b": AB}},
        {"required": ["a", "b"]},
        {"dependentRequired": {"c": ["b"], "a": ["b"]}},
        {"properties": {"a": {}}},
    ],
)
def test_members_come_as_the_schema_has_them_and_others_after_these(schema: Any) -> None:
    assert json.dumps(in_schema_order({"z": 0, "b": 1, "a": 2, "y": 3}, schema)) in (
        '{"a": 2, "b": 1, "z": 0, "y": 3}',
        '{"a": 2, "z": 0, "b": 1, "y": 3}' if schema == {"properties": {"a": {}}} else None,
    )


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"x": AB}},
        {"patternProperties": {"x": AB}},
        {"additionalProperties": AB},
        {"patternProperties": {"x": {"properties": {"b": {}, "a": {}}}}, "properties": {"x": AB}},
    ],
)
def test_members_within_members_are_ordered_too(schema: Any) -> None:
    assert json.dumps(in_schema_order({"x": {"b": 1, "a": 2}}, schema)) == '{"x": {"a": 2, "b": 1}}'


@pytest.mark.parametrize("schema", [{"items": AB}, {"prefixItems": [AB, AB]}, {"prefixItems": [AB], "items": AB}, {"items": [AB, AB]}])
def test_members_of_items_are_ordered_too(schema: Any) -> None:
    assert json.dumps(in_schema_order([{"b": 1, "a": 2}] * 2, schema)) == '[{"a": 2, "b": 1}, {"a": 2, "b": 1}]'


@pytest.mark.parametrize("schema", [{"$ref": "#"}, {"$ref": "#/nowhere"}, {"allOf": 5, "properties": [], "required": 7}, {"properties": 1}])
def test_a_schema_that_is_none_orders_nothing(schema: Any) -> None:
    assert json.dumps(in_schema_order({"b": 1, "a": 2}, schema)) == '{"b": 1, "a": 2}'
