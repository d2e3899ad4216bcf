"""What is left of a JSON Schema without the keywords that its translation cannot enforce."""

import itertools
from collections.abc import Mapping
from typing import Any

from penstock.engine.errors import UnsupportedGrammar
from penstock.plugins.grammars.json_schema.left_out import MAX_WARNINGS, left_out
from penstock.plugins.grammars.json_schema.number_range import number
from penstock.plugins.grammars.json_schema.schema_keywords import ANNOTATIONS, TRANSLATED
from penstock.plugins.grammars.json_schema.schema_shape import are_disjoint
from penstock.plugins.grammars.json_schema.string_formats import string_format
from penstock.plugins.grammars.regex.llguidance_regex import UnwritableRegex, check_size
from penstock.plugins.grammars.regex.regex_syntax import RegexError, ecma_dialect, parse
from penstock.plugins.grammars.regex.regular import MisplacedAnchor, search

MAX_COMPARED = 100  # each with each
_COMBINERS = ("anyOf", "oneOf", "allOf")


class LenientSchema:
    """Takes keywords away from one subschema after the other; `warnings` collects each with its path.

    What is left allows every value that the whole schema allows.
    """

    def __init__(self, warnings: list[str]) -> None:
        self._warnings = warnings

    def relaxed(self, schema: Mapping[str, Any], root: Any, path: str) -> Mapping[str, Any]:
        """The subschema at `path` of `root`, its members in their order."""
        kept = {keyword: value for keyword, value in schema.items() if keyword not in ANNOTATIONS and not keyword.startswith("x-")}
        for keyword in [keyword for keyword in kept if not self._is_kept(keyword, kept, root)]:
            self._warn(keyword, path)
            _weaken(keyword, kept)
        return kept

    def _warn(self, keyword: str, path: str) -> None:
        warning = left_out(keyword, f"{path}.{keyword}")
        if len(self._warnings) < MAX_WARNINGS and warning not in self._warnings:
            self._warnings.append(warning)

    def _is_kept(self, keyword: str, schema: Mapping[str, Any], root: Any) -> bool:
        value = schema[keyword]
        if "$ref" in schema:
            return keyword == "$ref"
        if "const" in schema or "enum" in schema:
            return keyword in ("const", "enum", "type")
        has_own = any(other in TRANSLATED for other in schema)
        if keyword in _COMBINERS:
            return (
                not has_own
                and keyword == next(name for name in _COMBINERS if name in schema)
                and _is_exact_combination(keyword, value, root)
            )
        if keyword in ("$id", "id"):
            return True
        return keyword in TRANSLATED and _is_exact(keyword, schema)


def _is_exact(keyword: str, schema: Mapping[str, Any]) -> bool:
    match keyword:
        case "uniqueItems":
            return schema[keyword] is False
        case "pattern":
            return isinstance(schema[keyword], str) and _is_translated(schema[keyword])
        case "format":
            return "pattern" not in schema and _is_known(schema[keyword])
        case "minLength" | "maxLength":
            return not {"pattern", "format"} & schema.keys()
        case "minimum" | "maximum" | "exclusiveMinimum" | "exclusiveMaximum":
            return _is_bounded(schema)
        case "items":
            return isinstance(schema[keyword], Mapping | bool)
    return True


def _weaken(keyword: str, schema: dict[str, Any]) -> None:
    """Takes the keyword away, or puts one in its place that says a part of it."""
    value = schema.pop(keyword)
    if schema.keys() - {"$id", "id"} or not isinstance(value, list) or not value:
        return
    if keyword == "oneOf":
        schema["anyOf"] = value
    elif keyword == "allOf":
        schema["allOf"] = value[:1]


def _is_exact_combination(keyword: str, schemas: Any, root: Any) -> bool:
    if not isinstance(schemas, list) or keyword == "anyOf":
        return True
    if keyword == "allOf":
        return len(schemas) == 1
    if len(schemas) > MAX_COMPARED:
        return False
    return all(are_disjoint(root, left, right) for left, right in itertools.combinations(schemas, 2))


def _is_translated(pattern: Any) -> bool:
    try:
        check_size(search(parse(pattern, ecma_dialect())))
    except (RegexError, MisplacedAnchor, UnwritableRegex):
        return False
    return True


def _is_known(name: Any) -> bool:
    try:
        string_format(name, "")
    except UnsupportedGrammar:
        return False
    return True


def _is_bounded(schema: Mapping[str, Any]) -> bool:
    types = schema.get("type", "number")
    try:
        number(schema, "", is_integer=types == "integer")
    except UnsupportedGrammar:
        return False
    return True
