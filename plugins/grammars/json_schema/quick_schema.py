"""Which JSON Schemas have masks that never take long, whatever has been said."""

import json
from typing import Any

from penstock.engine.grammar import GrammarKind, GrammarSpec

MAX_CHARACTERS = 50_000
MAX_VALUES = 2_000  # that a schema lists, or schemas that it has
MAX_LENGTH = 10_000
# With these, a lexer may have to follow many possibilities at once, or the parser many readings of the same text.
_DEMANDING = frozenset({"pattern", "patternProperties", "propertyNames", "multipleOf", "not", "allOf", "oneOf", "x-guidance"})
_MAX_BRANCHES = 16


def has_quick_masks(spec: GrammarSpec) -> bool:
    """Whether the spec is JSON without patterns, many alternatives or anything very large. Otherwise masks may be quick as well."""
    if spec.kind is GrammarKind.JSON_OBJECT:
        return spec.whitespace_pattern in (None, "")
    if spec.kind is not GrammarKind.JSON_SCHEMA or len(spec.text) > MAX_CHARACTERS or spec.whitespace_pattern not in (None, ""):
        return False
    return _is_modest(json.loads(spec.text))


def _is_modest(schema: Any) -> bool:
    num_values = 0
    pending = [schema]
    while pending:
        value = pending.pop()
        num_values += 1
        if isinstance(value, dict):
            if _DEMANDING & value.keys() or any(_is_large(value.get(key)) for key in ("minLength", "maxLength")):
                return False
            if len(value.get("anyOf", ())) > _MAX_BRANCHES:
                return False
            pending += value.values()
        elif isinstance(value, list):
            pending += value
        if num_values + len(pending) > MAX_VALUES:
            return False
    return True


def _is_large(length: Any) -> bool:
    return isinstance(length, (int, float)) and length > MAX_LENGTH
