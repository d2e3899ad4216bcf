"""Tool calls written as Python expressions: a list of them, or a line for each, with markers around or nothing."""

import re
from dataclasses import dataclass

from penstock.engine.contracts.parsing import Event, SpecialText, ToolFormat, Turn
from penstock.plugins.calls.python_call import NAME, PythonCall
from penstock.plugins.calls.stream import CallStream, MalformedCall
from penstock.plugins.markers import Waiting, is_cut_marker, text_into

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


class PythonStream(CallStream):
    """Reads calls whose arguments are literals, each by a keyword; anything else is no call, and `Text`, unchanged.

    A call between others that is none does not keep those after it from being read. One that goes wrong after its first value is closed
    there, and the rest is `Text`. With `tool_choice: none`, everything is text.
    """

    def __init__(self, turn: Turn, envelope: PythonEnvelope, tool_format: ToolFormat | None = None) -> None:
        super().__init__(turn, tool_format)
        self._envelope = envelope
        self._starts = (envelope.start,) if envelope.start else ()
        self._ends = (envelope.end,) if envelope.end else ()
        self._has_bracket = False  # the list that is being read has begun with one
        self._tokens = turn.added_tokens & {envelope.start, envelope.end}
        self._call = PythonCall()
        self._is_started = False
        self._was_call = False  # what has been read last
        self._past_end: list[str] = []  # the end marker inside a string, and what follows it, while it may be the end of the calls
        self._next_head: list[str] | None = None  # what follows the start marker there, up to a bracket
        self._malformed: MalformedCall | None = None
        self._step = self._read_start if envelope.is_bare else self._read_text

    @property
    def is_in_call(self) -> bool:
        """Between the brackets of a call, and of what turned out to be none."""
        return self._step in (self._read_malformed, self._read_past_end) or (self._step == self._read_call and self._call.name is not None)

    def finish(self) -> list[Event]:
        events: list[Event] = []
        if self._step == self._read_past_end:
            self._end_string(events)
            events += self._read_on()
        rest = self._buffer.finish()
        if self._step == self._read_call:
            while rest and self._call.quote:
                self._call.feed(rest.pop(0), 0)
            self._call.cut()
            self._give_out(events)
        if self._was_call and is_cut_marker(rest, *self._closers):
            return events
        self._held += rest
        self._give_back(events)
        return events

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
        self._give_back(events)
        self._was_call = False
        self._step = self._read_text

    def _read_item(self, events: list[Event]) -> None:
        space, marker = self._buffer.start(*self._closers)
        self._held += space
        if marker is not None:
            self._close(marker, events)
            return
        self._call = PythonCall(in_list=self._has_bracket)
        self._is_started = False
        self._step = self._read_call

    def _close(self, marker: str, events: list[Event]) -> None:
        self._held.append(marker)
        if self._was_call:
            self._held = []
        self._give_back(events)
        if self._envelope.start and self._was_call:
            self._step = self._read_between if marker in self._ends else self._read_end
        else:
            self._step = self._read_after if self._was_call else self._read_text

    def _read_call(self, events: list[Event]) -> None:
        if self._call.quote and self._ends:
            self._read_string(events)
            return
        piece = self._buffer.next_piece()
        start = self._buffer.offset
        is_end = isinstance(piece, SpecialText) and piece in (self._envelope.start, self._envelope.end)
        end = start if is_end else self._call.feed(piece, start)
        if is_end:
            self._call.close()
        is_malformed = self._call.is_malformed or (is_end and not self._call.is_started)
        if not self._call.is_started:
            if isinstance(piece, SpecialText) and is_malformed:
                end = start
            if end > start:
                self._held.append(piece if isinstance(piece, SpecialText) else piece[start:end])
        self._buffer.skip(end - start)
        self._give_out(events)
        self._follow_call(events, is_malformed=is_malformed, is_end=is_end)

    def _follow_call(self, events: list[Event], *, is_malformed: bool, is_end: bool = False) -> None:
        if is_malformed:
            self._end_malformed(events)
        elif self._call.is_complete or is_end:
            self._was_call = True
            self._step = self._read_separator
            if self._call.has_ended_list:
                self._close("]", events)

    def _read_string(self, events: list[Event]) -> None:
        """To its quotation mark, or the end marker, with the brackets before it that end the call if the string was not closed."""
        quote, end, closers = self._call.quote, self._envelope.end, self._call.closers
        ends = (end, f"){end}", f"{closers}{end}", f")\n{end}", f"{closers}\n{end}")
        starts = (self._envelope.start,) if self._is_token(self._envelope.start) else ()
        pieces, marker = self._buffer.take_until(*dict.fromkeys((quote, *ends, *starts)))
        for piece in pieces:
            self._call.feed(piece, 0)
        self._give_out(events)
        if marker is None:
            raise Waiting
        if marker != quote and self._is_token(marker):
            self._buffer.put_back([SpecialText(marker if marker in starts else end)])
            self._end_call(events)
            return
        self._call.feed(marker, 0)
        if marker == quote:
            self._give_out(events)
        else:
            self._past_end = [marker]
            self._next_head = None
            self._step = self._read_past_end

    def _is_token(self, marker: str) -> bool:
        return any(token in marker for token in self._tokens)

    def _read_past_end(self, events: list[Event]) -> None:
        """The end marker belongs to the string where that is closed later; not where another call begins before that."""
        if not self._call.quote:
            self._read_past_string(events)
            return
        head = self._next_head
        pieces, marker = self._buffer.take_until(self._call.quote, self._envelope.start, *(("(",) if head is not None else ()))
        for piece in (*pieces, *([] if marker is None else [marker])):
            self._past_end.append(piece)
            self._call.feed(piece, 0)
        if head is not None:
            head += pieces
        if marker is None:
            raise Waiting
        self._next_head = [] if marker == self._envelope.start else None
        if marker == "(" and head is not None and _HEAD.fullmatch("".join(head)):
            self._end_string(events)

    def _read_past_string(self, events: list[Event]) -> None:
        """What follows a quotation mark tells whether the string is over."""
        piece = self._buffer.next_piece()
        symbol = piece if isinstance(piece, SpecialText) else piece[self._buffer.offset]
        end = self._call.feed(symbol, 0)
        self._past_end.append(symbol[:end])
        self._buffer.skip(end)
        if not self._call.is_in_string:
            self._past_end = []
            self._step = self._read_call
            self._give_out(events)
            self._follow_call(events, is_malformed=self._call.is_malformed)

    def _end_string(self, events: list[Event]) -> None:
        """The call ended with the marker, within a string that was not closed; the rest is read anew."""
        self._buffer.put_back([self._envelope.end, *self._past_end[1:]])
        self._past_end = []
        self._call.take_arguments()
        self._end_call(events)

    def _end_call(self, events: list[Event]) -> None:
        self._call.close()
        self._give_out(events)
        self._was_call = True
        self._step = self._read_separator

    def _give_out(self, events: list[Event]) -> None:
        if not self._call.is_started:
            return
        if not self._is_started:
            self._is_started = True
            self._was_call = True
            self.start_call(events, self._call.name or "")
        self.give_arguments(events, self._call.take_arguments())

    def _end_malformed(self, events: list[Event]) -> None:
        """The rest of what looked like a call is text; with a bracket open, there may be others after it."""
        if self._call.name is None:
            self._go_on_with_text(events)
            return
        self._held += [self._call.left] if self._is_started and self._call.left else []
        self._give_back(events)
        self._was_call = False
        self._malformed = MalformedCall(self._buffer, self._call.depth, self._ends)
        self._step = self._read_malformed

    def _read_malformed(self, events: list[Event]) -> None:
        assert self._malformed is not None
        marker = self._malformed.read(events)
        if marker in self._ends:
            self._close(marker, events)
        elif self._malformed.is_over:
            self._step = self._read_separator

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

    def _read_end(self, events: list[Event]) -> None:
        self._read_next(events, *self._ends, self._envelope.start)

    def _read_between(self, events: list[Event]) -> None:
        self._read_next(events, self._envelope.start)

    def _read_after(self, events: list[Event]) -> None:
        self._read_next(events)

    def _read_next(self, events: list[Event], *markers: str) -> None:
        """White space after calls, and what may come then."""
        space, marker = self._buffer.start(*markers)
        self._held += space
        if marker == self._envelope.start and marker:
            self._open(marker)
        elif marker is not None:
            self._held = []
            self._step = self._read_between
        else:
            self._go_on_with_text(events)
