"""Tool calls in JSON between markers, one call after the other or in arrays: a parser for all envelopes of that kind."""

import re
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

from penstock.engine.contracts.parsing import Event, SpecialText, Text, ToolFormat, Turn
from penstock.plugins.calls.json_call import JsonCall, JsonCallReader, NamedCall
from penstock.plugins.calls.stream import CallStream, MalformedCall, new_call_id
from penstock.plugins.markers import StepBuffer, Waiting, compile_markers, is_cut_marker, join_pieces, text_into


@dataclass(frozen=True, slots=True, kw_only=True)
class CallEnvelope:
    """The markers of a format; white space between them is part of it.

    A call begins after one of `openings`, on its own or at the start of one of `sections`. After a call, `closings` may follow, in this
    order and each at most once, and then the next call. `separators` are written between calls that have no opening of their own.

    With `is_array`, `openings` are followed by an array of calls; where `may_be_array`, by one call or by an array. `bare` are texts with
    which calls begin that have no opening at all: the first character of an array or of an object, and what more it takes to tell it from
    prose. `first` are such texts that count only where the answer begins, and `following` those that count only after another call.
    """

    openings: tuple[str, ...] = ()
    sections: tuple[str, ...] = ()
    closings: tuple[str, ...] = ()
    separators: tuple[str, ...] = ()
    bare: tuple[str, ...] = ()
    first: tuple[str, ...] = ()
    following: tuple[str, ...] = ()
    is_array: bool = False
    may_be_array: bool = False

    @property
    def starts(self) -> tuple[str, ...]:
        return (*self.sections, *self.openings, *self.bare)

    @property
    def starts_of_answer(self) -> tuple[str, ...]:
        return (*self.starts, *self.first)

    @property
    def starts_after_call(self) -> tuple[str, ...]:
        return (*self.starts, *self.following)

    def is_bare(self, start: str) -> bool:
        """Whether a call or an array begins with this itself."""
        return start in (*self.bare, *self.first, *self.following)


MAX_LENGTH = 512
_FIELD = re.compile(r'\s*[^\s<>{}\[\]"]*\s*')

Identity = tuple[str, str | None]
"""A call's name, and its id where the format has one."""


def name_only(fields: Mapping[str, str]) -> Identity | None:
    """The call is what its field `name` says, and `id` where there is one."""
    return (fields["name"], fields.get("id") or None) if fields["name"] else None


@dataclass(frozen=True, slots=True)
class CallHead:
    """The fields between a call's opening and its arguments: single words with white space around them.

    `fields` has, for each field, the markers that end it, and the field that follows each: None for the arguments. The first field is the
    first. A brace belongs to the arguments that it opens. `identify` makes a call's identity of the fields, or None where they are none.
    """

    fields: Mapping[str, Mapping[str, str | None]]
    identify: Callable[[Mapping[str, str]], Identity | None] = name_only

    @property
    def first(self) -> str:
        return next(iter(self.fields))


def is_field(text: str) -> bool:
    """Whether this may be a field, or the beginning of one. What cannot be one does not become one by more text."""
    return len(text) <= MAX_LENGTH and _FIELD.fullmatch(text) is not None


class JsonCallReading:
    """Hands the text in `buffer` to a reader, one call after the other, and emits what the reader makes of it.

    `block` is the text of a call that has not started, with what precedes it: it becomes text if no call starts. An added token
    that is one of `ends` ends any call, even in the middle of a string; plain text that is one does where the string has no right end.
    """

    def __init__(self, stream: CallStream, buffer: StepBuffer, ends: Collection[str], added_tokens: frozenset[str]) -> None:
        self._stream = stream
        self.is_started = False
        self.is_over = True
        self.block: list[str] = []
        self._buffer = buffer
        self._ends = ends
        in_strings = (marker for marker in ends if _is_distinct(marker) and not any(token in marker for token in added_tokens))
        self._ends_in_strings = compile_markers(tuple(in_strings), added_tokens)
        self._held: deque[str] = deque()  # what has been read last, where a marker may cut it off
        self._num_held = 0
        self._ids: set[str] = set()

    @property
    def depth(self) -> int:
        """How many brackets of the call are open."""
        return self._reader.depth

    @property
    def is_whole(self) -> bool:
        """The call ended as it should."""
        return self._reader.is_complete and not self._reader.is_malformed

    def open(self, reader: JsonCallReader, block: list[str]) -> None:
        """A call may begin here."""
        reader.arguments.ends = self._ends_in_strings
        self._reader = reader
        self._held.clear()
        self._num_held = 0
        self.block = block
        self.is_started = False
        self.is_over = False

    def read(self, events: list[Event]) -> None:
        """Reads on in the call that is open. What is not the call's stays in the buffer."""
        piece = self._buffer.next_piece()
        reader, start = self._reader, self._buffer.offset
        is_special = isinstance(piece, SpecialText)
        is_end = is_special and piece in self._ends
        end = start if is_end else reader.feed(piece, start)
        is_malformed = is_end or reader.is_malformed
        if not self.is_started and is_special and is_malformed:  # it is left whole for the markers' own states
            end = start
        self._take(piece if is_special else piece[start:end], end - start)
        if is_malformed:
            self._end_malformed(events)
            return
        self.announce(events)
        if reader.is_complete or reader.is_refused:
            self.is_over = reader.is_complete
            self._give_back(events)

    def _take(self, text: str, length: int) -> None:
        if not length:
            return
        self._buffer.skip(length)
        if not self.is_started:
            self.block.append(text)
        num_held = self._reader.arguments.num_held
        self._held.append(text)
        self._num_held += length
        while self._held and self._num_held - len(self._held[0]) >= num_held:
            self._num_held -= len(self._held.popleft())

    def _end_malformed(self, events: list[Event]) -> None:
        """The call ends before what made no sense, or before the marker that did."""
        reader, arguments = self._reader, self._reader.arguments
        if reader.is_malformed and arguments.num_held and not reader.is_refused:  # of a refused call all is text already
            _, cut_off = _split_end(self._held, arguments.num_held)
            if not self.is_started:
                self.block, _ = _split_end(self.block, arguments.num_held)
            self._buffer.put_back(cut_off)
        arguments.close()
        self.announce(events)
        self.is_over = True
        self._give_back(events)
        if self.is_started and arguments.left:
            events.append(Text(arguments.left))

    def _give_back(self, events: list[Event]) -> None:
        events += map(Text, join_pieces(self.block))
        self.block = []

    def end_at_marker(self, events: list[Event]) -> bool:
        """Generation is over: where a marker in a string ended the call, what follows that is in the buffer again."""
        if self.is_over or not self._reader.end_at_marker():
            return False
        self._end_malformed(events)
        return True

    def announce(self, events: list[Event], *, is_cut: bool = False) -> None:
        """Emits what the reader knows by now; where the answer `is_cut` here, a name is enough for a call."""
        reader = self._reader
        if not self.is_started:
            if reader.name is None or not (reader.can_start or is_cut) or reader.is_refused:
                return
            self.is_started = True
            self.block = []
            self._stream.start_call(events, reader.name, self._id_of(reader))
        self._stream.give_arguments(events, reader.arguments.take())

    def _id_of(self, reader: JsonCallReader) -> str | None:
        """The format's own id, unless the model has written it before in this answer: results are told apart by it."""
        call_id = reader.call_id
        if call_id is None or call_id in self._ids:
            return None
        self._ids.add(call_id)
        return call_id

    def finish(self, events: list[Event]) -> None:
        """At the end of the answer, an open call stays a call as far as it was written, from its name on."""
        if not self.is_over and (self.is_started or self._reader.is_named):
            self._reader.arguments.stop()
            self.announce(events, is_cut=True)


def _is_distinct(marker: str) -> bool:
    """Whether a marker is more than what strings of any kind may hold: a fence, a bracket, the beginning of an object."""
    return len(marker) > 3 and not any(char in marker for char in "`{\n")


def _split_end(pieces: Iterable[str], length: int) -> tuple[list[str], list[str]]:
    """The pieces without their last characters, and those."""
    kept = list(pieces)
    end: list[str] = []
    while length:
        piece = kept.pop()
        if len(piece) > length:
            kept.append(piece[:-length])
            piece = piece[-length:]
        end.append(piece)
        length -= len(piece)
    return kept, end[::-1]


_BETWEEN = " \t\r\n,;"


class JsonStream(CallStream):
    """A call starts as soon as it is known by name and its arguments have begun; these are emitted as they were written where they are
    JSON.

    White space between calls is part of the format. What is no call is `Text`, unchanged, and calls after it are read; one that goes
    wrong after it has started is closed there, and the rest is `Text`. With `tool_choice: none`, everything is.

    `call` makes the reader of a call that is one JSON object. With `head`, a call is named before its arguments; in an envelope that
    has arrays too, where no bracket follows.
    """

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
        super().__init__(turn, tool_format, new_id)
        self._envelope = envelope
        self._call = call
        self._head = head
        self._reading = JsonCallReading(self, self._buffer, (*envelope.starts, *envelope.closings), turn.added_tokens)
        self._step = self._read_start if envelope.first else self._read_text
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

    def finish(self) -> list[Event]:
        """An open call with a name stays a call as far as it was written; without one it is text."""
        events: list[Event] = []
        if self._step == self._read_arguments:
            self._open(self._named)
        while self._step == self._read_call and self._reading.end_at_marker(events):
            self._leave_call()
            events += self._read_on()
        self._reading.finish(events)
        rest = join_pieces([*self._held, *self._reading.block, *self._buffer.finish()])
        self._held = self._reading.block = []
        if self._was_call and self._step not in (self._read_start, self._read_text) and not "".join(rest).strip(_BETWEEN):
            return events
        if self._step == self._read_end and is_cut_marker(rest, *self._closings):
            return events
        return [*events, *map(Text, rest)]

    def release(self) -> list[Event]:
        """Emits as text what is no call yet, because a call in another format has begun. Reading goes on after that call."""
        held = join_pieces([*self._held, *self._reading.block, *self._buffer.finish()])
        self._held = self._reading.block = []
        if self._step != self._read_start:
            self._step = self._read_text
        return [] if self._is_off else [Text(piece) for piece in held]

    def _read_start(self, events: list[Event]) -> None:
        space, marker = self._buffer.start(*self._envelope.starts_of_answer)
        if marker is not None:
            self._enter(marker, space)
        else:
            events += map(Text, space)
            self._step = self._read_text

    def _read_text(self, events: list[Event]) -> None:
        self._enter(self._buffer.until(text_into(events), *self._envelope.starts), [])

    def _enter(self, marker: str, before: list[str]) -> None:
        """Enters the state after `marker`, where calls may begin; `before` and the marker are text unless one does."""
        self._held = [*before, *self._as_written(marker)]
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

    def _start(self) -> None:
        self._is_in_array = False
        if self._head is None:
            self._open(self._call())
        else:
            self._field = self._head.first
            self._fields = {self._field: ""}
            self._step = self._read_head

    def _open(self, reader: JsonCallReader) -> JsonCallReader:
        self._reading.open(reader, self._held)
        self._held = []
        self._step = self._read_call
        return reader

    def _read_section(self, events: list[Event]) -> None:
        self._enter_next(self._envelope.openings, events)

    def _read_separated(self, events: list[Event]) -> None:
        self._enter_next(self._envelope.starts_after_call, events)

    def _enter_next(self, markers: Iterable[str], events: list[Event]) -> None:
        space, marker = self._buffer.start(*markers)
        self._held += space
        if marker is None:
            self._reject(events)
        else:
            self._enter(marker, self._held)

    def _read_bracket(self, events: list[Event]) -> None:
        space, marker = self._buffer.start("[", *(("{",) if self._head is not None else ()))
        self._held += space
        if marker is not None:
            self._is_in_array = True
            self._held += self._as_written(marker)
            reader = self._open(self._call())
            if marker == "{":  # an array without its brackets
                reader.feed(marker, 0)
        elif self._head is not None or self._envelope.may_be_array:
            self._start()
        else:
            self._reject(events)

    def _read_head(self, events: list[Event]) -> None:
        assert self._head is not None
        ends = self._head.fields[self._field]
        pieces, marker = self._buffer.take_until(*ends, *self._envelope.starts)
        self._held += pieces
        self._fields[self._field] += "".join(pieces)
        if not is_field(self._fields[self._field]) or (marker is not None and marker not in ends):
            self._reject(events)
            if marker in self._envelope.starts:
                self._enter(marker, [])
            elif marker is not None:
                events += map(Text, self._as_written(marker))
            return
        if marker is None:
            raise Waiting
        self._held += self._as_written(marker)
        self._fields[self._field] = self._fields[self._field].strip()
        following = ends[marker]
        if following is not None:
            self._field = following
            self._fields[following] = ""
        else:
            self._name_call(marker, events)

    def _name_call(self, marker: str, events: list[Event]) -> None:
        assert self._head is not None
        identity = self._head.identify(self._fields)
        if identity is None:
            self._reject(events)
            return
        self._named = NamedCall(*identity)
        if marker == "{":
            self._open(self._named).feed(marker, 0)
        else:
            self._step = self._read_arguments

    def _read_arguments(self, events: list[Event]) -> None:
        """After a head: a call without arguments may be closed at once."""
        space, marker = self._buffer.start(*self._closings)
        self._held += space
        self._open(self._named)
        if marker is not None:
            self._named.end()
            self._reading.announce(events)
            self._close(marker)

    def _read_call(self, events: list[Event]) -> None:
        self._reading.read(events)
        if self._reading.is_over:
            self._leave_call()

    def _leave_call(self) -> None:
        is_started = self._was_call = self._reading.is_started
        if self._is_in_array and (is_started or not self._envelope.bare):
            self._malformed = MalformedCall(self._buffer, self._reading.depth, (*self._envelope.starts, *self._closings), quotes='"')
        else:
            self._malformed = None
        self._step = self._read_end if is_started else self._read_text if self._malformed is None else self._read_malformed

    def _read_malformed(self, events: list[Event]) -> None:
        """The rest of what was no call in an array; others may follow it."""
        assert self._malformed is not None
        self._was_call = False
        if not self._malformed.is_over:
            mark = self._malformed.read(events)
            if mark in self._envelope.starts:
                self._enter(mark, [])
            elif mark in self._closings:
                events += map(Text, self._buffer.marker_pieces)
                self._step = self._read_text
            return
        space, marker = self._buffer.start(",")
        events += map(Text, [*space, *([] if marker is None else [marker])])
        if marker is None:
            self._step = self._read_text
        else:
            self._open(self._call())

    def _read_end(self, events: list[Event]) -> None:
        of_array = ("]", ",") if self._is_in_array else ()
        surplus = ("}",) if self._closings and self._reading.is_whole else ()
        markers = (*of_array, *surplus, *self._closings, *self._envelope.separators, *self._envelope.starts_after_call)
        space, marker = self._buffer.start(*markers)
        if marker is None:
            self._leave_end(events, space)
        elif marker in surplus:
            self._held = [*space, *self._as_written(marker)]
            self._step = self._read_surplus
        elif marker == "]" and self._is_in_array:
            self._is_in_array = False
        elif marker in of_array:
            self._held = [*space, *self._as_written(marker)]
            self._open(self._call())
        elif marker in self._closings:
            self._close(marker)
        elif marker in self._envelope.separators:
            self._held = [*space, *self._as_written(marker)]
            self._step = self._read_separated
        else:
            self._enter(marker, space)

    def _leave_end(self, events: list[Event], pieces: list[str]) -> None:
        """The text after a call is not part of the format."""
        events += map(Text, pieces)
        self._step = self._read_text if self._malformed is None else self._read_malformed

    def _read_surplus(self, events: list[Event]) -> None:
        """Surplus closing brackets belong to the format if a closing follows."""
        space, marker = self._buffer.start("}", "]", *self._closings)
        if marker in self._closings and marker is not None:
            self._held = []
            self._close(marker)
            return
        self._held += [*space, *([] if marker is None else self._as_written(marker))]
        if marker is None:
            self._leave_end(events, join_pieces(self._held))
            self._held = []

    def _close(self, marker: str) -> None:
        self._closings = self._closings[self._closings.index(marker) + 1 :]
        self._is_in_array = False
        self._step = self._read_end

    def _reject(self, events: list[Event]) -> None:
        self._give_back(events)
        self._step = self._read_text
