"""A tool call that is being read out of the text of an answer: its events, and the text again where it was none."""

from collections.abc import Callable, Collection

from penstock.engine.events import Event, SpecialText, Text, ToolCallArguments, ToolCallStart
from penstock.plugins.json_calls.json_call_reader import JsonCallReader
from penstock.plugins.markers import MarkerBuffer, join_pieces


class JsonCallReading:
    """Hands the text in `buffer` to a reader, one call after the other, and gives out what the reader makes of it.

    `block` is the text of a call that has not started, with what stands before it: it is given back where no call starts. An added token
    that is one of `ends` ends any call, even in the middle of a string.
    """

    def __init__(self, buffer: MarkerBuffer, ends: Collection[str], new_id: Callable[[], str]) -> None:
        self.num_calls = 0
        self.is_started = False
        self.is_over = True
        self.block: list[str] = []
        self._buffer = buffer
        self._ends = ends
        self._new_id = new_id
        self._ids: set[str] = set()

    @property
    def depth(self) -> int:
        """How many brackets of the call are open."""
        return self._reader.depth

    def open(self, reader: JsonCallReader, block: list[str]) -> None:
        """A call may begin here."""
        self._reader = reader
        self.block = block
        self.is_started = False
        self.is_over = False

    def read(self, events: list[Event]) -> bool:
        """Reads on in the call that is open; False where there is no more text. What is not the call's stays in the buffer."""
        piece = self._buffer.peek()
        if piece is None:
            return False
        reader, start = self._reader, self._buffer.offset
        is_special = isinstance(piece, SpecialText)
        is_end = is_special and piece in self._ends
        end = start if is_end else reader.feed(piece, start)
        is_malformed = is_end or reader.is_malformed
        if not self.is_started:
            if is_special and is_malformed:  # it stays whole, for those who look for it
                end = start
            if end > start:
                self.block.append(piece if is_special else piece[start:end])
        self._buffer.skip(end - start)
        if is_malformed:
            reader.close()
        self.announce(events)
        if is_malformed or reader.is_complete or reader.is_refused:
            self.is_over = is_malformed or reader.is_complete
            events += map(Text, join_pieces(self.block))
            self.block = []
            if is_malformed and self.is_started and reader.left:
                events.append(Text(reader.left))
        return True

    def announce(self, events: list[Event], *, is_cut: bool = False) -> None:
        """Gives out what the reader knows by now; where the answer `is_cut` here, a name is enough for a call."""
        reader = self._reader
        if not self.is_started:
            if reader.name is None or not (reader.can_start or is_cut) or reader.is_refused:
                return
            self.is_started = True
            self.block = []
            events.append(ToolCallStart(self.num_calls, reader.name, self._id_of(reader)))
            self.num_calls += 1
        fragment = reader.take_arguments()
        if fragment:
            events.append(ToolCallArguments(self.num_calls - 1, fragment))

    def _id_of(self, reader: JsonCallReader) -> str:
        """The format's own id, unless the model has written it before in this answer: results are told apart by it."""
        call_id = reader.call_id
        if call_id is None or call_id in self._ids:
            return self._new_id()
        self._ids.add(call_id)
        return call_id

    def finish(self, events: list[Event]) -> None:
        """Generation is over: a call that is open keeps what came of it, from its name on."""
        if not self.is_over and (self.is_started or self._reader.is_named):
            self._reader.stop()
            self.announce(events, is_cut=True)
