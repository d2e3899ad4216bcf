"""The rest of a call that went wrong, in formats that write several calls in one list: text, after which others may follow."""

from collections.abc import Sequence

from penstock.engine.events import Event, Text
from penstock.plugins.markers import MarkerBuffer

_OPENERS = "([{"
_CLOSERS = ")]}"


class MalformedCall:
    """Passes text up to the bracket that closes the call, of which `depth` are open. Brackets in strings do not count."""

    def __init__(self, buffer: MarkerBuffer, depth: int, ends: Sequence[str], *, quotes: str = "\"'") -> None:
        self.is_over = depth <= 0
        self._buffer = buffer
        self._depth = depth
        self._ends = ends
        self._quotes = quotes
        self._quote = ""

    def read(self, events: list[Event]) -> str | None:
        """Reads on to the next mark, which is text unless it is one of `ends`; None where more text has to come first."""
        marks = (self._quote, f"\\{self._quote}") if self._quote else (*_OPENERS, *_CLOSERS, *self._quotes)
        pieces, marker = self._buffer.take_until(*marks, *self._ends)
        events += map(Text, pieces)
        if marker is None or marker in self._ends:
            return marker
        events.append(Text(marker))
        if self._quote or marker in self._quotes:
            if len(marker) == 1:
                self._quote = "" if self._quote else marker
        else:
            self._depth += 1 if marker in _OPENERS else -1
            self.is_over = self._depth <= 0
        return marker
