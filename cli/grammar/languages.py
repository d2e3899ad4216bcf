"""Languages that an audit holds a backend's masks against, so they share no code with any: which tokens may come next in a text, and which
may not.

A regex is what Python's `re` says it is, and which texts begin a match is found out by the package `regex`; a choice is its texts; Lark
and GBNF are read by `context_free.py`. These are exact: a token that can be followed by something has to be allowed. JSON's syntax
(RFC 8259) is read byte by byte, and tells which tokens can never come next.
"""

import bisect
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import regex as partial_regex  # type: ignore[import-untyped]

UNDECIDED = "\0"  # no backend generates it
WHITE_SPACE = frozenset(b" \t\n\r")
DIGITS = frozenset(b"0123456789")
HEX_DIGITS = frozenset(b"0123456789abcdefABCDEF")
ESCAPED = frozenset(b'"\\/bfnrt')
LITERALS = (b"true", b"false", b"null")
CLOSERS = {ord("}"): "{", ord("]"): "["}
MAX_STACK = 8  # containers that a state remembers: no token closes more of them
MAX_KNOWN = 4096  # states whose tokens are remembered
UNKNOWN = "?"  # what a remembered stack begins with where there were more

# First bytes of UTF-8 sequences, by what may follow them at once (Unicode 16.0, table 3-7) and how many continuations follow that.
_LEADS: tuple[tuple[range, range, int], ...] = (
    (range(0xC2, 0xE0), range(0x80, 0xC0), 0),
    (range(0xE0, 0xE1), range(0xA0, 0xC0), 1),
    (range(0xE1, 0xED), range(0x80, 0xC0), 1),
    (range(0xED, 0xEE), range(0x80, 0xA0), 1),
    (range(0xEE, 0xF0), range(0x80, 0xC0), 1),
    (range(0xF0, 0xF1), range(0x90, 0xC0), 2),
    (range(0xF1, 0xF4), range(0x80, 0xC0), 2),
    (range(0xF4, 0xF5), range(0x80, 0x90), 2),
)

# Numbers: for each state, the bytes that may follow and the state that they lead to.
_NUMBERS: Mapping[str, tuple[tuple[frozenset[int], str], ...]] = {
    "minus": ((frozenset(b"0"), "zero"), (DIGITS, "integer")),
    "zero": ((frozenset(b"."), "point"), (frozenset(b"eE"), "exponent")),
    "integer": ((DIGITS, "integer"), (frozenset(b"."), "point"), (frozenset(b"eE"), "exponent")),
    "point": ((DIGITS, "fraction"),),
    "fraction": ((DIGITS, "fraction"), (frozenset(b"eE"), "exponent")),
    "exponent": ((DIGITS, "power"), (frozenset(b"+-"), "sign")),
    "sign": ((DIGITS, "power"),),
    "power": ((DIGITS, "power"),),
}
_WHOLE_NUMBERS = frozenset({"zero", "integer", "fraction", "power"})


class Language(ABC):
    """A set of texts. `is_exact` says whether `begins` is never true of a text that nothing could complete."""

    is_exact: bool = True

    @abstractmethod
    def begins(self, text: str) -> bool:
        """Whether a text of the language begins so."""

    @abstractmethod
    def holds(self, text: str) -> bool: ...


class RegexLanguage(Language):
    """Where a pattern looks around, what begins a match is not known exactly."""

    def __init__(self, pattern: str) -> None:
        self._whole = re.compile(pattern)
        self._begun = partial_regex.compile(spelled_out(pattern), partial_regex.V0)
        self.is_exact = re.search(r"\(\?<?[=!]", pattern) is None

    def begins(self, text: str) -> bool:
        return self._begun.fullmatch(text, partial=True) is not None

    def holds(self, text: str) -> bool:
        return self._whole.fullmatch(text) is not None


_SHORTHANDS = re.compile(r"\\([dDsSwW])|\\.|\[\^?\]?|\]", re.DOTALL)


def spelled_out(pattern: str) -> str:
    """With the characters that `re` matches in the place of shorthands, of which `regex` matches others: U+001C is no `\\s` to it."""
    is_class = False

    def replaced(found: re.Match[str]) -> str:
        nonlocal is_class
        if found[1]:
            return _ranges(found[0]) if is_class else f"[{_ranges(found[0])}]"
        if found[0][0] in "[]" and (not is_class or found[0] == "]"):
            is_class = found[0][0] == "["
        return found[0]

    return _SHORTHANDS.sub(replaced, pattern)


@cache
def _ranges(shorthand: str) -> str:
    spans = re.finditer(f"{shorthand}+", "".join(chr(point) for point in range(0x110000) if not 0xD800 <= point <= 0xDFFF))
    return "".join(f"\\U{ord(span[0][0]):08x}-\\U{ord(span[0][-1]):08x}" for span in spans)


class ChoiceLanguage(Language):
    def __init__(self, choices: list[str]) -> None:
        self._choices = sorted(choices)

    def begins(self, text: str) -> bool:
        place = bisect.bisect_left(self._choices, text)
        return place < len(self._choices) and self._choices[place].startswith(text)

    def holds(self, text: str) -> bool:
        place = bisect.bisect_left(self._choices, text)
        return place < len(self._choices) and self._choices[place] == text


@dataclass(frozen=True, slots=True)
class TextState:
    """Where a text is after some bytes; `pending` are those of a character that is not complete. Equal for equal texts of a language."""

    language: Language
    text: str = ""
    pending: bytes = b""

    @property
    def is_complete(self) -> bool:
        return not self.pending and self.language.holds(self.text)

    @property
    def is_settled(self) -> bool:
        """Whether it is known that something completes the text."""
        return self.language.is_exact and not self.pending and UNDECIDED not in self.text

    def shortened(self) -> "TextState":
        return self

    def step(self, byte: int) -> "TextState | None":
        """None where no text of the language goes on so."""
        data = self.pending + bytes([byte])
        try:
            text = self.text + data.decode()
        except UnicodeDecodeError as error:
            return TextState(self.language, self.text, data) if error.reason == "unexpected end of data" else None
        return TextState(self.language, text) if self.language.begins(text) else None

    def after(self, data: bytes) -> "TextState | None":
        state: TextState | None = self
        for byte in data:
            state = state.step(byte) if state is not None else None
        return state


def read_choices(text: str) -> list[str]:
    choices = json.loads(text)
    if not isinstance(choices, list) or not choices or not all(isinstance(choice, str) for choice in choices):
        raise ValueError("a choice is an array of strings")
    return choices


class Syntax(NamedTuple):
    """Where a JSON text is after some bytes.

    `mode` is what comes next: "value", "first item", "first name", "name", "colon", "after" (a value), a state of a number, a literal
    that has begun, or a string. `rest` is what is left of a literal, of an escape or of a UTF-8 sequence. `stack` are the open
    containers, the innermost last.
    """

    mode: str = "value"
    stack: str = ""
    rest: bytes = b""
    is_name: bool = False  # of a string

    @property
    def is_settled(self) -> bool:
        return False  # it depends on the schema

    @property
    def is_complete(self) -> bool:
        return not self.stack and (self.mode == "after" or self.mode in _WHOLE_NUMBERS)

    def after(self, data: bytes) -> "Syntax | None":
        """None where no JSON text continues so."""
        state = self
        for byte in data:
            following = state.step(byte)
            if following is None:
                return None
            state = following
        return state

    def step(self, byte: int) -> "Syntax | None":
        if self.mode == "unknown":
            return self
        if self.mode == "string":
            return self._in_string(byte)
        if self.mode == "literal":
            return self._in_literal(byte)
        if self.mode in _NUMBERS:
            for following, mode in _NUMBERS[self.mode]:
                if byte in following:
                    return self._replace(mode=mode)
            return self._replace(mode="after").step(byte) if self.mode in _WHOLE_NUMBERS else None
        if byte in WHITE_SPACE:
            return self
        return self._between(byte)

    def _between(self, byte: int) -> "Syntax | None":
        if self.mode in ("value", "first item"):
            return self._closed(byte) if self.mode == "first item" and byte == ord("]") else self._value(byte)
        if self.mode in ("first name", "name"):
            if byte == ord('"'):
                return self._replace(mode="string", is_name=True)
            return self._closed(byte) if self.mode == "first name" else None
        if self.mode == "colon":
            return self._replace(mode="value") if byte == ord(":") else None
        if byte == ord(",") and self.stack:
            if self.stack == UNKNOWN:
                return self._replace(mode="unknown")
            return self._replace(mode="name" if self.stack[-1] == "{" else "value")
        return self._closed(byte)

    def _value(self, byte: int) -> "Syntax | None":
        if byte == ord('"'):
            return self._replace(mode="string", is_name=False)
        if byte in b"{[":
            return self._replace(mode="first name" if byte == ord("{") else "first item", stack=self.stack + chr(byte))
        if byte == ord("-"):
            return self._replace(mode="minus")
        if byte in DIGITS:
            return self._replace(mode="zero" if byte == ord("0") else "integer")
        for literal in LITERALS:
            if byte == literal[0]:
                return self._replace(mode="literal", rest=literal[1:])
        return None

    def _closed(self, byte: int) -> "Syntax | None":
        if byte not in CLOSERS or not self.stack:
            return None
        if self.stack == UNKNOWN:
            return self._replace(mode="after")
        return self._replace(mode="after", stack=self.stack[:-1]) if self.stack[-1] == CLOSERS[byte] else None

    def _in_literal(self, byte: int) -> "Syntax | None":
        if byte != self.rest[0]:
            return None
        return self._replace(rest=self.rest[1:]) if len(self.rest) > 1 else self._replace(mode="after", rest=b"")

    def _in_string(self, byte: int) -> "Syntax | None":
        if self.rest:
            return self._in_sequence(byte)
        if byte == ord('"'):
            return self._replace(mode="colon" if self.is_name else "after", is_name=False)
        if byte == ord("\\"):
            return self._replace(rest=b"\\")
        if byte < 0x20:
            return None
        if byte < 0x80:
            return self
        for number, (leads, _, _) in enumerate(_LEADS):
            if byte in leads:
                return self._replace(rest=bytes([number]))
        return None

    def _in_sequence(self, byte: int) -> "Syntax | None":
        """`rest` is a backslash, a number of `_LEADS`, or as many "u" or 0x80 as there are digits or continuations to come."""
        kind = self.rest[0]
        if kind == ord("\\"):
            if byte == ord("u"):
                return self._replace(rest=b"uuuu")
            return self._replace(rest=b"") if byte in ESCAPED else None
        if kind == ord("u"):
            return self._replace(rest=self.rest[1:]) if byte in HEX_DIGITS else None
        if kind == 0x80:
            return self._replace(rest=self.rest[1:]) if byte in range(0x80, 0xC0) else None
        _, following, num_more = _LEADS[kind]
        return self._replace(rest=b"\x80" * num_more) if byte in following else None

    def shortened(self) -> "Syntax":
        """With no more of the stack than a token can close."""
        return self if len(self.stack) <= MAX_STACK else self._replace(stack=UNKNOWN + self.stack[-MAX_STACK:])


class State(Protocol):
    """Where a text of some language is. `is_settled`: something completes it, for certain."""

    @property
    def is_settled(self) -> bool: ...

    def step(self, byte: int) -> "State | None": ...

    def shortened(self) -> Any: ...


_Node: TypeAlias = "tuple[list[int], dict[int, _Node]]"  # the tokens that end here, and what follows by bytes


@dataclass
class DecidedTokens:
    """The tokens of a vocabulary that no text of a language has at some place, and those that some text has there."""

    token_bytes: Iterable[bytes | None]
    size: int
    _root: _Node = field(init=False)
    _known: dict[Any, tuple[bytes, bytes]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self._root = ([], {})
        for token_id, data in enumerate(self.token_bytes):
            node = self._root
            for byte in data or b"":
                node = node[1].setdefault(byte, ([], {}))
            if data:
                node[0].append(token_id)

    def at(self, state: State) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
        """Two of bool [size]: those that can only be masked, and those that have to be allowed.

        Stop tokens and added ones, which are no text, are among the former; tokens that end within a character are among neither.
        """
        key = state.shortened()
        if (known := self._known.get(key)) is None:
            if len(self._known) == MAX_KNOWN:
                self._known.clear()
            impossible, needed = np.ones(self.size, dtype=np.bool_), np.zeros(self.size, dtype=np.bool_)
            for token_ids, is_settled in self._possible(key):
                impossible[token_ids] = False
                needed[token_ids] = is_settled
            known = self._known[key] = (np.packbits(impossible).tobytes(), np.packbits(needed).tobytes())
        impossible, needed = (np.unpackbits(np.frombuffer(bits, dtype=np.uint8), count=self.size).astype(np.bool_) for bits in known)
        return impossible, needed

    def _possible(self, state: State) -> Iterator[tuple[list[int], bool]]:
        waiting = [(state, self._root)]
        while waiting:
            state, (_, following) = waiting.pop()
            for byte, node in following.items():
                then = state.step(byte)
                if then is not None:
                    if node[0]:
                        yield node[0], then.is_settled
                    waiting.append((then, node))
