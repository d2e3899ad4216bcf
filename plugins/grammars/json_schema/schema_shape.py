"""What can be told of a JSON Schema without translating it: where a reference leads, and whether two schemas can share a value."""

from collections.abc import Mapping
from typing import Any

from penstock.engine.errors import UnsupportedGrammar
from penstock.engine.grammars.joined_keywords import position
from penstock.plugins.grammars.json_schema.json_text import JSON_TYPES, dumps, json_type


def resolve(root: Any, reference: str, param: str) -> tuple[list[str], Any]:
    """The steps of a reference within the document and what they lead to. Raises `UnsupportedGrammar` with `param`."""
    if reference != "#" and not reference.startswith("#/"):
        raise UnsupportedGrammar(f"only references within the schema (#/...) are supported, got {dumps(reference)}", param)
    steps = [step.replace("~1", "/").replace("~0", "~") for step in reference.split("/")[1:]]
    target = root
    for step in steps:
        if isinstance(target, Mapping) and step in target:
            target = target[step]
        elif isinstance(target, list) and (place := position(step, len(target))) is not None:
            target = target[place]
        else:
            raise UnsupportedGrammar(f"{dumps(reference)} leads nowhere in this schema", param)
    return steps, target


def are_disjoint(root: Any, left: Any, right: Any) -> bool:
    """True where no value can satisfy both schemas, as far as types, given values and required discriminating properties tell."""
    left, right = _follow(root, left), _follow(root, right)
    if left is None or right is None:
        return False
    if not _types(left) & _types(right):
        return True
    left_values, right_values = _values(left), _values(right)
    if left_values is not None and right_values is not None:
        return not left_values & right_values
    if _types(left) & _types(right) != {"object"}:
        return False
    return any(are_disjoint(root, left["properties"][name], right["properties"][name]) for name in _required(left) & _required(right))


def _follow(root: Any, schema: Any) -> Mapping[str, Any] | None:
    """The schema behind its references; None where there is none or it combines others."""
    for _ in range(16):
        if not isinstance(schema, Mapping):
            return None
        if "$ref" not in schema:
            return None if {"anyOf", "oneOf", "allOf"} & schema.keys() else schema
        _, schema = resolve(root, schema["$ref"], "$ref")
    return None


def _types(schema: Mapping[str, Any]) -> set[str]:
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if values is not None:
        return {json_type(value) for value in values}
    given = schema.get("type", list(JSON_TYPES))
    types = {given} if isinstance(given, str) else set(given)
    return types | {"integer"} if "number" in types else types


def _values(schema: Mapping[str, Any]) -> set[str] | None:
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if values is None:
        return None
    return {dumps(int(value) if isinstance(value, float) and value.is_integer() else value) for value in values}


def _required(schema: Mapping[str, Any]) -> set[str]:
    return {name for name in schema.get("required", []) if name in schema.get("properties", {})}
