"""Intersections and complements of regular languages: trees as deterministic automata, and back (McNaughton and Yamada, 1960)."""

from collections.abc import Iterable
from collections.abc import Sequence as Several
from dataclasses import dataclass

from penstock.plugins.grammars.regex.tree import (
    ANY,
    EMPTY,
    Chars,
    CharSet,
    Either,
    Literal,
    Node,
    Positions,
    Repeat,
    Sequence,
    charset,
    either,
    intersect,
    union,
)

MAX_PLACES = 300  # for a character, counts of repeats written out
MAX_STATES = 300
MAX_SIZE = 2000  # nodes of the tree that is written


class OversizedAutomaton(Exception):
    """Too many states, or too large a tree."""


@dataclass(frozen=True, slots=True)
class Automaton:
    """Complete: a state's moves are disjoint sets of characters that make up `ANY`, each with the next state. State 0 is the start."""

    moves: tuple[tuple[tuple[CharSet, int], ...], ...]
    accepting: frozenset[int]


def intersection(parts: Several[tuple[Node, bool]]) -> Node:
    """What all these trees match or, where their flag is false, do not match. Without any text of that kind, an `Either` of nothing.

    The trees have neither anchors nor look-around. Raises `OversizedAutomaton`.
    """
    return _written(_smallest(_product([(_automaton(node), is_wanted) for node, is_wanted in parts])))


def _automaton(node: Node) -> Automaton:
    positions = Positions()
    whole = positions.read(_unrolled(node, [MAX_PLACES]))
    numbers: dict[frozenset[int] | None, int] = {None: 0}  # None is the start
    moves: list[tuple[tuple[CharSet, int], ...]] = []
    accepting = {0} if whole.is_nullable else set()
    pending: list[frozenset[int] | None] = [None]
    for state in pending:
        offered = whole.first if state is None else frozenset[int]().union(*(positions.follow[place] for place in state))
        points = positions.points(offered)
        ranges: dict[frozenset[int], list[tuple[int, int]]] = {}
        for low, high in zip([1, *points], [*points, 0x110000], strict=True):
            if low < high:
                target = frozenset(place for place in offered if any(start <= low <= end for start, end in positions.chars[place]))
                ranges.setdefault(target, []).append((low, high - 1))
        row = []
        for target, spans in ranges.items():
            if chars := charset(*spans):
                if target not in numbers:
                    numbers[target] = len(numbers)
                    pending.append(target)
                    if len(numbers) > MAX_STATES:
                        raise OversizedAutomaton
                    if target & whole.last:
                        accepting.add(numbers[target])
                row.append((chars, numbers[target]))
        moves.append(tuple(row))
    return Automaton(tuple(moves), frozenset(accepting))


def _unrolled(node: Node, budget: list[int]) -> Node:
    """With each repeat that has counts written out: `budget` is what is left of the places."""
    match node:
        case Literal(text):
            budget[0] -= len(text)
        case Chars():
            budget[0] -= 1
        case Sequence(items):
            node = Sequence(tuple(_unrolled(item, budget) for item in items))
        case Either(items):
            node = Either(tuple(_unrolled(item, budget) for item in items))
        case Repeat(item, minimum, maximum):
            if max(minimum, maximum or 0) > MAX_PLACES:
                raise OversizedAutomaton
            first = [_unrolled(item, budget) for _ in range(minimum)]
            rest: Node = Repeat(_unrolled(item, budget), 0, None) if maximum is None else EMPTY
            for _ in range((maximum or minimum) - minimum):
                rest = Repeat(Sequence((_unrolled(item, budget), rest)), 0, 1)
            node = Sequence((*first, rest))
    if budget[0] < 0:
        raise OversizedAutomaton
    return node


def _product(parts: Several[tuple[Automaton, bool]]) -> Automaton:
    numbers = {(0,) * len(parts): 0}
    pending = [*numbers]
    moves: list[tuple[tuple[CharSet, int], ...]] = []
    for states in pending:
        shared: list[tuple[CharSet, tuple[int, ...]]] = [(ANY, ())]
        for (automaton, _), state in zip(parts, states, strict=True):
            shared = [
                (both, (*targets, target))
                for chars, targets in shared
                for others, target in automaton.moves[state]
                if (both := intersect(chars, others))
            ]
        for _, targets in shared:
            if targets not in numbers:
                numbers[targets] = len(numbers)
                pending.append(targets)
                if len(numbers) > MAX_STATES:
                    raise OversizedAutomaton
        moves.append(tuple((chars, numbers[targets]) for chars, targets in shared))
    accepting = {
        number
        for states, number in numbers.items()
        if all((state in automaton.accepting) == is_wanted for (automaton, is_wanted), state in zip(parts, states, strict=True))
    }
    return Automaton(tuple(moves), frozenset(accepting))


def _smallest(automaton: Automaton) -> Automaton:
    """With equal states as one (Moore, 1956)."""
    classes = [int(state in automaton.accepting) for state in range(len(automaton.moves))]
    while True:
        kinds: dict[tuple[object, ...], int] = {}
        refined = []
        for state, moves in enumerate(automaton.moves):
            refined.append(kinds.setdefault((classes[state], *sorted(_joined((chars, classes[to]) for chars, to in moves))), len(kinds)))
        if len(kinds) == len(set(classes)):
            break
        classes = refined
    first = {kind: state for state, kind in reversed([*enumerate(refined)])}  # numbered as they come: the start's is 0
    rows = (_joined((chars, refined[to]) for chars, to in automaton.moves[first[kind]]) for kind in sorted(first))
    merged = tuple(tuple((chars, to) for to, chars in row) for row in rows)
    return Automaton(merged, frozenset(refined[state] for state in automaton.accepting))


def _joined(moves: Iterable[tuple[CharSet, int]]) -> list[tuple[int, CharSet]]:
    joined: dict[int, CharSet] = {}
    for chars, to in moves:
        joined[to] = union(joined.get(to, ()), chars)
    return [*joined.items()]


_OUT = -1


def _written(automaton: Automaton) -> Node:
    """By elimination of states, those with the fewest ways through them first."""
    into: dict[int, dict[int, Node]] = {}  # from each state to others
    for state, moves in enumerate(automaton.moves):
        into[state] = {to: Chars(chars) for chars, to in moves}
        if state in automaton.accepting:
            into[state][_OUT] = EMPTY
    alive = {_OUT}
    while more := {state for state, ways in into.items() if state not in alive and not alive.isdisjoint(ways)}:
        alive |= more
    into = {state: {to: node for to, node in ways.items() if to in alive} for state, ways in into.items() if state in alive}
    if 0 not in into:
        return Either(())
    start = len(automaton.moves)
    into[start] = {0: EMPTY}
    while len(into) > 1:
        state = min((one for one in into if one != start), key=lambda one: _cost(into, one))
        ways = into.pop(state)
        loop = ways.pop(state, None)
        again: tuple[Node, ...] = () if loop is None else (Repeat(loop, 0, None),)
        for others in into.values():
            if (before := others.pop(state, None)) is not None:
                for to, after in ways.items():
                    way = _sequence(before, *again, after)
                    others[to] = way if to not in others else _either(others[to], way)
        if sum(_size(node) for others in into.values() for node in others.values()) > MAX_SIZE:
            raise OversizedAutomaton
    return into[start][_OUT]


def _cost(into: dict[int, dict[int, Node]], state: int) -> int:
    num_before = sum(state in ways for other, ways in into.items() if other != state)
    return num_before * len(into[state])


def _sequence(*items: Node) -> Node:
    flat = [part for item in items for part in (item.items if isinstance(item, Sequence) else (item,))]
    return flat[0] if len(flat) == 1 else Sequence(tuple(flat))


def _either(left: Node, right: Node) -> Node:
    if left == EMPTY or right == EMPTY:
        return Repeat(right if left == EMPTY else left, 0, 1)
    if isinstance(left, Chars) and isinstance(right, Chars):
        return Chars(union(left.chars, right.chars))
    return either(*(part for node in (left, right) for part in (node.items if isinstance(node, Either) else (node,))))


def _size(node: Node) -> int:
    match node:
        case Sequence(items) | Either(items):
            return 1 + sum(map(_size, items))
        case Repeat(item):
            return 1 + _size(item)
    return 1
