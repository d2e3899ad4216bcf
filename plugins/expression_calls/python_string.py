"""A string as Python writes it, read as it arrives."""

import re
import unicodedata

_SIMPLE = {"n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "f": "\f", "v": "\v", "\n": "", **{char: char for char in "\\'\"/"}}
_HEX = frozenset("0123456789abcdefABCDEF")
_OCTAL = frozenset("01234567")
_NUM_DIGITS = {"x": 2, "u": 4, "U": 8}
_MAX_NAME = 100
_PLAIN = {quote: re.compile(rf"[^{quote}\\]+") for quote in "'\""}


class PythonString:
    """Begins after its first quotation mark. `take` gives its characters, and `is_over` says that it has been closed.

    An escape that Python does not know stays as it was written, but for `\\/`, which JSON writes. Line breaks need no escape.
    """

    def __init__(self, quote: str, *, is_raw: bool = False) -> None:
        self.is_over = False
        self._quote = quote
        self._is_raw = is_raw
        self._num_quotes = 1  # that stand side by side at the moment
        self._is_triple: bool | None = None  # None: no other character than the first mark has come
        self._escape: list[str] | None = None
        self._characters: list[str] = []

    @property
    def is_open(self) -> bool:
        """What comes next is part of it. Two marks side by side may be all of it, or begin one between three."""
        return not self.is_over and not (self._is_triple is None and self._num_quotes == 2)

    def take(self) -> str:
        """The characters that have come since the last call of this."""
        text = "".join(self._characters)
        self._characters.clear()
        return text

    def feed(self, text: str, position: int) -> int:
        """Reads from `position`; returns where it stopped."""
        while position < len(text) and not self.is_over:
            if self._escape is not None:
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
                self._escape = []
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
        assert self._escape is not None
        escape = self._escape
        if self._is_raw:
            return self._end_escape(f"\\{char}")
        if not escape:
            if char in _SIMPLE:
                return self._end_escape(_SIMPLE[char])
            if char not in _OCTAL and char not in _NUM_DIGITS and char != "N":
                return self._end_escape(f"\\{char}")
            escape.append(char)
            return 1
        kind = escape[0]
        if kind in _OCTAL:
            if char in _OCTAL and len(escape) < 3:
                escape.append(char)
                return 1
            return self._end_escape(chr(int("".join(escape), 8))) - 1
        if kind == "N":
            return self._read_name(char)
        if char not in _HEX:
            return self._end_escape("\\" + "".join(escape)) - 1
        escape.append(char)
        if len(escape) > _NUM_DIGITS[kind]:
            number = int("".join(escape[1:]), 16)
            return self._end_escape(chr(number) if number < 0x110000 else "\\" + "".join(escape))
        return 1

    def _read_name(self, char: str) -> int:
        assert self._escape is not None
        escape = self._escape
        if (len(escape) == 1 and char != "{") or len(escape) > _MAX_NAME or char in (self._quote, "\\"):
            return self._end_escape("\\" + "".join(escape)) - 1
        escape.append(char)
        if char != "}":
            return 1
        written = "".join(escape)
        try:
            return self._end_escape(unicodedata.lookup(written[2:-1]))
        except KeyError:
            return self._end_escape(f"\\{written}")

    def _end_escape(self, text: str) -> int:
        self._characters.append(text)
        self._escape = None
        return 1
