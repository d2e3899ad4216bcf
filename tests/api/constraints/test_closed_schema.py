from typing import Any

import pytest

from penstock.api.constraints.closed_schema import closed
from penstock.engine.errors import InvalidRequest

OPEN = {"type": "object", "properties": {"a": {}}}
SHUT = OPEN | {"additionalProperties": False}


@pytest.mark.parametrize(
    "members", [{"additionalProperties": True}, {"additionalProperties": {"type": "null"}}, {"unevaluatedProperties": {}}]
)
def test_what_is_said_of_other_properties_stays(members: dict[str, Any]) -> None:
    assert closed(OPEN | members, "p") == OPEN | members


@pytest.mark.parametrize(
    "around",
    [
        lambda schema: schema,
        lambda schema: {"items": schema, "type": "array"},
        lambda schema: {"prefixItems": [True, schema]},
        lambda schema: {"anyOf": [schema, {"type": "null"}]},
        lambda schema: {"oneOf": [schema]},
        lambda schema: {"allOf": [schema], "description": "the one"},
        lambda schema: {"type": "object", "additionalProperties": schema},
        lambda schema: {"$ref": "#/$defs/x", "$defs": {"x": schema}},
        lambda schema: {"properties": {"b": schema}, "additionalProperties": False},
        lambda schema: {"patternProperties": {"b": schema}, "additionalProperties": False},
    ],
)
def test_every_object_with_names_is_closed(around: Any) -> None:
    assert closed(around(OPEN), "p") == around(SHUT)
    assert list(closed(around(OPEN), "p")) == list(around(SHUT))


@pytest.mark.parametrize("schema", [True, {}, {"type": "object"}, {"enum": [OPEN]}, {"not": {"required": ["a"]}}, {"default": OPEN}])
def test_nothing_else_is(schema: Any) -> None:
    assert closed(schema, "p") == schema


@pytest.mark.parametrize(
    ("schema", "path"),
    [
        ({"allOf": [OPEN, OPEN]}, ".allOf"),
        (OPEN | {"anyOf": [{"required": ["a"]}]}, ".anyOf"),
        ({"items": OPEN | {"$ref": "#/$defs/x"}}, ".items.$ref"),
        ({"properties": {"b": {"if": OPEN, "then": {}}}}, ".properties.b.if"),
        ({"prefixItems": [{}, {"not": {"anyOf": [OPEN]}}]}, ".prefixItems[1].not"),
    ],
)
def test_what_would_contradict_itself_is_refused_with_its_path(schema: Any, path: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        closed(schema, "guided_json")
    assert caught.value.param == f"guided_json{path}"


def test_what_nests_too_deeply_is_refused() -> None:
    schema: Any = {}
    for _ in range(100_000):
        schema = {"items": schema}
    with pytest.raises(InvalidRequest, match="too deeply"):
        closed(schema, "guided_json")
