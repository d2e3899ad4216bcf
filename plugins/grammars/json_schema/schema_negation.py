"""The opposite of a JSON Schema, without `not`: alternatives that together allow what it forbids."""

import itertools
from collections.abc import Callable
from typing import Any

from penstock.plugins.grammars.json_schema.json_text import json_type
from penstock.plugins.grammars.json_schema.schema_keywords import ANNOTATIONS
from penstock.plugins.grammars.json_schema.schema_overlap import TYPES, Overlap, same_key, values_of

MAX_ALTERNATIVES = 200
MAX_CHARACTERS = 2000
MAX_LENGTH = 100
CHARACTERS_PER_STEP = 10
MAX_DEPTH = 16

_OPPOSITE_BOUNDS = {
    "minimum": "exclusiveMaximum",
    "maximum": "exclusiveMinimum",
    "exclusiveMinimum": "maximum",
    "exclusiveMaximum": "minimum",
}
_SIZES = {
    "minLength": ("string", "maxLength", -1),
    "maxLength": ("string", "minLength", 1),
    "minItems": ("array", "maxItems", -1),
    "maxItems": ("array", "minItems", 1),
}
_NO_ASSERTIONS = ANNOTATIONS | {"$id", "id", "$anchor", "if", "then", "else", "contentEncoding", "contentMediaType"}


class Inexpressible(Exception):
    """The opposite cannot be written with the keywords that are left."""


class Negation:
    """Of schemas of one document. `is_assertion` says of a keyword and its value whether they demand anything at all.

    With `is_partial`, alternatives within an object that cannot be written are left out: what is left is forbidden still.
    """

    def __init__(self, overlap: Overlap, is_assertion: Callable[[str, Any], bool], *, is_partial: bool = False) -> None:
        self._overlap = overlap
        self._is_assertion = is_assertion
        self._is_partial = is_partial
        self._num_alternatives = 0
        self._num_members = 0  # within each other, of those whose opposite is being written

    def of(self, schema: Any, depth: int = 0) -> list[Any]:
        """None where the schema allows everything. Raises `Inexpressible`."""
        if schema is True or schema is False:
            return [] if schema else [True]
        if not isinstance(schema, dict) or depth > MAX_DEPTH or not self._overlap.can_go_on():
            raise Inexpressible
        asserted = [keyword for keyword, value in schema.items() if keyword not in _NO_ASSERTIONS and self._is_assertion(keyword, value)]
        if "$ref" in schema:
            target = self._overlap.follow(schema)
            if asserted != ["$ref"] or (isinstance(target, dict) and "$ref" in target):
                raise Inexpressible  # what stands beside a reference counts in some drafts only
            return self.of(target, depth + 1)
        alternatives: list[Any] = []
        for keyword in asserted:
            try:
                alternatives += self._of_keyword(keyword, schema, depth)
            except Inexpressible:
                if not self._is_partial or not self._num_members:
                    raise
        if "if" in schema and self._is_assertion("if", schema["if"]):
            alternatives += self._of_condition(schema, depth)
        self._num_alternatives += len(alternatives)
        if self._num_alternatives > MAX_ALTERNATIVES:
            raise Inexpressible
        return alternatives

    def _of_keyword(self, keyword: str, schema: dict[str, Any], depth: int) -> list[Any]:
        value = schema[keyword]
        if keyword in _OPPOSITE_BOUNDS and isinstance(value, int | float) and not isinstance(value, bool):
            if any(isinstance(schema.get(name), bool) for name in _OPPOSITE_BOUNDS):
                raise Inexpressible  # draft 4's `exclusiveMinimum: true`
            return [{"type": "number", _OPPOSITE_BOUNDS[keyword]: value}]
        if keyword in _SIZES and isinstance(value, int):
            type_name, opposite, step = _SIZES[keyword]
            return [{"type": type_name, opposite: value + step}] if value + step >= 0 else []
        match keyword, value:
            case "type", str() | list():
                return _other_types([value] if isinstance(value, str) else value, is_partial=self._is_partial and self._num_members > 0)
            case ("const", _) | ("enum", list()):
                values = values_of({keyword: value}) or []
                if not self._overlap.can_go_on(sum(len(text) for text in values if isinstance(text, str)) // CHARACTERS_PER_STEP):
                    raise Inexpressible
                return _other_values(values)
            case "required", list():
                return [{"type": "object", "properties": {name: False}} for name in value]
            case "properties", dict():
                return self._of_properties(value, depth)
            case (("additionalProperties" | "patternProperties"), _) if self._is_partial:
                return []
            case (("additionalProperties" | "items"), _) if value is True or value == {}:
                return []
            case "not", _:
                return [value]
            case "allOf", list():
                return [alternative for part in value for alternative in self.of(part, depth + 1)]
            case (("anyOf" | "oneOf"), list()):
                return self._of_alternatives(keyword, value, depth)
        raise Inexpressible

    def _of_properties(self, properties: dict[str, Any], depth: int) -> list[Any]:
        if self._is_partial and self._num_members:
            return []  # what is left out anyway need not be written at length
        self._num_members += 1
        try:
            opposites = {name: self._of_member(schema, depth) for name, schema in properties.items()}
        finally:
            self._num_members -= 1
        return [
            {"type": "object", "properties": {name: any_of(opposite)}, "required": [name]}
            for name, opposite in opposites.items()
            if opposite
        ]

    def _of_member(self, schema: Any, depth: int) -> list[Any]:
        try:
            return self.of(schema, depth + 1)
        except Inexpressible:
            if not self._is_partial:
                raise
            return []

    def _of_alternatives(self, keyword: str, schemas: list[Any], depth: int) -> list[Any]:
        if keyword == "oneOf" and not all(
            self._overlap.are_disjoint(left, right) for place, left in enumerate(schemas) for right in schemas[:place]
        ):
            raise Inexpressible
        opposites = [self.of(schema, depth + 1) for schema in schemas]
        return [{"allOf": [any_of(opposite) for opposite in opposites]}] if all(opposites) else []

    def _of_condition(self, schema: dict[str, Any], depth: int) -> list[Any]:
        alternatives: list[Any] = []
        opposite_then = self.of(schema.get("then", True), depth + 1)
        if opposite_then:
            alternatives.append({"allOf": [schema["if"], any_of(opposite_then)]})
        opposite_else = self.of(schema.get("else", True), depth + 1)
        opposite_if = self.of(schema["if"], depth + 1) if opposite_else else []
        if opposite_if:
            alternatives.append({"allOf": [any_of(opposite_if), any_of(opposite_else)]})
        return alternatives


def any_of(schemas: list[Any]) -> Any:
    return schemas[0] if len(schemas) == 1 else {"anyOf": schemas}


def _other_types(names: list[Any], *, is_partial: bool) -> list[Any]:
    others = [name for name in TYPES if name not in names]
    if "integer" in names and "number" in others:
        if not is_partial:
            raise Inexpressible  # numbers that are not whole
        others.remove("number")
    return [{"type": others}] if others else []


def _other_values(values: list[Any]) -> list[Any]:
    by_type: dict[str, list[Any]] = {}
    for value in {same_key(value): value for value in values}.values():
        name = json_type(value)
        by_type.setdefault("number" if name == "integer" else name, []).append(value)
    alternatives: list[Any] = [{"type": others}] if (others := [name for name in TYPES if name not in by_type]) else []
    for name, given in by_type.items():
        match name:
            case "boolean":
                alternatives += [{"const": not given[0]}] if len(given) == 1 else []
            case "string":
                alternatives.append({"type": "string", "pattern": _other_strings(given)})
            case "number":
                alternatives += _other_numbers(sorted(given))
            case "array" | "object":
                if any(given):
                    raise Inexpressible
                alternatives.append({"type": name, "minItems" if name == "array" else "minProperties": 1})
    return alternatives


def _other_numbers(values: list[float]) -> list[Any]:
    between = [{"exclusiveMinimum": low, "exclusiveMaximum": high} for low, high in itertools.pairwise(values)]
    spans = [{"exclusiveMaximum": values[0]}, *between, {"exclusiveMinimum": values[-1]}]
    return [{"type": "number", **span} for span in spans]


def _other_strings(values: list[str]) -> str:
    """A regex for every string but these."""
    if sum(map(len, values)) > MAX_CHARACTERS or max(map(len, values)) > MAX_LENGTH:
        raise Inexpressible
    tree: dict[str, Any] = {}
    for value in values:
        node = tree
        for character in value:
            node = node.setdefault(character, {})
        node[""] = True
    return f"^{_outside(tree)}$"


def _outside(node: dict[str, Any]) -> str:
    children = {character: child for character, child in node.items() if character}
    others = "".join(map(_escaped, children))
    ways = [rf"[^{others}][\s\S]*" if others else r"[\s\S]+"]
    ways += [_escaped(character) + _outside(child) for character, child in children.items()]
    return f"(?:{'|'.join(ways)})" + ("" if "" in node else "?")


def _escaped(character: str) -> str:
    return f"\\u{ord(character):04x}" if ord(character) < 0x10000 else character
