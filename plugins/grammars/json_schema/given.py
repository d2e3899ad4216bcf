"""Values that a schema gives outright, less those that its other keywords forbid: then only an `enum` has to be enforced.

Values are judged by the package jsonschema. No pattern is tried that could take it long, and no reference is followed.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from penstock.plugins.grammars.json_schema.document import walk
from penstock.plugins.grammars.json_schema.values import ANNOTATIONS, dumps

MAX_CHARACTERS = 20_000  # of the values
MAX_SUBSCHEMAS = 200
# What is no part of what a value has to meet, or means different things by draft, or takes jsonschema long.
_UNJUDGED = frozenset(
    {
        *("$ref", "$dynamicRef", "$recursiveRef", "$id", "id", "$anchor", "format", "dependencies", "items", "additionalItems"),
        *("unevaluatedProperties", "unevaluatedItems", "multipleOf", "exclusiveMinimum", "exclusiveMaximum", "definitions", "$defs"),
    }
)
_QUANTIFIERS = re.compile(r"[*+?{]")


def has_given_values(schema: Mapping[str, Any]) -> bool:
    """Whether values are given beside something else."""
    return len(schema) > 1 - ("allOf" in schema) and next(_givers(schema), None) is not None


def remaining_values(schema: Mapping[str, Any], keywords: frozenset[str]) -> list[Any] | None:
    """Of the values that the schema, or a part of its `allOf`, gives, those that satisfy it; None where that is not found out.

    It is where one of `keywords` occurs, the others being enforced as they are.
    """
    from jsonschema import Draft202012Validator  # type: ignore[import-untyped]

    values = next(_givers(schema), None)
    parts = [part for _, part in walk(schema)]
    said = {keyword for part in parts for keyword in part if keyword not in ANNOTATIONS}
    if values is None or len(parts) > MAX_SUBSCHEMAS or said & _UNJUDGED or not said & keywords:
        return None
    if len(dumps(values)) > MAX_CHARACTERS or not all(_is_quick(pattern) for part in parts for pattern in _patterns(part)):
        return None
    validator = Draft202012Validator(schema)
    return [value for value in values if validator.is_valid(value)]


def _givers(schema: Mapping[str, Any]) -> Iterator[list[Any]]:
    parts = schema.get("allOf")
    for part in (schema, *(parts if isinstance(parts, list) else ())):
        if isinstance(part, Mapping):
            if "const" in part:
                yield [part["const"]]
            elif isinstance(part.get("enum"), list):
                yield part["enum"]


def _patterns(schema: Mapping[str, Any]) -> Iterator[Any]:
    if "pattern" in schema:
        yield schema["pattern"]
    patterns = schema.get("patternProperties", {})
    yield from patterns if isinstance(patterns, Mapping) else (None,)


def _is_quick(pattern: Any) -> bool:
    """One quantifier at most: Python's `re` then takes no more than the square of the text's length."""
    if not isinstance(pattern, str) or len(_QUANTIFIERS.findall(pattern)) > 1 or "\\" in pattern:
        return False
    try:
        re.compile(pattern)
    except re.error:
        return False
    return True
