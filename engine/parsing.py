"""The contract of every parser: sans I/O, sans tokenizer, sans request."""

import enum
from abc import ABC, abstractmethod
from collections.abc import Iterable

from penstock.engine.events import Event
from penstock.engine.tool_format import ToolFormat


class Parser(ABC):
    """Turns the text of one answer into events.

    Two properties hold for every parser and are checked by `penstock.testing.check_parser`: any cut of the text gives the same answer,
    and after any prefix `finish` gives back all that is held. A parser never raises on model output and never swallows any.
    """

    @abstractmethod
    def feed(self, text: str) -> Iterable[Event]:
        """Takes text as it arrived, however it is cut. A `SpecialText` is always a piece of its own."""

    @abstractmethod
    def finish(self) -> Iterable[Event]:
        """Generation is over: gives back whatever is held."""

    def release(self) -> Iterable[Event]:
        """Gives back what is held, because a tool call has begun, and reads on after it. A parser that cannot do that gives nothing."""
        return ()

    @property
    def is_in_call(self) -> bool:
        """Whether what comes next belongs to a tool call that has begun: no marker of reasoning is one in there."""
        return False


class Phase(enum.Enum):
    """The part of the answer being generated. UNDECIDED: only white space so far, and the model may still open its reasoning itself."""

    UNDECIDED = "undecided"
    REASONING = "reasoning"
    CONTENT = "content"


class ReasoningParser(Parser):
    """A parser that splits reasoning from content, and reports the current phase to the engine.

    The engine reads `phase` to scope stop strings, start grammars, count reasoning tokens and hold the thinking budget;
    it writes `end_marker` itself when the budget is spent.
    """

    start_marker: str
    end_marker: str

    @property
    @abstractmethod
    def phase(self) -> Phase: ...


class ToolParser(Parser):
    """A parser that gives tool calls, and says how they are written.

    A parser without `tool_format` reads calls all the same, but nothing can be promised of them: `tool_choice` `required` and the like
    are refused by name.
    """

    tool_format: ToolFormat | None = None
