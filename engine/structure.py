"""Constraints made of parts: markers, free text and constrained values in an order. Structural tags and tool calls come down to these."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.engine.grammar import GrammarSpec


@dataclass(frozen=True, slots=True)
class Literal:
    """Exactly this text, in ordinary tokens. It may be empty."""

    text: str


@dataclass(frozen=True, slots=True)
class Marker:
    """A marker as parsers recognize it: the added token of this spelling where the vocabulary has one, else the plain text."""

    text: str


@dataclass(frozen=True, slots=True)
class FreeText:
    """Any text in ordinary tokens, none included, in which no `without` marker comes up; the last part of what it stands in.

    A marker that is an added token cannot come up: its plain spelling is a quotation, and allowed.
    """

    without: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TextUntil:
    """Any text in ordinary tokens, none included, up to and including the first `marker`, which is as in `Marker`.

    No `without` marker comes up before its end, in the sense of `FreeText`: what several markers could end is one of these for each,
    without the others.
    """

    marker: str
    without: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Value:
    """What a constraint of its own allows. Its `param` says where errors in it are."""

    spec: "GrammarSpec"


@dataclass(frozen=True, slots=True)
class Sequence:
    """One part after the other."""

    parts: tuple["Structure", ...]


@dataclass(frozen=True, slots=True)
class Either:
    """One of the parts, of which there is at least one."""

    parts: tuple["Structure", ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    """The part from `minimum` to `maximum` times; without `maximum`, without bound."""

    part: "Structure"
    minimum: int = 0
    maximum: int | None = None


Structure = Literal | Marker | FreeText | TextUntil | Value | Sequence | Either | Repeat
