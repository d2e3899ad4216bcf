"""Finds what a compiler of JSON Schemas that gives no paths objects to: by asking it about ever smaller parts."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, unquote

from penstock.plugins.grammars.json_schema.schema_keywords import ASSERTIONS
from penstock.plugins.grammars.json_schema.schema_rewrite import REWRITTEN
from penstock.plugins.grammars.json_schema.schema_shape import resolve
from penstock.plugins.grammars.json_schema.schema_walk import Steps, at, pointer, subschemas, typed_steps

MAX_SECONDS = 0.5

# What the compiler reads as schemas; the others it refuses or passes over whole.
_COMPILED = frozenset(
    {
        *("properties", "patternProperties", "additionalProperties", "items", "prefixItems", "additionalItems"),
        *("anyOf", "oneOf", "allOf"),
    }
)
_BLAMED_LAST = ("items", "$ref", "properties", "type")
_HOME = "penstock-schema"


@dataclass(frozen=True, slots=True)
class Fault:
    """`keyword` of the subschema at `steps` is to blame; None where no single one is. `message` is the compiler's."""

    steps: Steps
    keyword: str | None
    message: str


def find_fault(schema: Any, error_of: Callable[[Any], str | None]) -> Fault | None:
    """The deepest, first thing in `schema` for which `error_of` a schema gives a message; None where there is nothing to blame.

    Where asking takes too long, the place is the deepest one known by then.
    """
    return _Search(schema, error_of).run()


def as_written(fault: Fault, document: Any) -> Fault:
    """The fault in the document from which the schema was rewritten: what is not there is put down to the keyword that it stands for."""
    for end in range(len(fault.steps), -1, -1):
        part = _part(document, fault.steps[:end])
        if not isinstance(part, dict):
            continue
        if end == len(fault.steps) and (fault.keyword is None or fault.keyword in part):
            return fault
        for keyword in part:
            if keyword in REWRITTEN:
                return Fault(fault.steps[:end], keyword, fault.message)
    return Fault((), None, fault.message)


def _part(document: Any, steps: Steps) -> Any:
    """None where there is none."""
    try:
        return at(document, steps)
    except (KeyError, IndexError, TypeError):
        return None


class _Search:
    """Goes from a schema that is refused to a part that is. References back to what was gone through are taken for any value:
    what is refused then is so on its own account.
    """

    def __init__(self, schema: Any, error_of: Callable[[Any], str | None]) -> None:
        self.schema = schema
        self.error_of = error_of
        self.deadline = time.monotonic() + MAX_SECONDS
        self.visited: set[str] = set()
        self.moved: Any = None

    def run(self) -> Fault | None:
        message = self.error_of(self.schema)
        return None if message is None else self.descend((), self.schema, message)

    def descend(self, steps: Steps, schema: Any, message: str) -> Fault:
        self.visited.add(pointer(steps))
        self.moved = self.move(self.schema)
        for below, child in self.parts(steps, schema):
            if time.monotonic() > self.deadline:
                return Fault(steps, None, message)
            if pointer(below) in self.visited or child is False:  # which is fine wherever another way is left
                continue
            inner = self.error_of(self.document({"$ref": f"#/$defs/{_HOME}{quote(pointer(below))}"}))
            if inner is not None:
                return self.descend(below, child, inner)
        keyword, own_message = self.keyword(schema, message)
        return Fault(steps, keyword, own_message or message)

    def parts(self, steps: Steps, schema: Any) -> list[tuple[Steps, Any]]:
        if not isinstance(schema, dict):
            return []
        parts = [(steps + below, child) for below, child in subschemas(schema) if below[0] in _COMPILED]
        reference = schema.get("$ref")
        if isinstance(reference, str) and reference.startswith("#/"):
            parts.append(_target(self.schema, reference))
        return parts

    def keyword(self, schema: Any, message: str) -> tuple[str | None, str | None]:
        """The one that is refused by itself, with the message, or else the first without which the rest is not."""
        if not isinstance(schema, dict):
            return None, None
        if message.startswith("min/maxProperties"):
            return next((keyword for keyword in ("minProperties", "maxProperties") if keyword in schema), None), None
        if message.startswith("circular references"):  # whatever else is left out, it may only be met elsewhere
            return next((keyword for keyword in ("allOf", "oneOf", "anyOf", "$ref") if keyword in schema), None), None
        moved = self.move(schema)
        keywords = [keyword for keyword in moved if keyword in ASSERTIONS]
        for keyword in keywords:
            own = self.error_of(self.document({keyword: moved[keyword]}))
            if own is not None:
                return keyword, own
        for keyword in sorted(keywords, key=lambda keyword: _BLAMED_LAST.index(keyword) if keyword in _BLAMED_LAST else -1):
            rest = {name: value for name, value in moved.items() if name != keyword}
            if self.error_of(self.document(rest)) is None:
                return keyword, None
        return None, None

    def document(self, schema: dict[str, Any]) -> dict[str, Any]:
        """A part as a document of its own, in which the references of the whole still lead somewhere."""
        dialect = {"$schema": self.schema["$schema"]} if isinstance(self.schema, dict) and "$schema" in self.schema else {}
        return {**dialect, **schema, "$defs": {_HOME: self.moved}}

    def move(self, schema: Any) -> Any:
        """With references as they must be when the document stands in `$defs` of another."""
        if isinstance(schema, list):
            return [self.move(item) for item in schema]
        if not isinstance(schema, dict):
            return schema
        moved = {
            name: self.move(value) for name, value in schema.items() if name not in ("$id", "id", "$schema") or not isinstance(value, str)
        }
        reference = moved.get("$ref")
        if isinstance(reference, str) and (reference == "#" or reference.startswith("#/")):
            if unquote(reference[1:]) in self.visited:
                del moved["$ref"]
            else:
                moved["$ref"] = f"#/$defs/{_HOME}{reference[1:]}"
        return moved


def _target(document: Any, reference: str) -> tuple[Steps, Any]:
    steps, target = resolve(document, unquote(reference), "$ref")
    return typed_steps(document, steps), target
