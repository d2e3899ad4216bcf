"""Trees without anchors and look-around: what a pattern matches as a whole, or anywhere in a text."""

from penstock.plugins.grammars.regex.automaton import OversizedAutomaton, intersection
from penstock.plugins.grammars.regex.tree import ANYTHING, EMPTY, Anchor, Either, Look, Node, Repeat, Sequence

_START, _END = Anchor(is_start=True, position=0), Anchor(is_start=False, position=0)


class MisplacedAnchor(Exception):
    """`^` or `$` where more text is allowed before or after it, or look-around where the text that it sees is repeated or grouped.

    The message says which, without `position`, its place in the pattern.
    """

    def __init__(self, anchor: Anchor | Look, reason: str = "") -> None:
        if isinstance(anchor, Look):
            name = "look-ahead" if anchor.is_ahead else "look-behind"
            super().__init__(f"{name} is refused {reason or 'within groups and repeats, and behind anywhere but at the end'}")
        else:
            super().__init__(f"{'^' if anchor.is_start else '$'} is refused where more text may lie beyond it")
        self.position = anchor.position


def full_match(node: Node) -> Node:
    """The tree without its anchors, to be matched as a whole. Raises `MisplacedAnchor`."""
    if not _has_look(node):
        return _strip(node, at_start=True, at_end=True)
    if isinstance(node, Either):
        return Either(tuple(full_match(item) for item in node.items))
    return search(Sequence((_START, *_items(node), _END)))


def search(node: Node) -> Node:
    """A tree whose full matches are the texts in which `node` is found somewhere, as JSON Schema's `pattern` means it.

    Anchors count only at the ends of the whole pattern's alternatives, look-around only outside of groups, and behind only at the end.
    Raises `MisplacedAnchor` for others.
    """
    if isinstance(node, Either):
        return Either(tuple(search(item) for item in node.items))
    items = _items(node)
    if len(items) == 1 and isinstance(items[0], Either | Sequence):
        return search(items[0])
    places = [place for place, item in enumerate(items) if isinstance(item, Look)]
    if places:
        # A look-behind sees what precedes a look-ahead, too: it comes first.
        return _seen(items, next((place for place in places if not _is_ahead(items[place])), places[0]))
    is_anchored_start = bool(items) and isinstance(items[0], Anchor) and items[0].is_start
    is_anchored_end = bool(items) and isinstance(items[-1], Anchor) and not items[-1].is_start
    inner = _strip(Sequence(items), at_start=is_anchored_start, at_end=is_anchored_end)
    return Sequence((*(() if is_anchored_start else (ANYTHING,)), inner, *(() if is_anchored_end else (ANYTHING,))))


def _is_ahead(node: Node) -> bool:
    return isinstance(node, Look) and node.is_ahead


def _items(node: Node) -> tuple[Node, ...]:
    return tuple(part for item in node.items for part in _items(item)) if isinstance(node, Sequence) else (node,)


def _alternatives(node: Node) -> tuple[Node, ...]:
    return node.items if isinstance(node, Either) else (node,)


def _is_start(items: tuple[Node, ...]) -> bool:
    return bool(items) and all(isinstance(item, Anchor) and item.is_start for item in items)


def _behind_within(node: Node) -> Anchor | Look | None:
    """What asks for the text before it."""
    match node:
        case Anchor() if node.is_start:
            return node
        case Look() if not node.is_ahead:
            return node
        case Sequence(items) | Either(items):
            return next((found for item in items if (found := _behind_within(item)) is not None), None)
        case Repeat(item) | Look(item):
            return _behind_within(item)
    return None


def _seen(items: tuple[Node, ...], place: int) -> Node:
    """A sequence with look-around. What a look-ahead sees is all that follows it, what a look-behind at the end sees all before it."""
    look = items[place]
    assert isinstance(look, Look)
    before, after = items[:place], items[place + 1 :]
    if look.is_ahead:
        for item in (*after, look.item) if not _is_start(before) else ():
            if (anchor := _behind_within(item)) is not None:
                raise MisplacedAnchor(anchor)
        head = search(Sequence((*before, _END))) if before else ANYTHING
        seen = Either(tuple(Sequence((_START, *_items(item))) for item in _alternatives(look.item)))
        return Sequence((head, _both(look, search(Sequence((_START, *after))), search(seen))))
    if not after or not all(isinstance(item, Anchor) and not item.is_start for item in after):
        raise MisplacedAnchor(look)
    whole = search(Sequence((*before, _END)))
    seen = Either(tuple(Sequence((*_items(item), _END)) for item in _alternatives(look.item)))
    return _both(look, whole, search(seen))


def _both(look: Look, text: Node, seen: Node) -> Node:
    try:
        both = intersection([(text, True), (seen, look.is_wanted)])
    except OversizedAutomaton:
        raise MisplacedAnchor(look, "where it makes a pattern too large") from None
    if both == Either(()):
        raise MisplacedAnchor(look, "that no text satisfies")
    return both


def _has_look(node: Node) -> bool:
    match node:
        case Look():
            return True
        case Sequence(items) | Either(items):
            return any(map(_has_look, items))
        case Repeat(item):
            return _has_look(item)
    return False


def _strip(node: Node, *, at_start: bool, at_end: bool) -> Node:
    match node:
        case Look():
            raise MisplacedAnchor(node)
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
