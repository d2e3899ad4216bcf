"""Parsers one after the other: each reads the content that the one before let through."""

from collections.abc import Iterable, Sequence

from penstock.engine.events import Event, Text
from penstock.engine.parsing import Parser


class ParserChain:
    """Feeds each parser the `Text` of the one before it; all other events pass by. Without parsers, everything is `Text`."""

    def __init__(self, parsers: Sequence[Parser]) -> None:
        self._parsers = tuple(parsers)

    def feed(self, piece: str) -> list[Event]:
        """The events that a piece of the answer completes."""
        events: list[Event] = [Text(piece)] if piece else []
        for parser in self._parsers:
            events = _through(parser, events)
        return events

    def finish(self) -> list[Event]:
        """Flushes in order: what one parser gives back is still read by those after it."""
        events: list[Event] = []
        for parser in self._parsers:
            events = [*_through(parser, events), *parser.finish()]
        return events


def _through(parser: Parser, events: Iterable[Event]) -> list[Event]:
    passed: list[Event] = []
    for event in events:
        if isinstance(event, Text):
            passed.extend(parser.feed(event.text))
        else:
            passed.append(event)
    return passed
