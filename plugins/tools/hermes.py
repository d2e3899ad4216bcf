"""Hermes and Qwen tool calls: `<tool_call>{"name": …, "arguments": …}</tool_call>`, one block for each call."""

from collections.abc import Callable

from penstock.engine.events import Event, SpecialText, Text, ToolCallArguments, ToolCallStart
from penstock.engine.hooks import Register, hookimpl
from penstock.engine.structure import Literal, Marker
from penstock.engine.turn import Turn
from penstock.plugins.call_ids import new_call_id
from penstock.plugins.json_call import JsonCall
from penstock.plugins.json_tool_format import JsonToolFormat
from penstock.plugins.markers import MarkerBuffer, join_pieces

START = "<tool_call>"
END = "</tool_call>"


class Hermes:
    """A call starts as soon as its name is known; its arguments are given out as they were written.

    White space between blocks is part of the format. A block that is no call is `Text` as it stood; one that goes wrong after its call has
    started keeps what it said, and the rest is `Text`. With `tool_choice: none`, everything is.
    """

    tool_format = JsonToolFormat(
        START, before=(Literal("\n"),), after=(Literal("\n"), Marker(END)), separator=(Literal("\n"), Marker(START))
    )

    def __init__(self, turn: Turn, new_id: Callable[[], str] = new_call_id) -> None:
        self._is_off = turn.tool_choice == "none"
        self._new_id = new_id
        self._buffer = MarkerBuffer(turn.added_tokens)
        self._step = self._read_text
        self._call = JsonCall()
        self._block: list[str] = []  # what to give back where this is no call: the block so far and the white space before it
        self._num_calls = 0
        self._is_started = False

    def feed(self, text: str) -> list[Event]:
        """Takes text as it arrived, however it is cut."""
        if self._is_off:
            return [Text(text)] if text else []
        self._buffer.feed(text)
        events: list[Event] = []
        while self._step(events):
            pass
        return events

    def finish(self) -> list[Event]:
        """An open block that has not named its call is text; one that has stays a call, as far as it came."""
        rest = [*self._block, *self._buffer.finish()]
        self._block = []
        is_after_call = self._step in (self._read_end, self._read_between)
        if is_after_call and all(piece.isspace() for piece in rest):
            return []
        return [Text(piece) for piece in join_pieces(rest)]

    def _read_text(self, events: list[Event]) -> bool:
        pieces, marker = self._buffer.take_until(START)
        events += map(Text, pieces)
        return marker is not None and self._open([marker])

    def _open(self, block: list[str]) -> bool:
        self._call = JsonCall()
        self._is_started = False
        self._block = block
        self._step = self._read_call
        return True

    def _read_call(self, events: list[Event]) -> bool:
        piece = self._buffer.peek()
        if piece is None:
            return False
        is_end = isinstance(piece, SpecialText) and piece in (START, END)
        start = self._buffer.offset
        end = start if is_end else self._call.feed(piece, start)
        is_malformed = is_end or self._call.is_malformed
        if not self._is_started:
            if isinstance(piece, SpecialText) and is_malformed:
                end = start
            if end > start:
                self._block.append(piece if isinstance(piece, SpecialText) else piece[start:end])
        self._buffer.skip(end - start)
        self._give_out(events)
        if is_malformed:
            events += map(Text, join_pieces(self._block))
            self._block = []
            # The brace that small models forget most is the outer one.
            self._step = self._read_end if self._is_started and self._call.has_whole_arguments else self._read_text
        elif self._call.is_complete:
            self._step = self._read_end
        return True

    def _give_out(self, events: list[Event]) -> None:
        if self._call.name is None:
            return
        if not self._is_started:
            self._is_started = True
            self._block = []
            events.append(ToolCallStart(self._num_calls, self._call.name, self._new_id()))
            self._num_calls += 1
        fragment = self._call.take_arguments()
        if fragment:
            events.append(ToolCallArguments(self._num_calls - 1, fragment))

    def _read_end(self, events: list[Event]) -> bool:
        return self._read_after(events, START, END)

    def _read_between(self, events: list[Event]) -> bool:
        return self._read_after(events, START)

    def _read_after(self, events: list[Event], *markers: str) -> bool:
        start = self._buffer.take_start(*markers)
        if start is None:
            return False
        space, marker = start
        if marker == START:
            return self._open([*space, marker])
        if marker == END:
            self._step = self._read_between
        else:
            events += map(Text, space)
            self._step = self._read_text
        return True


@hookimpl
def register_tool_parsers(register: Register) -> None:
    register("hermes", Hermes)
