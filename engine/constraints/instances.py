"""Short instances of JSON Schemas, as guesses: where an answer may end soonest, before any mask has been looked at."""

import json
import re
from collections.abc import Iterator, Mapping
from itertools import islice
from re import _parser as parser  # type: ignore[attr-defined]  # of the standard library: whatever else it makes of a pattern is only a guess
from typing import Any

MAX_DEPTH = 16
MAX_VALUES = 2000  # that are tried, alternatives among them
MAX_CHARACTERS = 4096  # of an instance
MAX_GIVEN = 16 * MAX_CHARACTERS  # characters of given values and patterns, of all that are tried
SMALL_NUMBERS = tuple(range(10))
# The shortest texts of the formats that JSON Schema defines, as far as any text of a format is one of all its versions.
FORMATS = {
    "date-time": "2000-01-01T00:00:00Z",
    "date": "2000-01-01",
    "time": "00:00:00Z",
    "duration": "P1D",
    "email": "a@a.aa",
    "idn-email": "a@a.aa",
    "hostname": "a",
    "idn-hostname": "a",
    "ipv4": "1.1.1.1",
    "ipv6": "::",
    "uri": "a:",
    "uri-reference": "",
    "iri": "a:",
    "iri-reference": "",
    "uuid": "00000000-0000-0000-0000-000000000000",
    "json-pointer": "",
}
Schema = Mapping[str, Any]


def short_instances(schema: str) -> list[str]:
    """JSON texts that may be valid, the shortest first: compact, and with the blanks that models write. None where nothing is known."""
    try:
        value = _Instances(json.loads(schema)).of_root()
        texts = [json.dumps(value, ensure_ascii=False, separators=separators) for separators in ((",", ":"), (", ", ": "))]
        "".join(texts).encode()  # raises ValueError for a lone surrogate, which no token is
    except (
        ValueError,
        TypeError,
        AttributeError,
        LookupError,
        StopIteration,
        OverflowError,
        RecursionError,
        re.error,
    ):  # a schema that this cannot read
        return []
    return [text for text in dict.fromkeys(texts) if len(text) <= MAX_CHARACTERS]


class _Instances:
    """Makes the instance of a schema that is the shortest text, as far as a part of the keywords says. Raises ValueError without one."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._num_left = MAX_VALUES
        self._num_left_given = MAX_GIVEN
        # What of a list of values, and of a pattern, is short: an array may ask for it a thousand times.
        self._shortest: dict[int, Any] = {}
        self._texts: dict[str, str] = {}

    def of_root(self) -> Any:
        return self._of(self._root, 0)

    def _of(self, schema: Any, depth: int) -> Any:
        self._num_left -= 1
        if self._num_left < 0:
            raise OverflowError("too many values to try")
        if schema is True or schema == {}:
            return 0
        if schema is False or depth > MAX_DEPTH:
            raise ValueError("no instance")
        if "$ref" in schema:
            return self._of({**self._target(schema["$ref"]), **{key: value for key, value in schema.items() if key != "$ref"}}, depth + 1)
        if "const" in schema:
            return self._given(schema["const"])
        if "enum" in schema:
            return self._given(self._shortest_of(schema["enum"]))
        for keyword in ("anyOf", "oneOf"):
            if keyword in schema:
                rest = {key: value for key, value in schema.items() if key != keyword}
                return min(self._each(schema[keyword], rest, depth), key=_size)
        if "allOf" in schema:
            parts = [{key: value for key, value in schema.items() if key != "allOf"}, *schema["allOf"]]
            return self._of(_merged([self._resolved(part) for part in parts]), depth + 1)
        kinds = schema.get("type", "object" if "properties" in schema or "required" in schema else ())
        kinds = [kinds] if isinstance(kinds, str) else kinds or _kinds_of(schema)
        return min(
            self._each([{"type": kind} for kind in kinds], schema, depth) if len(kinds) > 1 else [self._typed(kinds[0], schema, depth)],
            key=_size,
        )

    def _given(self, value: Any) -> Any:
        self._spend(_within_bounds(_size(value)))
        return value

    def _spend(self, num_characters: int) -> None:
        self._num_left_given -= num_characters
        if self._num_left_given < 0:
            raise OverflowError("too many characters to try")

    def _shortest_of(self, values: list[Any]) -> Any:
        if id(values) not in self._shortest:
            self._shortest[id(values)] = min(values, key=_size)
        return self._shortest[id(values)]

    def _text_for(self, pattern: str) -> str:
        if pattern not in self._texts:
            self._spend(len(pattern))
            self._texts[pattern] = _matching(parser.parse(pattern))
        return self._texts[pattern]

    def _each(self, options: list[Any], rest: Schema, depth: int) -> list[Any]:
        found = []
        for option in options:
            try:
                found.append(self._of(_merged([rest, self._resolved(option)]), depth + 1))
            except ValueError:
                continue
        if not found:
            raise ValueError("no instance")
        return found

    def _typed(self, kind: str, schema: Schema, depth: int) -> Any:
        match kind:
            case "object":
                properties, names = schema.get("properties", {}), dict.fromkeys(schema.get("required", ()))
                others = schema.get("additionalProperties", True)
                num_more = max(0, schema.get("minProperties", 0) - len(names))
                names |= dict.fromkeys(islice((name for name in properties if name not in names), num_more))
                ordered = [*(name for name in properties if name in names), *(name for name in names if name not in properties)]
                return {name: self._of(properties.get(name, others), depth + 1) for name in ordered}
            case "array":
                first, number = schema.get("prefixItems", []), _within_bounds(schema.get("minItems", 0))
                return [self._of(item, depth + 1) for item in [*first, *[schema.get("items", True)] * number][:number]]
            case "string":
                pattern = schema.get("pattern")
                text = FORMATS.get(schema.get("format", ""), "") if pattern is None else self._text_for(pattern)
                return text + "a" * max(0, _within_bounds(schema.get("minLength", 0)) - len(text))
            case "integer" | "number":
                return _number(schema)
            case "boolean":
                return True
            case "null":
                return None
        raise ValueError(f"no type {kind}")

    def _resolved(self, schema: Any) -> Any:
        for _ in range(MAX_DEPTH):
            if not isinstance(schema, dict) or "$ref" not in schema:
                break
            schema = {**self._target(schema["$ref"]), **{key: value for key, value in schema.items() if key != "$ref"}}
        return {} if schema is True else schema

    def _target(self, reference: str) -> Any:
        target = self._root
        for key in filter(None, reference.removeprefix("#").split("/")):
            target = target[key.replace("~1", "/").replace("~0", "~")]
        return target


def _merged(parts: list[Any]) -> dict[str, Any]:
    """All keywords of the parts; of those that several have, what both ask of an object."""
    found: dict[str, Any] = {}
    for part in parts:
        for key, value in part.items():
            if key == "properties":
                found[key] = {**found.get(key, {}), **value}
            elif key == "required":
                found[key] = list(dict.fromkeys([*found.get(key, ()), *value]))
            elif key in ("minLength", "minItems", "minimum", "minProperties") and key in found:
                found[key] = max(found[key], value)
            elif key == "type" and key in found:
                found[key] = _common_types(found[key], value)
            else:
                found[key] = value
    return found


def _common_types(left: Any, right: Any) -> list[str]:
    lefts, rights = ([kinds] if isinstance(kinds, str) else kinds for kinds in (left, right))
    common = [kind for kind in rights if kind in lefts or (kind == "integer" and "number" in lefts)]
    common += ["integer"] if "integer" in lefts and "number" in rights and "integer" not in common else []
    if not common:
        raise ValueError("no type is left")
    return common


def _kinds_of(schema: Schema) -> list[str]:
    """The types that the keywords of a schema without types leave open."""
    if "items" in schema or "minItems" in schema:
        return ["integer", "array"]
    return ["integer"]


def _numbers() -> Iterator[int]:
    yield from SMALL_NUMBERS
    yield from (-number for number in SMALL_NUMBERS[1:])


def _number(schema: Schema) -> int | float:
    low, high = schema.get("minimum"), schema.get("maximum")
    above, below = schema.get("exclusiveMinimum"), schema.get("exclusiveMaximum")
    step = schema.get("multipleOf")

    def is_valid(number: float) -> bool:
        bounds = (low is None or number >= low, high is None or number <= high, above is None or number > above)
        return all(bounds) and (below is None or number < below) and (not step or number % step == 0)

    ends = [bound + change for bound in (low, high, above, below) if bound is not None for change in (0, 1, -1)]
    rounded = [round(end / step) * step for end in ends if step] + [step or 0]
    found = next((number for number in islice([*_numbers(), *ends, *rounded], 64) if is_valid(number)), None)
    if found is None:
        raise ValueError("no number")
    return int(found) if isinstance(found, float) and found.is_integer() else found


def _matching(pattern: Any) -> str:
    """A short text that a parsed regular expression matches; look-around and references are not read. Raises ValueError for these."""
    found = ""
    for operation, operand in pattern:
        match str(operation):
            case "LITERAL":
                found += chr(operand)
            case "ANY" | "NOT_LITERAL":
                found += "b" if operand == ord("a") else "a"
            case "IN":
                found += next(character for character in _CHARACTERS if _is_in(character, operand))
            case "MAX_REPEAT" | "MIN_REPEAT" | "POSSESSIVE_REPEAT":
                found += (item := _matching(operand[2])) * (_within_bounds(operand[0] * len(item)) // max(1, len(item)))
            case "SUBPATTERN":
                found += _matching(operand[-1])
            case "BRANCH":
                found += min(map(_matching, operand[1]), key=len)
            case "AT":
                pass
            case _:
                raise ValueError(f"{operation} in a pattern")
        _within_bounds(len(found))
    return found


def _within_bounds(number: int) -> int:
    if number > MAX_CHARACTERS:
        raise ValueError("longer than is worth guessing")
    return number


_CHARACTERS = ("a", "0", *map(chr, range(32, 127)))  # that are tried for a class of a pattern
_CATEGORIES = {"CATEGORY_DIGIT": r"\d", "CATEGORY_WORD": r"\w", "CATEGORY_SPACE": r"\s"}


def _is_in(character: str, items: list[Any]) -> bool:
    is_negated = bool(items) and str(items[0][0]) == "NEGATE"
    return any(_is_of(character, *item) for item in items[is_negated:]) != is_negated


def _is_of(character: str, operation: Any, operand: Any) -> bool:
    match str(operation):
        case "LITERAL":
            return bool(ord(character) == operand)
        case "RANGE":
            return bool(operand[0] <= ord(character) <= operand[1])
        case "CATEGORY":
            name = str(operand).replace("_NOT_", "_")
            is_in = re.match(_CATEGORIES[name], character, re.ASCII) is not None
            return is_in == (name == str(operand))
    raise ValueError(f"{operation} in a class")


def _size(value: Any) -> int:
    return len(json.dumps(value, ensure_ascii=False, separators=(",", ":")))
