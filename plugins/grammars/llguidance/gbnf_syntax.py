"""Reads GBNF, llama.cpp's grammars, and the EBNF that XGrammar takes: rules of literals, character classes, groups and repeats.

A rule ends where the next begins, so its alternatives may stand on lines of their own.
"""

import re
from dataclasses import dataclass
from typing import NoReturn

from penstock.plugins.grammars.regex.charset import ANY, CharSet, charset, complement, union
from penstock.plugins.grammars.regex.regular import Chars, Literal, Node

MAX_DEPTH = 64
MAX_REPEAT = 100_000

_SPACE = re.compile(r"(?:[ \t\r\n]+|#[^\n]*)*")
_NAME = re.compile(r"[A-Za-z_][\w-]*")
_DEFINED = re.compile(r"::=")
_BRACES = re.compile(r"\{\s*(\d{1,9})\s*(?:(,)\s*(\d{0,9})\s*)?\}")
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t"}
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}
_ITSELF = "\"\\[]^-/'"


class GbnfError(Exception):
    """`line` and `column` count from 1."""

    def __init__(self, message: str, line: int, column: int) -> None:
        super().__init__(message)
        self.line = line
        self.column = column


@dataclass(frozen=True, slots=True)
class Text:
    """Characters; in what was read, a literal or one of a set."""

    node: Node


@dataclass(frozen=True, slots=True)
class Name:
    """What another rule describes."""

    name: str


@dataclass(frozen=True, slots=True)
class Parts:
    """One after the other."""

    items: tuple["Expression", ...]


@dataclass(frozen=True, slots=True)
class Alternatives:
    items: tuple["Expression", ...]


@dataclass(frozen=True, slots=True)
class Repeated:
    item: "Expression"
    minimum: int
    maximum: int | None


Expression = Text | Name | Parts | Alternatives | Repeated


def parse_gbnf(text: str) -> dict[str, Expression]:
    """The rules by name, each name known and `root` among them. Raises `GbnfError`."""
    return _Parser(text).rules()


class _Parser:
    """Recursive descent; `place` is the next character's."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.place = 0
        self.used: dict[str, int] = {}

    def fail(self, message: str, place: int | None = None) -> NoReturn:
        place = self.place if place is None else place
        raise GbnfError(message, self.text.count("\n", 0, place) + 1, place - self.text.rfind("\n", 0, place))

    def space(self) -> None:
        found = _SPACE.match(self.text, self.place)
        assert found is not None
        self.place = found.end()

    def accept(self, text: str) -> bool:
        if not self.text.startswith(text, self.place):
            return False
        self.place += len(text)
        self.space()
        return True

    def rules(self) -> dict[str, Expression]:
        rules: dict[str, Expression] = {}
        self.space()
        while self.place < len(self.text):
            start = self.place
            name = self.name()
            if name is None or not self.accept("::="):
                self.fail("expected a rule, `name ::= ...`")
            if name in rules:
                self.fail(f"a second rule {name[:40]!r}", start)
            rules[name] = self.alternatives(0)
        for name, place in self.used.items():
            if name not in rules:
                self.fail(f"no rule is named {name[:40]!r}", place)
        if "root" not in rules:
            self.fail("there is no rule `root`")
        return rules

    def name(self) -> str | None:
        found = _NAME.match(self.text, self.place)
        if found is None:
            return None
        self.place = found.end()
        self.space()
        return found[0]

    def alternatives(self, depth: int) -> Expression:
        if depth > MAX_DEPTH:
            self.fail(f"groups nested deeper than {MAX_DEPTH}")
        items = [self.sequence(depth)]
        while self.accept("|"):
            items.append(self.sequence(depth))
        return items[0] if len(items) == 1 else Alternatives(tuple(items))

    def sequence(self, depth: int) -> Expression:
        items: list[Expression] = []
        while (item := self.item(depth)) is not None:
            items.append(self.repeated(item))
        return items[0] if len(items) == 1 else Parts(tuple(items))

    def item(self, depth: int) -> Expression | None:
        start = self.place
        if self.text.startswith('"', start):
            return Text(self.literal())
        if self.text.startswith("[", start):
            return Text(Chars(self.char_class()))
        if self.accept("."):
            return Text(Chars(ANY))
        if self.accept("("):
            inner = self.alternatives(depth + 1)
            if not self.accept(")"):
                self.fail("expected `)`")
            return inner
        name = self.name()
        if name is None:
            return None
        if _DEFINED.match(self.text, self.place):  # the next rule
            self.place = start
            return None
        self.used.setdefault(name, start)
        return Name(name)

    def repeated(self, item: Expression) -> Expression:
        while True:
            for sign, bounds in (("*", (0, None)), ("+", (1, None)), ("?", (0, 1))):
                if self.accept(sign):
                    item = Repeated(item, *bounds)
                    break
            else:
                if not self.text.startswith("{", self.place):
                    return item
                item = Repeated(item, *self.bounds())

    def bounds(self) -> tuple[int, int | None]:
        found = _BRACES.match(self.text, self.place)
        if found is None:
            self.fail("expected `{m}`, `{m,}` or `{m,n}`")
        minimum = int(found[1])
        maximum = minimum if found[2] is None else int(found[3]) if found[3] else None
        if max(minimum, maximum or 0) > MAX_REPEAT or (maximum is not None and maximum < minimum):
            self.fail(f"bounds out of order, or more than {MAX_REPEAT} repeats")
        self.place = found.end()
        self.space()
        return minimum, maximum

    def literal(self) -> Literal:
        start = self.place
        self.place += 1
        points: list[int] = []
        while not self.text.startswith('"', self.place):
            if self.text[self.place : self.place + 1] in ("", "\n"):
                self.fail("a literal without its end", start)
            points.append(self.character())
        self.place += 1
        self.space()
        return Literal("".join(map(chr, points)))

    def char_class(self) -> CharSet:
        start = self.place
        self.place += 1
        is_negated = self.text.startswith("^", self.place)
        self.place += is_negated
        spans: list[CharSet] = []
        while not self.text.startswith("]", self.place):
            if self.text[self.place : self.place + 1] in ("", "\n"):
                self.fail("a character class without its end", start)
            low = high = self.character()
            if self.text.startswith("-", self.place) and not self.text.startswith("-]", self.place):
                self.place += 1
                high = self.character()
                if high < low:
                    self.fail("a range that ends before it begins")
            spans.append(charset((low, high)))
        self.place += 1
        self.space()
        chars = union(*spans)
        return complement(chars) if is_negated else chars

    def character(self) -> int:
        if self.text[self.place] != "\\":
            self.place += 1
            return ord(self.text[self.place - 1])
        start = self.place
        letter = self.text[start + 1 : start + 2]
        self.place += 2
        if letter in _HEX_DIGITS:
            digits = self.text[self.place : self.place + _HEX_DIGITS[letter]]
            if re.fullmatch(f"[0-9a-fA-F]{{{_HEX_DIGITS[letter]}}}", digits) is None or int(digits, 16) > 0x10FFFF:
                self.fail("not a hexadecimal escape", start)
            self.place += len(digits)
            return int(digits, 16)
        if letter and letter in _ESCAPES:
            return ord(_ESCAPES[letter])
        if letter and letter in _ITSELF:
            return ord(letter)
        self.fail(f"an unknown escape \\{letter}", start)
