"""Tool calls written as Python expressions: a list of them, or a line for each, with markers around or nothing."""

import re
from dataclasses import dataclass

from penstock.engine.contracts.parsing import Event, SpecialText, ToolFormat, Turn
from penstock.plugins.calls.python_call import NAME, PythonCall
from penstock.plugins.calls.stream import CallReader, CallStream, Progress, Surroundings
from penstock.plugins.markers import StepBuffer, Waiting, is_cut_marker, text_into

_HEAD = re.compile(rf"\s*\[?\s*{NAME.pattern}")


@dataclass(frozen=True, slots=True)
class PythonEnvelope:
    """`start` and `end` enclose the calls anywhere in the answer; `is_bare` calls begin the answer without a marker.

    `has_list` says that the calls are a list in brackets, which may be missing between markers where `may_lack_brackets`; else each has a
    line of its own.
    """

    start: str = ""
    end: str = ""
    is_bare: bool = False
    has_list: bool = True
    may_lack_brackets: bool = False


class PythonReader(CallReader):
    """One call, from its name on, in a list where `in_list`; it is certain with its first value or its end.

    An added token that is one of the markers around calls ends it, even in the middle of a string. `end` as plain text does where the
    string is not closed later, or not before another call begins.
    """

    def __init__(self, buffer: StepBuffer, around: Surroundings, envelope: PythonEnvelope, *, in_list: bool) -> None:
        super().__init__(buffer, around)
        self._start = envelope.start
        self._end = envelope.end
        self._call = PythonCall(in_list=in_list)
        self._arguments = ""
        self._past_end: list[str] = []  # the end marker inside a string, and what follows it, while it may be the end of the calls
        self._next_head: list[str] | None = None  # what follows the start marker there, up to a bracket
        self._step = self._read_code

    @property
    def is_whole(self) -> bool:
        return not self._call.is_malformed

    @property
    def depth(self) -> int:
        return self._call.depth

    @property
    def has_ended_list(self) -> bool:
        """The bracket of the list has ended the call."""
        return self._call.has_ended_list

    def take_arguments(self) -> str:
        arguments = "" if self._past_end else self._call.take_arguments()
        if self._arguments:
            arguments, self._arguments = self._arguments + arguments, ""
        return arguments

    def settle(self) -> bool:
        if not self._past_end:
            return False
        self._step = self._end_string
        return True

    def finish(self) -> list[str]:
        rest = self._buffer.finish()
        while rest and self._call.quote:
            self._call.feed(rest.pop(0), 0)
        self._call.cut()
        self._note()
        return rest

    def _note(self) -> None:
        self.name = self._call.name
        self.is_certain = self._call.is_started

    def _read_code(self) -> Progress:
        if self._end and self._call.quote:
            return self._read_string()
        piece = self._buffer.next_piece()
        start = self._buffer.offset
        is_special = isinstance(piece, SpecialText)
        is_end = is_special and piece in self._around.markers
        end = start if is_end else self._call.feed(piece, start)
        if not self._call.is_started:
            if is_special and (is_end or self._call.is_malformed):
                end = start
            if end > start:
                self.head.append(piece if is_special else piece[start:end])
        self._buffer.skip(end - start)
        return self._end_call() if is_end else self._follow()

    def _follow(self) -> Progress:
        if not self.is_certain:
            self._note()
        if not self._call.is_malformed:
            return Progress.OVER if self._call.is_complete else Progress.READ
        self.left = [self._call.left]
        return Progress.OVER if self.is_certain else Progress.MALFORMED

    def _end_call(self) -> Progress:
        """The call ends here, whatever is open."""
        self._call.close()
        self._note()
        return Progress.OVER if self.is_certain else Progress.MALFORMED

    def _read_string(self) -> Progress:
        """To its quotation mark, or the end marker, with the brackets before it that end the call if the string was not closed."""
        quote, end, closers = self._call.quote, self._end, self._call.closers
        ends = (end, f"){end}", f"{closers}{end}", f")\n{end}", f"{closers}\n{end}")
        starts = (self._start,) if self._start in self._around.tokens else ()
        pieces, marker = self._buffer.take_until(*dict.fromkeys((quote, *ends, *starts)))
        for piece in pieces:
            self._call.feed(piece, 0)
        if marker is None:
            raise Waiting
        if marker in starts or (marker != quote and end in self._around.tokens):
            self._buffer.put_back([SpecialText(marker if marker in starts else end)])
            return self._end_call()
        if marker != quote:
            self._arguments += self._call.take_arguments()
            self._past_end = [marker]
            self._next_head = None
            self._step = self._read_past_end
        self._call.feed(marker, 0)
        return Progress.READ

    def _read_past_end(self) -> Progress:
        """The end marker belongs to the string where that is closed later; not where another call begins before that."""
        if not self._call.quote:
            return self._read_past_string()
        head = self._next_head
        pieces, marker = self._buffer.take_until(self._call.quote, self._start, *(("(",) if head is not None else ()))
        for piece in (*pieces, *([] if marker is None else [marker])):
            self._past_end.append(piece)
            self._call.feed(piece, 0)
        if head is not None:
            head += pieces
        if marker is None:
            raise Waiting
        self._next_head = [] if marker == self._start else None
        if marker == "(" and head is not None and _HEAD.fullmatch("".join(head)):
            return self._end_string()
        return Progress.READ

    def _read_past_string(self) -> Progress:
        """What follows a quotation mark tells whether the string is over."""
        piece = self._buffer.next_piece()
        symbol = piece if isinstance(piece, SpecialText) else piece[self._buffer.offset]
        end = self._call.feed(symbol, 0)
        self._past_end.append(symbol[:end])
        self._buffer.skip(end)
        if self._call.is_in_string:
            return Progress.READ
        self._past_end = []
        self._step = self._read_code
        return self._follow()

    def _end_string(self) -> Progress:
        """The call ended with the marker, within a string that was not closed; the rest is read anew."""
        self._buffer.put_back([self._end, *self._past_end[1:]])
        self._past_end = []
        self._call.take_arguments()
        return self._end_call()


class PythonStream(CallStream):
    """Calls whose arguments are literals, each by a keyword; anything else is no call.

    A call between others that is none does not keep those after it from being read.
    """

    def __init__(self, turn: Turn, envelope: PythonEnvelope, tool_format: ToolFormat | None = None) -> None:
        self._starts = (envelope.start,) if envelope.start else ()
        self._ends = (envelope.end,) if envelope.end else ()
        super().__init__(turn, (*self._starts, *self._ends), tool_format)
        self._envelope = envelope
        self._has_bracket = False  # the list that is being read has begun with one
        self._was_call = False  # what has been read last
        self._nexts: tuple[str, ...] = ()  # the markers that may follow calls
        if envelope.is_bare:
            self._step = self._read_start

    def _is_cut_end(self, held: list[str], rest: list[str]) -> bool:
        return self._was_call and is_cut_marker(rest, *self._closers)

    @property
    def _closers(self) -> tuple[str, ...]:
        return (*self._ends, "]") if self._has_bracket else self._ends

    def _read_start(self, events: list[Event]) -> None:
        self._read_opening(events, "[", *self._starts)

    def _read_bracket(self, events: list[Event]) -> None:
        self._read_opening(events, "[")

    def _read_opening(self, events: list[Event], *markers: str) -> None:
        space, marker = self._buffer.start(*markers)
        self._held += space
        if marker is not None:
            self._held.append(marker)
            self._has_bracket = marker == "["
            self._step = self._read_item if self._has_bracket else self._read_bracket
        elif self._envelope.may_lack_brackets:
            self._step = self._read_item
        else:
            self._go_on_with_text(events)

    def _read_text(self, events: list[Event]) -> None:
        self._open(self._buffer.until(text_into(events), *self._starts))

    def _open(self, marker: str) -> None:
        self._was_call = False
        self._has_bracket = False
        self._held.append(marker)
        self._step = self._read_bracket if self._envelope.has_list else self._read_item

    def _go_on_with_text(self, events: list[Event]) -> None:
        self._was_call = False
        self._reject(events)

    def _read_item(self, events: list[Event]) -> None:
        space, marker = self._buffer.start(*self._closers)
        self._held += space
        if marker is not None:
            self._close(marker, events)
        else:
            self._begin(PythonReader(self._buffer, self._around, self._envelope, in_list=self._has_bracket), self._held)

    def _close(self, marker: str, events: list[Event]) -> None:
        self._held.append(marker)
        if self._was_call:
            self._held = []
        self._give_back(events)
        self._nexts = self._starts if marker in self._ends else (*self._ends, *self._starts)
        self._step = self._read_next if self._was_call else self._read_text

    def _leave_call(self, reader: CallReader, events: list[Event], *, is_call: bool) -> None:
        assert isinstance(reader, PythonReader)
        self._was_call = is_call and reader.is_whole
        if self._was_call:
            self._step = self._read_separator
            if reader.has_ended_list:
                self._close("]", events)
        elif reader.name is None:
            self._step = self._read_text
        else:  # there may be other calls after it
            self._pass_over(reader.depth, self._ends, quotes="\"'", then=self._follow_malformed)

    def _follow_malformed(self, marker: str | None, events: list[Event]) -> None:
        if marker is None:
            self._step = self._read_separator
        else:
            self._close(marker, events)

    def _read_separator(self, events: list[Event]) -> None:
        space, marker = self._buffer.start(",", *self._closers)
        self._held += space
        if marker == ",":
            self._held.append(marker)
            self._step = self._read_item
        elif marker is not None:
            self._close(marker, events)
        elif self._has_bracket or not space:
            self._go_on_with_text(events)
        else:
            self._step = self._read_item

    def _read_next(self, events: list[Event]) -> None:
        """White space after calls, and what may come then."""
        space, marker = self._buffer.start(*self._nexts)
        self._held += space
        if marker is None:
            self._go_on_with_text(events)
        elif marker in self._starts:
            self._open(marker)
        else:
            self._held = []
            self._nexts = self._starts
