"""Reasoning that turns out to be the answer, because nothing follows it."""

from collections.abc import Iterable

from penstock.engine.events import Event, Reasoning, Text
from penstock.engine.parsing import Phase, ReasoningParser, release


class NonemptyContent:
    """A reasoning parser that moves the reasoning another one gives to the content, where that has nothing but white space.

    Which of the two it was is known when content comes, or at the end: until then it is held back.
    """

    def __init__(self, parser: ReasoningParser) -> None:
        self.start_marker = parser.start_marker
        self.end_marker = parser.end_marker
        self._parser = parser
        self._held: list[Event] = []
        self._is_decided = False

    @property
    def phase(self) -> Phase:
        return self._parser.phase

    def feed(self, text: str) -> list[Event]:
        """Takes text as it arrived, however it is cut."""
        return self._through(self._parser.feed(text))

    def finish(self) -> list[Event]:
        """Gives back what is held."""
        events = self._through(self._parser.finish())
        events += [Text(event.text) if isinstance(event, Reasoning) else event for event in self._held]
        self._held = []
        return events

    def release(self) -> list[Event]:
        """Gives back what the other parser holds: a tool call has begun before it. Reading goes on after the call."""
        return self._through(release(self._parser))

    def _through(self, events: Iterable[Event]) -> list[Event]:
        if self._is_decided:
            return list(events)
        for event in events:
            self._held.append(event)
            self._is_decided = self._is_decided or not (isinstance(event, Reasoning) or (isinstance(event, Text) and event.text.isspace()))
        if not self._is_decided:
            return []
        released, self._held = self._held, []
        return released
