"""GBNF, llama.cpp's grammars, and the EBNF that XGrammar takes: read, and written as Lark for llguidance."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import NoReturn

from penstock.plugins.grammars.llguidance.edges import of_regex
from penstock.plugins.grammars.regex import tree as regular
from penstock.plugins.grammars.regex.lark import quoted, to_terminal
from penstock.plugins.grammars.regex.tree import (
    ANY,
    Budget,
    Chars,
    CharSet,
    Literal,
    Node,
    charset,
    complement,
    continuation,
    intersect,
    union,
)

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


MAX_ROUNDS = 40


class Indistinct(Exception):
    """Some lexemes cannot be told apart."""


@dataclass(frozen=True, slots=True)
class _Edges:
    """`first` may begin a part, `more` goes on with its last lexeme, `opens` begins another that its end leaves open."""

    first: CharSet = ()
    more: CharSet = ()
    opens: CharSet = ()
    is_nullable: bool = False


_NOTHING = _Edges(is_nullable=True)


def check_apart(rules: Mapping[str, Expression]) -> None:
    """Raises `Indistinct` unless all lexemes, the texts in `rules`, can be told apart; also where that is too hard to say."""
    edges = dict.fromkeys(rules, _Edges())
    lexemes = _Lexemes()
    for _ in range(MAX_ROUNDS):
        wider = {name: _edges(expression, edges, lexemes) for name, expression in rules.items()}
        if wider == edges:
            return
        edges = wider
    raise Indistinct


class _Lexemes:
    """What is known of texts, each looked at once, and all of them together only for so long."""

    def __init__(self) -> None:
        self._known: dict[int, _Edges] = {}
        self._budget = Budget()

    def edges(self, node: Node) -> _Edges:
        """The tree is kept by the rules, so that its identity stays its own."""
        if id(node) not in self._known:
            lexeme = of_regex(node)
            self._known[id(node)] = _Edges(lexeme.first, continuation(node, self._budget), (), lexeme.is_nullable)
        return self._known[id(node)]


def _edges(expression: Expression, rules: Mapping[str, _Edges], lexemes: _Lexemes) -> _Edges:
    match expression:
        case Text(node):
            return lexemes.edges(node)
        case Name(name):
            return rules[name]
        case Parts(items):
            whole = _NOTHING
            for item in items:
                whole = _followed(whole, _edges(item, rules, lexemes))
            return whole
        case Alternatives(items):
            either = _Edges()
            for item in items:
                other = _edges(item, rules, lexemes)
                _check(either.first, other.first)
                either = _Edges(*_joined(either, other), either.is_nullable or other.is_nullable)
            return either
        case Repeated(item, minimum, maximum):
            part = _edges(item, rules, lexemes)
            if maximum != 1:
                _followed(part, part)
                part = _Edges(part.first, part.more, union(part.opens, part.first), part.is_nullable)
            return _Edges(part.first, part.more, part.opens, part.is_nullable or minimum == 0)


def _followed(left: _Edges, right: _Edges) -> _Edges:
    left_opens = union(left.opens, left.first) if left.is_nullable else left.opens
    _check(union(left.more, left_opens), right.first)
    if not right.is_nullable:
        return _Edges(union(left.first, right.first) if left.is_nullable else left.first, right.more, right.opens)
    return _Edges(
        union(left.first, right.first) if left.is_nullable else left.first,
        union(left.more, right.more),
        union(left_opens, right.opens, right.first),
        left.is_nullable,
    )


def _joined(left: _Edges, right: _Edges) -> tuple[CharSet, CharSet, CharSet]:
    return union(left.first, right.first), union(left.more, right.more), union(left.opens, right.opens)


def _check(chars: CharSet, others: CharSet) -> None:
    if intersect(chars, others):
        raise Indistinct


MAX_FUSED = 20_000  # characters and sets of what is made one text: rules that name others twice double it each time

_SIGNS: Mapping[tuple[int, int | None], str] = {(0, None): "*", (1, None): "+", (0, 1): "?"}


def to_lark(text: str) -> str:
    """Lark statements for the same language. Raises `GbnfError`, and `UnwritableRegex` for what cannot be generated."""
    rules = parse_gbnf(text)
    fused = _Fusion(rules).run()
    try:
        check_apart(fused)
    except Indistinct:
        return _Writer(rules, is_fused=False).statements()
    return _Writer(fused, is_fused=True).statements()


class _Fusion:
    """Makes one text of what is regular, rules that are not recursive included, up to `MAX_FUSED`."""

    def __init__(self, rules: Mapping[str, Expression]) -> None:
        self._rules = rules
        self._nodes: dict[str, Node | None] = {}
        self._sizes: dict[int, tuple[Node, int]] = {}

    def run(self) -> dict[str, Expression]:
        fused = {"root": self.fused(self._rules["root"])}
        pending = ["root"]
        while pending:
            for name in _names(fused[pending.pop()]):
                if name not in fused:
                    fused[name] = self.fused(self._rules[name])
                    pending.append(name)
        return fused

    def node(self, expression: Expression) -> Node | None:
        """None where the expression is not regular, or too large to be one text."""
        match expression:
            case Text(node):
                return node
            case Name(name):
                if name not in self._nodes:
                    self._nodes[name] = None  # what it is while one looks at it from within
                    self._nodes[name] = self.node(self._rules[name])
                return self._nodes[name]
            case Repeated(item, minimum, maximum):
                inner = self.node(item)
                return None if inner is None else self.bounded(regular.Repeat(inner, minimum, maximum))
            case Parts(items) | Alternatives(items):
                nodes = [node for node in map(self.node, items) if node is not None]
                if len(nodes) < len(items):
                    return None
                return self.bounded((regular.Sequence if isinstance(expression, Parts) else regular.Either)(tuple(nodes)))

    def bounded(self, node: Node) -> Node | None:
        return node if self.size(node) <= MAX_FUSED else None

    def size(self, node: Node) -> int:
        """Written out, without its repeats. What occurs in several places is looked at once."""
        if id(node) not in self._sizes:
            size = 1
            match node:
                case regular.Literal(text):
                    size += len(text)
                case regular.Chars(chars):
                    size += len(chars)
                case regular.Sequence(items) | regular.Either(items):
                    size += sum(map(self.size, items))
                case regular.Repeat(item):
                    size += self.size(item)
            self._sizes[id(node)] = node, size  # with the node, whose identity is another's once it is gone
        return self._sizes[id(node)][1]

    def fused(self, expression: Expression) -> Expression:
        node = self.node(expression)
        if node is not None:
            return Text(node)
        match expression:
            case Parts(items):
                parts: list[Expression] = []
                for is_regular, run in groupby(items, key=lambda item: self.node(item) is not None):
                    members = tuple(run)
                    parts += self.whole(Parts(members)) if is_regular else map(self.fused, members)
                return parts[0] if len(parts) == 1 else Parts(tuple(parts))
            case Alternatives(items):
                texts = tuple(item for item in items if self.node(item) is not None)
                others = [self.fused(item) for item in items if self.node(item) is None]
                return Alternatives((*(self.whole(Alternatives(texts)) if texts else []), *others))
            case Repeated(item, minimum, maximum):
                return Repeated(self.fused(item), minimum, maximum)
        return expression

    def whole(self, expression: Parts | Alternatives) -> list[Expression]:
        """As one text where that is small enough, else each of its texts."""
        node = self.node(expression)
        nodes = map(self.node, expression.items) if node is None else [node]
        return [Text(node) for node in nodes if node is not None]


def _names(expression: Expression) -> list[str]:
    match expression:
        case Name(name):
            return [name]
        case Repeated(item):
            return _names(item)
        case Parts(items) | Alternatives(items):
            return [name for item in items for name in _names(item)]
    return []


class _Writer:
    def __init__(self, rules: Mapping[str, Expression], *, is_fused: bool) -> None:
        self._rules = rules
        self._is_fused = is_fused
        self._names = {name: "start" if name == "root" else f"rule_{place}" for place, name in enumerate(rules)}
        self._terminals: dict[str, str] = {}

    def statements(self) -> str:
        lines = [f"{self._names[name]}: {self._written(expression)}" for name, expression in self._rules.items()]
        return "\n".join([*lines, *(f"{name}: {body}" for body, name in self._terminals.items()), ""])

    def _written(self, expression: Expression) -> str:
        match expression:
            case Text(regular.Literal(text)) if not self._is_fused:
                return " ".join(map(quoted, text)) or quoted("")
            case Text(node):
                return self._terminals.setdefault(to_terminal(node), f"TEXT_{len(self._terminals)}")
            case Name(name):
                return self._names[name]
            case Parts(items):
                return " ".join(
                    f"({self._written(item)})" if isinstance(item, Alternatives) else self._written(item) for item in items
                ) or quoted("")
            case Alternatives(items):
                return " | ".join(map(self._written, items))
            case Repeated(item, minimum, maximum):
                times = _SIGNS.get((minimum, maximum), f"{{{minimum},{'' if maximum is None else maximum}}}")
                return f"({self._written(item)}){times}"
