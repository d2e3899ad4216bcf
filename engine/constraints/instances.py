"""What the text of a JSON Schema says of how soon an answer may end, before any mask has been looked at.

Short instances, as guesses; and how much at most is missing from any beginning of an instance.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
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
            return self._of(
                {**_target(self._root, schema["$ref"]), **{key: value for key, value in schema.items() if key != "$ref"}}, depth + 1
            )
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
            schema = {**_target(self._root, schema["$ref"]), **{key: value for key, value in schema.items() if key != "$ref"}}
        return {} if schema is True else schema


def _target(root: Any, reference: str, *, is_one_document: bool = False) -> Any:
    """Raises ValueError where `is_one_document` and the target is within a schema whose references are its own."""
    target = root
    for key in filter(None, reference.removeprefix("#").split("/")):
        target = target[key.replace("~1", "/").replace("~0", "~")]
        if is_one_document and isinstance(target, dict) and any(isinstance(target.get(keyword), str) for keyword in ("$id", "id")):
            raise ValueError("a schema with references of its own")
    return target


@dataclass(frozen=True, slots=True)
class Missing:
    """Bounds of what a text still needs to be an instance of a schema, in bytes: of JSON, and so at least as many as the tokens are.

    `whole` before it has begun, and `rest` at any place. Where `is_open`, values of any kind may begin in it, and each bracket that they
    open is one byte more.
    """

    whole: int
    rest: int
    is_open: bool = False


def missing_at_most(schema: str) -> Missing | None:
    """None where the schema has a keyword whose effect is not bounded here, or refers to itself."""
    try:
        root = json.loads(schema)
        return _Bounds(root).of(root)
    except (ValueError, TypeError, AttributeError, LookupError, OverflowError, RecursionError, re.error):
        return None


class _Bounds:
    """Methods raise ValueError where nothing is known."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._num_characters = 0  # of patterns, each of which takes microseconds
        self._referred: dict[str, Missing | None] = {"#": None}  # None while it is looked at

    def of(self, schema: Any) -> Missing:
        if schema is True:
            return _ANYTHING
        if schema is not self._root and "$id" in schema:
            raise ValueError("a schema with references of its own")
        keywords = {key: value for key, value in schema.items() if key not in _ANNOTATIONS}
        if not keywords:
            return _ANYTHING
        if "$ref" in keywords:
            if keywords.keys() != {"$ref"}:
                raise ValueError("a reference with more to it")
            return self._referred_to(schema["$ref"])
        if "const" in keywords or "enum" in keywords:
            longest = max(_num_bytes(value) for value in keywords.get("enum", [schema.get("const")]))
            return Missing(longest, longest)
        for keyword in ("anyOf", "oneOf"):
            if keyword in keywords:
                if keywords.keys() != {keyword}:
                    raise ValueError("alternatives with more to them")
                options = [option for option in keywords[keyword] if option is not False]
                if keyword == "oneOf" and not _have_own_types(options):
                    raise ValueError("alternatives that may exclude each other's shortest instances")
                return _either([self.of(option) for option in options])
        kinds = keywords.pop("type")
        return _either([self._typed(kind, keywords) for kind in ([kinds] if isinstance(kinds, str) else dict.fromkeys(kinds))])

    def _referred_to(self, reference: str) -> Missing:
        if reference not in self._referred:
            self._referred[reference] = None
            self._referred[reference] = self.of(_target(self._root, reference, is_one_document=True))
        found = self._referred[reference]
        if found is None:
            raise ValueError("a reference to itself")
        return found

    def _typed(self, kind: str, keywords: Schema) -> Missing:
        if not keywords.keys() <= _BOUNDED:
            raise ValueError("a keyword that is not bounded")
        match kind:
            case "object":
                return self._object(keywords)
            case "array":
                return self._array(keywords)
            case "string":
                self._num_characters += len(keywords.get("pattern", ""))
                _within_bounds(self._num_characters)
                return _string(keywords)
            case "integer" | "number":
                step = str(keywords.get("multipleOf", 1))
                if len(step) > _MAX_STEP or len(step.strip("0.")) > _MAX_STEP_DIGITS:
                    raise ValueError("multiples that searches may not find")
                num_digits = 2 * max((_num_bytes(keywords[name]) for name in _NUMBERS if name in keywords), default=1)
                return Missing(num_digits, num_digits + _MARGIN)
            case "boolean" | "null":
                return Missing(5, 5)
        raise ValueError(f"no type {kind}")

    def _object(self, keywords: Schema) -> Missing:
        properties, required = keywords.get("properties", {}), keywords.get("required", [])
        others = keywords.get("additionalProperties", True)
        values = {name: self.of(value) for name, value in properties.items() if value is not False}
        if keywords.get("minProperties", 0) > len(required) or not values.keys() >= set(required):
            raise ValueError("properties without names")
        entries = {name: _with_more(value, _num_bytes(name) + _SEPARATORS) for name, value in values.items()}
        more = [] if others is False else [_with_more(self.of(others), _MARGIN)]
        return _sum([entries.pop(name) for name in dict.fromkeys(required)], _BRACKETS, [*entries.values(), *more])

    def _array(self, keywords: Schema) -> Missing:
        firsts, number = keywords.get("prefixItems", []), _within_bounds(keywords.get("minItems", 0))
        items = [_with_more(self.of(item), _SEPARATORS) for item in firsts]
        others = keywords.get("items", True)
        more = [] if others is False else [_with_more(self.of(others), _SEPARATORS)]
        num_more = max(0, number - len(items)) if more else 0
        return _sum(items[:number], _BRACKETS + sum(each.whole for each in more) * num_more, [*items[number:], *more])


# Keywords that say nothing of what is valid, and those that are bounded for each type.
_ANNOTATIONS = frozenset(
    (
        "$schema",
        "$id",
        "$comment",
        "$defs",
        "definitions",
        "title",
        "description",
        "default",
        "examples",
        "deprecated",
        "readOnly",
        "writeOnly",
    )
)
_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_BOUNDED = frozenset(
    (
        *(
            "properties",
            "required",
            "additionalProperties",
            "minProperties",
            "maxProperties",
            "items",
            "prefixItems",
            "minItems",
            "maxItems",
        ),
        *("minLength", "maxLength", "pattern", "format", *_NUMBERS),
    )
)
_EXPONENT = re.compile(r"\de[+-]\d")  # as `json` writes it: also in texts
_BRACKETS, _SEPARATORS = 2, 4
_MARGIN = 16  # of an escape or a character that has begun, of a number's sign, point and exponent, and of a key
_MAX_STEP, _MAX_STEP_DIGITS = 4, 2  # of multiples, which each digit may be followed by
_MAX_FORMAT = 64  # of a text of any of `FORMATS`, or of a part of it that has begun
_CHARACTER = 6  # of a text, as an escape
_ANYTHING = Missing(1, _MARGIN, is_open=True)


def _have_own_types(options: list[Any]) -> bool:
    """Whether each value is of the type of at most one of them."""
    kinds = [kind for option in options for kind in ([option["type"]] if isinstance(option["type"], str) else option["type"])]
    return len({"number" if kind == "integer" else kind for kind in kinds}) == len(kinds)


def _num_bytes(value: Any) -> int:
    """Raises ValueError for a number with an exponent, which may be written out."""
    text = json.dumps(value, allow_nan=False)
    if _EXPONENT.search(text):
        json.loads(text, parse_float=_written_out)
    return len(text)


def _written_out(text: str) -> float:
    if "e" in text:
        raise ValueError("an exponent")
    return float(text)


def _with_more(missing: Missing, num_bytes: int) -> Missing:
    return Missing(missing.whole + num_bytes, missing.rest + num_bytes, missing.is_open)


def _either(options: list[Missing]) -> Missing:
    return Missing(min(each.whole for each in options), max(each.rest for each in options), any(each.is_open for each in options))


def _sum(parts: list[Missing], num_bytes: int, optional: Sequence[Missing] = ()) -> Missing:
    """What all the parts need, one of which may have begun, or one of those that are `optional` while the parts are still to come."""
    whole = num_bytes + sum(part.whole for part in parts)
    begun = max([part.rest - part.whole for part in parts] + [part.rest for part in optional], default=0)
    return Missing(whole, whole + begun, any(part.is_open for part in (*parts, *optional)))


def _string(keywords: Schema) -> Missing:
    if "pattern" in keywords:
        if keywords.keys() & {"minLength", "maxLength", "format"}:
            raise ValueError("a pattern with more to it")
        found = _with_more(_missing_of_pattern(parser.parse(keywords["pattern"])), _BRACKETS)
        return Missing(found.whole, found.rest + _MARGIN)  # a pattern that is not anchored asks for no more of what has begun
    num_bytes = _BRACKETS + _within_bounds(keywords.get("minLength", 0))
    if "format" in keywords:
        if keywords["format"] not in FORMATS or keywords.keys() & {"minLength", "maxLength"}:
            raise ValueError("a format that is not known")
        num_bytes += _MAX_FORMAT
    return Missing(num_bytes, num_bytes + _MARGIN)


def _missing_of_pattern(pattern: Any) -> Missing:
    parts = []
    for operation, operand in pattern:
        match str(operation):
            case "LITERAL" | "NOT_LITERAL" | "ANY" | "IN":
                parts.append(Missing(_CHARACTER, _CHARACTER))
            case "MAX_REPEAT" | "MIN_REPEAT":
                item = _missing_of_pattern(operand[2])
                parts.append(_sum([], operand[0] * item.whole, [item]))
            case "SUBPATTERN":
                parts.append(_missing_of_pattern(operand[-1]))
            case "BRANCH":
                parts.append(_either([_missing_of_pattern(option) for option in operand[1]]))
            case "AT" if str(operand) in ("AT_BEGINNING", "AT_END", "AT_BEGINNING_STRING", "AT_END_STRING"):
                pass
            case _:
                raise ValueError(f"{operation} in a pattern")
    found = _sum(parts, 0)
    _within_bounds(found.rest)
    return found


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
