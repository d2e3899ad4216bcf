"""Follows an answer through the fields of a response template."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from penstock.engine.events import SpecialText
from penstock.plugins.markers import join_pieces
from penstock.plugins.response_templates.response_template import Field, ResponseTemplate
from penstock.plugins.response_templates.symbol_pattern import Captures, Search


@dataclass(frozen=True, slots=True)
class Stretch:
    """Text inside one field, or outside all."""

    field: Field | None
    pieces: list[str]


@dataclass(frozen=True, slots=True)
class Opened:
    """A field begins: with the text that opened it, and what its pattern captured there."""

    field: Field
    pieces: list[str]
    groups: dict[str, str]


@dataclass(frozen=True, slots=True)
class Closed:
    """A field ends, with the text that closed it."""

    field: Field
    pieces: list[str]


Part = Stretch | Opened | Closed


class TemplateReader:
    """Gives the parts of an answer, none later than it is certain. Text outside all fields belongs to the implicit field, or to none."""

    def __init__(self, template: ResponseTemplate, added_tokens: frozenset[str]) -> None:
        self.current: Field | None = template.implicit
        self.has_begun = False
        """Whether a field has been opened, or anything but white space has come outside all."""
        self.template = template
        self._added_tokens = added_tokens
        self._waiting: deque[str] = deque()  # symbols that have been looked at and may belong to a delimiter
        self._first = 0  # which symbol of the answer the first waiting one is
        self._watch()

    def _watch(self) -> None:
        program, self._opened = self.template.watched(self.current, self._added_tokens)
        self._search = Search(program, self._first)

    def feed(self, symbols: Iterable[str]) -> list[Part]:
        """Takes characters, and added tokens as a whole."""
        parts: list[Part] = []
        unread = deque(symbols)
        while unread or self._search.found is not None:
            if self._search.found is not None:
                self._take_delimiter(parts, unread)
            else:
                symbol = unread.popleft()
                self._waiting.append(symbol)
                self._search.feed(symbol)
        self._release(self._search.first_open, parts)
        return parts

    def finish(self) -> list[Part]:
        """The answer is over."""
        parts: list[Part] = []
        self._search.finish()
        while self._search.found is not None:
            unread: deque[str] = deque()
            self._take_delimiter(parts, unread)
            parts += self.feed(unread)
            self._search.finish()
        self._release(self._first + len(self._waiting), parts)
        return parts

    def _take_delimiter(self, parts: list[Part], unread: deque[str]) -> None:
        found = self._search.found
        assert found is not None
        self._release(found.start, parts)
        taken = [self._waiting.popleft() for _ in range(found.end - found.start)]
        unread.extendleft(reversed(self._waiting))
        self._waiting.clear()
        self._first = found.end
        opened = self._opened[found.index]
        left = self.current
        if (left is not None and left is not self.template.implicit) or (opened is None and left is not None):
            parts.append(Closed(left, join_pieces(taken)))
        if opened is not None:
            parts.append(Opened(opened, join_pieces(taken), _groups(taken, found.start, found.captures)))
            self.has_begun = True
        self.current = opened if opened is not None else self.template.implicit
        self._watch()

    def _release(self, end: int, parts: list[Part]) -> None:
        """Gives out the waiting symbols before `end`."""
        pieces = [self._waiting.popleft() for _ in range(end - self._first)]
        self._first = end
        if pieces:
            parts.append(Stretch(self.current, join_pieces(pieces)))
            self.has_begun = self.has_begun or any(isinstance(piece, SpecialText) or not piece.isspace() for piece in pieces)


def _groups(symbols: list[str], first: int, captures: Captures) -> dict[str, str]:
    groups: dict[str, str] = {}
    starts: dict[str, int] = {}
    for name, position in captures:
        if name in starts:
            groups[name] = "".join(symbols[starts.pop(name) - first : position - first])
        else:
            starts[name] = position
    return groups
