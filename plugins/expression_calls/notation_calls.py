"""Tool calls in Gemma's notation: `call:NAME{…}` between two markers, strings between delimiters of their own."""

import re
from collections.abc import Callable

from penstock.engine.events import Event, Text, ToolCallArguments, ToolCallStart
from penstock.engine.turn import Turn
from penstock.plugins.call_ids import new_call_id
from penstock.plugins.expression_calls.notation_call import NotationCall
from penstock.plugins.markers import MarkerBuffer, is_cut_marker, join_pieces, read_steps
from penstock.plugins.schema_types import STRING, ToolSchemas, Types

_HEAD = re.compile(r"\s*(?:call)?:\s*([\w.\-/]+)\s*")  # Gemma 4 forgets the word now and then
_MAX_HEAD = 400


class NotationCalls:
    """A call is certain when its name and the brace after it have come; what is none is `Text` as it stood.

    One that is cut off is closed, so that its arguments are a JSON document all the same. White space between calls is part of the format.
    With `tool_choice: none`, everything is text.
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
        return self._step == self._read_arguments

    def feed(self, text: str) -> list[Event]:
        """Takes text as it arrived, however it is cut."""
        if self._is_off:
            return [Text(text)] if text else []
        return read_steps(self._buffer, text, lambda events: self._step(events))

    def finish(self) -> list[Event]:
        """An open call is closed as far as it came."""
        rest = self._buffer.finish()
        events: list[Event] = []
        if self._step == self._read_arguments:
            self._end_call(rest, events)
            return events
        ends = {self._read_end: (self._end,), self._read_between: ()}.get(self._step)
        if ends is not None and is_cut_marker(rest, *ends):
            return events
        return [Text(piece) for piece in join_pieces([*self._head, *rest])]

    def _read_text(self, events: list[Event]) -> bool:
        pieces, marker = self._buffer.take_until(self._start)
        events += map(Text, pieces)
        return marker is not None and self._open([marker])

    def _open(self, head: list[str]) -> bool:
        self._head = head
        self._name = []
        self._length = 0
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
        watches_end = self._ends_strings or not self._call.is_in_string
        pieces, marker = self._buffer.take_until(*self._call.marks, *((self._end,) if watches_end else ()))
        if marker == self._end:
            self._end_call(pieces, events)
            self._step = self._read_between
            return True
        for piece in pieces:
            self._call.add(piece)
        if marker is not None:
            self._call.mark(marker)
        self._give_out(events)
        if self._call.is_complete:
            self._step = self._read_end
        return marker is not None

    def _end_call(self, rest: list[str], events: list[Event]) -> None:
        for piece in rest:
            self._call.add(piece)
        self._call.finish()
        self._give_out(events)

    def _give_out(self, events: list[Event]) -> None:
        fragment = self._call.take_arguments()
        if fragment:
            events.append(ToolCallArguments(self._num_calls - 1, fragment))

    def _read_end(self, events: list[Event]) -> bool:
        return self._read_after(events, self._start, self._end)

    def _read_between(self, events: list[Event]) -> bool:
        return self._read_after(events, self._start)

    def _read_after(self, events: list[Event], *markers: str) -> bool:
        start = self._buffer.take_start(*markers)
        if start is None:
            return False
        space, marker = start
        if marker == self._start:
            return self._open([*space, marker])
        if marker == self._end:
            self._step = self._read_between
        else:
            events += map(Text, space)
            self._step = self._read_text
        return True
