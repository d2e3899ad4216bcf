"""A JSON Schema whose objects have the properties that it names and no others: vLLM's `disable_additional_properties`."""

from typing import Any

from penstock.engine.errors import InvalidRequest
from penstock.plugins.grammars.json_schema.schema_walk import Steps, path

_OTHERS = ("additionalProperties", "unevaluatedProperties")
_NAMING = ("properties", "patternProperties")
_OF_NAMES = ("properties", "patternProperties", "$defs", "definitions")
_OF_VALUES = ("items", "prefixItems", "additionalItems", "additionalProperties", "anyOf", "oneOf")
_COMBINING = ("allOf", "anyOf", "oneOf", "$ref")
_PARTIAL = ("if", "then", "else", "not", "dependentSchemas", "dependencies")


def closed(schema: Any, param: str) -> Any:
    """With `additionalProperties: false` wherever properties are named and nothing is said of others. Members keep their order.

    Raises `InvalidRequest` with the path of what would then contradict itself: where several schemas name the properties of one object.
    """
    try:
        return _closed(schema, param, ())
    except RecursionError:
        raise InvalidRequest(f"`{param}` is nested too deeply", param) from None


def _closed(schema: Any, param: str, steps: Steps) -> Any:
    if not isinstance(schema, dict):
        return schema
    names = any(keyword in schema for keyword in _NAMING)
    for keyword in schema:
        is_several = keyword == "allOf" and isinstance(schema[keyword], list) and len(schema[keyword]) > 1
        if is_several or (names and keyword in _COMBINING) or (keyword in _PARTIAL and _names_properties(schema[keyword])):
            message = f"additional properties cannot be disabled beside `{keyword}`: say `additionalProperties: false` where it is meant"
            raise InvalidRequest(message, param + path((*steps, keyword)))
    whole = {keyword: _below(keyword, value, param, (*steps, keyword)) for keyword, value in schema.items()}
    return whole if not names or any(keyword in schema for keyword in _OTHERS) else whole | {"additionalProperties": False}


def _below(keyword: str, value: Any, param: str, steps: Steps) -> Any:
    if isinstance(value, dict) and keyword in _OF_NAMES:
        return {name: _closed(child, param, (*steps, name)) for name, child in value.items()}
    if isinstance(value, list) and keyword in (*_OF_VALUES, "allOf"):
        return [_closed(child, param, (*steps, place)) for place, child in enumerate(value)]
    return _closed(value, param, steps) if keyword in _OF_VALUES else value


def _names_properties(value: Any) -> bool:
    if isinstance(value, list):
        return any(map(_names_properties, value))
    return isinstance(value, dict) and (any(keyword in value for keyword in _NAMING) or any(map(_names_properties, value.values())))
