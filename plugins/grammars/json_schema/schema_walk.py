"""Where the subschemas of a JSON Schema stand, and how such a place is written."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from urllib.parse import unquote

from penstock.engine.grammars.joined_keywords import position

Steps = tuple[str | int, ...]  # from the document's root: names and positions
# Of a subschema that is being read: that of the one around it, with that itself, then the steps from there. Written out where it is told.
Place = tuple[Any, ...]
ROOT: Place = ()

SCHEMAS_BY_NAME = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies"})
SCHEMAS_IN_LISTS = frozenset({"anyOf", "oneOf", "allOf", "prefixItems", "items"})
SINGLE_SCHEMAS = frozenset(
    {
        *("items", "additionalItems", "contains", "unevaluatedItems"),
        *("additionalProperties", "propertyNames", "unevaluatedProperties"),
        *("not", "if", "then", "else"),
    }
)
SCHEMA_KEYWORDS = SCHEMAS_BY_NAME | SCHEMAS_IN_LISTS | SINGLE_SCHEMAS
_SCHEMA_TYPES = (dict, bool)


def subschemas(schema: Any) -> Iterator[tuple[Steps, Any]]:
    """What stands one level below, in the schema's order: the steps there, and the subschema. Values that are none are passed over."""
    if not isinstance(schema, dict):
        return
    for keyword, value in schema.items():
        if keyword not in SCHEMA_KEYWORDS:
            continue
        if isinstance(value, dict) and keyword in SCHEMAS_BY_NAME:
            for name, child in value.items():
                if isinstance(child, _SCHEMA_TYPES):
                    yield (keyword, name), child
        elif isinstance(value, list) and keyword in SCHEMAS_IN_LISTS:
            for place, child in enumerate(value):
                yield (keyword, place), child
        elif keyword in SINGLE_SCHEMAS and isinstance(value, _SCHEMA_TYPES):
            yield (keyword,), value


def steps_of(place: Place, known: Mapping[int, Steps]) -> Steps:
    """A place from the document's root. `known` are those of schemas, by identity."""
    steps: Steps = ()
    while place:
        around, *below = place
        steps = (*below, *steps)
        if not around:
            break
        place, schema = around
        if id(schema) in known:
            return known[id(schema)] + steps
    return steps


def walk(schema: Any) -> Iterator[tuple[Steps, dict[str, Any]]]:
    """Every subschema that is an object, the outermost first."""
    pending: list[tuple[Steps, Any]] = [((), schema)]
    while pending:
        steps, current = pending.pop()
        if isinstance(current, dict):
            yield steps, current
            pending += [(steps + below, child) for below, child in subschemas(current)]


def schemas_below(schema: dict[str, Any]) -> Iterator[tuple[str, Iterable[Any]]]:
    """The keywords that hold subschemas, each with those. There may be values among them that are none."""
    for keyword, value in schema.items():
        if keyword not in SCHEMA_KEYWORDS:
            continue
        if isinstance(value, dict):
            if keyword in SCHEMAS_BY_NAME:
                yield keyword, value.values()
            elif keyword in SINGLE_SCHEMAS:
                yield keyword, (value,)
        elif isinstance(value, list) and keyword in SCHEMAS_IN_LISTS:
            yield keyword, value


def schemas_within(schema: Any) -> Iterator[dict[str, Any]]:
    """Every subschema that is an object, and the schema itself, in no order that is told."""
    pending = [schema]
    while pending:
        current = pending.pop()
        if isinstance(current, dict):
            yield current
            if SCHEMA_KEYWORDS.isdisjoint(current):
                continue
            for _, children in schemas_below(current):
                pending += children


def path(steps: Steps) -> str:
    """As it follows the name of the request's field: `.properties.a.anyOf[0]`."""
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in steps)


def pointer(steps: Steps) -> str:
    """A JSON Pointer (RFC 6901)."""
    return "".join("/" + str(step).replace("~", "~0").replace("/", "~1") for step in steps)


def at(document: Any, steps: Steps) -> Any:
    for step in steps:
        document = document[step]
    return document


def typed_steps(document: Any, steps: list[str]) -> Steps:
    """The steps of a JSON Pointer to something that is there, positions in arrays as numbers."""
    typed: list[str | int] = []
    for step in steps:
        typed.append(int(step) if isinstance(document, list) else step)
        document = document[typed[-1]]
    return tuple(typed)


def reachable(document: Any) -> frozenset[int]:
    """The identities of the subschemas that count: definitions only where something that counts refers to them."""
    pending: list[Any] = [document]
    found: set[int] = set()
    while pending:
        schema = pending.pop()
        if not isinstance(schema, dict) or id(schema) in found:
            continue
        found.add(id(schema))
        for keyword, children in schemas_below(schema):
            if keyword not in ("$defs", "definitions"):
                pending += children
        reference = schema.get("$ref")
        if isinstance(reference, str) and reference.startswith("#"):
            pending.append(at_pointer(document, unquote(reference[1:])))
    return frozenset(found)


def at_pointer(document: Any, target: str) -> Any:
    """What stands there. True, which has nothing in it, where it leads nowhere."""
    for step in target.split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(document, dict) and name in document:
            document = document[name]
        elif isinstance(document, list) and (place := position(name, len(document))) is not None:
            document = document[place]
        else:
            return True
    return document
