"""Reasoning between a start marker and an end marker: what most model families write."""

from collections.abc import Mapping, Sequence

from penstock.engine.events import Event, Reasoning, SpecialText, Text
from penstock.engine.parsing import Phase
from penstock.plugins.markers import MarkerBuffer, read_steps


class ThinkTags:
    """A reasoning parser for one pair of markers, or for several spellings of each; the first spelling is the one that the engine writes.

    `phase` is where the answer starts. A start marker at the very start is taken out in UNDECIDED and in REASONING (a model may repeat the
    one that its prompt opened), and white space before it belongs to the reasoning. An implicit end stays in the content, for the
    next parser to read. `num_stray_ends` end markers are taken out of the content; any more stay visible. Where `drops_leading_end`, so is
    one that the answer begins with. `newlines_after_start` and `newlines_after_end` say how many line breaks right after a marker are part
    of it. `content_blocks` are content that stands within the reasoning, from each key to its value; both stay visible.

    Another block begins at a start marker that is an added token, and at one that only white space separates from the block before it.
    Any other start marker in the content is text, and so is the end marker that closes it. No block begins in an answer that starts in
    CONTENT. Content that `is_constrained` stays as it is, and no reasoning follows it.
    """

    def __init__(
        self,
        phase: Phase,
        *,
        starts: Sequence[str] = ("<think>",),
        ends: Sequence[str] = ("</think>",),
        implicit_ends: Sequence[str] = (),
        num_stray_ends: int = 0,
        drops_leading_end: bool = False,
        newlines_after_start: int = 0,
        newlines_after_end: int = 0,
        content_blocks: Mapping[str, str] | None = None,
        is_constrained: bool = False,
        added_tokens: frozenset[str] = frozenset(),
    ) -> None:
        self.start_marker = starts[0]
        self.end_marker = ends[0]
        self._starts = tuple(starts)
        self._ends = tuple(ends)
        self._may_reopen = phase is not Phase.CONTENT and not is_constrained
        self._token_starts = tuple(start for start in starts if self._may_reopen and start in added_tokens)
        self._num_stray_ends = 0 if is_constrained else num_stray_ends
        self._num_quoted_starts = 0  # in the content, whose end markers have not come yet
        self._is_after_block = False  # with nothing but white space since
        self._drops_leading_end = drops_leading_end
        self._newlines_after_start = newlines_after_start
        self._newlines_after_end = newlines_after_end
        self._blocks = dict(content_blocks or {}) if not is_constrained else {}
        self._all_ends = (*ends, *implicit_ends, *(content_blocks or ()))
        self._block_end: str | None = None  # what ends the content block that the reasoning is interrupted by
        self._num_newlines = 0  # that would still belong to the last marker
        self._buffer = MarkerBuffer(added_tokens)
        self._phase = phase
        self._is_at_start = phase is not Phase.CONTENT or drops_leading_end

    @property
    def phase(self) -> Phase:
        return self._phase

    def feed(self, text: str) -> list[Event]:
        """Takes text as it arrived, however it is cut."""
        return read_steps(self._buffer, text, lambda events: self._step(events))

    def finish(self) -> list[Event]:
        """Gives back what is held: a marker that was never completed is part of what it stood in."""
        return self._events(self._buffer.finish())

    def release(self) -> list[Event]:
        """Gives back what is held: a tool call has begun before it. Reading goes on after the call."""
        return self.finish()

    def _step(self, events: list[Event]) -> bool:
        """Reads up to the next marker; False where that has not come yet."""
        if self._is_at_start:
            return self._open(events)
        if self._phase is Phase.REASONING:
            return self._read_reasoning(events)
        if self._block_end is not None:
            return self._read_block(events, self._block_end)
        return self._read_next_start(events) if self._is_after_block else self._read_content(events)

    def _open(self, events: list[Event]) -> bool:
        starts = () if self._phase is Phase.CONTENT else self._starts
        start = self._buffer.take_start(*starts, *(self._ends if self._drops_leading_end else ()))
        if start is None:
            return False
        space, marker = start
        self._is_at_start = False
        if marker is not None and marker in self._ends:
            events += self._events(space)
            self._end_block()
            return True
        if self._phase is Phase.UNDECIDED:
            self._phase = Phase.CONTENT if marker is None else Phase.REASONING
        events += self._events(space)
        self._num_newlines = 0 if marker is None else self._newlines_after_start
        return True

    def _read_reasoning(self, events: list[Event]) -> bool:
        pieces, marker = self._buffer.take_until(*self._all_ends)
        events += self._events(pieces)
        if marker is None:
            return False
        if marker in self._ends:
            self._end_block()
        else:
            self._enter(Phase.CONTENT)
            self._block_end = self._blocks.get(marker)
            events += map(Text, self._buffer.marker_pieces)
        return True

    def _end_block(self) -> None:
        self._enter(Phase.CONTENT, self._newlines_after_end)
        self._is_after_block = self._may_reopen

    def _read_next_start(self, events: list[Event]) -> bool:
        """After a block, where another one may follow. White space between two belongs to the reasoning."""
        start = self._buffer.take_start(*self._starts)
        if start is None:
            return False
        space, marker = start
        self._is_after_block = False
        if marker is not None:
            self._phase = Phase.REASONING
        events += self._events(space)
        if marker is not None:
            self._num_newlines = self._newlines_after_start
        return True

    def _read_content(self, events: list[Event]) -> bool:
        pieces, marker = self._buffer.take_until(*((*self._starts, *self._ends) if self._num_stray_ends else self._token_starts))
        events += self._events(pieces)
        if marker is None:
            return False
        if marker in self._token_starts:
            self._enter(Phase.REASONING, self._newlines_after_start)
        elif marker in self._starts:
            self._num_quoted_starts += 1
            events += map(Text, self._buffer.marker_pieces)
        elif self._num_quoted_starts:
            self._num_quoted_starts -= 1
            events += map(Text, self._buffer.marker_pieces)
        else:
            self._num_stray_ends -= 1
        return True

    def _read_block(self, events: list[Event], end: str) -> bool:
        pieces, marker = self._buffer.take_until(end)
        events += self._events(pieces)
        if marker is None:
            return False
        events += map(Text, self._buffer.marker_pieces)
        self._block_end = None
        self._enter(Phase.REASONING)
        return True

    def _enter(self, phase: Phase, num_newlines: int = 0) -> None:
        self._phase = phase
        self._num_newlines = num_newlines

    def _events(self, pieces: list[str]) -> list[Event]:
        kind = Reasoning if self._phase is Phase.REASONING else Text
        return [kind(piece) for piece in map(self._without_newlines, pieces) if piece]

    def _without_newlines(self, piece: str) -> str:
        """The piece without the line breaks that still belong to the marker before it."""
        if not self._num_newlines:
            return piece
        num_newlines = 0 if isinstance(piece, SpecialText) else _num_leading_newlines(piece, self._num_newlines)
        self._num_newlines = self._num_newlines - num_newlines if num_newlines == len(piece) else 0
        return piece[num_newlines:] if num_newlines else piece


def _num_leading_newlines(text: str, most: int) -> int:
    return next((position for position, character in enumerate(text[:most]) if character != "\n"), min(most, len(text)))
