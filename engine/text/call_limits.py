"""Bounds on the tool calls of one answer: where the answer ends, and what of its calls is delivered."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from penstock.engine.events import Event, Text, ToolCallArguments, ToolCallStart


@dataclass(frozen=True, slots=True, kw_only=True)
class CallLimits:
    """An answer ends after `max_calls` calls, and after `max_alike` consecutive calls of the same name and arguments, to the letter.

    None is no bound. `opening` is the text with which a grammar opens calls: where an answer is cut before a call has its name, that text
    and all after it is the grammar's markup and no content. An answer that is held to calls alone has an empty `opening`: all of it is.
    """

    max_calls: int | None = None
    max_alike: int | None = None
    opening: str | None = None


NO_LIMITS = CallLimits()


class LimitedCalls:
    """Passes the events of one answer on until a call goes beyond the limits; from there on nothing passes, and `is_over` is set.

    A call that may yet turn out to repeat the ones before it once too often is held back until it differs from them.
    """

    def __init__(self, limits: CallLimits) -> None:
        self.is_over = False
        self._limits = limits
        self._num_calls = 0
        self._num_alike = 0  # the last whole call, and those before it that were the same
        self._previous = ("", "")  # the last whole call: its name and arguments
        self._name = ""
        self._arguments: list[str] = []
        self._held: list[Event] = []
        self._num_matched = 0  # characters of the previous arguments that the held call has repeated so far

    def feed(self, events: Iterable[Event]) -> list[Event]:
        passed: list[Event] = []
        for event in events:
            if self.is_over:
                break
            if isinstance(event, ToolCallStart):
                passed += self._start(event)
            elif isinstance(event, ToolCallArguments):
                passed += self._go_on(event)
            else:
                passed += [*self._release(), event]
        return passed

    def finish(self, unread: Sequence[Event]) -> list[Event]:
        """Generation is over, and `unread` is what parsers had held. A call that was cut while it was held passes as far as it came."""
        passed = self.feed(unread if self._limits.opening is None else _before(self._limits.opening, unread))
        return passed + self._release()

    def _release(self) -> list[Event]:
        held, self._held = self._held, []
        return held

    def _start(self, event: ToolCallStart) -> list[Event]:
        passed = self._release()
        if self._num_calls:
            call = (self._name, "".join(self._arguments))
            self._num_alike = self._num_alike + 1 if call == self._previous else 1
            self._previous = call
        if self._limits.max_calls is not None and self._num_calls >= self._limits.max_calls:
            self.is_over = True
            return passed
        self._num_calls += 1
        self._name, self._num_matched = event.name, 0
        self._arguments.clear()
        if self._limits.max_alike is None or self._num_alike < self._limits.max_alike or event.name != self._previous[0]:
            return [*passed, event]
        self._held = [event]
        return passed

    def _go_on(self, event: ToolCallArguments) -> list[Event]:
        self._arguments.append(event.fragment)
        if not self._held:
            return [event]
        self._held.append(event)
        arguments = self._previous[1]
        if not arguments.startswith(event.fragment, self._num_matched):
            return self._release()
        self._num_matched += len(event.fragment)
        if self._num_matched == len(arguments):  # a whole document, of which nothing can follow
            self.is_over = True
            self._held = []
        return []


def _before(opening: str, events: Sequence[Event]) -> list[Event]:
    """The events without the text from `opening` on."""
    room = "".join(event.text for event in events if isinstance(event, Text)).find(opening)
    if room < 0:
        return list(events)
    kept: list[Event] = []
    for event in events:
        if isinstance(event, Text):
            event = event if len(event.text) <= room else Text(event.text[:room])
            room -= len(event.text)
        kept.append(event)
    return kept
