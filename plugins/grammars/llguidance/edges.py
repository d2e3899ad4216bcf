"""How parts of a structure begin and may go on: whether a lexer can tell one part from the next."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import reduce

from penstock.plugins.grammars.regex import tree as regular
from penstock.plugins.grammars.regex.tree import ANY, CharSet, intersect, of, union

TEXT = "text"
REGEX = "regex"
GRAMMAR = "grammar"


class Indistinct(Exception):
    """Two parts that cannot be told apart. The message says why, as the end of a sentence."""


@dataclass(frozen=True, slots=True)
class Head:
    """A lexeme that a part may begin with, or several of a kind.

    `first` may begin it, and `then` be what follows it; `is_last`: the part may end with it. `start` is the text that it begins with, as
    far as that is known, and `holds` are texts that are in it wherever it ends. `without` says of free text what may not come up in it;
    it is None for any other lexeme.
    """

    kind: str
    first: CharSet
    then: CharSet = ()
    is_last: bool = True
    start: str = ""
    holds: frozenset[str] = frozenset()
    without: frozenset[str] | None = None


@dataclass(frozen=True, slots=True)
class Edges:
    """`more` may go on where the part could have ended; `options` begin what its end leaves open, such as one more repetition.

    Added tokens are no characters, so a part that begins with one has no head.
    """

    heads: tuple[Head, ...] = ()
    more: CharSet = ()
    is_nullable: bool = False
    options: tuple[Head, ...] = ()

    @property
    def first(self) -> CharSet:
        return union(*(head.first for head in self.heads))

    @property
    def open_heads(self) -> tuple[Head, ...]:
        return self.options + self.heads if self.is_nullable else self.options


EMPTY = Edges(is_nullable=True)
ADDED_TOKEN = Edges()


def literal(text: str) -> Edges:
    return Edges((Head(TEXT, of(text[0]), start=text, holds=frozenset({text})),)) if text else EMPTY


def free_text(without: Iterable[str]) -> Edges:
    return Edges((Head(TEXT, ANY, without=frozenset(without)),), more=ANY, is_nullable=True)


def text_until(marker: str, without: Iterable[str]) -> Edges:
    return Edges((Head(TEXT, ANY, holds=frozenset({marker}), without=frozenset({marker, *without})),))


def json_value(whitespace_pattern: str | None, *, is_number: bool) -> Edges:
    """`is_number`: it may be one. Values with the same white space share their lexemes."""
    first, more = ('{["-0123456789tfn', "0123456789.eE+-") if is_number else ('{["tfn', "")
    return Edges((Head(f"json {whitespace_pattern}", of(first)),), of(more))


def of_grammar(alphabet: CharSet) -> Edges:
    """A grammar of a client's making, which has lexemes of its own."""
    return Edges((Head(GRAMMAR, alphabet),), more=alphabet, is_nullable=True)


def of_regex(node: regular.Node) -> Edges:
    """A regular tree of a client's making: one lexeme."""
    edges = _of_node(node)
    return replace(edges, heads=tuple(Head(REGEX, head.first) for head in edges.heads))


def sequence(parts: Sequence[Edges]) -> Edges:
    """Parts with lexemes of their own. Raises `Indistinct`, as `either` and `repeat` do."""
    return reduce(_before, reversed(parts), EMPTY)


def _before(rest: Edges, part: Edges) -> Edges:
    if intersect(part.more, rest.first):
        raise Indistinct("a value or text could go on with what follows it")
    part = Edges(_followed(part.heads, rest), part.more, part.is_nullable, _followed(part.options, rest))
    _check_apart(part.open_heads, rest.heads)
    return Edges(
        _merged(part.heads + rest.heads if part.is_nullable else part.heads),
        union(rest.more, part.more) if rest.is_nullable else rest.more,
        part.is_nullable and rest.is_nullable,
        _merged(part.open_heads + rest.options if rest.is_nullable else rest.options),
    )


def _followed(heads: tuple[Head, ...], rest: Edges) -> tuple[Head, ...]:
    """What their lexemes are followed by is known now, and with it whether they can be told apart."""
    followed = tuple(replace(head, then=union(head.then, rest.first), is_last=rest.is_nullable) if head.is_last else head for head in heads)
    for place, head in enumerate(followed):
        _check_apart((head,), followed[place + 1 :])
    return followed


def either(parts: Sequence[Edges]) -> Edges:
    heads: tuple[Head, ...] = ()
    for part in parts:
        _check_apart(heads, part.heads)
        heads = _merged(heads + part.heads)
    options = _merged(tuple(head for part in parts for head in part.options))
    return Edges(heads, union(*(part.more for part in parts)), any(part.is_nullable for part in parts), options)


def repeat(part: Edges, minimum: int, maximum: int | None) -> Edges:
    if maximum == 0:
        return EMPTY
    is_nullable = minimum == 0 or part.is_nullable
    if maximum == 1:
        return replace(part, is_nullable=is_nullable)
    repeated = sequence((part, replace(part, is_nullable=True)))
    return Edges(repeated.heads, part.more, is_nullable, _merged(repeated.options + repeated.heads))


def lexeme_sequence(parts: Sequence[Edges]) -> Edges:
    """Parts that are one lexeme, in which nothing needs telling apart; so in the next two."""
    more: CharSet = ()
    is_nullable = True
    heads: list[Head] = []
    held: list[str] = []
    free: list[frozenset[str]] = []
    start, is_literal, is_ended = "", True, False
    for part in parts:
        is_split = bool(intersect(more, part.first))
        more = union(part.more, more, part.first) if part.is_nullable else part.more
        more = ANY if is_split else more
        for head in part.heads:
            heads += [head] if is_nullable else []
            held += [] if part.is_nullable else head.holds
            start += head.start if is_literal else ""
            is_literal = is_literal and head.holds == {head.start}
            if not is_ended and (head.without is not None or head.kind == REGEX):
                free.append(head.without or frozenset())
                is_ended = not part.more  # what comes after it comes after its marker
        is_nullable = is_nullable and part.is_nullable
    return _lexeme(heads, more, is_nullable, start, frozenset(held), free)


def lexeme_either(parts: Sequence[Edges]) -> Edges:
    first: CharSet = ()
    more = union(*(part.more for part in parts))
    for part in parts:
        more = ANY if intersect(first, part.first) else more
        first = union(first, part.first)
    heads = [head for part in parts for head in part.heads]
    is_nullable = any(part.is_nullable for part in parts)
    holds = frozenset[str]() if is_nullable or not heads else heads[0].holds.intersection(*(head.holds for head in heads))
    start = "" if is_nullable else _common_start([head.start for head in heads])
    return _lexeme(heads, more, is_nullable, start, holds, [head.without for head in heads if head.without is not None])


def lexeme_repeat(part: Edges, minimum: int, maximum: int | None) -> Edges:
    if maximum == 0:
        return EMPTY
    is_nullable = minimum == 0 or part.is_nullable
    if maximum == 1:
        return replace(part, is_nullable=is_nullable)
    several = lexeme_sequence((part, replace(part, is_nullable=True)))
    return replace(several, more=union(several.more, part.first), is_nullable=is_nullable)


def _lexeme(
    heads: Iterable[Head], more: CharSet, is_nullable: bool, start: str, holds: frozenset[str], free: list[frozenset[str]]
) -> Edges:
    heads = list(heads)
    if not heads:
        return EMPTY if is_nullable else Edges()
    kind = REGEX if any(head.kind == REGEX for head in heads) else TEXT
    without = free[0].intersection(*free) if free else None
    return Edges((Head(kind, union(*(head.first for head in heads)), start=start, holds=holds, without=without),), more, is_nullable)


def _of_node(node: regular.Node) -> Edges:
    match node:
        case regular.Literal(text):
            return literal(text)
        case regular.Chars(chars):
            return Edges((Head(TEXT, chars),))
        case regular.Sequence(items):
            return lexeme_sequence([_of_node(item) for item in items])
        case regular.Either(items) if all(isinstance(item, regular.Literal) for item in items):
            return _of_texts(sorted({item.text for item in items if isinstance(item, regular.Literal)}))
        case regular.Either(items):
            return lexeme_either([_of_node(item) for item in items])
        case regular.Repeat(item, minimum, maximum):
            return lexeme_repeat(_of_node(item), minimum, maximum)
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
    firsts = of("".join(sorted({text[0] for text in texts if text})))
    return Edges((Head(TEXT, firsts),), of("".join(sorted(more))), is_nullable="" in texts)


def _check_apart(heads: tuple[Head, ...], others: tuple[Head, ...]) -> None:
    for head in heads:
        for other in others:
            if head.kind == other.kind == TEXT:
                if _is_swallowed(head, other) or _is_swallowed(other, head):
                    raise Indistinct("free text is allowed in the place of other text that is followed by more")
            elif (head.kind != other.kind or head.kind in (REGEX, GRAMMAR)) and intersect(head.first, other.first):
                raise Indistinct("a value begins like something else that is allowed in its place")


def _is_swallowed(head: Head, text: Head) -> bool:
    """Whether free text may go on over the end of another lexeme that something follows."""
    if text.without is None or not head.then or not intersect(head.first, text.first):
        return False
    if not head.start.startswith(text.start) and not text.start.startswith(head.start):
        return False
    return not any(marker in held for marker in text.without for held in head.holds)


def _merged(heads: tuple[Head, ...]) -> tuple[Head, ...]:
    merged: dict[tuple[object, ...], Head] = {}
    for head in heads:
        # By their starts, too: what literals of different starts share tells nothing apart from free text that begins like one of them.
        key = (head.kind, head.is_last, head.without, head.start, head.holds if head.without is not None else None)
        other = merged.get(key)
        merged[key] = head if other is None else _both(other, head)
    return tuple(merged.values())


def _both(head: Head, other: Head) -> Head:
    return replace(
        head,
        first=union(head.first, other.first),
        then=union(head.then, other.then),
        start=_common_start([head.start, other.start]),
        holds=head.holds & other.holds,
    )


def _common_start(texts: list[str]) -> str:
    """The lowest and the highest share what all of them do."""
    low, high = min(texts, default=""), max(texts, default="")
    return low[: next((place for place, pair in enumerate(zip(low, high, strict=False)) if pair[0] != pair[1]), len(low))]
