"""A tool call that is being read out of the text of an answer: its events, and the text again where it was none."""

from collections import deque
from collections.abc import Callable, Collection, Iterable

from penstock.engine.events import Event, SpecialText, Text, ToolCallArguments, ToolCallStart
from penstock.plugins.automaton import compile_markers
from penstock.plugins.json_calls.json_call_reader import JsonCallReader
from penstock.plugins.markers import MarkerBuffer, join_pieces


class JsonCallReading:
    """Hands the text in `buffer` to a reader, one call after the other, and gives out what the reader makes of it.

    `block` is the text of a call that has not started, with what stands before it: it is given back where no call starts. An added token
    that is one of `ends` ends any call, even in the middle of a string; plain text that is one does where the string has no right end.
    """

    def __init__(self, buffer: MarkerBuffer, ends: Collection[str], added_tokens: frozenset[str], new_id: Callable[[], str]) -> None:
        self.num_calls = 0
        self.is_started = False
        self.is_over = True
        self.block: list[str] = []
        self._buffer = buffer
        self._ends = ends
        in_strings = (marker for marker in ends if _is_distinct(marker) and not any(token in marker for token in added_tokens))
        self._ends_in_strings = compile_markers(tuple(in_strings), added_tokens)
        self._held: deque[str] = deque()  # what has been read last, where a marker may cut it off
        self._num_held = 0
        self._new_id = new_id
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
        reader.watch(self._ends_in_strings)
        self._reader = reader
        self._held.clear()
        self._num_held = 0
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
        if not self.is_started and is_special and is_malformed:  # it stays whole, for those who look for it
            end = start
        self._take(piece if is_special else piece[start:end], end - start)
        if is_malformed:
            self._end_malformed(events)
            return True
        self.announce(events)
        if reader.is_complete or reader.is_refused:
            self.is_over = reader.is_complete
            self._give_back(events)
        return True

    def _take(self, text: str, length: int) -> None:
        if not length:
            return
        self._buffer.skip(length)
        if not self.is_started:
            self.block.append(text)
        num_held = self._reader.num_held
        self._held.append(text)
        self._num_held += length
        while self._held and self._num_held - len(self._held[0]) >= num_held:
            self._num_held -= len(self._held.popleft())

    def _end_malformed(self, events: list[Event]) -> None:
        """The call ends before what made no sense, or before the marker that did."""
        reader = self._reader
        if reader.is_malformed and reader.num_held and not reader.is_refused:  # of a refused call all is text already
            _, cut_off = _split_end(self._held, reader.num_held)
            if not self.is_started:
                self.block, _ = _split_end(self.block, reader.num_held)
            self._buffer.put_back(cut_off)
        reader.close()
        self.announce(events)
        self.is_over = True
        self._give_back(events)
        if self.is_started and reader.left:
            events.append(Text(reader.left))

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
