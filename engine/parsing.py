"""The contract of every parser: sans I/O, sans tokenizer, sans request."""

import enum
from collections.abc import Callable, Iterable
from typing import Protocol

from penstock.engine.events import Event
from penstock.engine.tool_format import ToolFormat


class Parser(Protocol):
    """Turns the text of one answer into events.

    Two properties hold for every parser and are checked by `penstock.testing.check_parser`: any cut of the text gives the same answer,
    and after any prefix `finish` gives back all that is held. A parser never raises on model output and never swallows any.
    """

    def feed(self, text: str) -> Iterable[Event]:
        """Takes text as it arrived, however it is cut. A `SpecialText` is always a piece of its own."""
        ...

    def finish(self) -> Iterable[Event]:
        """Generation is over: gives back whatever is held."""
        ...


class Phase(enum.Enum):
    """Where generation stands. UNDECIDED: nothing but white space so far, and the model may yet open its reasoning itself."""

    UNDECIDED = "undecided"
    REASONING = "reasoning"
    CONTENT = "content"


class ReasoningParser(Parser, Protocol):
    """A parser that splits reasoning from content, and tells the engine where it stands.

    The engine reads `phase` to scope stop strings, start grammars, count reasoning tokens and hold the thinking budget;
    it writes `end_marker` itself when the budget is spent.
    """

    start_marker: str
    end_marker: str

    @property
    def phase(self) -> Phase: ...


class ToolParser(Parser, Protocol):
    """A parser that gives tool calls, and says how they are written.

    A parser without `tool_format` reads calls all the same, but nothing can be promised of them: `tool_choice` `required` and the like
    are refused by name.

    `is_in_call` says that what comes next belongs to a call that has begun: its arguments, strings in them included. There, markers of
    reasoning are no markers. A parser without `is_in_call` is never inside a call.
    """

    @property
    def tool_format(self) -> ToolFormat | None: ...

    @property
    def is_in_call(self) -> bool: ...


def release(parser: Parser) -> list[Event]:
    """What a parser holds, where it can give that back and read on. A parser says so with a method `release`."""
    give_back: Callable[[], Iterable[Event]] | None = getattr(parser, "release", None)
    return [] if give_back is None else list(give_back())


def is_in_call(parser: Parser) -> bool:
    """Whether a parser says that what comes next belongs to a call."""
    return bool(getattr(parser, "is_in_call", False))
