"""The contract of every parser: sans I/O, sans tokenizer, sans request."""

import enum
from collections.abc import Iterable
from typing import Protocol

from penstock.engine.events import Event


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
