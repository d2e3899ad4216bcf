"""Regular expressions as trees, over sets of characters as sorted ranges of code points."""

import re
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache, lru_cache
from sys import byteorder
from typing import Any

CharSet = tuple[tuple[int, int], ...]  # inclusive, sorted, neither overlapping nor touching
_Run = tuple[int, int, Any]  # from the first to the last, and what each of them is

MAX_CACHED = 1024  # sets come from clients: what is learnt of them must not pile up
_SURROGATES = (0xD800, 0xDFFF)
ANY: CharSet = ((1, _SURROGATES[0] - 1), (_SURROGATES[1] + 1, 0x10FFFF))


def _merge(ranges: Iterable[tuple[int, int]]) -> CharSet:
    merged: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(high, merged[-1][1]))
        else:
            merged.append((low, high))
    return tuple(merged)


def charset(*ranges: tuple[int, int]) -> CharSet:
    """The characters in any of the inclusive ranges, less NUL and the surrogates."""
    return intersect(_merge(ranges), ANY)


def of(characters: str) -> CharSet:
    """These characters."""
    return charset(*((ord(character), ord(character)) for character in characters))


def union(*sets: CharSet) -> CharSet:
    return _merge(span for one in sets for span in one)


@lru_cache(MAX_CACHED)
def complement(chars: CharSet) -> CharSet:
    """All other characters that can be generated."""
    gaps = []
    start = 1
    for low, high in chars:
        gaps.append((start, low - 1))
        start = high + 1
    gaps.append((start, 0x10FFFF))
    return charset(*((low, high) for low, high in gaps if low <= high))


def intersect(left: CharSet, right: CharSet) -> CharSet:
    shared = []
    i = j = 0
    while i < len(left) and j < len(right):
        low, high = max(left[i][0], right[j][0]), min(left[i][1], right[j][1])
        if low <= high:
            shared.append((low, high))
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return tuple(shared)


@cache
def unicode_word() -> CharSet:
    """What Python's `re` matches with `\\w`."""
    return _matched_by(r"\w")


@cache
def unicode_digit() -> CharSet:
    return _matched_by(r"\d")


@cache
def unicode_space() -> CharSet:
    return _matched_by(r"\s")


ASCII_DIGIT = charset((0x30, 0x39))
ASCII_WORD = union(ASCII_DIGIT, charset((0x41, 0x5A), (0x61, 0x7A)), of("_"))


@lru_cache(MAX_CACHED)
def lead_bytes(chars: CharSet) -> frozenset[int]:
    """The first bytes of the characters' UTF-8 forms."""
    leads: set[int] = set()
    for low, high in chars:
        leads.update(range(_lead(low), _lead(high) + 1))
    return frozenset(leads)


@lru_cache(MAX_CACHED)
def num_utf8_states(chars: CharSet) -> int:
    """How many states an automaton needs inside the characters' UTF-8 forms: distinct tails after one, two and three bytes."""
    runs = _blocks([(low, high, None) for low, high in intersect(chars, charset((0x80, 0x10FFFF)))])
    tails = {tail for _, _, tail in runs}
    # One more byte for what no two-byte form reaches, then for what no three-byte form reaches.
    for first in (0x800 >> 6, 0x10000 >> 12):
        runs = _blocks([(max(low, first), high, tail) for low, high, tail in runs if high >= first])
        tails.update(tail for _, _, tail in runs)
    return len(tails)


def _blocks(runs: list[_Run]) -> list[_Run]:
    """The aligned blocks of 64 that the runs touch, each with what it holds; those that hold the same in a row are one run again."""
    blocks: list[_Run] = []
    for low, high, tail in runs:
        while low <= high:
            block = low >> 6
            if low & 63 == 0 and high - low >= 63:  # whole blocks
                last = ((high + 1) >> 6) - 1
                blocks.append((block, last, ((0, 63, tail),)))
                low = (last + 1) << 6
                continue
            end = min(high, low | 63)
            part = (low & 63, end & 63, tail)
            if blocks and blocks[-1][0] == block:
                blocks[-1] = (block, block, (*blocks[-1][2], part))
            else:
                blocks.append((block, block, (part,)))
            low = end + 1
    joined: list[_Run] = []
    for low, high, tail in blocks:
        if joined and joined[-1][1] + 1 == low and joined[-1][2] == tail:
            joined[-1] = (joined[-1][0], high, tail)
        else:
            joined.append((low, high, tail))
    return joined


def _lead(code_point: int) -> int:
    return chr(code_point).encode()[0]


def _matched_by(pattern: str) -> CharSet:
    everything = array("I", range(0x110000)).tobytes().decode(f"utf-32-{byteorder[0]}e", "surrogatepass")
    return charset(*((found.start(), found.end() - 1) for found in re.finditer(f"{pattern}+", everything)))


@dataclass(frozen=True, slots=True)
class Literal:
    text: str


@dataclass(frozen=True, slots=True)
class Chars:
    """One character out of a set."""

    chars: CharSet


@dataclass(frozen=True, slots=True)
class Sequence:
    items: tuple["Node", ...]


@dataclass(frozen=True, slots=True)
class Either:
    items: tuple["Node", ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    """`minimum` to `maximum` times; None is without end."""

    item: "Node"
    minimum: int
    maximum: int | None


@dataclass(frozen=True, slots=True)
class Anchor:
    """The start or the end of the text. `position` is its place in the pattern, for messages."""

    is_start: bool
    position: int


@dataclass(frozen=True, slots=True)
class Look:
    """A look-around: at its place, the text that follows (or precedes) has to begin (or end) with a match of `item`, or must not."""

    item: "Node"
    is_ahead: bool
    is_wanted: bool
    position: int


@dataclass(frozen=True, slots=True)
class Reference:
    """What a rule of this name stands for, where a grammar has rules. Regular expressions have none."""

    name: str


Node = Literal | Chars | Sequence | Either | Repeat | Anchor | Look | Reference

EMPTY = Sequence(())
ANYTHING = Repeat(Chars(ANY), 0, None)


def sequence(*items: Node) -> Node:
    return items[0] if len(items) == 1 else Sequence(items)


def either(*items: Node) -> Node:
    """One of the items; an only one is itself."""
    return items[0] if len(items) == 1 else Either(items)


def optional(item: Node) -> Node:
    return Repeat(item, 0, 1)


def chars(characters: str) -> Chars:
    return Chars(of(characters))


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
    positions = Positions()
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
class Part:
    first: _Places = frozenset()
    last: _Places = frozenset()
    is_nullable: bool = True


@dataclass(slots=True)
class Positions:
    """Each place in the tree that takes a character: which ones, and what places may come after it."""

    chars: list[CharSet] = field(default_factory=list)
    follow: list[set[int]] = field(default_factory=list)

    def read(self, node: Node) -> Part:
        match node:
            case Literal(text):
                return self.read(Sequence(tuple(Chars(of(character)) for character in text)))
            case Chars(chars):
                self.chars.append(chars)
                self.follow.append(set())
                place = frozenset({len(self.chars) - 1})
                return Part(place, place, is_nullable=False)
            case Sequence(items):
                whole = Part()
                for item in items:
                    whole = self.joined(whole, self.read(item))
                return whole
            case Either(items):
                parts = [self.read(item) for item in items]
                first = frozenset[int]().union(*(part.first for part in parts))
                last = frozenset[int]().union(*(part.last for part in parts))
                return Part(first, last, any(part.is_nullable for part in parts))
            case Repeat(item, minimum, maximum):
                if maximum == 0:
                    return Part()
                part = self.read(item)
                if maximum != 1:
                    self.joined(part, part)
                return Part(part.first, part.last, part.is_nullable or minimum == 0)
        raise AssertionError("anchors, look-around and references are resolved before")

    def joined(self, left: Part, right: Part) -> Part:
        for place in left.last:
            self.follow[place] |= right.first
        return Part(
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
