"""Tool calls that have a marker of their own, alone or in sections."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from penstock.engine.contracts.parsing import Event, ToolFormat, Turn
from penstock.plugins.calls.schema_values import ToolSchemas, has_strict_tool
from penstock.plugins.calls.stream import CallReader, CallStream, Surroundings
from penstock.plugins.markers import StepBuffer, is_cut_marker

_TAIL = 64
_INDENT = " \t"


@dataclass(frozen=True, slots=True, kw_only=True)
class Envelope:
    """`call` opens a call; `section` and `section_end`, if given, enclose all of them.

    `skipped` markers may occur between calls and mean nothing. Where `may_lack_section`, a call of an offered tool may begin a line
    without one. Where `is_offered_only`, what calls a tool that the request does not offer is text.
    """

    call: str
    section: str = ""
    section_end: str = ""
    skipped: tuple[str, ...] = ()
    may_lack_section: bool = False
    is_offered_only: bool = False

    @property
    def enclosing(self) -> tuple[str, ...]:
        """The markers around calls."""
        return tuple(marker for marker in (self.section, self.section_end, self.call) if marker)


NewReader = Callable[[StepBuffer, ToolSchemas, Surroundings], CallReader]


class SectionStream(CallStream):
    """Calls that begin with a marker of their own, alone or in sections; `new_reader` makes the reader of one call."""

    def __init__(self, turn: Turn, envelope: Envelope, new_reader: NewReader, tool_format: ToolFormat | None) -> None:
        super().__init__(turn, envelope.enclosing, tool_format)
        self._new_reader = new_reader
        self._envelope = envelope
        self._schemas = ToolSchemas(turn.tools)
        # Strict calls are held to their tool from the section's marker on, so that a call without one would evade that.
        self._may_lack_section = envelope.may_lack_section and not has_strict_tool(turn.tools)
        self._is_bare = False  # the call that is being read has no section
        self._is_in_section = False
        self._tail = ""  # the end of the text so far, where there are sections

    def _is_cut_end(self, held: list[str], rest: list[str]) -> bool:
        return self._step == self._read_after and is_cut_marker(rest, *self._ends)

    def _read_text(self, events: list[Event]) -> None:
        envelope = self._envelope
        markers: tuple[str, ...] = envelope.enclosing if self._is_in_section else (envelope.section or envelope.call,)
        if self._may_lack_section and envelope.call not in markers:
            markers = (*markers, envelope.call)
        marker = self._buffer.until(lambda piece: self._say([piece], events), *markers)
        if marker == envelope.call and envelope.section and not self._is_in_section and not self._may_begin_here:
            self._say(self._around.pieces(marker), events)
        else:
            self._follow(marker, [])

    def _follow(self, marker: str, space: list[str]) -> None:
        """Handles a marker of the envelope that is allowed here."""
        envelope = self._envelope
        pieces = [*space, *self._around.pieces(marker)]
        if marker == envelope.call:
            self._open(pieces)
        elif marker == envelope.section:
            self._held = pieces
            self._step = self._read_section
        elif marker == envelope.section_end:
            self._is_in_section = False
            if self._step != self._read_text:  # white space after other text is text
                self._step = self._read_after

    @property
    def _may_begin_here(self) -> bool:
        """At the beginning of a line, and not after a quotation of what sections begin with."""
        before = self._tail.rstrip(_INDENT)
        return (not before or before.endswith("\n")) and not before.rstrip().endswith(self._envelope.section)

    def _read_section(self, events: list[Event]) -> None:
        space, marker = self._buffer.start(self._envelope.call)
        self._held += space
        if marker is not None:
            self._open([*self._held, *self._around.pieces(marker)])
        else:
            self._reject(events)

    def _open(self, block: list[str]) -> None:
        self._is_bare = bool(self._envelope.section) and not self._is_in_section and self._step != self._read_section
        self._begin(self._new_reader(self._buffer, self._schemas, self._around), block)

    def _may_call(self, name: str) -> bool:
        is_offered_only = self._is_bare or self._envelope.is_offered_only
        return not is_offered_only or not self._schemas or name in self._schemas

    def _start(self, name: str, call_id: str | None, events: list[Event]) -> None:
        super()._start(name, call_id, events)
        self._is_in_section = not self._is_bare and bool(self._envelope.section)

    def _leave_call(self, reader: CallReader, events: list[Event], *, is_call: bool) -> None:
        self._step = self._read_after if is_call and not reader.left else self._read_text
        if is_call and reader.next_head is not None:
            self._open(reader.next_head)
        elif is_call and reader.end_marker is not None:
            self._follow(reader.end_marker, [])

    def _read_after(self, events: list[Event]) -> None:
        envelope = self._envelope
        markers = (
            *self._ends,
            envelope.section,
            envelope.call if self._is_in_section or not envelope.section or self._may_lack_section else "",
        )
        space, marker = self._buffer.start(*(marker for marker in markers if marker))
        if marker is None:
            self._say(space, events)
            self._step = self._read_text
        elif marker not in envelope.skipped:
            self._is_bare = False
            self._follow(marker, space)

    @property
    def _ends(self) -> tuple[str, ...]:
        """What may follow a call and is none."""
        envelope = self._envelope
        ends = (envelope.section_end, *envelope.skipped) if self._is_in_section or self._is_bare else ()
        return tuple(marker for marker in ends if marker)

    def _say(self, pieces: Sequence[str], events: list[Event]) -> None:
        super()._say(pieces, events)
        if self._envelope.section:
            self._tail = "".join([self._tail, *(piece[-_TAIL:] for piece in pieces)])[-_TAIL:]
