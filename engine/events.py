"""Parsed model output as events, in order. Parsers produce these; every endpoint is a fold over them."""

from dataclasses import dataclass


class SpecialText(str):
    """The text of one added token, as a piece of its own.

    A parser's marker that the vocabulary holds as one token matches only such a piece, so prose that quotes the marker does not trigger it.
    `is_hidden` says that the tokenizer calls the token special: with `skip_special_tokens` it is left out where no parser consumed it.
    """

    __slots__ = ("is_hidden",)
    is_hidden: bool

    def __new__(cls, text: str, *, is_hidden: bool = True) -> "SpecialText":
        piece = super().__new__(cls, text)
        piece.is_hidden = is_hidden
        return piece


@dataclass(frozen=True, slots=True)
class Text:
    """Content for the reader. `text` is a `SpecialText` where it is one added token that nothing consumed."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A piece of the model's reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """A tool call begins. `index` counts from 0 within the answer; `id` is the format's native id or a fresh one."""

    index: int
    name: str
    id: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """More of the arguments of call `index`: the concatenated fragments are one JSON document."""

    index: int
    fragment: str


Event = Text | Reasoning | ToolCallStart | ToolCallArguments
