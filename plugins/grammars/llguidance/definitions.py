"""The definitions of a schema as llguidance gets it: what is referred to, and what stands in several places, each read there once.

It takes some microseconds for the smallest subschema, up to a millisecond for a regex, wherever they stand.
"""

from collections.abc import Iterable
from typing import Any

from penstock.plugins.grammars.json_schema.schema_walk import Place

PREFIX = "penstock-"
_SIMPLE_TYPES = frozenset({"null", "boolean", "integer", "number", "string", "array", "object"})
_BOUNDS = (("minLength", "maxLength"), ("minItems", "maxItems"), ("minimum", "maximum"))
_ALL_BOUNDS = frozenset().union(*_BOUNDS)
_SHARED = frozenset({"type", "enum", "pattern", "format", "items", "properties", "required", "additionalProperties", "anyOf", *_ALL_BOUNDS})
_OF_SCHEMAS = frozenset({"anyOf", "items", "additionalProperties", "properties"})


class Definitions:
    """`origins` say where in the client's document what a definition holds stands first.

    Where `are_ground`, only that is shared which refers to nothing else: what it refers to might lead to where it stands.
    """

    def __init__(self, *, are_ground: bool) -> None:
        self.contents: dict[str, Any] = {}
        self.origins: dict[str, Place] = {}
        self.pending: list[tuple[str, Any]] = []  # what is referred to and has not been read
        self._are_ground = are_ground
        self._names: dict[str, str] = {}
        self._first: dict[str, tuple[dict[str, Any], Place]] = {}
        self._shared: dict[str, dict[str, Any]] = {}
        self._keys: dict[int, tuple[str, dict[str, Any]]] = {}  # with the schema, whose identity is another's once it is gone

    def refer(self, pointer: str, target: Any, place: Place) -> str:
        """A reference to what stands at `pointer` in the client's document."""
        if pointer not in self._names:
            self._names[pointer] = name = self._new_name(place)
            self.pending.append((name, target))
        return f"#/$defs/{self._names[pointer]}"

    def share(self, schema: dict[str, Any], place: Place) -> dict[str, Any]:
        """The schema or, from the second one like it on, a reference in its place, also in that of the first.

        It must surely have values: llguidance leaves out a member that has none, but not one behind a reference.
        """
        types = schema.get("type") if len(schema) == 1 else None
        content = types if isinstance(types, str) and types in _SIMPLE_TYPES else self._content(schema)
        if not content:
            return schema
        shared = self._shared.get(content)
        if shared is not None:
            return shared
        if content not in self._first:
            self._first[content] = schema, place
            self._keys[id(schema)] = f"={len(self._keys)}", schema
            return schema
        first, first_place = self._first[content]
        name = self._new_name(first_place)
        self.contents[name] = first.copy()
        first.clear()
        first["$ref"] = f"#/$defs/{name}"
        self._shared[content] = first
        return first

    def _content(self, schema: dict[str, Any]) -> str | None:
        """Equal for schemas that say the same in the same order; None where it is not clear that they have values."""
        if not _SHARED.issuperset(schema):
            return None
        parts = []
        for keyword, value in schema.items():
            if keyword not in _OF_SCHEMAS:
                part: str | None = repr(value)
            elif keyword == "properties":
                members = self._all(value.values()) if isinstance(value, dict) else None
                part = None if members is None else f"{list(value)}{members}"
            elif keyword == "anyOf":
                part = self._all(value) if value and isinstance(value, list) and len(schema) == 1 else None
            else:
                part = self._part(value)
            if part is None:
                return None
            parts.append(f"{keyword}:{part}")
        return ";".join(parts) if _surely_has_values(schema) else None

    def _all(self, schemas: Iterable[Any]) -> str | None:
        parts = []
        keys = self._keys
        for schema in schemas:
            known = keys.get(id(schema))
            part = self._part(schema) if known is None else known[0]
            if part is None:
                return None
            parts.append(part)
        return ",".join(parts)

    def _part(self, schema: Any) -> str | None:
        if isinstance(schema, bool) or not schema:
            return str(schema)
        known = self._keys.get(id(schema))
        if known is not None:
            return known[0]
        return schema["$ref"] if not self._are_ground and isinstance(schema, dict) and [*schema] == ["$ref"] else None

    def _new_name(self, place: Place) -> str:
        name = f"{PREFIX}{len(self.origins)}"
        self.origins[name] = place
        return name


def _surely_has_values(schema: dict[str, Any]) -> bool:
    """Of one whose parts do, where they are not false."""
    if "anyOf" in schema:
        return False not in schema["anyOf"]
    types, values = schema.get("type", []), schema.get("enum")
    if "enum" in schema and (not isinstance(values, list) or not values):
        return False
    if types == []:
        return len(schema) == 1 or "enum" not in schema
    names = types if isinstance(types, list) else [types]
    for name in names:
        if not isinstance(name, str) or name not in _SIMPLE_TYPES:
            return False
    if values is not None:
        return len(schema) == 2 and types == "string" and all(isinstance(value, str) for value in values)
    for low, high in () if _ALL_BOUNDS.isdisjoint(schema) else _BOUNDS:
        bounds = [schema[keyword] for keyword in (low, high) if keyword in schema]
        if not all(isinstance(bound, int) and not isinstance(bound, bool) for bound in bounds) or bounds != sorted(bounds):
            return False
        if bounds and low != "minimum" and bounds[0] < 0:
            return False
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        return False
    if required:
        properties, others = schema.get("properties", {}), schema.get("additionalProperties", True)
        if any(properties.get(name, others) is False for name in required):
            return False
    return schema.get("items", True) is not False or not schema.get("minItems")
