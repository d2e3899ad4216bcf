"""Reads one streamed JSON object as models write it, and emits valid JSON."""

import re
from enum import Enum, auto

from penstock.engine.text.streaming import PatternState
from penstock.plugins.calls.schema_values import ANY_TYPE, TextValue, quoted, to_json

_SPACE = re.compile(r"[ \t\n\r]+")
_PLAIN = {'"': re.compile(r'[^"\\\x00-\x1f]+'), "'": re.compile(r"[^'\"\\\x00-\x1f]+")}
_BARE = re.compile(r"[^,\n<`()\[\]{}]+")
_BARE_KEY = re.compile(r"[\w$.\-]+")
_ESCAPED = frozenset("\"'\\/bfnrtu")
_HEX = frozenset("0123456789abcdefABCDEF")
_CLOSERS = {"{": "}", "[": "]"}
_MARKUP = "<`"
"""No JSON begins so, and the markers after a call do."""
_MAX_KEY = 256


class _Next(Enum):
    """The token expected next."""

    KEY = auto()  # or the end of the object
    COLON = auto()
    VALUE = auto()
    ITEM = auto()  # or the end of the array
    COMMA = auto()  # or the end of the object or array


class JsonRepair:
    """Passes valid JSON on unchanged, each character once, and repairs common mistakes of models whose meaning is clear:

    - in a string: control characters, and a backslash that begins no escape, are escaped; so is a quotation mark that nothing follows
      which could follow a string
    - strings and keys in single quotes, keys without any, and constants as Python writes them; a value that is nothing of all that is
      the string of what was written
    - a comma or a colon that is missing or too many, a value that is missing (null), a bracket that was not closed before one around it

    `is_malformed` at the first character that makes no sense after all that. `left` is what was read then and belongs to nothing.

    A marker of `ends` in a string is held back, with what follows it, until it is decided: it is part of the string where a quotation
    mark ends that as it should, and otherwise the end of the object, which is then malformed. `num_held` characters were read by then,
    from the marker on, that are not the object's.
    """

    def __init__(self, ends: PatternState[str] | None = None) -> None:
        self.is_complete = False
        self.is_malformed = False
        self.is_begun = False
        """More than the opening brace has come."""
        self.left = ""
        self._out: list[str] = []
        self._closers: list[str] = []
        self._next = _Next.VALUE
        self._step = self._read_gap
        self._held: list[str] = []  # a comma or a quotation mark, then white space: what follows tells what it is
        self._closing: list[str] = []  # a quotation mark before a comma: what follows that tells whether it ended the string
        self._is_key = False
        self._quote = '"'
        self._escape = ""
        self._bare: list[str] = []
        self._bare_depth = 0
        self._ends = self._state = ends
        self._is_marked = False  # one of `ends` occurs in the string
        self._is_dubious = False  # a quotation mark in the string did not end it
        self._tail: list[str] = []  # of the string, from what may be a marker on
        self._num_marked = 0

    @property
    def num_held(self) -> int:
        """How many characters were read last that are held back, from what may be a marker on."""
        return self._num_marked if self._is_marked else len(self._tail)

    @property
    def depth(self) -> int:
        """How many brackets are open."""
        return len(self._closers)

    def feed(self, text: str, position: int) -> int:
        """Reads from `position`, at first where the object begins; returns where it stopped."""
        while position < len(text) and not self.is_complete and not self.is_malformed:
            was_marked = self._is_marked
            end = self._step(text, position)
            if was_marked and self._is_marked:
                self._num_marked += end - position
            position = end
        return position

    def end_at_marker(self) -> bool:
        """At the end of input: a marker in the open string ended the object. False without such a marker."""
        if not self._is_marked or self._closing or self._step == self._read_string_end:
            return False
        self._fail_at_marker()
        return True

    def take(self) -> str:
        """The new JSON since the last call."""
        text = "".join(self._out)
        self._out.clear()
        return text

    def close(self) -> None:
        """The object ends here: what is open is closed, so that it is a JSON document."""
        if self.is_complete:
            return
        if self._closing and self._bare:
            self._reopen_string()
        self._release()
        if self._step == self._read_bare:
            self._end_bare()
        elif self._step == self._read_escape:
            self._end_escape("\\" + self._escape)
        if self._step in (self._read_string, self._read_string_end):
            self._held.clear()
            self._out.append('"')
            self._next = _Next.COLON if self._is_key else _Next.COMMA
        self._fill_gap()
        self._out += reversed(self._closers)
        self._closers.clear()
        self.is_complete = True

    def stop(self) -> None:
        """At the end of input: emits the text held back, unchanged."""
        self._release()
        self._flush()
        self._out.append(self._escape)
        bare = "".join(self._bare)
        if self._step == self._read_bare_key:
            self._out.append(quoted(bare)[:-1])
        elif bare:
            value = TextValue(ANY_TYPE, is_json=True)
            self._out.append(value.feed(bare) + value.cut())

    def _fail(self, position: int, left: str = "") -> int:
        self._end_string()
        self.is_malformed = True
        self.left = "".join(self._held) + left
        self._held.clear()
        return position

    # Between keys and values

    def _read_gap(self, text: str, position: int) -> int:
        space = _SPACE.match(text, position)
        if space is not None:
            (self._held or self._out).append(space[0])
            return space.end()
        char = text[position]
        if char in _MARKUP or (char in "]}" and char not in self._closers):
            return self._fail(position)
        if char in "]}":
            return self._close(char, position)
        match self._next:
            case _Next.KEY:
                return self._start_key(char, position)
            case _Next.COLON:
                return self._pass_colon(char, position)
            case _Next.COMMA:
                return self._pass_comma(char, position)
            case _:
                return self._start_value(char, position)

    def _close(self, closer: str, position: int) -> int:
        self._fill_gap()
        while True:
            last = self._closers.pop()
            self._out.append(last)
            if last == closer:
                break
        self._next = _Next.COMMA
        self.is_begun = True
        self.is_complete = not self._closers
        return position + 1

    def _fill_gap(self) -> None:
        # A bracket closes here: a comma before it is too many, and a key without a value has null.
        self._end_string()
        self._out += self._held[1:]
        self._held.clear()
        if self._next is _Next.COLON:
            self._out.append(": null")
        elif self._next is _Next.VALUE:
            self._out.append("null")

    def _pass_colon(self, char: str, position: int) -> int:
        if char == ",":
            self._out.append(": null")
            self._next = _Next.COMMA
            return position
        self._next = _Next.VALUE
        self._out.append(":" if char in ":=" else ": ")
        return position + (char in ":=")

    def _pass_comma(self, char: str, position: int) -> int:
        # After a value. A missing comma is plain where a string or a bracket begins.
        if char != "," and not (char in "\"'" or (char in _CLOSERS and self._closers[-1] == "]")):
            return self._fail(position)
        self._held = [","]
        self._next = _Next.KEY if self._closers[-1] == "}" else _Next.ITEM
        return position + (char == ",")

    def _flush(self) -> None:
        self._end_string()
        self._out += self._held
        self._held.clear()

    # Keys and values

    def _start_key(self, char: str, position: int) -> int:
        if char == ",":
            self._end_string()
            return position + 1
        if char in "\"'":
            self._flush()
            self.is_begun = True
            self._start_string(char, is_key=True)
            return position + 1
        self._step = self._read_bare_key
        return position

    def _read_bare_key(self, text: str, position: int) -> int:
        found = _BARE_KEY.match(text, position)
        if found is not None and self._bare_depth == 0:
            self._bare.append(found[0])
            return found.end() if sum(map(len, self._bare)) <= _MAX_KEY else self._fail_key(found.end())
        space = _SPACE.match(text, position)
        if space is not None and self._bare:
            self._bare.append(space[0])
            self._bare_depth = 1  # the key is over
            return space.end()
        if not self._bare or text[position] not in ":=":
            return self._fail_key(position)
        self._flush()
        self.is_begun = True
        self._out.append(quoted(self._take_bare().strip()))
        self._next = _Next.COLON
        self._step = self._read_gap
        return position

    def _fail_key(self, position: int) -> int:
        # The text after a comma is not a key: the string before it continues, if there is one.
        if not self._closing:
            return self._fail(position, self._take_bare())
        if self._is_marked:
            self._closing.clear()
            self._take_bare()
            self._fail_at_marker()
        else:
            self._reopen_string()
        return position

    def _reopen_string(self) -> None:
        """The quotation mark that was read last, and what has been read after it, is part of the string."""
        self._put(quoted("".join([self._quote, *self._closing[1:], *self._held, self._take_bare()]))[1:-1])
        self._closing.clear()
        self._held.clear()
        self._is_dubious = True
        self._step = self._read_string

    def _take_bare(self) -> str:
        written = "".join(self._bare)
        self._bare.clear()
        self._bare_depth = 0
        return written

    def _start_value(self, char: str, position: int) -> int:
        if char == ",":
            if self._next is _Next.VALUE:
                self._out.append("null")
                self._next = _Next.COMMA
                return position
            return position + 1
        self._flush()
        if char in _CLOSERS:
            self._out.append(char)
            self._closers.append(_CLOSERS[char])
            self._next = _Next.KEY if char == "{" else _Next.ITEM
            return position + 1
        if char in "\"'":
            self._start_string(char, is_key=False)
            return position + 1
        self._step = self._read_bare
        return position

    def _read_bare(self, text: str, position: int) -> int:
        """A value without quotation marks, to the comma, the bracket or the line break that ends it."""
        found = _BARE.match(text, position)
        if found is not None:
            self._bare.append(found[0])
            return found.end()
        char = text[position]
        if char in _MARKUP or (not self._bare_depth and char in ",\n]}"):
            self._end_bare()
            return position
        self._bare_depth += char in "([{"
        self._bare_depth -= char in ")]}" and self._bare_depth > 0
        self._bare.append(char)
        return position + 1

    def _end_bare(self) -> None:
        self._out.append(to_json("".join(self._bare).strip(), ANY_TYPE, is_json=True))
        self._bare.clear()
        self._bare_depth = 0
        self._next = _Next.COMMA
        self._step = self._read_gap

    # Strings

    def _start_string(self, quote: str, *, is_key: bool) -> None:
        self._out.append('"')
        self._quote = quote
        self._is_key = is_key
        self._is_dubious = False
        self._step = self._read_string

    def _read_string(self, text: str, position: int) -> int:
        plain = _PLAIN[self._quote].match(text, position)
        if plain is not None:
            return self._read_plain(text, position, plain.end())
        if not self._is_marked:
            self._release()
        char = text[position]
        if char == self._quote:
            self._held = ['"']
            self._step = self._read_string_end
        elif char == "\\":
            self._escape = char
            self._step = self._read_escape
        else:
            self._put(quoted(char)[1:-1])
        return position + 1

    def _read_plain(self, text: str, position: int, end: int) -> int:
        """Characters that stand for themselves, to the first marker in them."""
        if self._state is None or self._is_marked:
            self._put(text[position:end])
            return end
        self._state, end = self._state.read(text, position, end)
        num_held = self._state.num_held
        if not num_held and not self._tail:
            self._out.append(text[position:end])
            return end
        stretch = "".join(self._tail) + text[position:end]
        num_certain = len(stretch) - num_held
        self._out.append(stretch[:num_certain])
        self._tail = list(stretch[num_certain:])
        if self._state.found is not None:
            self._is_marked = True
            self._num_marked = num_held
            if self._is_dubious:
                self._fail_at_marker()
        return end

    def _fail_at_marker(self) -> None:
        self.is_malformed = True
        self._tail.clear()
        self._held.clear()
        self._escape = ""
        self._step = self._read_string

    def _put(self, json_text: str) -> None:
        (self._tail if self._is_marked else self._out).append(json_text)

    def _end_string(self) -> None:
        """The quotation mark that was read last ended the string, if that was open yet."""
        if self._closing:
            self._release()
            self._out += self._closing
            self._closing.clear()

    def _release(self) -> None:
        """What was held back is part of the string."""
        self._out += self._tail
        self._tail.clear()
        self._state = self._ends
        self._is_marked = False

    def _read_escape(self, text: str, position: int) -> int:
        """One character after a backslash, or after `\\u`."""
        char = text[position]
        is_unicode = len(self._escape) > 1
        if char in (_HEX if is_unicode else _ESCAPED):
            self._escape += char
            if self._escape != "\\u" and len(self._escape) in (2, 6):
                self._end_escape(char if char == "'" else self._escape)
            return position + 1
        self._end_escape("\\" + self._escape)
        return position

    def _end_escape(self, json_text: str) -> None:
        self._put(json_text)
        self._escape = ""
        self._step = self._read_string

    def _read_string_end(self, text: str, position: int) -> int:
        """After a quotation mark, which ends the string where something follows that can follow one."""
        space = _SPACE.match(text, position)
        if space is not None:
            self._held.append(space[0])
            return space.end()
        char = text[position]
        if char == "," and not self._is_key and self._closers[-1] == "}":
            self._closing, self._held = self._held, []
            self._next = _Next.COMMA
            self._step = self._read_gap
            return position
        is_missing_comma = char in "\"'" and len(self._held) > 1 and not self._is_key
        is_closer = char in "]}" and char in self._closers
        if char in (":," if self._is_key else ",") or is_closer or char in _MARKUP or is_missing_comma:
            self._closing, self._held = self._held, []
            self._end_string()
            self._next = _Next.COLON if self._is_key else _Next.COMMA
            self._step = self._read_gap
        elif self._is_marked:
            self._fail_at_marker()
        else:
            self._is_dubious = True
            self._out.append(quoted("".join([self._quote, *self._held[1:]]))[1:-1])
            self._held.clear()
            self._step = self._read_string
        return position
