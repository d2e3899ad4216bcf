"""One tool call written as a JSON object, `{"name": …, "arguments": …}`, read as it arrives."""

import json

from penstock.plugins.json_scanner import Chunk, JsonScanner, State

ARGUMENTS_KEYS = ("arguments", "parameters")


class JsonCall:
    """Reads the object and gives out its arguments as they were written, character by character.

    The keys may come in either order, and others are passed over. `is_malformed` at the first character that cannot be right: no JSON, no
    object, a name that is no string, or an object that ends without one. An object that ends without arguments has `{}`.
    """

    def __init__(self) -> None:
        self.name: str | None = None
        self.is_malformed = False
        self._scanner = JsonScanner()
        self._key: list[str] = []
        self._value: list[str] = []  # of the name
        self._arguments: list[str] = []  # not yet given out
        self._reading = ""  # the key whose value is being read, where it matters
        self._has_arguments = False
        self.has_whole_arguments = False  # their value is complete, the object perhaps not

    @property
    def is_complete(self) -> bool:
        return self._scanner.state is State.COMPLETE and not self.is_malformed

    def feed(self, text: str, position: int) -> int:
        """Reads from `position`; returns where it stopped: the end of the text, or of the object, or what is malformed."""
        while position < len(text) and not self.is_malformed and not self.is_complete:
            depth = self._scanner.depth
            end = self._scanner.take(text, position)
            if self._scanner.state is State.MALFORMED or not self._note(text[position:end], depth):
                self.is_malformed = True
                break
            position = end
        return position

    def take_arguments(self) -> str:
        """The arguments that have come since the last call of this."""
        fragment = "".join(self._arguments)
        self._arguments.clear()
        return fragment

    def _note(self, chunk: str, depth: int) -> bool:
        """Keeps what matters of a chunk that was read at `depth`; False where it makes this no call."""
        scanner = self._scanner
        deepest = max(depth, scanner.depth)
        if deepest == 0:
            return scanner.chunk is Chunk.SPACE
        if deepest > 1 or scanner.chunk is Chunk.SCALAR:
            return self._note_value(chunk)
        if scanner.chunk is Chunk.KEY:
            self._key.append(chunk)
        elif scanner.state is State.VALUE:
            self._start_value()
        elif scanner.state is State.COMPLETE:
            if not self._has_arguments:
                self._arguments.append("{}")
            return self.name is not None
        return True

    def _start_value(self) -> None:
        """After a colon at depth 1. A key that comes again is passed over: its first value may have been given out already."""
        if not self._key:
            return
        key = json.loads("".join(self._key))
        self._key.clear()
        self._reading = ""
        if key == "name" and self.name is None:
            self._reading = "name"
        elif key in ARGUMENTS_KEYS and not self._has_arguments:
            self._reading = "arguments"
            self._has_arguments = True

    def _note_value(self, chunk: str) -> bool:
        if self._reading == "arguments":
            self._arguments.append(chunk)
            self.has_whole_arguments = self._scanner.depth == 1 and not self._scanner.is_in_scalar
        elif self._reading == "name":
            self._value.append(chunk)
            if self._value[0][0] != '"':
                return False
            if not self._scanner.is_in_scalar:
                self.name = json.loads("".join(self._value))
                return _is_name(self.name)
        return True


def _is_name(text: str) -> bool:
    # Half a surrogate pair is legal in JSON and cannot be encoded.
    return bool(text) and not any("\ud800" <= char <= "\udfff" for char in text)
