"""How JSON values are spelled: strings, numbers between bounds, formats, and the keywords that restrict them."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from penstock.engine.errors import UnsupportedGrammar
from penstock.plugins.grammars.regex.syntax import ecma_dialect, parse
from penstock.plugins.grammars.regex.tree import (
    ANY,
    EMPTY,
    Chars,
    CharSet,
    Either,
    Literal,
    Node,
    Repeat,
    Sequence,
    chars,
    charset,
    complement,
    either,
    intersect,
    of,
    optional,
    sequence,
    union,
)

JSON_TYPES = ("string", "integer", "number", "boolean", "null", "array", "object")
MAX_DIGITS = 19  # as many as 64 bits hold
MAX_FRACTION_DIGITS = 20  # as many as printing a double takes
MAX_INDENT = 40
INDENT_PER_LEVEL = 4
_SHORT_ESCAPES = {"\b": "b", "\t": "t", "\n": "n", "\f": "f", "\r": "r", '"': '"', "\\": "\\"}
_MUST_ESCAPE = union(charset((1, 0x1F)), of('"\\'))
_LONG_ESCAPES = intersect(charset((1, 0x1F)), complement(of("".join(_SHORT_ESCAPES))))
_HEX = charset((0x30, 0x39), (0x41, 0x46), (0x61, 0x66))
_PLAIN = intersect(ANY, complement(_MUST_ESCAPE))
_ANY_ESCAPE = Sequence((Literal("\\"), Either((chars('"\\/bfnrt'), Sequence((Literal("u00"), chars("01"), Chars(_HEX)))))))

STRING_CHARACTER = Either((Chars(_PLAIN), _ANY_ESCAPE))
BOOLEAN = Either((Literal("true"), Literal("false")))
NULL = Literal("null")
DIGIT = Chars(charset((0x30, 0x39)))
_NATURAL = Either((Literal("0"), Sequence((chars("123456789"), Repeat(DIGIT, 0, MAX_DIGITS - 1)))))
INTEGER = Sequence((optional(Literal("-")), _NATURAL))
FRACTION = Sequence((Literal("."), Repeat(DIGIT, 1, MAX_FRACTION_DIGITS)))
_EXPONENT = Sequence((chars("eE"), optional(chars("+-")), Repeat(DIGIT, 1, 3)))
NUMBER = Sequence((INTEGER, optional(FRACTION), optional(_EXPONENT)))


def string(minimum: int = 0, maximum: int | None = None) -> Node:
    """Any string of so many characters; an escape counts as the one character it stands for."""
    return quoted(Repeat(STRING_CHARACTER, minimum, maximum))


def quoted(content: Node) -> Node:
    return Sequence((Literal('"'), content, Literal('"')))


def encoded(node: Node) -> Node:
    """The tree over texts, as a tree over their spelling between the quotes of a JSON string."""
    match node:
        case Literal(text):
            return Literal(json.dumps(text, ensure_ascii=False)[1:-1])
        case Chars(members):
            return _encoded_set(members)
        case Sequence(items):
            return Sequence(tuple(encoded(item) for item in items))
        case Either(items):
            return Either(tuple(encoded(item) for item in items))
        case Repeat(item, minimum, maximum):
            return Repeat(encoded(item), minimum, maximum)
    raise AssertionError("anchors are resolved before a pattern is encoded")


def _encoded_set(members: CharSet) -> Node:
    forms: list[Node] = []
    plain = intersect(members, _PLAIN)
    if plain:
        forms.append(Chars(plain))
    short = "".join(letter for character, letter in _SHORT_ESCAPES.items() if intersect(members, of(character)))
    if short:
        forms.append(Sequence((Literal("\\"), chars(short))))
    for low, high in intersect(members, _LONG_ESCAPES):
        forms += [Literal(f"\\u{point:04x}") for point in range(low, high + 1)]
    return either(*forms) if forms else Chars(())


@dataclass(frozen=True, slots=True)
class Whitespace:
    """The white space between a document's parts. `pattern` is the client's own, for wherever JSON allows white space in containers."""

    pattern: Node | None = None

    def line(self, depth: int) -> Node:
        """At the start and the end of a container and after a comma: nothing, a blank, or a line break and blanks."""
        if self.pattern is not None:
            return self.pattern
        indent = Repeat(Literal(" "), 0, min(MAX_INDENT, INDENT_PER_LEVEL * (depth + 1)))
        return optional(Either((Literal(" "), Sequence((Literal("\n"), indent)))))

    def after_colon(self) -> Node:
        return self.pattern if self.pattern is not None else optional(Literal(" "))

    def before_separator(self) -> Node:
        return self.pattern if self.pattern is not None else EMPTY

    def comma(self, depth: int) -> Node:
        return Sequence((self.before_separator(), Literal(","), self.line(depth)))

    def member(self, key: Node, value: Node) -> Node:
        return Sequence((key, self.before_separator(), Literal(":"), self.after_colon(), value))

    def container(self, brackets: str, content: Node | None, depth: int) -> Node:
        """`content` between the brackets; None for an empty container."""
        opening, closing = Literal(brackets[0]), Literal(brackets[1])
        if content is None:
            return Sequence((opening, self.line(depth), closing))
        return Sequence((opening, self.line(depth), content, self.line(depth), closing))


def value(data: Any, whitespace: Whitespace, depth: int = 0) -> Node:
    """One given JSON value, its members in their own order."""
    match data:
        case dict():
            members = [whitespace.member(Literal(dumps(key)), value(item, whitespace, depth + 1)) for key, item in data.items()]
            return whitespace.container("{}", joined(members, whitespace.comma(depth)), depth)
        case list():
            items = [value(item, whitespace, depth + 1) for item in data]
            return whitespace.container("[]", joined(items, whitespace.comma(depth)), depth)
    return Literal(dumps(data))


def joined(items: list[Node], comma: Node) -> Node | None:
    if not items:
        return None
    return sequence(items[0], *(Sequence((comma, item)) for item in items[1:]))


def dumps(data: Any) -> str:
    return json.dumps(data, ensure_ascii=False)


def json_type(data: Any) -> str:
    """The narrowest of `JSON_TYPES` that a decoded value has."""
    match data:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "integer" if data.is_integer() else "number"
        case str():
            return "string"
        case list():
            return "array"
    return "object"


_LIMIT = 10**MAX_DIGITS - 1
_ZEROS = Sequence((Literal("."), Repeat(Literal("0"), 1, MAX_FRACTION_DIGITS)))
_LEADING_ZEROS = Repeat(Literal("0"), 0, MAX_FRACTION_DIGITS // 2)
_NOT_ZERO = Sequence((Literal("."), _LEADING_ZEROS, chars("123456789"), Repeat(DIGIT, 0, MAX_FRACTION_DIGITS // 2)))


def number(schema: Mapping[str, Any], path: str, *, is_integer: bool) -> Node:
    """The numbers that a schema's bounds leave. Beside a bound, a number is spelled without an exponent.

    Raises `UnsupportedGrammar` for bounds that are no numbers, bounds of `number` that are no integers, and where nothing is left.
    """
    low, is_above = _bound(schema, "minimum", "exclusiveMinimum", path)
    high, is_below = _bound(schema, "maximum", "exclusiveMaximum", path)
    if low is None and high is None:
        return INTEGER if is_integer else NUMBER
    if is_integer:
        lowest = -_LIMIT if low is None else math.floor(low) + 1 if is_above else math.ceil(low)
        highest = _LIMIT if high is None else math.ceil(high) - 1 if is_below else math.floor(high)
        forms = _integers(lowest, highest)
    else:
        for bound, keyword in ((low, "exclusiveMinimum" if is_above else "minimum"), (high, "exclusiveMaximum" if is_below else "maximum")):
            if bound is not None and bound != int(bound):
                raise UnsupportedGrammar(f"`{keyword}` of a `number` is supported only where it is an integer", f"{path}.{keyword}")
        forms = _numbers(-_LIMIT if low is None else int(low), is_above, _LIMIT if high is None else int(high), is_below)
    if not forms:
        raise UnsupportedGrammar("no number is within the bounds", path)
    return either(*forms)


def _bound(schema: Mapping[str, Any], inclusive: str, exclusive: str, path: str) -> tuple[int | float | None, bool]:
    """The tighter of two bounds and whether it is itself left out."""
    for keyword in (inclusive, exclusive):
        bound = schema.get(keyword, 0)
        if isinstance(bound, bool) or not isinstance(bound, int | float) or abs(bound) > _LIMIT:
            raise UnsupportedGrammar(f"`{keyword}` must be a number of at most {MAX_DIGITS} digits", f"{path}.{keyword}")
    first, second = schema.get(inclusive), schema.get(exclusive)
    if first is None or second is None:
        return (first, False) if second is None else (second, True)
    is_tighter = second >= first if inclusive == "minimum" else second <= first
    return (second, True) if is_tighter else (first, False)


def _integers(lowest: int, highest: int) -> list[Node]:
    forms: list[Node] = []
    if max(lowest, 0) <= highest:
        forms.append(_naturals(max(lowest, 0), min(highest, _LIMIT)))
    if lowest <= min(highest, -1):
        forms.append(Sequence((Literal("-"), _naturals(max(1, -highest), min(-lowest, _LIMIT)))))
    return forms


def _numbers(low: int, is_above: bool, high: int, is_below: bool) -> list[Node]:
    forms = _magnitudes(max(low, 0), is_above and low >= 0, high, is_below)
    if low < 0:
        forms += [Sequence((Literal("-"), form)) for form in _magnitudes(max(-high, 0), is_below and high <= 0, -low, is_above)]
    return forms


def _magnitudes(low: int, is_above: bool, high: int, is_below: bool) -> list[Node]:
    """Numbers without a sign: those that begin with the lower bound's integer, those between, and the upper bound itself."""
    forms: list[Node] = []
    if low < high:
        forms.append(Sequence((Literal(str(low)), _NOT_ZERO if is_above else optional(FRACTION))))
    if low + 1 < high:
        forms.append(Sequence((_naturals(low + 1, high - 1), optional(FRACTION))))
    if not is_below and (low < high or (low == high and not is_above)):
        forms.append(Sequence((Literal(str(high)), optional(_ZEROS))))
    return forms


def _naturals(low: int, high: int) -> Node:
    forms: list[Node] = []
    first_full = len(str(low)) if low in (0, 1) or low == 10 ** (len(str(low)) - 1) else len(str(low)) + 1
    last_full = len(str(high)) if high == 10 ** len(str(high)) - 1 else len(str(high)) - 1
    if low == 0:
        forms.append(Literal("0"))
        low, first_full = 1, 1
    if first_full <= last_full:
        # All numbers of these lengths.
        forms.append(Sequence((chars("123456789"), Repeat(DIGIT, first_full - 1, last_full - 1))))
    for num_digits in range(len(str(low)), len(str(high)) + 1):
        if not first_full <= num_digits <= last_full:
            lowest, highest = max(low, 10 ** (num_digits - 1)), min(high, 10**num_digits - 1)
            if lowest <= highest:
                forms.append(_same_length(str(lowest), str(highest)))
    return either(*forms)


def _same_length(low: str, high: str) -> Node:
    """The digit strings from `low` to `high`, which are equally long."""
    if not low:
        return EMPTY
    rest = len(low) - 1
    if low[1:] == "0" * rest and high[1:] == "9" * rest:
        return Sequence((_digits(low[0], high[0]), Repeat(DIGIT, rest, rest)))
    if low[0] == high[0]:
        return Sequence((Literal(low[0]), _same_length(low[1:], high[1:])))
    forms: list[Node] = [Sequence((Literal(low[0]), _same_length(low[1:], "9" * rest)))]
    if int(low[0]) + 1 < int(high[0]):
        forms.append(Sequence((_digits(str(int(low[0]) + 1), str(int(high[0]) - 1)), Repeat(DIGIT, rest, rest))))
    forms.append(Sequence((Literal(high[0]), _same_length("0" * rest, high[1:]))))
    return either(*forms)


def _digits(low: str, high: str) -> Node:
    return Chars(charset((ord(low), ord(high))))


_LEAP_YEAR = r"(?:\d\d(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)"
_DAY = r"(?:(?:0[13578]|1[02])-(?:0[1-9]|[12]\d|3[01])|(?:0[469]|11)-(?:0[1-9]|[12]\d|30)|02-(?:0[1-9]|1\d|2[0-8]))"
_DATE = rf"(?:\d{{4}}-{_DAY}|{_LEAP_YEAR}-02-29)"
_TIME = r"(?:[01]\d|2[0-3]):[0-5]\d:[0-5]\d(?:\.\d{1,9})?(?:Z|[+-](?:[01]\d|2[0-3]):[0-5]\d)"
_HEX_DIGITS = "[0-9a-fA-F]"
_OCTET = r"(?:25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
PATTERNS = {
    "date": _DATE,  # RFC 3339
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "uuid": f"{_HEX_DIGITS}{{8}}-{_HEX_DIGITS}{{4}}-{_HEX_DIGITS}{{4}}-{_HEX_DIGITS}{{4}}-{_HEX_DIGITS}{{12}}",
    "ipv4": rf"{_OCTET}(?:\.{_OCTET}){{3}}",
}


def string_format(name: object, param: str) -> Node:
    """The strings of a format. Raises `UnsupportedGrammar` for others than dates, times, UUIDs and IPv4 addresses."""
    if not isinstance(name, str) or name not in PATTERNS:
        raise UnsupportedGrammar(f"`format` is supported as one of {', '.join(PATTERNS)}", param)
    return _tree(name)


@cache
def _tree(name: str) -> Node:
    return parse(PATTERNS[name], ecma_dialect())


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
