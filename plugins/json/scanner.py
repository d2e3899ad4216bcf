"""Reads one streamed JSON document (RFC 8259), each character once, and rejects the first that is invalid."""

import enum
import re

_SPACE = re.compile(r"[ \t\n\r]+")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_PLAIN_OR_CONTROL = re.compile(r'[^"\\]+')
_DIGITS = frozenset("0123456789")
_HEX = frozenset("0123456789abcdefABCDEF")
_CLOSERS = {"{": "}", "[": "]"}
_LITERALS = {"t": "rue", "f": "alse", "n": "ull"}

# Number states: what each character leads to. Where a state may end the number, any other character ends it.
_NUMBER = {
    "-": {"0": "0", **dict.fromkeys("123456789", "1")},
    "0": {".": ".", "e": "e", "E": "e"},
    "1": {**dict.fromkeys("0123456789", "1"), ".": ".", "e": "e", "E": "e"},
    ".": dict.fromkeys("0123456789", "f"),
    "f": {**dict.fromkeys("0123456789", "f"), "e": "e", "E": "e"},
    "e": {**dict.fromkeys("0123456789", "x"), "+": "s", "-": "s"},
    "s": dict.fromkeys("0123456789", "x"),
    "x": dict.fromkeys("0123456789", "x"),
}
_NUMBER_ENDS = frozenset("01fx")


class State(enum.Enum):
    """What may come next."""

    VALUE = enum.auto()
    FIRST_ITEM = enum.auto()  # a value, or the end of an empty array
    FIRST_KEY = enum.auto()  # a key, or the end of an empty object
    KEY = enum.auto()
    COLON = enum.auto()
    AFTER_VALUE = enum.auto()
    STRING = enum.auto()
    ESCAPE = enum.auto()
    NUMBER = enum.auto()
    LITERAL = enum.auto()
    COMPLETE = enum.auto()
    MALFORMED = enum.auto()


class Chunk(enum.Enum):
    """What `take` has just passed."""

    SPACE = enum.auto()
    MARK = enum.auto()  # one of { } [ ] , :
    KEY = enum.auto()  # part of a string that is a key
    SCALAR = enum.auto()  # part of any other string, a number or a literal


_IN_SCALAR = frozenset({State.STRING, State.ESCAPE, State.NUMBER, State.LITERAL})


class JsonScanner:
    """A pushdown automaton that is given text and passes it chunk by chunk.

    Where `allows_control`, strings may hold line breaks and other control characters as they are, as models write them.
    """

    def __init__(self, *, allows_control: bool = False) -> None:
        self.state = State.VALUE
        self.chunk = Chunk.SPACE
        self._plain = _PLAIN_OR_CONTROL if allows_control else _PLAIN
        self._open: list[str] = []  # the closers that are still owed, the innermost last
        self._is_key = False
        self._number = "-"
        self._owed = ""  # the rest of a literal, or the hexadecimal digits of an escape

    @property
    def depth(self) -> int:
        """How many objects and arrays are open."""
        return len(self._open)

    @property
    def is_over(self) -> bool:
        """Complete or malformed: nothing more is taken."""
        return self.state in (State.COMPLETE, State.MALFORMED)

    @property
    def is_in_scalar(self) -> bool:
        """Inside a string, number or literal. A number ends only with the character after it."""
        return self.state in _IN_SCALAR

    def take(self, text: str, position: int) -> int:
        """Passes one chunk of `text` and returns where it ends, which is `position` where the document is complete or malformed."""
        if self.is_in_scalar:
            end = self._take_scalar(text, position)
            if end > position:
                self.chunk = Chunk.KEY if self._is_key else Chunk.SCALAR
                return end
        if self.is_over:
            return position
        space = _SPACE.match(text, position)
        if space is not None:
            self.chunk = Chunk.SPACE
            return space.end()
        return position + self._start(text[position])

    def pass_value(self) -> None:
        """Where a value has to come: it has been read by other means."""
        assert self.state is State.VALUE
        self._is_key = False
        self.state = self._after_scalar()

    def _start(self, char: str) -> bool:
        """Takes the first character of a token; False where it is malformed."""
        self.chunk = Chunk.MARK
        if self._open and char == self._open[-1] and self.state in (State.FIRST_ITEM, State.FIRST_KEY, State.AFTER_VALUE):
            self._open.pop()
            self.state = State.AFTER_VALUE if self._open else State.COMPLETE
        elif self.state is State.AFTER_VALUE and char == "," and self._open:
            self.state = State.KEY if self._open[-1] == "}" else State.VALUE
        elif self.state is State.COLON and char == ":":
            self.state = State.VALUE
        elif self.state in (State.KEY, State.FIRST_KEY) and char == '"':
            self._start_string(is_key=True)
        elif self.state in (State.VALUE, State.FIRST_ITEM):
            return self._start_value(char)
        else:
            self.state = State.MALFORMED
        return self.state is not State.MALFORMED

    def _start_value(self, char: str) -> bool:
        self._is_key = False
        self.chunk = Chunk.SCALAR
        if char == '"':
            self._start_string(is_key=False)
        elif char in _CLOSERS:
            self.chunk = Chunk.MARK
            self._open.append(_CLOSERS[char])
            self.state = State.FIRST_KEY if char == "{" else State.FIRST_ITEM
        elif char == "-" or char in _DIGITS:
            self.state = State.NUMBER
            self._number = char if char in "-0" else "1"
        elif char in _LITERALS:
            self.state = State.LITERAL
            self._owed = _LITERALS[char]
        else:
            self.state = State.MALFORMED
        return self.state is not State.MALFORMED

    def _start_string(self, is_key: bool) -> None:
        self.state = State.STRING
        self.chunk = Chunk.KEY if is_key else Chunk.SCALAR
        self._is_key = is_key

    def _take_scalar(self, text: str, position: int) -> int:
        """Takes as much of a string, number or literal as there is; nothing where a number has ended."""
        if self.state is State.STRING:
            return self._take_string(text, position)
        char = text[position]
        if self.state is State.NUMBER:
            if char in _NUMBER[self._number]:
                self._number = _NUMBER[self._number][char]
                return position + 1
            self.state = self._after_scalar() if self._number in _NUMBER_ENDS else State.MALFORMED
            return position
        if self.state is State.LITERAL:
            fits = char == self._owed[0]
            done = self._after_scalar()
        else:
            fits = char in _HEX if self._owed else char in '"\\/bfnrtu'
            done = State.STRING
        if not fits:
            self.state = State.MALFORMED
            return position
        self._owed = "0000" if self.state is State.ESCAPE and not self._owed and char == "u" else self._owed[1:]
        if not self._owed:
            self.state = done
        return position + 1

    def _take_string(self, text: str, position: int) -> int:
        plain = self._plain.match(text, position)
        if plain is not None:
            return plain.end()
        if text[position] == '"':
            self.state = State.COLON if self._is_key else self._after_scalar()
        elif text[position] == "\\":
            self.state = State.ESCAPE
            self._owed = ""
        else:
            self.state = State.MALFORMED
            return position
        return position + 1

    def _after_scalar(self) -> State:
        return State.AFTER_VALUE if self._open else State.COMPLETE
