"""With which characters a text may go on where a regular tree matches it already (Glushkov's positions, made deterministic)."""

from dataclasses import dataclass, field

from penstock.plugins.grammars.regex.charset import ANY, CharSet, of, union
from penstock.plugins.grammars.regex.regular import Chars, Either, Literal, Node, Repeat, Sequence

MAX_POSITIONS = 2000
MAX_STATES = 2000
_Places = frozenset[int]


@dataclass(slots=True)
class Budget:
    """Steps left, each of which asks a place about a character: up to a microsecond."""

    num_steps: int = 300_000


def continuation(node: Node, budget: Budget | None = None) -> CharSet:
    """Counts of repeats are passed over, so that it may name too many; where the tree is large or the budget spent, every character."""
    budget = budget or Budget()
    positions = _Positions()
    whole = positions.read(node)
    if len(positions.chars) > MAX_POSITIONS:
        return ANY
    more: CharSet = union(*(positions.chars[place] for place in whole.first)) if whole.is_nullable else ()
    seen: set[_Places] = set()
    pending = [whole.first]
    while pending:
        offered = pending.pop()
        points = positions.points(offered)
        budget.num_steps -= len(points) * sum(len(positions.chars[place]) for place in offered)
        if budget.num_steps < 0:
            return ANY
        for state in positions.states(offered, points):
            if state in seen:
                continue
            seen.add(state)
            if len(seen) > MAX_STATES:
                return ANY
            after = frozenset[int]().union(*(positions.follow[place] for place in state))
            if state & whole.last and after:
                more = union(more, *(positions.chars[place] for place in after))
            pending.append(after)
    return more


@dataclass(frozen=True, slots=True)
class _Part:
    first: _Places = frozenset()
    last: _Places = frozenset()
    is_nullable: bool = True


@dataclass(slots=True)
class _Positions:
    """Each place in the tree that takes a character: which ones, and what places may come after it."""

    chars: list[CharSet] = field(default_factory=list)
    follow: list[set[int]] = field(default_factory=list)

    def read(self, node: Node) -> _Part:
        match node:
            case Literal(text):
                return self.read(Sequence(tuple(Chars(of(character)) for character in text)))
            case Chars(chars):
                self.chars.append(chars)
                self.follow.append(set())
                place = frozenset({len(self.chars) - 1})
                return _Part(place, place, is_nullable=False)
            case Sequence(items):
                whole = _Part()
                for item in items:
                    whole = self.joined(whole, self.read(item))
                return whole
            case Either(items):
                parts = [self.read(item) for item in items]
                first = frozenset[int]().union(*(part.first for part in parts))
                last = frozenset[int]().union(*(part.last for part in parts))
                return _Part(first, last, any(part.is_nullable for part in parts))
            case Repeat(item, minimum, maximum):
                if maximum == 0:
                    return _Part()
                part = self.read(item)
                if maximum != 1:
                    self.joined(part, part)
                return _Part(part.first, part.last, part.is_nullable or minimum == 0)
        raise AssertionError("anchors and references are resolved before")

    def joined(self, left: _Part, right: _Part) -> _Part:
        for place in left.last:
            self.follow[place] |= right.first
        return _Part(
            left.first | right.first if left.is_nullable else left.first,
            left.last | right.last if right.is_nullable else right.last,
            left.is_nullable and right.is_nullable,
        )

    def points(self, offered: _Places) -> list[int]:
        """One character of each kind that these places tell apart."""
        edges = sorted({edge for place in offered for low, high in self.chars[place] for edge in (low, high + 1)})
        return [edge for edge in edges if edge <= 0x10FFFF]

    def states(self, offered: _Places, points: list[int]) -> set[_Places]:
        """The places that one character, whichever, can be at."""
        found = {frozenset(place for place in offered if _holds(self.chars[place], point)) for point in points}
        return found - {frozenset()}


def _holds(chars: CharSet, point: int) -> bool:
    return any(low <= point <= high for low, high in chars)
