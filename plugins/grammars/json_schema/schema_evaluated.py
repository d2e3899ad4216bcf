"""Which properties and items a JSON Schema speaks of, whatever the value: `unevaluatedProperties` and its like mean the others."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from penstock.plugins.grammars.json_schema.schema_negation import Inexpressible

_CONDITIONAL = ("anyOf", "oneOf", "if", "then", "else", "dependentSchemas")
_DYNAMIC = ("$dynamicRef", "$recursiveRef")


@dataclass(slots=True)
class Evaluated:
    """Names and patterns of properties, and how many items from the first on. `has_all_…` where the schema says something of all others."""

    names: dict[str, bool] = field(default_factory=dict)
    patterns: dict[str, bool] = field(default_factory=dict)
    has_all_properties: bool = False
    num_items: int = 0
    has_all_items: bool = False

    def covers(self, other: "Evaluated") -> bool:
        return (
            other.names.keys() <= self.names.keys()
            and other.patterns.keys() <= self.patterns.keys()
            and other.num_items <= self.num_items
            and not (other.has_all_properties or other.has_all_items)
        )


def evaluated(schema: Any, target: Callable[[str], Any]) -> Evaluated:
    """Without what the schema's own `unevaluated…` keywords speak of. `target` is what a reference leads to, or None.

    Raises `Inexpressible` where it depends on the value.
    """
    found, parts = Evaluated(), Evaluated()
    if isinstance(schema, dict):
        _collect(schema, target, found, parts, (), is_outermost=True)
    if not found.covers(parts):
        raise Inexpressible
    return found


def _collect(
    schema: Any, target: Callable[[str], Any], found: Evaluated, parts: Evaluated, within: tuple[str, ...], *, is_outermost: bool = False
) -> None:
    """`parts` takes what is said under conditions, `within` are references that are being followed."""
    if not isinstance(schema, dict):
        return
    if any(keyword in schema for keyword in _DYNAMIC) or "contains" in schema:
        raise Inexpressible
    found.names |= dict.fromkeys(schema.get("properties", {}), True)
    found.patterns |= dict.fromkeys(schema.get("patternProperties", {}), True)
    for items in (schema.get("prefixItems"), schema.get("items")):
        found.num_items = max(found.num_items, len(items) if isinstance(items, list) else 0)
    found.has_all_properties |= "additionalProperties" in schema or ("unevaluatedProperties" in schema and not is_outermost)
    found.has_all_items |= isinstance(schema.get("items"), dict | bool) or "additionalItems" in schema
    found.has_all_items |= "unevaluatedItems" in schema and not is_outermost
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference not in within:
        referred = target(reference)
        if referred is None:
            raise Inexpressible
        _collect(referred, target, found, parts, (*within, reference))
    for part in schema.get("allOf", []):
        _collect(part, target, found, parts, within)
    for part in _conditional(schema):
        _collect(part, target, parts, parts, within)


def _conditional(schema: dict[str, Any]) -> Iterator[Any]:
    for keyword in _CONDITIONAL:
        part = schema.get(keyword)
        if isinstance(part, list):
            yield from part
        elif keyword == "dependentSchemas" and isinstance(part, dict):
            yield from part.values()
        else:
            yield part
