"""Whether the next character always says which lexeme of a grammar it belongs to, as a lexer that never reconsiders needs it."""

from collections.abc import Mapping
from dataclasses import dataclass

from penstock.plugins.grammars.llguidance.continuation import Budget, continuation
from penstock.plugins.grammars.llguidance.gbnf_syntax import Alternatives, Expression, Name, Parts, Repeated, Text
from penstock.plugins.grammars.llguidance.part_edges import of_regex
from penstock.plugins.grammars.regex.charset import CharSet, intersect, union
from penstock.plugins.grammars.regex.regular import Node

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
