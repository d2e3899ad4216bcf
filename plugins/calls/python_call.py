"""One call written as a Python expression, `f(x=1, y='a')`, emitted as JSON while it arrives."""

import json
import math
import re
import unicodedata
from collections.abc import Callable

from penstock.plugins.json.writer import JsonWriter, escaped

_SIMPLE = {"n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "f": "\f", "v": "\v", "\n": "", **{char: char for char in "\\'\"/"}}
_HEX = "[0-9a-fA-F]"
_ESCAPE = re.compile(rf"\\(?:(?P<octal>[0-7]{{1,3}})|x{_HEX}{{2}}|u{_HEX}{{4}}|U{_HEX}{{8}}|N\{{(?P<name>[^}}\\'\"]*)\}})")
_OPEN_ESCAPE = re.compile(rf"\\(?:[0-7]{{1,2}}|x{_HEX}?|u{_HEX}{{0,3}}|U{_HEX}{{0,7}}|N(?:\{{[^}}\\'\"]{{0,100}})?)")
_PLAIN = {quote: re.compile(rf"[^{quote}\\]+") for quote in "'\""}


class PythonString:
    """Begins after its first quotation mark. `take` gives its characters, and `is_over` says that it has been closed.

    An escape that Python does not know stays as it was written, but for `\\/`, which JSON writes. Line breaks need no escape.
    """

    def __init__(self, quote: str, *, is_raw: bool = False) -> None:
        self.is_over = False
        self._quote = quote
        self._is_raw = is_raw
        self._num_quotes = 1  # adjacent ones, so far
        self._is_triple: bool | None = None  # None: no other character than the first mark has come
        self._escape = ""  # a backslash, and what of the escape has come
        self._characters: list[str] = []

    @property
    def is_open(self) -> bool:
        """What comes next is part of it. Two marks side by side may be all of it, or begin one between three."""
        return not self.is_over and not (self._is_triple is None and self._num_quotes == 2)

    def take(self) -> str:
        """The new characters since the last call."""
        text = "".join(self._characters)
        self._characters.clear()
        return text

    def feed(self, text: str, position: int) -> int:
        """Reads from `position`; returns where it stopped."""
        while position < len(text) and not self.is_over:
            if self._escape:
                position += self._read_escape(text[position])
                continue
            char = text[position]
            if char == self._quote:
                position += self._read_quote()
                continue
            if self._is_triple is None:
                if self._num_quotes == 2:  # nothing was between them
                    self.is_over = True
                    break
                self._is_triple = False
            self._flush_quotes()
            if char == "\\":
                self._escape = char
                position += 1
                continue
            plain = _PLAIN[self._quote].match(text, position)
            assert plain is not None
            self._characters.append(plain[0])
            position = plain.end()
        return position

    def reopen(self) -> None:
        """The quotation mark that closed it was one of its characters."""
        self.is_over = False
        self._is_triple = False
        self._num_quotes = 0

    def _read_quote(self) -> int:
        if self._is_triple is False:
            self.is_over = True
            return 1
        self._num_quotes += 1
        if self._num_quotes == 3:
            self.is_over = self._is_triple is True
            self._is_triple = True
            self._num_quotes = 0
        return 1

    def _flush_quotes(self) -> None:
        """Marks inside a string between three of them."""
        if self._is_triple:
            self._characters.append(self._quote * self._num_quotes)
        self._num_quotes = 0

    def _read_escape(self, char: str) -> int:
        """Takes one character after a backslash; 0 where it is not part of the escape."""
        written = self._escape + char
        if not self._is_raw and _OPEN_ESCAPE.fullmatch(written):
            self._escape = written
            return 1
        is_part = self._is_raw or len(written) == 2 or _ESCAPE.fullmatch(written) is not None
        self._characters.append(written if self._is_raw else _meaning(written if is_part else self._escape))
        self._escape = ""
        return int(is_part)


def _meaning(escape: str) -> str:
    """What a whole escape stands for; one that Python does not know stands for itself."""
    found = _ESCAPE.fullmatch(escape)
    try:
        if found is None:
            return _SIMPLE.get(escape[1:], escape)
        if found["octal"]:
            return chr(int(found["octal"], 8))
        return unicodedata.lookup(found["name"]) if found["name"] else chr(int(escape[2:], 16))
    except (KeyError, ValueError, OverflowError):  # no such name, no such character
        return escape


_SPACE = re.compile(r"\s+")
NAME = re.compile(r"[\w.\-]+")
KEY = re.compile(r"[\w\-]+")
_TOKEN = re.compile(r"[\w.+\-]+")
_EXPRESSION = re.compile(r"[^,:<()\[\]{}]+")
_WORDS = {"True": "true", "true": "true", "False": "false", "false": "false", "None": "null", "null": "null"}
_JSON_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?", re.ASCII)
_INTEGER = re.compile(r"[+-]?\d[\d_]*", re.ASCII)
_OTHER_INTEGER = re.compile(r"[+-]?0[xXoObB][0-9a-fA-F_]+", re.ASCII)
_FLOAT = re.compile(r"[+-]?(\d[\d_]*\.?[\d_]*|\.\d[\d_]*)([eE][+-]?\d+)?", re.ASCII)
_CLOSERS = {"[": "]", "(": ")"}
_MAX_CLOSERS = 8
MAX_WORD = 1000
"""Characters of a name or a number: what is longer is none."""

Step = Callable[[str, int], int]


class PythonCall:
    """Reads from the first character of the name to the closing bracket.

    `name` is known once the bracket after it has come, and the call is certain (`is_started`) with its first value or its end: then its
    arguments come out character by character. Tuples and sets are arrays. A quotation mark inside a string of its own kind is part of it,
    unless what follows could follow a string.

    `is_malformed` at the first character that cannot be right. Once the call is certain, there is less of that: a value that is no literal
    is the string of what was written, and a bracket that was not closed before one around it is. `in_list` says that one may be around the
    call itself; `has_ended_list` that it has come where the call's own is missing. `left` is what was read before something malformed and
    is no part of the call.
    """

    def __init__(self, *, in_list: bool = False) -> None:
        self.name: str | None = None
        self.is_complete = False
        self.is_malformed = False
        self.has_ended_list = False
        self.left = ""
        self._in_list = in_list
        self._writer = JsonWriter()
        self._has_value = False
        self._word: list[str] = []
        self._length = 0
        self._closers: list[str] = []
        self._nexts: list[Step] = []  # what reads the next item of each open bracket
        self._string = PythonString("'")
        self._quote = ""
        self._space: list[str] = []  # after a string that may go on
        self._key: list[str] | None = None  # the scalar being read, where it is a key or may be one
        self._expression: list[str] = []  # a value that is no literal
        self._expression_depth = 0
        self._last = ""  # a bracket after a string, which ends the call if what follows can follow a call
        self._step: Step = self._read_name

    @property
    def is_started(self) -> bool:
        return self.is_complete or self._has_value

    @property
    def depth(self) -> int:
        """How many brackets are open."""
        return len(self._closers)

    @property
    def quote(self) -> str:
        """The mark that ends the string that is being read, where that is a value."""
        is_open = self._step == self._read_string and self._key is None and self._string.is_open
        return self._quote if is_open else ""

    @property
    def is_in_string(self) -> bool:
        """In a value that is a string, or after what may be its end."""
        return self._key is None and self._step in (self._read_string, self._read_after_string, self._read_after_last)

    @property
    def closers(self) -> str:
        """The brackets that end the call from here, and its list, where they are few."""
        closers = self._closers if self.depth <= _MAX_CLOSERS else ()
        return "".join(reversed(closers)) + ("]" if self._in_list else "")

    def take_arguments(self) -> str:
        """The new arguments since the last call."""
        return self._writer.take() if self.is_started else ""

    def feed(self, text: str, position: int) -> int:
        """Reads from `position`; returns where it stopped: the end of the text, or of the call, what is malformed, or a string's text."""
        while position < len(text) and not self.is_complete and not self.is_malformed:
            position = self._step(text, position)
            if self.quote:
                break
        return position

    def close(self) -> None:
        """The call ends here: ends what is open, and leaves out what has no value yet."""
        self._end_pending()
        if self._step == self._read_expression:
            self._end_expression()
        if self.is_started:
            self._writer.close()

    def cut(self) -> None:
        """At the end of input: emits what is certain, from the name on, and closes nothing."""
        self._end_pending()
        self._has_value = self.name is not None

    def _end_pending(self) -> None:
        """What was only waiting for something to follow it."""
        if self._step == self._read_after_last:
            self._end_last()
        elif self._step == self._read_after_string and self._key is None:
            self._writer.end_string()
        elif self._step in (self._read_token, self._read_after_token) and self._key is None:
            value = json_of("".join(self._word))
            if value is not None:
                self._has_value = True
                self._writer.scalar(value)

    def _fail(self, position: int, left: str = "") -> int:
        self.is_malformed = True
        self.left = left
        if self.is_started:
            self._writer.close()
        return position

    def _open(self, closer: str, read_next: Step) -> None:
        self._closers.append(closer)
        self._nexts.append(read_next)
        self._step = read_next

    def _close(self) -> None:
        self._closers.pop()
        self._nexts.pop()
        self._writer.end()
        self.is_complete = not self._closers
        self._step = self._read_after_value

    def _take_word(self, pattern: re.Pattern[str], text: str, position: int) -> int:
        found = pattern.match(text, position)
        if found is None:
            return position
        self._word.append(found[0])
        self._length += len(found[0])
        self.is_malformed = self._length > MAX_WORD
        return found.end()

    def _end_word(self) -> str:
        word = "".join(self._word)
        self._word.clear()
        self._length = 0
        return word

    def _read_name(self, text: str, position: int) -> int:
        end = self._take_word(NAME, text, position)
        if end > position:
            return end
        if text[position] != "(" or not self._word:
            return self._fail(position)
        self.name = self._end_word()
        self._writer.begin("{")
        self._open(")", self._read_parameter)
        return position + 1

    def _read_parameter(self, text: str, position: int) -> int:
        space = _SPACE.match(text, position)
        if space is not None and not self._word:
            return space.end()
        end = self._take_word(KEY, text, position)
        if end > position:
            return end
        if text[position] == ")" and not self._word:
            self._close()
            return position + 1
        self._step = self._read_equals
        if self._word:
            return position
        return self._end_at_bracket(position) if self.is_started and self._is_bracket_of_list(text[position]) else self._fail(position)

    def _is_bracket_of_list(self, char: str) -> bool:
        return self._in_list and char == "]" and "]" not in self._closers

    def _end_at_bracket(self, position: int) -> int:
        """The list ends before the call does, whose bracket is left to the reader of the list."""
        while self._closers:
            self._close()
        return position

    def _read_equals(self, text: str, position: int) -> int:
        space = _SPACE.match(text, position)
        if space is not None:
            return space.end()
        if text[position] != "=":
            return self._fail(position, "".join(self._word))
        self._writer.key(self._end_word())
        self._step = self._read_value
        return position + 1

    def _read_value(self, text: str, position: int) -> int:
        space = _SPACE.match(text, position)
        if space is not None:
            return space.end()
        char = text[position]
        if char in _CLOSERS:
            self._has_value = True
            self._writer.begin("[")
            self._open(_CLOSERS[char], self._read_item)
        elif char == "{":
            self._has_value = True
            self._open("}", self._read_first)
        elif char in "'\"":
            self._has_value = True
            self._writer.begin_string()
            self._open_string(char)
        elif self.is_started and (char in self._closers or char == ","):
            self._writer.scalar("null")
            self._step = self._read_after_value
            return position
        else:
            self._step = self._read_token
            return position
        return position + 1

    def _read_item(self, text: str, position: int) -> int:
        if text[position] == self._closers[-1]:
            self._close()
            return position + 1
        return self._read_value(text, position)

    def _read_first(self, text: str, position: int) -> int:
        """After a brace: a key, an item of a set, or the end of an empty dict."""
        if text[position] == "}":
            self._writer.begin("{")
        return self._read_key(text, position)

    def _read_key(self, text: str, position: int) -> int:
        space = _SPACE.match(text, position)
        if space is not None:
            return space.end()
        char = text[position]
        if char == "}":
            self._close()
            return position + 1
        self._key = []
        if char in "'\"":
            self._open_string(char)
            return position + 1
        self._step = self._read_token
        return position

    def _open_string(self, quote: str, *, is_raw: bool = False) -> None:
        self._string = PythonString(quote, is_raw=is_raw)
        self._quote = quote
        self._step = self._read_string

    def _read_string(self, text: str, position: int) -> int:
        end = self._string.feed(text, position)
        self._add(self._string.take())
        if self._string.is_over:
            self._step = self._read_after_string
        return end

    def _add(self, characters: str) -> None:
        if self._key is not None:
            self._key.append(characters)
        elif characters:
            self._writer.add(characters)

    def _read_after_string(self, text: str, position: int) -> int:
        """What follows tells whether the string is over: another one goes on with it, as in Python."""
        space = _SPACE.match(text, position)
        if space is not None:
            self._space.append(space[0])
            return space.end()
        char = text[position]
        if char in "'\"":
            self._open_string(char)
            self._space.clear()
            return position + 1
        if self._key is None and self.depth == 1 and (char == ")" or self._is_bracket_of_list(char)):
            self._last = char
            self._step = self._read_after_last
            return position + 1
        is_over = char in (",", self._closers[-1]) if self._key is None else char in ":,}"
        if not is_over:
            self._go_on_with_string("")
        elif self._key is not None:
            self._key = [f'"{escaped("".join(self._key))}"']
            self._step = self._read_after_key
        else:
            self._writer.end_string()
            self._step = self._read_after_value
        self._space.clear()
        return position

    def _go_on_with_string(self, after: str) -> None:
        self._add(self._quote + "".join(self._space) + after)
        self._string.reopen()
        self._step = self._read_string

    def _read_after_last(self, text: str, position: int) -> int:
        """A bracket ends the call only where something can come after it that ends a call."""
        char = text[position]
        if char in (",]<" if self._last == ")" else ",<\n") or (self._last == ")" and char.isspace()):
            self._end_last(is_more=char == ",")
        else:
            self._go_on_with_string(self._last)
        self._space.clear()
        return position

    def _end_last(self, *, is_more: bool = False) -> None:
        self._writer.end_string()
        self._close()
        self.has_ended_list = self._last == "]" and not is_more

    def _read_token(self, text: str, position: int) -> int:
        end = self._take_word(_TOKEN, text, position)
        if end > position:
            return end
        word = self._end_word()
        if text[position] in "'\"" and word in ("r", "R", "u", "U"):
            if self._key is None:
                self._has_value = True
                self._writer.begin_string()
            self._open_string(text[position], is_raw=word in "rR")
            return position + 1
        self._word.append(word)
        self._step = self._read_after_token
        return position

    def _read_after_token(self, text: str, position: int) -> int:
        """A number or a constant is one where nothing more of an expression follows."""
        space = _SPACE.match(text, position)
        if space is not None:
            self._space.append(space[0])
            return space.end()
        written = "".join(self._word)
        value = json_of(written)
        char = text[position]
        is_closer = char in ")]}" and (char in self._closers or self._is_bracket_of_list(char))
        is_over = char in ",:}" if self._key is not None else char == "," or is_closer
        if value is None or not is_over:
            if not self.is_started:
                return self._fail(position)
            self._expression = [written, *self._space]
            self._step = self._read_expression
        elif self._key is not None:
            self._key = [value]
            self._step = self._read_after_key
        else:
            self._has_value = True
            self._writer.scalar(value)
            self._step = self._read_after_value
        self._end_word()
        self._space.clear()
        return position

    def _read_expression(self, text: str, position: int) -> int:
        """What is no literal, to the comma or the bracket that ends it."""
        found = _EXPRESSION.match(text, position)
        if found is not None:
            self._expression.append(found[0])
            return found.end()
        char = text[position]
        if not self._expression_depth and (char in ",)]}<" or (char == ":" and self._key is not None)):
            self._end_expression()
            return position
        self._expression_depth += char in "([{"
        self._expression_depth -= char in ")]}"
        self._expression.append(char)
        return position + 1

    def _end_expression(self) -> None:
        value = f'"{escaped("".join(self._expression).strip())}"'
        self._expression.clear()
        self._expression_depth = 0
        if self._key is not None:
            self._key = [value]
            self._step = self._read_after_key
        else:
            self._writer.scalar(value)
            self._step = self._read_after_value

    def _read_after_key(self, text: str, position: int) -> int:
        space = _SPACE.match(text, position)
        if space is not None:
            return space.end()
        assert self._key is not None
        value = "".join(self._key)
        self._key = None
        is_first = self._nexts[-1] == self._read_first
        if text[position] == ":":
            if is_first:
                self._writer.begin("{")
                self._nexts[-1] = self._read_key
            self._writer.key(json.loads(value) if value[0] == '"' else value)
            self._step = self._read_value
            return position + 1
        if not is_first or text[position] not in ",}":
            return self._fail(position)
        self._writer.begin("[")
        self._nexts[-1] = self._read_item
        self._writer.scalar(value)
        self._step = self._read_after_value
        return position

    def _read_after_value(self, text: str, position: int) -> int:
        space = _SPACE.match(text, position)
        if space is not None:
            return space.end()
        char = text[position]
        if char == ",":
            self._step = self._nexts[-1]
        elif char in self._closers:
            while self._closers[-1] != char:
                self._close()
            self._close()
        elif self._is_bracket_of_list(char):
            return self._end_at_bracket(position)
        else:
            return self._fail(position)
        return position + 1


def json_of(word: str) -> str | None:
    """A number or a constant as JSON; None for anything else, numbers beyond the range of floats among it."""
    if word in _WORDS:
        return _WORDS[word]
    if _JSON_NUMBER.fullmatch(word):
        is_finite = not ("e" in word or "E" in word or "." in word) or math.isfinite(float(word))
        return word if is_finite else None
    try:
        if _INTEGER.fullmatch(word):
            return str(int(word))
        if _OTHER_INTEGER.fullmatch(word):
            return str(int(word, 0))
        if _FLOAT.fullmatch(word) and math.isfinite(float(word)):
            return repr(float(word))
    except ValueError:  # an underscore at a place where Python has none
        return None
    return None
