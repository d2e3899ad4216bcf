"""White space that stands alone next to tool calls: it belongs to how a model lays out an answer, and nobody wants to read it."""

from collections.abc import Iterable

from penstock.engine.events import Event, Text, ToolCallStart


class BlankText:
    """Leaves out content that is nothing but white space between reasoning, tool calls and the end of an answer that has calls.

    White space is held until what follows it is known; next to any other content it stays as it was written.
    """

    def __init__(self) -> None:
        self._held = ""
        self._has_called = False
        self._has_content = False  # since the last call

    def feed(self, events: Iterable[Event]) -> list[Event]:
        shown: list[Event] = []
        for event in events:
            if isinstance(event, Text):
                text = self._take_held() + event.text
                self._has_content = self._has_content or bool(text.strip())
                if self._has_content:
                    shown.append(Text(text))
                else:
                    self._held = text
                continue
            if isinstance(event, ToolCallStart):
                self._take_held()
                self._has_called = True
                self._has_content = False
            shown.append(event)
        return shown

    def finish(self) -> list[Event]:
        """What was held, where there are no calls."""
        held = self._take_held()
        return [Text(held)] if held and not self._has_called else []

    def _take_held(self) -> str:
        held, self._held = self._held, ""
        return held
