"""How large an index would become, found before it is built.

outlines_core determinizes a pattern and then walks the whole vocabulary from each state, with no limit of its own: `.*a.{20}` takes all
memory there is. The same construction over characters instead of bytes, stopped at a bound, costs milliseconds and tells what it would
have come to.
"""

import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from penstock.plugins.grammars.regex.tree import (
    Anchor,
    Chars,
    CharSet,
    Either,
    Literal,
    Look,
    Node,
    Reference,
    Repeat,
    Sequence,
    lead_bytes,
    num_utf8_states,
    of,
)

MAX_POSITIONS = 30_000
MAX_WORK = 300_000  # 100 ms of Python
MAX_DEPTH = 300
_WORK_BETWEEN_PAUSES = 5_000
_PAUSE_SECONDS = 0.0005


class IndexTooLarge(Exception):
    """The message says which bound was passed."""


@dataclass(frozen=True, slots=True)
class IndexSize:
    """`num_states` counts an automaton's states over bytes; `num_transitions` is how many (state, token) pairs it holds, at most."""

    num_states: int
    num_transitions: int


def measure(node: Node, openings: "TokenOpenings", max_states: int = 2**30) -> IndexSize:
    """The size of the index of `node`'s full matches over a vocabulary.

    Raises `IndexTooLarge` as soon as it is certain that there are more than `max_states`, or that finding out takes too much.
    """
    _check_positions(node)
    work = _Work()
    nfa = _Nfa(work)
    start = nfa.add_state()
    nfa.add(node, start)
    alphabet = _Alphabet(nfa.sets, work)
    # What each state of the deterministic automaton leads to: letters, and the state behind them.
    blocks: dict[tuple[int, ...], list[tuple[int, tuple[int, ...]]]] = {}
    pending: list[tuple[int, ...]] = [(start,)]
    while pending:
        key = pending.pop()
        if key in blocks:
            continue
        if len(blocks) == max_states:
            raise IndexTooLarge(f"more than {max_states} states")
        overlapping: dict[int, set[int]] = {}
        for state in nfa.closure(key):
            edge = nfa.edges[state]
            if edge is not None:
                overlapping.setdefault(alphabet.mask(edge[0]), set()).add(edge[1])
        blocks[key] = [(mask, tuple(sorted(targets))) for mask, targets in _split(overlapping, work)]
        pending += [target for _, target in blocks[key]]
    leads = {key: frozenset[int]().union(*(alphabet.lead_bytes(mask) for mask, _ in edges)) for key, edges in blocks.items()}
    num_states, num_transitions = len(blocks), 0
    for group in blocks.values():
        for mask, target in group:
            work.add(1)
            num_states += alphabet.num_utf8_states(mask)
            num_transitions += openings.count(alphabet.lead_bytes(mask), leads[target])
    return IndexSize(num_states, num_transitions)


class _Work:
    """How much has been done, in steps of well under a microsecond.

    This runs in a thread beside the event loop and the model's, which wait for the interpreter's lock: it pauses so that they get it at
    once rather than after the interpreter's switch interval, at each of their calls.
    """

    def __init__(self) -> None:
        self._done = 0
        self._next_pause = _WORK_BETWEEN_PAUSES

    def add(self, amount: int) -> None:
        self._done += amount
        if self._done > MAX_WORK:
            raise IndexTooLarge("more states than can be searched")
        if self._done > self._next_pause:
            time.sleep(_PAUSE_SECONDS)
            self._next_pause = self._done + _WORK_BETWEEN_PAUSES


class TokenOpenings:
    """How many tokens open with which two bytes: how many can follow a state is estimated closely enough from the next two characters."""

    def __init__(self, tokens: Iterable[bytes]) -> None:
        self._num_alone: Counter[int] = Counter()
        self._num_followed: dict[int, Counter[int]] = {}
        for beginning, number in Counter(token[:2] for token in tokens).items():
            if len(beginning) == 1:
                self._num_alone[beginning[0]] = number
            else:
                self._num_followed.setdefault(beginning[0], Counter())[beginning[1]] = number
        self._counts: dict[tuple[frozenset[int], frozenset[int]], int] = {}

    def count(self, first: frozenset[int], second: frozenset[int]) -> int:
        """How many tokens begin with a byte of `first` and are over, or go on within a character or with a byte of `second`."""
        key = (first, second)
        if key not in self._counts:
            self._counts[key] = sum(self._num_alone[lead] + self._count_followed(lead, second) for lead in first)
        return self._counts[key]

    def _count_followed(self, lead: int, second: frozenset[int]) -> int:
        followed = self._num_followed.get(lead, Counter())
        return followed.total() if lead >= 0x80 else sum(followed[byte] for byte in second)


def _check_positions(node: Node) -> None:
    """Raises `IndexTooLarge`. What occurs in several places of a tree is looked at once: written out, it can be exponentially larger."""
    known: dict[int, tuple[int, int]] = {}

    def measured(node: Node, depth: int) -> tuple[int, int]:
        """How many characters' places, and how deeply nested."""
        if depth > MAX_DEPTH:
            raise IndexTooLarge(f"nested deeper than {MAX_DEPTH}")
        if id(node) in known:
            return known[id(node)]
        items: tuple[Node, ...] = ()
        match node:
            case Sequence(parts) | Either(parts):
                items = parts
            case Repeat(item):
                items = (item,)
        inner = [measured(item, depth + 1) for item in items]
        num_places = (len(node.text) if isinstance(node, Literal) else 1) + sum(num for num, _ in inner)
        if isinstance(node, Repeat):
            num_places = 1 + inner[0][0] * max(node.minimum, node.maximum or 1)
        height = 1 + max((height for _, height in inner), default=0)
        if num_places > MAX_POSITIONS:
            raise IndexTooLarge(f"more than {MAX_POSITIONS} characters once repeats are written out")
        known[id(node)] = num_places, height
        return known[id(node)]

    if measured(node, 0)[1] > MAX_DEPTH:
        raise IndexTooLarge(f"nested deeper than {MAX_DEPTH}")


@dataclass(slots=True)
class _Nfa:
    """Thompson's construction: a state has one edge over a set of characters, or any number of empty ones."""

    work: _Work
    edges: list[tuple[CharSet, int] | None] = field(default_factory=list)
    empty: list[list[int]] = field(default_factory=list)
    sets: set[CharSet] = field(default_factory=set)

    def add_state(self) -> int:
        self.work.add(4)
        self.edges.append(None)
        self.empty.append([])
        return len(self.edges) - 1

    def add_edge(self, start: int, chars: CharSet) -> int:
        """A fresh state behind `start`, whose own edge must still be free."""
        end = self.add_state()
        self.edges[start] = (chars, end)
        self.sets.add(chars)
        return end

    def add(self, node: Node, start: int) -> int:
        """Adds the node behind `start`, whose edge is free; returns its end, whose edge is free too."""
        match node:
            case Literal(text):
                for character in text:
                    start = self.add_edge(start, of(character))
                return start
            case Chars(chars):
                return self.add_edge(start, chars)
            case Sequence(items):
                for item in items:
                    start = self.add(item, start)
                return start
            case Either(items):
                end = self.add_state()
                for item in items:
                    self.empty[self.add(item, self.add_behind(start))].append(end)
                return end
            case Repeat(item, minimum, maximum):
                return self.add_repeat(item, minimum, maximum, start)
            case Anchor() | Look() | Reference():
                raise AssertionError("anchors are resolved before an index is measured")

    def add_behind(self, start: int) -> int:
        state = self.add_state()
        self.empty[start].append(state)
        return state

    def add_repeat(self, item: Node, minimum: int, maximum: int | None, start: int) -> int:
        for _ in range(minimum):
            start = self.add(item, start)
        if maximum is None:
            loop = self.add_behind(start)
            end = self.add_behind(loop)
            self.empty[self.add(item, self.add_behind(loop))].append(loop)
            return end
        end = self.add_state()
        for _ in range(maximum - minimum):
            self.empty[start].append(end)
            start = self.add(item, self.add_behind(start))
        self.empty[start].append(end)
        return end

    def closure(self, states: tuple[int, ...]) -> list[int]:
        reached = set(states)
        pending = list(states)
        while pending:
            for state in self.empty[pending.pop()]:
                if state not in reached:
                    reached.add(state)
                    pending.append(state)
        self.work.add(2 * len(reached))
        return [state for state in reached if self.edges[state] is not None]


class _Alphabet:
    """Characters that no set of the pattern tells apart are one letter; a set is an int with a bit for each of its letters."""

    def __init__(self, sets: set[CharSet], work: _Work) -> None:
        self._work = work
        work.add(4 * sum(len(chars) for chars in sets))
        bounds = sorted({bound for chars in sets for low, high in chars for bound in (low, high + 1)})
        number = {bound: i for i, bound in enumerate(bounds)}
        members: list[set[int]] = [set() for _ in bounds]
        ordered = list(sets)
        for i, chars in enumerate(ordered):
            for low, high in chars:
                work.add(number[high + 1] - number[low])
                for segment in range(number[low], number[high + 1]):
                    members[segment].add(i)
        letters: dict[frozenset[int], int] = {}
        self._masks = dict.fromkeys(ordered, 0)
        self._ranges: list[list[tuple[int, int]]] = []
        for segment, owners in enumerate(members):
            work.add(len(owners))
            if not owners:
                continue
            letter = letters.setdefault(frozenset(owners), len(letters))
            if letter == len(self._ranges):
                self._ranges.append([])
                for i in owners:
                    self._masks[ordered[i]] |= 1 << letter
            self._ranges[letter].append((bounds[segment], bounds[segment + 1] - 1))
        self._chars: dict[int, CharSet] = {}

    def mask(self, chars: CharSet) -> int:
        return self._masks[chars]

    def num_utf8_states(self, mask: int) -> int:
        return num_utf8_states(self._charset(mask))

    def lead_bytes(self, mask: int) -> frozenset[int]:
        return lead_bytes(self._charset(mask))

    def _charset(self, mask: int) -> CharSet:
        if mask not in self._chars:
            self._work.add(4 * sum(map(len, self._ranges)))  # a set's bytes are looked at as well
            self._chars[mask] = tuple(sorted(span for letter, spans in enumerate(self._ranges) if mask >> letter & 1 for span in spans))
        return self._chars[mask]


def _split(edges: dict[int, set[int]], work: _Work) -> Iterator[tuple[int, set[int]]]:
    """The edges with overlapping sets cut apart, so that each letter leads to one set of states."""
    blocks: list[tuple[int, set[int]]] = []
    for mask, targets in edges.items():
        rest = mask
        cut: list[tuple[int, set[int]]] = []
        for other, reached in blocks:
            work.add(2 + len(reached))
            shared = other & rest
            if shared:
                cut.append((shared, reached | targets))
                rest &= ~shared
            if other & ~shared:
                cut.append((other & ~shared, reached))
        if rest:
            cut.append((rest, targets))
        blocks = cut
    yield from blocks
