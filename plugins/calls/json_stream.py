"""Tool calls in JSON between markers, one call after the other or in arrays: a parser for all envelopes of that kind."""

import re
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from penstock.engine.contracts.parsing import Event, SpecialText, ToolFormat, Turn
from penstock.plugins.calls.json_call import JsonCall, NamedCall, StreamedCall
from penstock.plugins.calls.stream import CallReader, CallStream, Progress, Surroundings, new_call_id
from penstock.plugins.markers import StepBuffer, Waiting, is_cut_marker, text_into


@dataclass(frozen=True, slots=True, kw_only=True)
class CallEnvelope:
    """The markers of a format; white space between them is part of it.

    A call begins after one of `openings`, on its own or at the start of one of `sections`. After a call, `closings` may follow, in this
    order and each at most once, and then the next call. `separators` are written between calls that have no opening of their own.

    With `is_array`, `openings` are followed by an array of calls; with `may_be_array`, by one call or by an array. `bare` are texts that
    begin calls without an opening: the first characters of an array or of an object, as many as distinguish it from
    prose. `first` are such texts that count only at the beginning of the answer, and `following` those that count only after another call.
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


class JsonReader(CallReader):
    """Hands the text in the buffer to a call in JSON.

    An added token that is one of the markers around calls ends any call, even in the middle of a string; plain text that is one does
    where the string has no right end.
    """

    def __init__(self, buffer: StepBuffer, around: Surroundings, call: StreamedCall, opening: str = "") -> None:
        super().__init__(buffer, around)
        self._last: deque[str] = deque()  # what has been read last, where a marker may cut it off
        self._num_last = 0
        self._open(call, opening)

    def _open(self, call: StreamedCall, opening: str = "") -> None:
        """The call begins, with what its opening is of its own text."""
        call.arguments.ends = self._around.ends_in_strings
        call.feed(opening, 0)
        self._call = call
        self._step = self._read_json

    @property
    def is_in_call(self) -> bool:
        """From the first character of the call's JSON to its last, and within what turned out to be none."""
        return self._step == self._read_json

    @property
    def is_refused(self) -> bool:
        return self._call.is_refused

    @property
    def is_whole(self) -> bool:
        return self._call.is_complete and not self._call.is_malformed

    @property
    def depth(self) -> int:
        return self._call.depth

    def take_arguments(self) -> str:
        return self._call.arguments.take()

    def settle(self) -> bool:
        if not self._call.end_at_marker():
            return False
        self._step = self._end_malformed
        return True

    def finish(self) -> list[str]:
        if self.is_certain or (self._call.is_named and not self._call.is_refused):
            self._call.arguments.stop()
            self._certify()
        return self._buffer.finish()

    def _certify(self) -> None:
        self.name, self.call_id = self._call.name, self._call.call_id
        self.is_certain = True

    def _read_json(self) -> Progress:
        piece = self._buffer.next_piece()
        call, start = self._call, self._buffer.offset
        is_special = isinstance(piece, SpecialText)
        is_end = is_special and piece in self._around.markers
        end = start if is_end else call.feed(piece, start)
        is_malformed = is_end or call.is_malformed
        if not self.is_certain and is_special and is_malformed:  # it is left whole for the markers' own states
            end = start
        self._take(piece if is_special else piece[start:end], end - start)
        if is_malformed:
            return self._end_malformed()
        self._note()
        if not call.is_complete:
            return Progress.READ
        return Progress.OVER if self.is_certain else Progress.MALFORMED

    def _note(self) -> None:
        if not self.is_certain and self._call.can_start and not self._call.is_refused:
            self._certify()

    def _take(self, text: str, length: int) -> None:
        if not length:
            return
        self._buffer.skip(length)
        if not self.is_certain:
            self.head.append(text)
        num_held = self._call.arguments.num_held
        self._last.append(text)
        self._num_last += length
        while self._last and self._num_last - len(self._last[0]) >= num_held:
            self._num_last -= len(self._last.popleft())

    def _end_malformed(self) -> Progress:
        """The call ends before what made no sense, or before the marker that did."""
        call, arguments = self._call, self._call.arguments
        if call.is_malformed and arguments.num_held and not call.is_refused:  # of a refused call all is text already
            _, cut_off = _split_end(self._last, arguments.num_held)
            if not self.is_certain:
                self.head, _ = _split_end(self.head, arguments.num_held)
            self._buffer.put_back(cut_off)
        arguments.close()
        self._note()
        self.left = [arguments.left]
        return Progress.OVER if self.is_certain else Progress.MALFORMED


class HeadReader(JsonReader):
    """A call that is named before its arguments; one without any may be closed at once, by one of `closings`."""

    def __init__(
        self, buffer: StepBuffer, around: Surroundings, head: CallHead, starts: tuple[str, ...], closings: tuple[str, ...]
    ) -> None:
        super().__init__(buffer, around, NamedCall(""))
        self._head = head
        self._starts = starts
        self._closings = closings
        self._field = head.first
        self._fields = {self._field: ""}
        self._step = self._read_field

    def settle(self) -> bool:
        return self._step == self._read_json and super().settle()

    def finish(self) -> list[str]:
        return self._buffer.finish() if self._step == self._read_field else super().finish()

    def _read_field(self) -> Progress:
        ends = self._head.fields[self._field]
        pieces, marker = self._buffer.take_until(*ends, *self._starts)
        self.head += pieces
        self._fields[self._field] += "".join(pieces)
        if not is_field(self._fields[self._field]) or (marker is not None and marker not in ends):
            self._buffer.put_back([] if marker is None else self._around.pieces(marker))
            return Progress.MALFORMED
        if marker is None:
            raise Waiting
        self.head += self._around.pieces(marker)
        self._fields[self._field] = self._fields[self._field].strip()
        following = ends[marker]
        if following is not None:
            self._field = following
            self._fields[following] = ""
            return Progress.READ
        identity = self._head.identify(self._fields)
        if identity is None:
            return Progress.MALFORMED
        self._open(NamedCall(*identity), marker if marker == "{" else "")
        if marker != "{":
            self._step = self._read_before_arguments
        return Progress.READ

    def _read_before_arguments(self) -> Progress:
        space, self.end_marker = self._buffer.start(*self._closings)
        self.head += space
        self._step = self._read_json
        if self.end_marker is None:
            return Progress.READ
        self._call.arguments.end()
        self._certify()
        return Progress.OVER


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
    """Calls in JSON, whose arguments are emitted as they were written where they are JSON.

    `call` makes the reader of a call that is one JSON object. With `head`, a call is named before its arguments; in an envelope that
    has arrays too, where no bracket follows.
    """

    def __init__(
        self,
        turn: Turn,
        envelope: CallEnvelope,
        tool_format: ToolFormat | None = None,
        *,
        call: Callable[[], StreamedCall] = JsonCall,
        head: CallHead | None = None,
        new_id: Callable[[], str] = new_call_id,
    ) -> None:
        super().__init__(turn, (*envelope.starts, *envelope.closings), tool_format, new_id)
        self._envelope = envelope
        self._call = call
        self._head = head
        if envelope.first:
            self._step = self._read_start
        self._closings = envelope.closings  # those that may yet follow
        self._is_in_array = False
        self._was_call = False  # what has been read last
        self._was_whole = False
        self._depth: int | None = None  # of the last call of an array, where others may follow it

    def _is_cut_end(self, held: list[str], rest: list[str]) -> bool:
        written = [*held, *rest]
        if self._was_call and self._step not in (self._read_start, self._read_text) and not "".join(written).strip(_BETWEEN):
            return True
        return self._step == self._read_end and is_cut_marker(written, *self._closings)

    def release(self) -> list[Event]:
        """Emits as text what is no call yet, because a call in another format has begun. Reading goes on after that call."""
        events: list[Event] = []
        if self._reader is not None and not self._is_started:
            self._held += self._reader.head
        self._reader = self._malformed = None
        self._held += self._buffer.finish()
        self._give_back(events)
        if self._step != self._read_start:
            self._step = self._read_text
        return [] if self._is_off else events

    def _read_start(self, events: list[Event]) -> None:
        space, marker = self._buffer.start(*self._envelope.starts_of_answer)
        if marker is not None:
            self._enter(marker, space)
        else:
            self._say(space, events)
            self._step = self._read_text

    def _read_text(self, events: list[Event]) -> None:
        self._enter(self._buffer.until(text_into(events), *self._envelope.starts), [])

    def _enter(self, marker: str, before: list[str]) -> None:
        """Enters the state after `marker`, where calls may begin; `before` and the marker are text unless one does."""
        self._held = [*before, *self._around.pieces(marker)]
        self._closings = self._envelope.closings
        if marker in self._envelope.sections:
            self._step = self._read_section
        elif self._envelope.is_bare(marker):
            self._is_in_array = marker[0] == "["
            self._open(marker[self._is_in_array :])
        elif self._envelope.is_array or self._envelope.may_be_array:
            self._step = self._read_bracket
        else:
            self._open_single()

    def _open_single(self) -> None:
        """A call that is in no array."""
        self._is_in_array = False
        if self._head is None:
            self._open()
        else:
            self._begin(HeadReader(self._buffer, self._around, self._head, self._envelope.starts, self._closings), self._held)

    def _open(self, opening: str = "") -> None:
        """A call, with what its opening is of its own text."""
        self._begin(JsonReader(self._buffer, self._around, self._call(), opening), self._held)

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
            self._held += self._around.pieces(marker)
            self._open(marker if marker == "{" else "")  # an array without its brackets
        elif self._head is not None or self._envelope.may_be_array:
            self._open_single()
        else:
            self._reject(events)

    def _leave_call(self, reader: CallReader, events: list[Event], *, is_call: bool) -> None:
        if reader.end_marker is not None:
            self._was_whole = True
            self._close(reader.end_marker)
            return
        self._was_call, self._was_whole = is_call, reader.is_whole
        self._depth = reader.depth if self._is_in_array and (is_call or not self._envelope.bare) else None
        if is_call:
            self._step = self._read_end
        else:
            self._go_on()

    def _go_on(self) -> None:
        """The rest of what was no call in an array is text; others may follow it."""
        if self._depth is None:
            self._step = self._read_text
        else:
            self._was_call = False
            self._pass_over(self._depth, (*self._envelope.starts, *self._closings), quotes='"', then=self._follow_malformed)

    def _follow_malformed(self, marker: str | None, events: list[Event]) -> None:
        if marker is None:
            self._step = self._read_comma
        elif marker in self._envelope.starts:
            self._enter(marker, [])
        else:
            self._say(self._buffer.marker_pieces, events)
            self._step = self._read_text

    def _read_comma(self, events: list[Event]) -> None:
        space, marker = self._buffer.start(",")
        if marker is None:
            self._say(space, events)
            self._step = self._read_text
        else:
            self._say([*space, marker], events)
            self._open()

    def _read_end(self, events: list[Event]) -> None:
        of_array = ("]", ",") if self._is_in_array else ()
        surplus = ("}",) if self._closings and self._was_whole else ()
        markers = (*of_array, *surplus, *self._closings, *self._envelope.separators, *self._envelope.starts_after_call)
        space, marker = self._buffer.start(*markers)
        if marker is None:
            self._say(space, events)
            self._go_on()
        elif marker in surplus:
            self._held = [*space, *self._around.pieces(marker)]
            self._step = self._read_surplus
        elif marker == "]" and self._is_in_array:
            self._is_in_array = False
        elif marker in of_array:
            self._held = [*space, *self._around.pieces(marker)]
            self._open()
        elif marker in self._closings:
            self._close(marker)
        elif marker in self._envelope.separators:
            self._held = [*space, *self._around.pieces(marker)]
            self._step = self._read_separated
        else:
            self._enter(marker, space)

    def _read_surplus(self, events: list[Event]) -> None:
        """Surplus closing brackets belong to the format if a closing follows."""
        space, marker = self._buffer.start("}", "]", *self._closings)
        if marker in self._closings and marker is not None:
            self._held = []
            self._close(marker)
            return
        self._held += [*space, *([] if marker is None else self._around.pieces(marker))]
        if marker is None:
            self._give_back(events)
            self._go_on()

    def _close(self, marker: str) -> None:
        self._closings = self._closings[self._closings.index(marker) + 1 :]
        self._is_in_array = False
        self._step = self._read_end
