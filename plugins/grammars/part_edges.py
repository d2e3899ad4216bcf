"""The characters with which parts of a structure begin and may go on: whether a lexer can tell one part from the next.

A lexer that takes the longest match and never reconsiders goes wrong in two places. A lexeme that could have ended takes in what comes
next: `[0-9]+` before a JSON number. And of two parts that may stand at one place it may take the wrong one, where values bring their own
lexemes. Within one lexeme neither matters. All of this errs on the safe side: what passes is told apart, and what does not might have been.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from penstock.plugins.grammars import regular
from penstock.plugins.grammars.charset import ANY, CharSet, intersect, of, union

TEXT = "text"  # lexemes that are made in knowledge of the others
REGEX = "regex"
GRAMMAR = "grammar"
Heads = Mapping[str, CharSet]


class Indistinct(Exception):
    """Two parts that cannot be told apart. The message says which, as the end of a sentence."""


@dataclass(frozen=True, slots=True)
class Edges:
    """What may begin a part, by whose lexemes these are: `TEXT`, or a name for each kind of value. Added tokens are no characters.

    `more` may go on where the part could have ended. `options` may begin what its end leaves open: one more of what is repeated.
    """

    heads: Heads = field(default_factory=dict)
    more: CharSet = ()
    is_nullable: bool = False
    options: Heads = field(default_factory=dict)

    @property
    def first(self) -> CharSet:
        return union(*self.heads.values())

    @property
    def open_heads(self) -> Heads:
        return _joined(self.options, self.heads) if self.is_nullable else self.options


EMPTY = Edges(is_nullable=True)
ADDED_TOKEN = Edges()
FREE_TEXT = Edges({TEXT: ANY}, more=ANY, is_nullable=True)
TEXT_AND_MARKER = Edges({TEXT: ANY})
ANY_GRAMMAR = Edges({GRAMMAR: ANY}, more=ANY, is_nullable=True)


def literal(text: str) -> Edges:
    return Edges({TEXT: of(text[0])}) if text else EMPTY


def json_value(whitespace_pattern: str | None, *, is_number: bool) -> Edges:
    """`is_number`: it may be one. Values with the same white space share their lexemes."""
    first, more = ('{["-0123456789tfn', "0123456789.eE+-") if is_number else ('{["tfn', "")
    return Edges({f"json {whitespace_pattern}": of(first)}, of(more))


def sequence(parts: Iterable[Edges], *, is_lexeme: bool) -> Edges:
    """Raises `Indistinct` unless all of it is one lexeme; as in the others."""
    result = EMPTY
    for part in parts:
        more = part.more
        if part.is_nullable:
            more = union(more, result.more, part.first if is_lexeme else ())
        if intersect(result.more, part.first):
            if not is_lexeme:
                raise Indistinct("a value or text could go on with what follows it")
            more = ANY
        if not is_lexeme:
            _check_apart(result.open_heads, part.heads)
        result = Edges(
            _joined(result.heads, part.heads) if result.is_nullable else result.heads,
            more,
            result.is_nullable and part.is_nullable,
            _joined(result.options, part.options) if part.is_nullable else part.options,
        )
        if part.is_nullable:
            result = Edges(result.heads, result.more, result.is_nullable, _joined(result.options, part.heads))
    return result


def either(parts: Iterable[Edges], *, is_lexeme: bool) -> Edges:
    result = Edges()
    is_first = True
    for part in parts:
        more = union(result.more, part.more)
        if is_lexeme and not is_first and intersect(result.first, part.first):
            more = ANY
        if not is_lexeme:
            _check_apart(result.heads, part.heads)
        is_nullable = result.is_nullable or part.is_nullable
        result = Edges(_joined(result.heads, part.heads), more, is_nullable, _joined(result.options, part.options))
        is_first = False
    return result


def repeat(part: Edges, minimum: int, maximum: int | None, *, is_lexeme: bool) -> Edges:
    if maximum == 0:
        return EMPTY
    several = part if maximum == 1 else sequence((part, part), is_lexeme=is_lexeme)
    more = union(several.more, part.first) if is_lexeme and maximum != 1 else several.more
    options = part.options if maximum == 1 else _joined(part.options, part.heads)
    return Edges(part.heads, more, part.is_nullable or minimum == 0, options)


def of_regex(node: regular.Node) -> Edges:
    """A regular tree, all of it one lexeme, of a client's making."""
    edges = _of_node(node)
    return Edges({REGEX: edges.first}, edges.more, edges.is_nullable)


def _of_node(node: regular.Node) -> Edges:
    match node:
        case regular.Literal(text):
            return literal(text)
        case regular.Chars(chars):
            return Edges({TEXT: chars})
        case regular.Sequence(items):
            return sequence(map(_of_node, items), is_lexeme=True)
        case regular.Either(items) if all(isinstance(item, regular.Literal) for item in items):
            return _of_texts(sorted({item.text for item in items if isinstance(item, regular.Literal)}))
        case regular.Either(items):
            return either(map(_of_node, items), is_lexeme=True)
        case regular.Repeat(item, minimum, maximum):
            return repeat(_of_node(item), minimum, maximum, is_lexeme=True)
    raise AssertionError("anchors are resolved, and a regex has no references")


def _of_texts(texts: list[str]) -> Edges:
    """Sorted: the texts that go on from one come right after it."""
    more: set[str] = set()
    shorter: list[str] = []
    for text in texts:
        while shorter and not text.startswith(shorter[-1]):
            shorter.pop()
        more.update(text[len(start)] for start in shorter)
        shorter.append(text)
    firsts = "".join(sorted({text[0] for text in texts if text}))
    return Edges({TEXT: of(firsts)}, of("".join(sorted(more))), is_nullable="" in texts)


def _check_apart(heads: Heads, others: Heads) -> None:
    """Lexemes made here may begin alike, and so may those that two values share."""
    for name, first in heads.items():
        for other, other_first in others.items():
            if (name != other or name in (REGEX, GRAMMAR)) and intersect(first, other_first):
                raise Indistinct("a value begins like something else that may stand in its place")


def _joined(heads: Heads, others: Heads) -> Heads:
    return {name: union(heads.get(name, ()), others.get(name, ())) for name in {**heads, **others}}
