"""Free text in which some words begin something else, put together from parts of a `Structure`."""

from collections.abc import Sequence as List
from dataclasses import dataclass
from typing import NamedTuple

from penstock.engine.errors import InvalidRequest
from penstock.engine.structure import Either, FreeText, Literal, Marker, Repeat, Sequence, Structure, TextUntil

MAX_WORDS = 64  # each is ruled out wherever another one may come first


class Rule(NamedTuple):
    """What must follow where `pattern` comes up."""

    pattern: str
    following: Structure


@dataclass(frozen=True, slots=True)
class Closing:
    """What ends a part: any of the texts, or, where there are none, the answer's own end. `param` is their path."""

    ends: tuple[str, ...] = ()
    param: str = ""

    @property
    def structure(self) -> Structure:
        return either([text(end) for end in self.ends]) if self.ends else Literal("")


def text(written: str) -> Structure:
    return Marker(written) if written else Literal("")


def row(*parts: Structure) -> Structure:
    """One part after the other, in as few objects as that takes."""
    flat: list[Structure] = []
    for part in parts:
        if isinstance(part, Sequence):
            flat += part.parts
        elif part != Literal(""):
            flat.append(part)
    if len(flat) == 1:
        return flat[0]
    return Sequence(tuple(flat)) if flat else Literal("")


def either(parts: List[Structure]) -> Structure:
    different = tuple(dict.fromkeys(parts))
    return different[0] if len(different) == 1 else Either(different)


def dispatch(rules: List[Rule], excludes: tuple[str, ...], closing: Closing, *, is_repeated: bool, param: str) -> Structure:
    """Free text with any number of the rules' patterns in it, or one at most, to where `closing` ends it.

    Raises `InvalidRequest` for too many words, and where it cannot be told which of them comes first.
    """
    if len(rules) + len(closing.ends) + len(excludes) > MAX_WORDS:
        raise InvalidRequest(f"more than {MAX_WORDS} words are looked for in free text", param)
    if "" in closing.ends:
        raise InvalidRequest("free text needs an end that is not empty", closing.param)
    markers = _distinct([*(rule.pattern for rule in rules), *closing.ends, *excludes], param)

    def until(marker: str) -> Structure:
        return TextUntil(marker, tuple(other for other in markers if other != marker))

    last = either([until(end) for end in closing.ends]) if closing.ends else FreeText(markers)
    if not rules:
        return last
    tagged = either([row(until(rule.pattern), rule.following) for rule in rules])
    return row(Repeat(tagged), last) if is_repeated else either([last, row(tagged, closing.structure)])


def _distinct(words: List[str], param: str) -> tuple[str, ...]:
    """Raises `InvalidRequest` for the same word twice, and for one inside another, which could never come up first."""
    by_length = sorted(words, key=len)
    for position, short in enumerate(by_length):
        for word in by_length[position + 1 :]:
            if short in word:
                raise InvalidRequest(f"both {short[:100]!r} and {word[:100]!r} are looked for in free text", param)
    return tuple(words)
