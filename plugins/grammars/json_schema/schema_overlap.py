"""Whether two JSON Schemas can share a value, told from types, given values, and the properties that one requires."""

from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

from penstock.engine.errors import UnsupportedGrammar
from penstock.plugins.grammars.json_schema.json_text import dumps, json_type
from penstock.plugins.grammars.json_schema.schema_keywords import ANNOTATIONS
from penstock.plugins.grammars.json_schema.schema_shape import resolve

TYPES = ("null", "boolean", "number", "string", "array", "object")  # whole numbers are among the numbers
ALL_TYPES = frozenset(TYPES)
MAX_DEPTH = 12
MAX_STEPS = 10_000  # of some microseconds, for all of a document: alternatives within alternatives multiply
VALUES_PER_STEP = 50

Schema = Mapping[str, Any]


def types_of(schema: Schema) -> frozenset[str]:
    """Those that `type` and the given values leave."""
    given = schema.get("type", [*TYPES])
    names = given if isinstance(given, list) else [given]
    types = frozenset("number" if name == "integer" else name for name in names)
    values = values_of(schema)
    return types if values is None else types & {"number" if (name := json_type(value)) == "integer" else name for value in values}


def values_of(schema: Schema) -> list[Any] | None:
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    return values if isinstance(values, list) else None


def same_key(value: Any) -> str:
    """Equal for what JSON Schema calls equal: 1.0 is 1, and members have no order."""
    match value:
        case float() if value.is_integer():
            return dumps(int(value))
        case list():
            return "[" + ",".join(map(same_key, value)) + "]"
        case dict():
            return "{" + ",".join(sorted(f"{dumps(name)}:{same_key(item)}" for name, item in value.items())) + "}"
    return dumps(value)


class Overlap:
    """Compares schemas of one document, through their references."""

    def __init__(self, root: Any) -> None:
        self.root = root
        self._num_steps = 0
        self._keys: dict[int, tuple[list[Any], frozenset[str]]] = {}
        self._types: dict[int, tuple[Schema, frozenset[str]]] = {}
        self._targets: dict[str, Any] = {}

    def can_go_on(self, num_steps: int = 1) -> bool:
        """Counts steps; False where there have been too many."""
        self._num_steps += num_steps
        return self._num_steps <= MAX_STEPS

    def follow(self, schema: Any) -> Any:
        """What stands behind a reference that stands alone; anything else as it is."""
        for _ in range(MAX_DEPTH):
            if not isinstance(schema, dict) or not isinstance(reference := schema.get("$ref"), str) or _has_more(schema):
                return schema
            target = self.target(reference)
            if target is None:
                return schema
            schema = target
        return True

    def target(self, reference: str) -> Any:
        """None where it leads nowhere in this document."""
        if reference not in self._targets:
            try:
                _, self._targets[reference] = resolve(self.root, unquote(reference), "")
            except UnsupportedGrammar:
                return None
        return self._targets[reference]

    def _beside(self, schema: Schema) -> Any:
        """What a reference leads to that does not stand alone; anything, where that is not known."""
        target = self.target(schema["$ref"]) if isinstance(schema["$ref"], str) else None
        return True if target is None else target

    def types(self, schema: Any, depth: int = 0) -> frozenset[str]:
        """No fewer than the values of the schema have."""
        schema = self.follow(schema)
        if not isinstance(schema, dict) or depth > MAX_DEPTH or not self.can_go_on(_cost(schema)):
            return frozenset() if schema is False else ALL_TYPES
        types = types_of(schema)
        if "$ref" in schema:
            types &= self.types(self._beside(schema), depth + 1)
        for keyword in ("anyOf", "oneOf", "allOf"):
            parts = schema.get(keyword)
            if isinstance(parts, list) and parts:
                of_parts = [self.types(part, depth + 1) for part in parts]
                types &= frozenset.intersection(*of_parts) if keyword == "allOf" else frozenset.union(*of_parts)
        return types

    def are_disjoint(self, left: Any, right: Any, types: frozenset[str] = ALL_TYPES, depth: int = 0) -> bool:
        """True only where no value of these types satisfies both."""
        left, right = self.follow(left), self.follow(right)
        if left is False or right is False:
            return True
        if not isinstance(left, dict) or not isinstance(right, dict) or depth > MAX_DEPTH or not self.can_go_on(_cost(left)):
            return False
        for one, other in ((left, right), (right, left)):
            for keyword in ("anyOf", "oneOf"):
                parts = one.get(keyword)
                if isinstance(parts, list) and all(self.are_disjoint(part, other, types, depth + 1) for part in parts):
                    return True
            parts = one.get("allOf")
            if isinstance(parts, list) and any(self.are_disjoint(part, other, types, depth + 1) for part in parts):
                return True
            if "$ref" in one and self.are_disjoint(self._beside(one), other, types, depth + 1):
                return True
        shared = self._all_types(left) & self._all_types(right) & types
        if not shared:
            return True
        left_values, right_values = values_of(left), values_of(right)
        if left_values is not None and right_values is not None:
            return self._keys_of(left_values).isdisjoint(self._keys_of(right_values))
        if shared == {"array"}:
            return (_least(left) > 0 or _least(right) > 0) and self._have_disjoint_items(left, right, depth)
        return shared == {"object"} and self._have_disjoint_members(left, right, depth)

    def share_the_empty_array_only(self, left: Any, right: Any, types: frozenset[str]) -> bool:
        """Whether no other value of these types satisfies both."""
        left, right = self.follow(left), self.follow(right)
        if not isinstance(left, dict) or not isinstance(right, dict):
            return False
        return self._all_types(left) & self._all_types(right) & types == {"array"} and self._have_disjoint_items(left, right, 0)

    def _have_disjoint_items(self, left: Schema, right: Schema, depth: int) -> bool:
        if not all(isinstance(schema.get("items"), dict) and "prefixItems" not in schema for schema in (left, right)):
            return False
        return self.are_disjoint(left["items"], right["items"], depth=depth + 1)

    def _all_types(self, schema: Schema) -> frozenset[str]:
        if id(schema) not in self._types:
            self._types[id(schema)] = schema, self.types(schema)  # with the schema, whose identity is another's once it is gone
        return self._types[id(schema)][1]

    def _keys_of(self, values: list[Any]) -> frozenset[str]:
        if len(values) == 1:
            return frozenset(map(same_key, values))
        if id(values) not in self._keys:
            self._keys[id(values)] = values, frozenset(map(same_key, values))  # with the list, as above
        return self._keys[id(values)][1]

    def _have_disjoint_members(self, left: Schema, right: Schema, depth: int) -> bool:
        names = {name for schema in (left, right) for name in schema.get("required", ()) if isinstance(name, str)}
        return any(self.are_disjoint(_member(left, name), _member(right, name), depth=depth + 1) for name in names)


def _has_more(schema: Schema) -> bool:
    """Than a reference."""
    return len(schema) > 1 and any(keyword != "$ref" and keyword not in ANNOTATIONS for keyword in schema)


def _cost(schema: Schema) -> int:
    """In steps."""
    return 1 + len(values_of(schema) or ()) // VALUES_PER_STEP


def _least(schema: Schema) -> int:
    least = schema.get("minItems", 0)
    return least if isinstance(least, int) else 0


def _member(schema: Schema, name: str) -> Any:
    properties = schema.get("properties")
    if isinstance(properties, dict) and name in properties:
        return properties[name]
    return True if schema.get("patternProperties") else schema.get("additionalProperties", True)
