"""The contract of parsers: the `Turn` that they get, the events that they return, and the description of their format."""

import enum
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from penstock.engine.contracts.grammar import GrammarSpec
from penstock.engine.contracts.structure import Structure


class SpecialText(str):
    """The text of one added token, as a separate piece.

    A parser's marker that the vocabulary has as one token matches only such a piece, so prose that quotes the marker does not trigger it.
    `is_hidden` is true for the tokenizer's special tokens: with `skip_special_tokens` they are left out unless a parser consumes them.
    """

    __slots__ = ("is_hidden",)
    is_hidden: bool

    def __new__(cls, text: str, *, is_hidden: bool = True) -> "SpecialText":
        piece = super().__new__(cls, text)
        piece.is_hidden = is_hidden
        return piece


@dataclass(frozen=True, slots=True)
class Text:
    """Content. `text` is a `SpecialText` if it is one added token that no parser consumed."""

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


@dataclass(frozen=True, slots=True)
class Preamble:
    """A piece of the free text before a constrained answer. No parser returns it."""

    text: str


Event = Text | Reasoning | ToolCallStart | ToolCallArguments | Preamble


@dataclass(frozen=True, slots=True)
class CallableTool:
    """A tool that may be called, and the JSON Schema of its arguments as a constraint: an object, exactly or leniently."""

    name: str
    arguments: GrammarSpec


class ToolFormat(Protocol):
    """The envelope of one wire format. Everything that its grammar allows, its parser reads as calls of these tools."""

    @property
    def opening(self) -> str:
        """The marker, or else the text, with which the first call begins. With `auto` the grammar applies from there on."""
        ...

    def calls(self, tools: Sequence[CallableTool], *, is_single: bool) -> Structure:
        """Everything after `opening`: one call of any of the tools, or, unless `is_single`, one or more."""
        ...


class Parser(ABC):
    """Turns the text of one answer into events.

    Two properties hold for every parser and are checked by `penstock.testing.check_parser`: any cut of the text gives the same answer,
    and after any prefix `finish` emits all buffered text. A parser never raises on model output and never loses any.
    """

    @abstractmethod
    def feed(self, text: str) -> Iterable[Event]:
        """Reads the next piece of text, however it is cut. A `SpecialText` is always a piece of its own."""

    @abstractmethod
    def finish(self) -> Iterable[Event]:
        """Ends the answer: emits the buffered text."""

    def release(self) -> Iterable[Event]:
        """Emits the buffered text, because a tool call has begun, and continues after the call. By default it emits nothing."""
        return ()

    @property
    def is_in_call(self) -> bool:
        """Whether the next text belongs to a tool call that has begun, in which markers of reasoning are ordinary text."""
        return False


class Phase(enum.Enum):
    """The part of the answer being generated. UNDECIDED: only white space so far, and the model may still open its reasoning itself.

    PREAMBLE is the free text that the request wants before its constrained answer; no parser reports it.
    """

    UNDECIDED = "undecided"
    REASONING = "reasoning"
    PREAMBLE = "preamble"
    CONTENT = "content"


class ReasoningParser(Parser):
    """A parser that splits reasoning from content, and reports the current phase to the engine.

    The engine reads `phase` to scope stop strings, start grammars, count reasoning tokens and enforce the thinking budget;
    it writes `end_marker` itself when the budget is spent. An empty marker is one that the engine cannot write: then no budget is enforced.
    """

    start_marker: str = ""
    end_marker: str = ""

    @property
    @abstractmethod
    def phase(self) -> Phase: ...


class ToolParser(Parser):
    """A parser that extracts tool calls, and describes how they are written.

    A parser without `tool_format` reads calls, but none can be enforced by a grammar: `tool_choice` `required` and the like are refused
    by name.
    """

    tool_format: ToolFormat | None = None


@dataclass(frozen=True, slots=True)
class Turn:
    """The context of an answer for its parsers: the prompt's end and the request's settings.

    `prompt_tail` is the rendered prompt after the last assistant header: `"<think>\\n"`, `"<think>\\n\\n</think>\\n\\n"` or `""`, and with
    `continue_final_message` the text that is being continued. That text is `continued`, as the client wrote it: a template may leave its
    reasoning out of the prompt. `added_tokens` are the texts that the vocabulary has as single tokens.
    `tools` are the request's tools as JSON; `tool_choice` is `"auto"`, `"none"`, `"required"` or a tool's name. `response_template` is
    the one in the checkpoint's tokenizer config, if any. If the answer `is_constrained`, a grammar applies to everything after the
    reasoning: once that has ended, nothing may be read as reasoning again.
    """

    prompt_tail: str = ""
    added_tokens: frozenset[str] = frozenset()
    tools: Sequence[Mapping[str, Any]] = ()
    tool_choice: str = "none"
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    response_template: Mapping[str, Any] | None = None
    continued: str = ""
    is_constrained: bool = False

    def phase(self, starts: str | Sequence[str], ends: str | Sequence[str], boundaries: Sequence[str] = ()) -> Phase:
        """REASONING if the last marker in the tail is one of `starts`, CONTENT if it is one of `ends`, UNDECIDED with neither.

        Markers before the last of `boundaries` belong to an earlier turn and are ignored. Without markers, the continuation of
        non-empty content is CONTENT.
        """
        for text in (self.prompt_tail, self.continued):
            boundary = _last(text, boundaries)
            start = _last(text, (starts,) if isinstance(starts, str) else starts)
            end = _last(text, (ends,) if isinstance(ends, str) else ends)
            if max(start, end) > boundary:
                return Phase.REASONING if start > end else Phase.CONTENT
        return Phase.CONTENT if self.continued.strip() else Phase.UNDECIDED


def _last(text: str, markers: Sequence[str]) -> int:
    return max((text.rfind(marker) for marker in markers), default=-1)


@dataclass(frozen=True, slots=True, kw_only=True)
class FormatInfo:
    """Registered with a parser's factory; docs/parsers.md is generated from these.

    `models` are the families that write the format, `markers` its markers, `quirks` anything else worth knowing, in a sentence.
    `aliases` are the parser's names in other servers.

    `signs` are texts that all occur in the chat template or among the added tokens of a model that writes this format; none of the
    `counter_signs` may occur. `other_signs` are further sets, each of which suffices like `signs`, for models whose template and
    tokens differ. Of several parsers that match, `--plugin auto` takes the one with the most signs, and of these the
    one whose signs are longest. If none matches, it takes one with a `declared_fields` entry in the checkpoint's own `response_template`.
    A parser with neither is never chosen automatically.

    `prompt_tail` is the usual end of these models' prompts after the last assistant header, with thinking on if it is optional:
    `penstock parse` assumes it without `--prompt-tail`. `example` is a short, complete answer in the format; a tool parser's calls the
    tool `weather` with the argument `city`, a string that is `Oslo`.
    """

    models: str
    markers: tuple[str, ...]
    quirks: str = ""
    aliases: tuple[str, ...] = ()
    signs: tuple[str, ...] = ()
    other_signs: tuple[tuple[str, ...], ...] = ()
    counter_signs: tuple[str, ...] = ()
    declared_fields: tuple[str, ...] = ()
    prompt_tail: str = ""
    example: str = ""


class Format(ABC):
    """A format that is a declaration: registered in place of a factory, it makes the parsers and describes itself."""

    __slots__ = ()

    @property
    @abstractmethod
    def info(self) -> FormatInfo: ...

    @abstractmethod
    def __call__(self, turn: Turn) -> Parser:
        """The parser of one answer."""
