"""Two ways in which one family writes tool calls: what the first parser lets through as text, the second one reads."""

from collections.abc import Callable, Iterable

from penstock.engine.events import Event, Text, ToolCallArguments, ToolCallStart
from penstock.engine.parsing import Parser, ToolParser
from penstock.engine.text.answer import split_at_calls


class ParsersInTurn(ToolParser):
    """A tool parser made of two, whose calls are numbered as one row. A call that the first finds ends whatever the second was reading.

    While the second is inside a call, text goes around the first, and so does what that one still holds when the call begins.
    """

    def __init__(self, first: Parser, new_second: Callable[[], Parser]) -> None:
        self._first = first
        self._new_second = new_second
        self._second = new_second()
        self._num_calls = 0

    @property
    def is_in_call(self) -> bool:
        """Whether either is inside a call."""
        return self._first.is_in_call or self._second.is_in_call

    def feed(self, text: str) -> list[Event]:
        """Takes text as it arrived, however it is cut."""
        events: list[Event] = []
        for part in split_at_calls(text):
            if self._second.is_in_call:
                events += self._through([Text(part)])
                continue
            events += self._through(self._first.feed(part))
            if self._second.is_in_call:
                events += self._through(self._first.release())
        return self._numbered(events)

    def finish(self) -> list[Event]:
        """What both give back."""
        return self._numbered([*self._through(self._first.finish()), *self._second.finish()])

    def _through(self, events: Iterable[Event]) -> list[Event]:
        passed: list[Event] = []
        for event in events:
            if isinstance(event, Text):
                passed += self._second.feed(event.text)
                continue
            if isinstance(event, ToolCallStart):
                passed += self._second.finish()
                self._second = self._new_second()
            passed.append(event)
        return passed

    def _numbered(self, events: Iterable[Event]) -> list[Event]:
        """No two calls are ever open, so arguments are those of the call that has begun last; those that follow each other become one."""
        numbered: list[Event] = []
        for event in events:
            if isinstance(event, ToolCallStart):
                event = ToolCallStart(self._num_calls, event.name, event.id)
                self._num_calls += 1
            elif isinstance(event, ToolCallArguments):
                last = numbered.pop() if numbered and isinstance(numbered[-1], ToolCallArguments) else None
                fragment = last.fragment if isinstance(last, ToolCallArguments) else ""
                event = ToolCallArguments(self._num_calls - 1, fragment + event.fragment)
            numbered.append(event)
        return numbered
