"""Languages other than JSON, independent of any grammar backend: which tokens may come next in a text of one, and which may not.

A regex is what Python's `re` says it is, and which texts begin a match is found out by the package `regex`; a choice is its texts; Lark
and GBNF are read by `context_free.py`. Unlike JSON's syntax they are exact: a token that can be followed by something has to be allowed.
"""

import bisect
import json
import re
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cache

import regex as partial_regex  # type: ignore[import-untyped]

UNDECIDED = "\0"  # no backend generates it


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
