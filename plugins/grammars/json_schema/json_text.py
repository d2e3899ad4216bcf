"""How JSON values are spelled: the trees for strings, numbers, white space and given values that a schema's translation is made of.

Narrower than JSON where a model could otherwise go on without end or where spelling is a matter of taste: at most 19 digits before a
point and 20 behind it, a bounded indentation, no escapes for characters that need none.
"""

import json
from dataclasses import dataclass
from typing import Any

from penstock.plugins.grammars.regex.charset import ANY, CharSet, charset, complement, intersect, of, union
from penstock.plugins.grammars.regex.regular import EMPTY, Chars, Either, Literal, Node, Repeat, Sequence, chars, either, optional, sequence

JSON_TYPES = ("string", "integer", "number", "boolean", "null", "array", "object")
MAX_DIGITS = 19  # as many as 64 bits hold
MAX_FRACTION_DIGITS = 20  # as many as printing a double takes
MAX_INDENT = 40
_INDENT_PER_LEVEL = 4
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
    """What may stand between a document's parts. `pattern` is the client's own, for wherever JSON allows white space in containers."""

    pattern: Node | None = None

    def line(self, depth: int) -> Node:
        """At the start and the end of a container and after a comma: nothing, a blank, or a line break and blanks."""
        if self.pattern is not None:
            return self.pattern
        indent = Repeat(Literal(" "), 0, min(MAX_INDENT, _INDENT_PER_LEVEL * (depth + 1)))
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
