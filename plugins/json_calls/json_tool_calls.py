"""Tool calls in JSON between markers, one call after the other or in arrays: a parser for all envelopes of that kind."""

from collections.abc import Callable

from penstock.engine.events import Event, SpecialText, Text
from penstock.engine.parsing import ToolParser
from penstock.engine.tool_format import ToolFormat
from penstock.engine.turn import Turn
from penstock.plugins.automaton import split_symbols
from penstock.plugins.call_ids import new_call_id
from penstock.plugins.json_calls.call_envelope import CallEnvelope
from penstock.plugins.json_calls.call_head import CallHead, is_field
from penstock.plugins.json_calls.json_call import JsonCall
from penstock.plugins.json_calls.json_call_reader import JsonCallReader
from penstock.plugins.json_calls.json_call_reading import JsonCallReading
from penstock.plugins.json_calls.named_call import NamedCall
from penstock.plugins.malformed_call import MalformedCall
from penstock.plugins.markers import MarkerBuffer, is_cut_marker, join_pieces, read_steps

_BETWEEN = " \t\r\n,;"


class JsonToolCalls(ToolParser):
    """A call starts as soon as it is known by name and its arguments have begun; these are given out as they were written where they are
    JSON.

    White space between calls is part of the format. What is no call is `Text` as it stood, and calls after it are read; one that goes
    wrong after it has started is closed there, and the rest is `Text`. With `tool_choice: none`, everything is.

    `call` makes the reader of a call that is one JSON object. With `head`, a call is named before its arguments; in an envelope that
    has arrays too, where no bracket follows.
    """

    tool_format: ToolFormat | None = None

    def __init__(
        self,
        turn: Turn,
        envelope: CallEnvelope,
        tool_format: ToolFormat | None = None,
        *,
        call: Callable[[], JsonCallReader] = JsonCall,
        head: CallHead | None = None,
        new_id: Callable[[], str] = new_call_id,
    ) -> None:
        if tool_format is not None:
            self.tool_format = tool_format
        self._added_tokens = turn.added_tokens
        self._is_off = turn.tool_choice == "none"
        self._envelope = envelope
        self._call = call
        self._head = head
        self._buffer = MarkerBuffer(turn.added_tokens)
        self._reading = JsonCallReading(self._buffer, (*envelope.starts, *envelope.closings), turn.added_tokens, new_id)
        self._step = self._read_start if envelope.first else self._read_text
        self._block: list[str] = []  # what to give back where no call comes of it
        self._closings = envelope.closings  # those that may yet follow
        self._is_in_array = False
        self._was_call = False  # what has been read last
        self._malformed: MalformedCall | None = None  # the last call of an array, where it was one or went wrong
        self._field = ""
        self._fields: dict[str, str] = {}

    @property
    def is_in_call(self) -> bool:
        """From the first character of a call's JSON to its last, and within what turned out to be none."""
        is_in_malformed = self._step == self._read_malformed and self._malformed is not None and not self._malformed.is_over
        return self._step == self._read_call or is_in_malformed

    def feed(self, text: str) -> list[Event]:
        """Takes text as it arrived, however it is cut."""
        if self._is_off:
            return [Text(text)] if text else []
        return read_steps(self._buffer, text, lambda events: self._step(events))

    def finish(self) -> list[Event]:
        """What has not named its call is text; what has stays a call, as far as it came."""
        events: list[Event] = []
        if self._step == self._read_arguments:
            self._open(self._named)
        while self._step == self._read_call and self._reading.end_at_marker(events):
            self._leave_call()
            events += read_steps(self._buffer, "", lambda events: self._step(events))
        self._reading.finish(events)
        rest = join_pieces([*self._block, *self._reading.block, *self._buffer.finish()])
        self._block = self._reading.block = []
        if self._was_call and self._step not in (self._read_start, self._read_text) and not "".join(rest).strip(_BETWEEN):
            return events
        if self._step == self._read_end and is_cut_marker(rest, *self._closings):
            return events
        return [*events, *map(Text, rest)]

    def release(self) -> list[Event]:
        """Gives back as text what is no call yet: one in another format has begun before it. Reading goes on after that call."""
        held = join_pieces([*self._block, *self._reading.block, *self._buffer.finish()])
        self._block = self._reading.block = []
        if self._step != self._read_start:
            self._step = self._read_text
        return [] if self._is_off else [Text(piece) for piece in held]

    def _read_start(self, events: list[Event]) -> bool:
        start = self._buffer.take_start(*self._envelope.starts_of_answer)
        if start is None:
            return False
        space, marker = start
        if marker is not None:
            return self._enter(marker, space)
        events += map(Text, space)
        self._step = self._read_text
        return True

    def _read_text(self, events: list[Event]) -> bool:
        pieces, marker = self._buffer.take_until(*self._envelope.starts)
        events += map(Text, pieces)
        return marker is not None and self._enter(marker, [])

    def _enter(self, marker: str, before: list[str]) -> bool:
        """Where calls may begin, with what stands before it and is text unless one does."""
        self._block = [*before, *self._as_written(marker)]
        self._closings = self._envelope.closings
        if marker in self._envelope.sections:
            self._step = self._read_section
        elif self._envelope.is_bare(marker):
            self._is_in_array = marker[0] == "["
            reader = self._open(self._call())
            reader.feed(marker, int(self._is_in_array))
        elif self._envelope.is_array or self._envelope.may_be_array:
            self._step = self._read_bracket
        else:
            self._start()
        return True

    def _start(self) -> None:
        """At a single call."""
        self._is_in_array = False
        if self._head is None:
            self._open(self._call())
        else:
            self._field = self._head.first
            self._fields = {self._field: ""}
            self._step = self._read_head

    def _open(self, reader: JsonCallReader) -> JsonCallReader:
        self._reading.open(reader, self._block)
        self._block = []
        self._step = self._read_call
        return reader

    def _read_section(self, events: list[Event]) -> bool:
        start = self._buffer.take_start(*self._envelope.openings)
        if start is None:
            return False
        space, marker = start
        self._block += space
        return self._give_back(events) if marker is None else self._enter(marker, self._block)

    def _read_bracket(self, events: list[Event]) -> bool:
        start = self._buffer.take_start("[", *(("{",) if self._head is not None else ()))
        if start is None:
            return False
        space, marker = start
        self._block += space
        if marker is not None:
            self._is_in_array = True
            self._block += self._as_written(marker)
            reader = self._open(self._call())
            if marker == "{":  # an array without its brackets
                reader.feed(marker, 0)
        elif self._head is not None or self._envelope.may_be_array:
            self._start()
        else:
            self._give_back(events)
        return True

    def _read_head(self, events: list[Event]) -> bool:
        assert self._head is not None
        ends = self._head.fields[self._field]
        pieces, marker = self._buffer.take_until(*ends, *self._envelope.starts)
        self._block += pieces
        self._fields[self._field] += "".join(pieces)
        if not is_field(self._fields[self._field]) or (marker is not None and marker not in ends):
            self._give_back(events)
            if marker in self._envelope.starts:
                self._enter(marker, [])
            elif marker is not None:
                events += map(Text, self._as_written(marker))
            return True
        if marker is None:
            return False
        self._block += self._as_written(marker)
        self._fields[self._field] = self._fields[self._field].strip()
        following = ends[marker]
        if following is not None:
            self._field = following
            self._fields[following] = ""
            return True
        return self._name_call(marker, events)

    def _name_call(self, marker: str, events: list[Event]) -> bool:
        """At the end of the head, where `marker` stood."""
        assert self._head is not None
        identity = self._head.identify(self._fields)
        if identity is None:
            return self._give_back(events)
        self._named = NamedCall(*identity)
        if marker == "{":
            self._open(self._named).feed(marker, 0)
        else:
            self._step = self._read_arguments
        return True

    def _read_arguments(self, events: list[Event]) -> bool:
        """After a head: a call without arguments may be closed at once."""
        start = self._buffer.take_start(*self._closings)
        if start is None:
            return False
        space, marker = start
        self._block += space
        self._open(self._named)
        if marker is not None:
            self._named.end()
            self._reading.announce(events)
            self._close(marker)
        return True

    def _read_call(self, events: list[Event]) -> bool:
        if not self._reading.read(events):
            return False
        if self._reading.is_over:
            self._leave_call()
        return True

    def _leave_call(self) -> None:
        is_started = self._was_call = self._reading.is_started
        if self._is_in_array and (is_started or not self._envelope.bare):
            self._malformed = MalformedCall(self._buffer, self._reading.depth, (*self._envelope.starts, *self._closings), quotes='"')
        else:
            self._malformed = None
        self._step = self._read_end if is_started else self._read_text if self._malformed is None else self._read_malformed

    def _read_malformed(self, events: list[Event]) -> bool:
        """The rest of what was no call in an array; others may follow it."""
        assert self._malformed is not None
        self._was_call = False
        if not self._malformed.is_over:
            marker = self._malformed.read(events)
            if marker in self._envelope.starts and marker is not None:
                return self._enter(marker, [])
            if marker in self._closings:
                events += map(Text, self._buffer.marker_pieces)
                self._step = self._read_text
            return marker is not None
        start = self._buffer.take_start(",")
        if start is None:
            return False
        space, marker = start
        events += map(Text, [*space, *([] if marker is None else [marker])])
        if marker is None:
            self._step = self._read_text
        else:
            self._open(self._call())
        return True

    def _read_end(self, events: list[Event]) -> bool:
        """After a call, whole or broken."""
        of_array = ("]", ",") if self._is_in_array else ()
        surplus = ("}",) if self._closings and self._reading.is_whole else ()
        markers = (*of_array, *surplus, *self._closings, *self._envelope.separators, *self._envelope.starts_after_call)
        start = self._buffer.take_start(*markers)
        if start is None:
            return False
        space, marker = start
        if marker is None:
            self._leave_end(events, space)
        elif marker in surplus:
            self._block = [*space, *self._as_written(marker)]
            self._step = self._read_surplus
        elif marker == "]" and self._is_in_array:
            self._is_in_array = False
        elif marker in of_array:
            self._block = [*space, *self._as_written(marker)]
            self._open(self._call())
        elif marker in self._closings:
            self._close(marker)
        elif marker in self._envelope.separators:
            self._block = [*space, *self._as_written(marker)]
            self._step = self._read_separated
        else:
            self._enter(marker, space)
        return True

    def _leave_end(self, events: list[Event], pieces: list[str]) -> None:
        """What follows a call is nothing of the format."""
        events += map(Text, pieces)
        self._step = self._read_text if self._malformed is None else self._read_malformed

    def _read_surplus(self, events: list[Event]) -> bool:
        """Brackets that close nothing belong to the format where a closing follows."""
        start = self._buffer.take_start("}", "]", *self._closings)
        if start is None:
            return False
        space, marker = start
        if marker in self._closings and marker is not None:
            self._block = []
            self._close(marker)
            return True
        self._block += [*space, *([] if marker is None else self._as_written(marker))]
        if marker is None:
            self._leave_end(events, join_pieces(self._block))
            self._block = []
        return True

    def _close(self, marker: str) -> None:
        self._closings = self._closings[self._closings.index(marker) + 1 :]
        self._is_in_array = False
        self._step = self._read_end

    def _read_separated(self, events: list[Event]) -> bool:
        start = self._buffer.take_start(*self._envelope.starts_after_call)
        if start is None:
            return False
        space, marker = start
        self._block += space
        return self._give_back(events) if marker is None else self._enter(marker, self._block)

    def _as_written(self, marker: str) -> list[str]:
        """A marker as the pieces in which it came: there may be added tokens in it."""
        return [marker] if isinstance(marker, SpecialText) else join_pieces(split_symbols(marker, self._added_tokens))

    def _give_back(self, events: list[Event]) -> bool:
        """No call has come of it."""
        events += map(Text, join_pieces(self._block))
        self._block = []
        self._step = self._read_text
        return True
