"""The keywords of JSON Schema, by what they are about."""

from collections.abc import Mapping
from typing import Any

from penstock.plugins.grammars.json_schema.json_text import JSON_TYPES

ANNOTATIONS = frozenset(
    {
        *("title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly", "$schema", "$comment"),
        *("$defs", "definitions"),
        "discriminator",  # OpenAPI's hint to parsers; what it says, `oneOf` says too
    }
)
KEYWORDS_OF = {
    "object": frozenset(
        {
            *("properties", "required", "additionalProperties", "patternProperties", "propertyNames", "minProperties", "maxProperties"),
            *("dependencies", "dependentRequired", "dependentSchemas", "unevaluatedProperties"),
        }
    ),
    "array": frozenset(
        {
            *("items", "prefixItems", "additionalItems", "minItems", "maxItems", "uniqueItems"),
            *("contains", "minContains", "maxContains", "unevaluatedItems"),
        }
    ),
    "string": frozenset({"minLength", "maxLength", "pattern", "format", "contentEncoding", "contentMediaType"}),
    "number": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}),
}
ASSERTIONS = frozenset(
    {"type", "const", "enum", "$ref", "allOf", "anyOf", "oneOf", "not", "if", "then", "else", "$dynamicRef", "$recursiveRef"}
).union(*KEYWORDS_OF.values())
TRANSLATED = frozenset(
    {
        *("type", "properties", "required", "additionalProperties"),
        *("items", "prefixItems", "minItems", "maxItems", "uniqueItems"),
        *("minLength", "maxLength", "pattern", "format"),
        *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
    }
)

_SINCE_DRAFT = {
    6: ("const", "contains", "propertyNames"),
    7: ("if", "then", "else"),
    8: ("dependentRequired", "dependentSchemas", "unevaluatedProperties", "unevaluatedItems", "minContains", "maxContains"),
}
_NEWEST = 8  # and 2019-09, which differ in nothing that matters here
_OLD_DRAFTS = {f"http://json-schema.org/draft-0{number}/schema": number for number in (4, 6, 7)}
DIALECTS = frozenset(
    {
        *_OLD_DRAFTS,
        "http://json-schema.org/draft-03/schema",
        *(f"https://json-schema.org/draft/{draft}/schema" for draft in ("2019-09", "2020-12")),
    }
)


def unknown_keywords(root: Any) -> frozenset[str]:
    """Those that the document's draft does not know, so that they say nothing in it."""
    draft = _draft(root)
    return frozenset(keyword for since, keywords in _SINCE_DRAFT.items() if since > draft for keyword in keywords)


_BESIDE_REFERENCES = frozenset({"$ref", "$schema", "$id", "id", "$defs", "definitions"})


def has_lone_references(root: Any) -> bool:
    """Whether the document's draft says that nothing beside a reference counts."""
    return _draft(root) < _NEWEST


def lone_reference(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Without what says nothing beside its reference."""
    return {keyword: value for keyword, value in schema.items() if keyword in _BESIDE_REFERENCES}


def _draft(root: Any) -> int:
    dialect = root.get("$schema") if isinstance(root, dict) else None
    return _OLD_DRAFTS.get(dialect.removesuffix("#"), _NEWEST) if isinstance(dialect, str) else _NEWEST


def has_unknown_type(schema: Mapping[str, Any]) -> bool:
    """Whether `type` names one that there is not."""
    given = schema.get("type", [])
    if isinstance(given, str):
        return given not in JSON_TYPES
    return any(name not in JSON_TYPES for name in (given if isinstance(given, list) else [given]))
