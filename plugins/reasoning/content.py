"""Reasoning parsers that change what is content: tags taken out of it, reasoning moved to it, the prompt's marker put in front of it."""

from collections.abc import Iterable

from penstock.engine.contracts.parsing import Event, Phase, Reasoning, ReasoningParser, Text, Turn
from penstock.plugins.markers import StepBuffer


class ContentTags(ReasoningParser):
    """Takes tags such as `<answer>` … `</answer>` out of the content that another reasoning parser gives.

    The opening tag counts only where the content begins, with the white space before it, and the closing tag only after it. A line break
    on the inner side of each belongs to it, and one after the closing tag. Content without the opening tag stays as it is.
    """

    def __init__(self, parser: ReasoningParser, opening: str, closing: str, added_tokens: frozenset[str] = frozenset()) -> None:
        self.start_marker = parser.start_marker
        self.end_marker = parser.end_marker
        self._parser = parser
        self._opening = opening
        self._closings = (f"\n{closing}", closing)
        self._buffer = StepBuffer(added_tokens)
        self._step = self._read_start
        self._may_drop_newline = False

    @property
    def phase(self) -> Phase:
        return self._parser.phase

    def feed(self, text: str) -> list[Event]:
        return self._through(self._parser.feed(text))

    def finish(self) -> list[Event]:
        events = self._through(self._parser.finish())
        return [*events, *self._texts(self._buffer.finish())]

    def release(self) -> list[Event]:
        events = self._through(self._parser.release())
        return [*events, *self._texts(self._buffer.finish())]

    def _through(self, inner: Iterable[Event]) -> list[Event]:
        events: list[Event] = []
        for event in inner:
            if not isinstance(event, Text):
                events += self._texts(self._buffer.finish())
                events.append(event)
                continue
            self._buffer.feed(event.text)
            events += self._buffer.run(lambda events: self._step(events))
        return events

    def _read_start(self, events: list[Event]) -> None:
        space, marker = self._buffer.start(self._opening)
        if marker is None:
            events += self._texts(space)
            self._step = self._read_rest
        else:
            self._may_drop_newline = True
            self._step = self._read_inside

    def _read_inside(self, events: list[Event]) -> None:
        self._buffer.until(lambda piece: events.extend(self._texts([piece])), *self._closings)
        self._may_drop_newline = True
        self._step = self._read_rest

    def _read_rest(self, events: list[Event]) -> None:
        self._buffer.until(lambda piece: events.extend(self._texts([piece])))

    def _texts(self, pieces: list[str]) -> list[Event]:
        if pieces and self._may_drop_newline:
            self._may_drop_newline = False
            if pieces[0].startswith("\n"):
                pieces = [pieces[0][1:], *pieces[1:]]
        return [Text(piece) for piece in pieces if piece]


class NonemptyContent(ReasoningParser):
    """Moves the reasoning that another parser gives to the content, where that has nothing but white space.

    Which of the two it was is known at the first content or at the end: until then it is held back.
    """

    def __init__(self, parser: ReasoningParser) -> None:
        self.start_marker = parser.start_marker
        self.end_marker = parser.end_marker
        self._parser = parser
        self._held: list[Event] = []
        self._is_decided = False

    @property
    def phase(self) -> Phase:
        return self._parser.phase

    def feed(self, text: str) -> list[Event]:
        return self._through(self._parser.feed(text))

    def finish(self) -> list[Event]:
        events = self._through(self._parser.finish())
        events += [Text(event.text) if isinstance(event, Reasoning) else event for event in self._held]
        self._held = []
        return events

    def release(self) -> list[Event]:
        return self._through(self._parser.release())

    def _through(self, events: Iterable[Event]) -> list[Event]:
        if self._is_decided:
            return list(events)
        for event in events:
            self._held.append(event)
            self._is_decided = self._is_decided or not (isinstance(event, Reasoning) or (isinstance(event, Text) and event.text.isspace()))
        if not self._is_decided:
            return []
        released, self._held = self._held, []
        return released


class AppendThink(ReasoningParser):
    """Emits `<think>` and then the whole answer, markers included. Nothing is reasoning, so constraints hold from the first token."""

    start_marker = "<think>"
    end_marker = "</think>"
    phase = Phase.CONTENT

    def __init__(self, turn: Turn) -> None:
        self._prefix = "" if turn.phase("<think>", "</think>") is Phase.CONTENT else self.start_marker

    def feed(self, text: str) -> list[Event]:
        if not text:
            return []
        if text in (self.start_marker, self.end_marker):
            text = str(text)  # a marker that is a special token is to be seen here
        prefix, self._prefix = self._prefix, ""
        return [Text(prefix), Text(text)] if prefix else [Text(text)]

    def finish(self) -> list[Event]:
        """Emits the marker even if nothing followed it."""
        prefix, self._prefix = self._prefix, ""
        return [Text(prefix)] if prefix else []
