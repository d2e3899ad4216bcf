"""Content in a wrapper of its own, such as `<answer>` … `</answer>`, which is no part of what the model says."""

from collections.abc import Iterable

from penstock.engine.events import Event, Text
from penstock.engine.parsing import Phase, ReasoningParser, release
from penstock.plugins.markers import MarkerBuffer


class ContentWrapper:
    """A reasoning parser that takes the wrapper out of the content which another one gives.

    The opening marker counts only where the content begins, with the white space before it, and the closing marker only after the opening
    one. A line break on the inner side of each belongs to it, and one after the closing marker. Content without the opening marker stays as
    it is.
    """

    def __init__(self, parser: ReasoningParser, opening: str, closing: str, added_tokens: frozenset[str] = frozenset()) -> None:
        self.start_marker = parser.start_marker
        self.end_marker = parser.end_marker
        self._parser = parser
        self._opening = opening
        self._closings = (f"\n{closing}", closing)
        self._buffer = MarkerBuffer(added_tokens)
        self._step = self._read_start
        self._may_drop_newline = False

    @property
    def phase(self) -> Phase:
        return self._parser.phase

    def feed(self, text: str) -> list[Event]:
        """Takes text as it arrived, however it is cut."""
        return self._through(self._parser.feed(text))

    def finish(self) -> list[Event]:
        """Gives back what is held."""
        events = self._through(self._parser.finish())
        return [*events, *self._texts(self._buffer.finish())]

    def release(self) -> list[Event]:
        """Gives back what both hold: a tool call has begun before it. Reading goes on after the call."""
        events = self._through(release(self._parser))
        return [*events, *self._texts(self._buffer.finish())]

    def _through(self, inner: Iterable[Event]) -> list[Event]:
        events: list[Event] = []
        for event in inner:
            if not isinstance(event, Text):
                events += self._texts(self._buffer.finish())
                events.append(event)
                continue
            self._buffer.feed(event.text)
            while self._step(events):
                pass
        return events

    def _read_start(self, events: list[Event]) -> bool:
        start = self._buffer.take_start(self._opening)
        if start is None:
            return False
        space, marker = start
        if marker is None:
            events += self._texts(space)
            self._step = self._read_rest
        else:
            self._may_drop_newline = True
            self._step = self._read_inside
        return True

    def _read_inside(self, events: list[Event]) -> bool:
        pieces, marker = self._buffer.take_until(*self._closings)
        events += self._texts(pieces)
        if marker is None:
            return False
        self._may_drop_newline = True
        self._step = self._read_rest
        return True

    def _read_rest(self, events: list[Event]) -> bool:
        pieces, _ = self._buffer.take_until()
        events += self._texts(pieces)
        return False

    def _texts(self, pieces: list[str]) -> list[Event]:
        if pieces and self._may_drop_newline:
            self._may_drop_newline = False
            if pieces[0].startswith("\n"):
                pieces = [pieces[0][1:], *pieces[1:]]
        return [Text(piece) for piece in pieces if piece]
