"""Parsers one after the other: each reads the content that the one before let through."""

import re
from collections.abc import Iterable, Sequence

from penstock.engine.events import Event, SpecialText, Text
from penstock.engine.parsing import Parser, ToolParser

_PARTS = re.compile(r" ?\w+|\W")  # calls begin and end at no character of a word, nor at the blank before one


class ParserChain(Parser):
    """Feeds each parser the `Text` of the one before it; all other events pass by. Without parsers, everything is `Text`.

    While the last parser is inside a call, text goes around the `reasoning` parser, which otherwise is the first: what looks like one of
    its markers there belongs to the call's arguments. So does what that parser still holds when the call begins.
    """

    def __init__(self, parsers: Sequence[Parser], *, reasoning: Parser | None = None) -> None:
        self._reasoning = reasoning
        self._parsers = tuple(parsers)
        self._has_calls = reasoning is not None and bool(self._parsers) and isinstance(self._parsers[-1], ToolParser)

    @property
    def is_in_call(self) -> bool:
        """Whether what comes next belongs to a call."""
        return bool(self._parsers) and self._parsers[-1].is_in_call

    def feed(self, piece: str) -> list[Event]:
        """The events that a piece of the answer completes."""
        if self._reasoning is None:
            return self._read_content([Text(piece)] if piece else [])
        events: list[Event] = []
        for part in split_at_calls(piece) if self._has_calls else (piece,):
            if self.is_in_call:
                events += self._read_content([Text(part)])
                continue
            events += self._read_content(self._reasoning.feed(part))
            if self.is_in_call:
                events += self._read_content(self._reasoning.release())
        return events

    def finish(self) -> list[Event]:
        """Flushes in order: what one parser gives back is still read by those after it."""
        events = [] if self._reasoning is None else list(self._reasoning.finish())
        for parser in self._parsers:
            events = [*_through(parser, events), *parser.finish()]
        return events

    def _read_content(self, events: Iterable[Event]) -> list[Event]:
        for parser in self._parsers:
            events = _through(parser, events)
        return list(events)


def split_at_calls(piece: str) -> Sequence[str]:
    """The piece in parts, in none of which a call begins or ends but at its end."""
    return (piece,) if len(piece) < 2 or isinstance(piece, SpecialText) else _PARTS.findall(piece)


def _through(parser: Parser, events: Iterable[Event]) -> list[Event]:
    passed: list[Event] = []
    for event in events:
        if isinstance(event, Text):
            passed.extend(parser.feed(event.text))
        else:
            passed.append(event)
    return passed
