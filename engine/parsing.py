"""The contract of every parser: sans I/O, sans tokenizer, sans request."""

import enum
from abc import ABC, abstractmethod
from collections.abc import Iterable

from penstock.engine.events import Event
from penstock.engine.tool_format import ToolFormat


class Parser(ABC):
    """Turns the text of one answer into events.

    Two properties hold for every parser and are checked by `penstock.testing.check_parser`: any cut of the text gives the same answer,
    and after any prefix `finish` emits all text held back. A parser never raises on model output and never swallows any.
    """

    @abstractmethod
    def feed(self, text: str) -> Iterable[Event]:
        """Reads the next piece of text, however it is cut. A `SpecialText` is always a piece of its own."""

    @abstractmethod
    def finish(self) -> Iterable[Event]:
        """Ends the answer: emits the text held back."""

    def release(self) -> Iterable[Event]:
        """Emits the text held back, because a tool call has begun, and reads on after the call. By default it emits nothing."""
        return ()

    @property
    def is_in_call(self) -> bool:
        """Whether the next text belongs to a tool call that has begun, in which markers of reasoning are ordinary text."""
        return False


class Phase(enum.Enum):
    """The part of the answer being generated. UNDECIDED: only white space so far, and the model may still open its reasoning itself."""

    UNDECIDED = "undecided"
    REASONING = "reasoning"
    CONTENT = "content"


class ReasoningParser(Parser):
    """A parser that splits reasoning from content, and reports the current phase to the engine.

    The engine reads `phase` to scope stop strings, start grammars, count reasoning tokens and enforce the thinking budget;
    it writes `end_marker` itself when the budget is spent.
    """

    start_marker: str
    end_marker: str

    @property
    @abstractmethod
    def phase(self) -> Phase: ...


class ToolParser(Parser):
    """A parser that extracts tool calls, and describes how they are written.

    A parser without `tool_format` reads calls, but none can be enforced by a grammar: `tool_choice` `required` and the like are refused
    by name.
    """

    tool_format: ToolFormat | None = None
