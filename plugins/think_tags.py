"""Reasoning between a start marker and an end marker: what most model families write."""

from collections.abc import Sequence

from penstock.engine.events import Event, Reasoning, Text
from penstock.engine.parsing import Phase
from penstock.plugins.markers import MarkerBuffer


class ThinkTags:
    """A reasoning parser for one pair of markers, or for several spellings of each; the first spelling is the one that the engine writes.

    `phase` is where the answer starts. A start marker at the very start is taken out in UNDECIDED and in REASONING (a model may repeat the
    one that its prompt opened), and white space before it belongs to the reasoning. An implicit end stays in the content, for the
    next parser to read. `num_stray_ends` end markers are taken out of the content; any more stay visible.
    """

    def __init__(
        self,
        phase: Phase,
        *,
        starts: Sequence[str] = ("<think>",),
        ends: Sequence[str] = ("</think>",),
        implicit_ends: Sequence[str] = (),
        num_stray_ends: int = 0,
        added_tokens: frozenset[str] = frozenset(),
    ) -> None:
        self.start_marker = starts[0]
        self.end_marker = ends[0]
        self._starts = tuple(starts)
        self._ends = tuple(ends)
        self._implicit_ends = frozenset(implicit_ends)
        self._all_ends = (*ends, *implicit_ends)
        self._num_stray_ends = num_stray_ends
        self._buffer = MarkerBuffer(added_tokens)
        self._phase = phase
        self._is_at_start = phase is not Phase.CONTENT

    @property
    def phase(self) -> Phase:
        return self._phase

    def feed(self, text: str) -> list[Event]:
        """Takes text as it arrived, however it is cut."""
        self._buffer.feed(text)
        events: list[Event] = []
        while self._step(events):
            pass
        return events

    def finish(self) -> list[Event]:
        """Gives back what is held: a marker that was never completed is part of what it stood in."""
        return self._events(self._buffer.finish())

    def _step(self, events: list[Event]) -> bool:
        """Reads up to the next marker; False where that has not come yet."""
        if self._is_at_start:
            return self._open(events)
        if self._phase is Phase.REASONING:
            pieces, marker = self._buffer.take_until(*self._all_ends)
            events += self._events(pieces)
            if marker is not None:
                self._phase = Phase.CONTENT
                if marker in self._implicit_ends:
                    events.append(Text(marker))
            return marker is not None
        pieces, marker = self._buffer.take_until(*(self._ends if self._num_stray_ends else ()))
        events += self._events(pieces)
        if marker is not None:
            self._num_stray_ends -= 1
        return marker is not None

    def _open(self, events: list[Event]) -> bool:
        start = self._buffer.take_start(*self._starts)
        if start is None:
            return False
        space, marker = start
        self._is_at_start = False
        if self._phase is Phase.UNDECIDED:
            self._phase = Phase.CONTENT if marker is None else Phase.REASONING
        events += self._events(space)
        return True

    def _events(self, pieces: list[str]) -> list[Event]:
        kind = Reasoning if self._phase is Phase.REASONING else Text
        return [kind(piece) for piece in pieces]
