"""Tool calls in Gemma's notation: `call:NAME{…}` between two markers, strings between delimiters of their own."""

import re
from collections.abc import Callable

from penstock.engine.events import Event, Text, ToolCallArguments, ToolCallStart
from penstock.engine.parsing import ToolParser
from penstock.engine.turn import Turn
from penstock.plugins.call_ids import new_call_id
from penstock.plugins.expression_calls.notation_call import NotationCall
from penstock.plugins.markers import MarkerBuffer, is_cut_marker, join_pieces, read_steps
from penstock.plugins.schema_types import STRING, ToolSchemas, Types

_HEAD = re.compile(r"\s*(?:call)?:\s*([\w.\-/]+)\s*")  # Gemma 4 forgets the word now and then
CALL = "call:"
_MAX_HEAD = 400


class NotationCalls(ToolParser):
    """A call is certain when its name and the brace after it have come; what is none is `Text` as it stood.

    White space between calls is part of the format; several may stand between one pair of markers. With `tool_choice: none`, everything is
    text.
    """

    def __init__(
        self,
        turn: Turn,
        *,
        start: str,
        end: str,
        delimiter: str,
        types_of_strings: Types = STRING,
        new_id: Callable[[], str] = new_call_id,
    ) -> None:
        self._is_off = turn.tool_choice == "none"
        self._start = start
        self._end = end
        self._delimiter = delimiter
        self._types_of_strings = types_of_strings
        self._new_id = new_id
        self._ends_strings = end in turn.added_tokens  # elsewhere a string may hold the marker's text
        self._schemas = ToolSchemas(turn.tools)
        self._buffer = MarkerBuffer(turn.added_tokens)
        self._call = self._new_call("")
        self._past_end: list[str] = []  # the end marker inside a string, and what follows it, while it may be the end of the call
        self._next_head: list[str] | None = None  # what follows the start marker there, up to a brace
        self._head: list[str] = []  # what to give back where this is no call: markers, white space before them, and the name
        self._name: list[str] = []
        self._length = 0
        self._num_calls = 0
        self._step = self._read_text

    def _new_call(self, name: str) -> NotationCall:
        return NotationCall(self._schemas.of(name).node, self._delimiter, self._types_of_strings)

    @property
    def is_in_call(self) -> bool:
        """From the brace that opens the arguments to their end."""
        return self._step in (self._read_arguments, self._read_past_end)

    def feed(self, text: str) -> list[Event]:
        """Takes text as it arrived, however it is cut."""
        if self._is_off:
            return [Text(text)] if text else []
        return read_steps(self._buffer, text, lambda events: self._step(events))

    def finish(self) -> list[Event]:
        """A call that is open keeps what came of it."""
        events: list[Event] = []
        if self._step == self._read_past_end:
            self._end_string(self._past_end, events)
            while self._step(events):
                pass
        rest = self._buffer.finish()
        if self._step == self._read_arguments:
            for piece in rest:
                self._call.add(piece)
            self._call.cut()
            self._give_out(events)
            return events
        ends = {self._read_end: (self._end, CALL), self._read_next_call: (CALL,), self._read_between: ()}.get(self._step)
        if ends is not None and is_cut_marker(rest, *ends):
            return events
        return [*events, *map(Text, join_pieces([*self._head, *rest]))]

    def _read_text(self, events: list[Event]) -> bool:
        pieces, marker = self._buffer.take_until(self._start)
        events += map(Text, pieces)
        return marker is not None and self._open([marker])

    def _open(self, head: list[str], name: str = "") -> bool:
        self._head = head
        self._name = [name]
        self._length = len(name)
        self._step = self._read_head
        return True

    def _read_head(self, events: list[Event]) -> bool:
        pieces, marker = self._buffer.take_until("{", self._start, self._end)
        self._head += pieces
        self._name += map(str, pieces)
        self._length += sum(map(len, pieces))
        if marker is None and self._length <= _MAX_HEAD:
            return False
        found = _HEAD.fullmatch("".join(self._name)) if marker == "{" and self._length <= _MAX_HEAD else None
        if found is not None:
            self._head = []
            self._call = self._new_call(found[1])
            self._step = self._read_arguments
            events.append(ToolCallStart(self._num_calls, found[1], self._new_id()))
            self._num_calls += 1
            return True
        events += map(Text, join_pieces(self._head))
        self._head = []
        self._step = self._read_text
        if marker == self._start:
            return self._open([marker])
        if marker is not None:
            events.append(Text(marker))
        return True

    def _read_arguments(self, events: list[Event]) -> bool:
        pieces, marker = self._buffer.take_until(*self._call.marks, *self._ends)
        for piece in pieces:
            self._call.add(piece)
        if marker is not None and self._call.is_in_string and marker.endswith(self._end):
            self._past_end = [marker]
            self._next_head = None
            self._step = self._read_past_end
            if self._ends_strings:
                self._end_string(self._past_end, events)
        elif marker == self._end:
            self._end_call(events)
        elif marker is not None:
            self._call.mark(marker)
        self._give_out(events)
        if self._call.is_complete:
            self._step = self._read_end
        return marker is not None

    @property
    def _ends(self) -> tuple[str, ...]:
        """The end marker; in a string also with the brackets before it that end the call if the string was not closed."""
        if not self._call.is_in_string:
            return (self._end,)
        return tuple(dict.fromkeys((self._end, f"}}{self._end}", f"{self._call.closers}{self._end}")))

    def _read_past_end(self, events: list[Event]) -> bool:
        """The end marker in a string belongs to it where the string is closed later; not where another call begins before that."""
        pieces, marker = self._buffer.take_until(self._delimiter, self._start, *(("{",) if self._next_head is not None else ()))
        self._past_end += pieces
        if self._next_head is not None:
            self._next_head += map(str, pieces)
        if marker is None:
            return False
        if marker == self._delimiter:
            for piece in self._past_end:
                self._call.add(piece)
            self._call.mark(marker)
            self._give_out(events)
            self._step = self._read_arguments
            return True
        self._past_end.append(marker)
        if marker == self._start:
            self._next_head = []
            return True
        head = _HEAD.fullmatch("".join(self._next_head or ()))
        self._next_head = None
        if head is not None and (not self._schemas or head[1] in self._schemas):
            self._end_string(self._past_end, events)
        return True

    def _end_string(self, pieces: list[str], events: list[Event]) -> None:
        """The first of these ends the call within a string that was not closed; the rest is read anew."""
        self._buffer.put_back(pieces[1:])
        self._end_call(events)

    def _end_call(self, events: list[Event]) -> None:
        self._call.close()
        self._give_out(events)
        self._step = self._read_between

    def _give_out(self, events: list[Event]) -> None:
        fragment = self._call.take_arguments()
        if fragment:
            events.append(ToolCallArguments(self._num_calls - 1, fragment))

    def _read_end(self, events: list[Event]) -> bool:
        return self._read_after(events, self._start, self._end, CALL, ",")

    def _read_next_call(self, events: list[Event]) -> bool:
        """After a comma between two calls."""
        start = self._buffer.take_start(CALL)
        if start is None:
            return False
        space, marker = start
        self._head += space
        if marker is not None:
            return self._open([*self._head, marker], marker)
        events += map(Text, join_pieces(self._head))
        self._head = []
        self._step = self._read_text
        return True

    def _read_between(self, events: list[Event]) -> bool:
        return self._read_after(events, self._start)

    def _read_after(self, events: list[Event], *markers: str) -> bool:
        start = self._buffer.take_start(*markers)
        if start is None:
            return False
        space, marker = start
        if marker == self._start:
            return self._open([*space, marker])
        if marker == CALL:
            return self._open([*space, marker], marker)
        if marker == ",":
            self._head = [*space, marker]
            self._step = self._read_next_call
        elif marker == self._end:
            self._step = self._read_between
        else:
            events += map(Text, space)
            self._step = self._read_text
        return True
