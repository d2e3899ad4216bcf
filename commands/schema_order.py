"""A value with its members in the order of a schema's properties, which is the order in which a model has to write them."""

from collections.abc import Iterable, Iterator
from typing import Any
from urllib.parse import unquote

from penstock.engine.errors import UnsupportedGrammar
from penstock.plugins.grammars.json_schema.schema_shape import resolve

MAX_PARTS = 10_000  # of all schemas for all values within one; alternatives within alternatives multiply
_OF_MEMBERS = ("properties", "patternProperties", "additionalProperties", "required", "items", "prefixItems", "additionalItems")
_ALTERNATIVES = ("anyOf", "oneOf", "then", "else", "dependentSchemas", "dependencies")
ABSENT = object()

Part = tuple[str, Any]


def in_schema_order(value: Any, schema: Any) -> Any:
    """An equal value. Members that the schema does not name come last, in the order they had.

    Of alternatives count those that are not plainly about another value: by `required`, `const` and `enum`. As it is, where the schema
    says too much.
    """
    return _Order(schema).ordered(value, [schema])


class _Order:
    def __init__(self, root: Any) -> None:
        self._root = root
        self._num_parts = 0

    def ordered(self, value: Any, schemas: Iterable[Any]) -> Any:
        if not isinstance(value, dict | list) or self._num_parts > MAX_PARTS:
            return value
        parts = [part for schema in schemas for part in self._parts(schema, value)]
        if isinstance(value, list):
            return [self.ordered(item, _of_item(parts, place)) for place, item in enumerate(value)]
        listed = [name for wanted in ("properties", "required") for keyword, names in parts if keyword == wanted for name in names]
        names = dict.fromkeys(name for name in [*listed, *value] if isinstance(name, str) and name in value)
        return {name: self.ordered(value[name], _of_member(parts, name)) for name in names}

    def _parts(self, schema: Any, value: Any, within: tuple[str, ...] = (), *, has_alternatives: bool = True) -> Iterator[Part]:
        """The keywords that speak of the value's members, in the schema's order. `within` are references that are being followed."""
        self._num_parts += 1
        if not isinstance(schema, dict) or self._num_parts > MAX_PARTS:
            return
        for keyword, part in schema.items():
            if keyword in _OF_MEMBERS and isinstance(part, dict | list):
                yield keyword, part
            elif keyword == "dependentRequired" and isinstance(part, dict):
                yield from (("required", [name, *names]) for name, names in part.items() if name in value and isinstance(names, list))
            elif keyword == "$ref" and isinstance(part, str) and part not in within:
                yield from self._parts(self._target(part), value, (*within, part), has_alternatives=has_alternatives)
            elif keyword == "allOf" and isinstance(part, list):
                for other in part:
                    yield from self._parts(other, value, within, has_alternatives=has_alternatives)
            elif keyword in _ALTERNATIVES and has_alternatives:
                for other in self._alternatives(keyword, part, value):
                    yield from self._parts(other, value, within)

    def _alternatives(self, keyword: str, part: Any, value: Any) -> Iterator[Any]:
        if isinstance(part, list):
            yield from (branch for branch in part if not self._is_about_another(branch, value))
        elif keyword in ("then", "else"):
            yield part
        elif isinstance(part, dict) and isinstance(value, dict):
            yield from (demand for name, demand in part.items() if name in value)

    def _is_about_another(self, branch: Any, value: Any) -> bool:
        if not isinstance(value, dict):
            return False
        parts = list(self._parts(branch, value, has_alternatives=False))
        required = [name for keyword, names in parts if keyword == "required" for name in names]
        members = [member for keyword, named in parts if keyword == "properties" and isinstance(named, dict) for member in named.items()]
        return any(name not in value for name in required) or any(not _may_be(value.get(name, ABSENT), schema) for name, schema in members)

    def _target(self, reference: str) -> Any:
        try:
            return resolve(self._root, unquote(reference), "")[1]
        except UnsupportedGrammar:
            return True


def _may_be(value: Any, schema: Any) -> bool:
    if not isinstance(schema, dict) or value is ABSENT:
        return True
    values = schema.get("enum")
    return value == schema.get("const", value) and (not isinstance(values, list) or value in values)


def _of_member(parts: list[Part], name: str) -> Iterator[Any]:
    """What is said of it by name comes first."""
    yield from (part[name] for keyword, part in parts if keyword == "properties" and isinstance(part, dict) and name in part)
    for keyword, part in parts:
        if keyword == "patternProperties" and isinstance(part, dict):
            yield from part.values()
        elif keyword == "additionalProperties":
            yield part


def _of_item(parts: list[Part], place: int) -> Iterator[Any]:
    for keyword, part in parts:
        if isinstance(part, list) and keyword in ("prefixItems", "items"):
            yield from part[place : place + 1]
        elif isinstance(part, dict) and keyword in ("items", "additionalItems"):
            yield part
