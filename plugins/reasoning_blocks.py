"""Reasoning in blocks that may stand anywhere in the answer, with markers of their own around what is no reasoning."""

from collections.abc import Mapping, Sequence

from penstock.engine.events import Event, Reasoning, Text
from penstock.engine.parsing import Phase
from penstock.plugins.edge_space import EdgeSpace
from penstock.plugins.markers import MarkerBuffer, read_steps


class ReasoningBlocks:
    """A reasoning parser for formats that `ThinkTags` is too simple for: a block may begin in the middle of the content too.

    `label` is what the first line of a block may be and is no part of it. `wrappers` stand around content and are taken out, as are end
    markers that end nothing. An implicit end stays in the content; so does an aside, from its key to its value, after which the block goes
    on. Where `trims_space`, white space at both ends of a block, and between a block and what wraps content, belongs to the markers. In
    content that `is_constrained`, no block begins or goes on, and no end marker is taken out.
    """

    def __init__(
        self,
        phase: Phase,
        *,
        starts: Sequence[str],
        ends: Sequence[str],
        first_starts: Sequence[str] = (),
        label: str = "",
        implicit_ends: Sequence[str] = (),
        wrappers: Sequence[str] = (),
        asides: Mapping[str, str] | None = None,
        trims_space: bool = False,
        is_constrained: bool = False,
        added_tokens: frozenset[str] = frozenset(),
    ) -> None:
        self.start_marker = starts[0]
        self.end_marker = ends[0]
        self._starts = tuple(starts)
        self._first_starts = (*starts, *first_starts)  # also those that may only be the first of all
        self._ends = tuple(ends)
        self._labels = (f"{label}\n", *(f"{label}{end}" for end in ends)) if label else ()
        self._implicit_ends = tuple(implicit_ends)
        self._wrappers = tuple(wrappers)
        self._content_markers = self._wrappers if is_constrained else (*starts, *ends, *wrappers)
        self._asides = asides or {}
        self._is_constrained = is_constrained
        self._aside_end = ""
        self._space = EdgeSpace() if trims_space else None
        self._buffer = MarkerBuffer(added_tokens)
        self._phase = phase
        self._step = self._read_content if phase is Phase.CONTENT else self._read_start

    @property
    def phase(self) -> Phase:
        return self._phase

    def feed(self, text: str) -> list[Event]:
        """Takes text as it arrived, however it is cut."""
        return read_steps(self._buffer, text, lambda events: self._step(events))

    def finish(self) -> list[Event]:
        """Gives back what is held: a marker that was never completed is part of what it stood in."""
        events: list[Event] = []
        self._give_out(self._buffer.finish(), events)
        return events + self._events(self._space.finish() if self._space is not None else [])

    def release(self) -> list[Event]:
        """Gives back what is held: a tool call has begun before it. Reading goes on after the call."""
        return self.finish()

    def _read_start(self, events: list[Event]) -> bool:
        """A start marker at the very start is taken out, though the prompt may have opened the block before."""
        start = self._buffer.take_start(*self._first_starts)
        if start is None:
            return False
        space, marker = start
        if self._phase is Phase.UNDECIDED and marker is None:
            self._phase = Phase.CONTENT
            self._step = self._read_content
        else:
            self._open(has_label=marker is not None)
        self._give_out(space, events)
        return True

    def _open(self, *, has_label: bool = True) -> None:
        self._phase = Phase.REASONING
        self._step = self._read_label if has_label and self._labels else self._read_reasoning

    def _read_label(self, events: list[Event]) -> bool:
        start = self._buffer.take_start(*self._labels)
        if start is None:
            return False
        space, label = start
        self._give_out(space, events)
        self._step = self._read_reasoning
        if label is not None and not label.endswith("\n"):
            self._end_block(events)
        return True

    def _read_reasoning(self, events: list[Event]) -> bool:
        pieces, marker = self._buffer.take_until(*self._ends, *self._implicit_ends, *self._asides)
        self._give_out(pieces, events)
        if marker is None:
            return False
        self._end_block(events)
        if marker not in self._ends:
            events += map(Text, self._buffer.marker_pieces)
        if marker in self._asides and not self._is_constrained:
            self._aside_end = self._asides[marker]
            self._step = self._read_aside
        return True

    def _end_block(self, events: list[Event]) -> None:
        self._end_stretch(events)
        self._phase = Phase.CONTENT
        self._step = self._read_content

    def _read_aside(self, events: list[Event]) -> bool:
        pieces, marker = self._buffer.take_until(self._aside_end)
        events += map(Text, pieces)
        if marker is not None:
            events += map(Text, self._buffer.marker_pieces)
            self._open(has_label=False)
        return marker is not None

    def _read_content(self, events: list[Event]) -> bool:
        watched = self._implicit_ends if self._space is not None else ()
        pieces, marker = self._buffer.take_until(*self._content_markers, *watched)
        self._give_out(pieces, events)
        if marker is None:
            return False
        self._end_stretch(events)
        if marker in self._starts:
            self._open()
        elif marker in watched:
            events += map(Text, self._buffer.marker_pieces)
        return True

    def _give_out(self, pieces: list[str], events: list[Event]) -> None:
        if self._space is not None and self._step != self._read_aside:
            pieces = self._space.take(pieces, drops_leading=self._phase is Phase.REASONING)
        events += self._events(pieces)

    def _end_stretch(self, events: list[Event]) -> None:
        if self._space is not None:
            events += self._events(self._space.end(drops_trailing=self._phase is Phase.REASONING))

    def _events(self, pieces: list[str]) -> list[Event]:
        kind = Reasoning if self._phase is Phase.REASONING else Text
        return [kind(piece) for piece in pieces]
