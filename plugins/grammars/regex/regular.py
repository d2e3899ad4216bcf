"""Regular expressions as a tree: what the regex parser and the JSON Schema translation both build."""

from dataclasses import dataclass
from functools import reduce

from penstock.plugins.grammars.regex.charset import ANY, CharSet, of, union


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
class Reference:
    """What a rule of this name stands for, where a grammar has rules. Regular expressions have none."""

    name: str


Node = Literal | Chars | Sequence | Either | Repeat | Anchor | Reference

EMPTY = Sequence(())
ANYTHING = Repeat(Chars(ANY), 0, None)


def sequence(*items: Node) -> Node:
    return items[0] if len(items) == 1 else Sequence(items)


def either(*items: Node) -> Node:
    return items[0] if len(items) == 1 else Either(items)


def optional(item: Node) -> Node:
    return Repeat(item, 0, 1)


def chars(characters: str) -> Chars:
    return Chars(of(characters))


def any_of(*sets: CharSet) -> Chars:
    return Chars(reduce(union, sets))


class MisplacedAnchor(Exception):
    """`^` or `$` where text may stand before or after it. `position` is its place in the pattern."""

    def __init__(self, anchor: Anchor) -> None:
        super().__init__("^" if anchor.is_start else "$")
        self.position = anchor.position


def full_match(node: Node) -> Node:
    """The tree without its anchors, to be matched as a whole. Raises `MisplacedAnchor`."""
    return _strip(node, at_start=True, at_end=True)


def search(node: Node) -> Node:
    """A tree whose full matches are the texts in which `node` is found somewhere, as JSON Schema's `pattern` means it.

    Anchors count only at the ends of the whole pattern's alternatives. Raises `MisplacedAnchor` for others.
    """
    if isinstance(node, Either):
        return Either(tuple(search(item) for item in node.items))
    items = node.items if isinstance(node, Sequence) else (node,)
    if len(items) == 1 and isinstance(items[0], Either | Sequence):
        return search(items[0])
    is_anchored_start = bool(items) and isinstance(items[0], Anchor) and items[0].is_start
    is_anchored_end = bool(items) and isinstance(items[-1], Anchor) and not items[-1].is_start
    inner = _strip(Sequence(items), at_start=is_anchored_start, at_end=is_anchored_end)
    return Sequence((*(() if is_anchored_start else (ANYTHING,)), inner, *(() if is_anchored_end else (ANYTHING,))))


def _strip(node: Node, *, at_start: bool, at_end: bool) -> Node:
    match node:
        case Anchor():
            if not (at_start if node.is_start else at_end):
                raise MisplacedAnchor(node)
            return EMPTY
        case Either(items):
            return Either(tuple(_strip(item, at_start=at_start, at_end=at_end) for item in items))
        case Repeat(item, minimum, maximum):
            is_single = maximum == 1
            return Repeat(_strip(item, at_start=at_start and is_single, at_end=at_end and is_single), minimum, maximum)
        case Sequence(items):
            widths = [not isinstance(item, Anchor) for item in items]
            return Sequence(
                tuple(
                    _strip(item, at_start=at_start and not any(widths[:i]), at_end=at_end and not any(widths[i + 1 :]))
                    for i, item in enumerate(items)
                )
            )
    return node
