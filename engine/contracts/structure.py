"""Constraints as data: a schema, regex or grammar as the client wrote it, or a structure of markers, text and constrained values."""

import typing
from dataclasses import dataclass
from enum import StrEnum


@dataclass(frozen=True, slots=True)
class Literal:
    """Exactly this text, in ordinary tokens. It may be empty."""

    text: str


@dataclass(frozen=True, slots=True)
class Marker:
    """A marker as parsers recognize it: the added token of this spelling if the vocabulary has one, else the plain text."""

    text: str


@dataclass(frozen=True, slots=True)
class FreeText:
    """Any text in ordinary tokens, none included, in which no `without` marker occurs; the last part of its container.

    A marker that is an added token cannot occur: its plain spelling is a quotation, and allowed.
    """

    without: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TextUntil:
    """Any text in ordinary tokens, none included, up to and including the first `marker`, which is as in `Marker`.

    No `without` marker occurs before its end, in the sense of `FreeText`: text that several markers could end is one of these for each,
    without the others.
    """

    marker: str
    without: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Value:
    """A text of another constraint, whose `param` is the path for errors in it."""

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

# How a JSON Schema is read that names properties of an object and says nothing of others: it has no others, or any.
AdditionalProperties = typing.Literal["closed", "open"]


class GrammarKind(StrEnum):
    """The kind of `GrammarSpec.text`."""

    JSON_SCHEMA = "json_schema"  # a JSON Schema document, keys in the client's order
    JSON_OBJECT = "json_object"  # no text: any JSON object
    REGEX = "regex"
    CHOICE = "choice"  # a JSON array of strings
    LARK = "lark"  # a context-free grammar with a rule `start`
    GBNF = "gbnf"  # one with a rule `root`, as llama.cpp and XGrammar ("EBNF") write them
    STRUCTURE = "structure"  # no text: `GrammarSpec.structure`


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """One constraint as the client wrote it. `param` is the JSON path of its field, for error messages.

    `whitespace_pattern` is a regex for the white space between the tokens of JSON: None for the default, bounded one, "" for none at all.
    With `is_lenient`, keywords of a JSON Schema that a backend cannot enforce may be left out; the compiled grammar then names them.
    `as_written` is the constraint whose closed reading this is: it is compiled instead if no backend compiles this one.
    """

    kind: GrammarKind
    text: str
    param: str = "guided_json"
    whitespace_pattern: str | None = None
    is_lenient: bool = False
    structure: Structure | None = None
    as_written: "GrammarSpec | None" = None
