"""A tool parser in one file, for models whose prompt asks them to call tools like this:

    ```call
    weather {"city": "Oslo"}
    ```

Run it: `penstock --plugin examples/fenced_calls.py`
"""

import json

from penstock import Event, MarkerBuffer, Register, Text, ToolCallArguments, ToolCallStart, ToolParser, Turn, hookimpl, new_call_id

START = "```call\n"
END = "\n```"  # JSON has no line break inside a string, so arguments cannot contain this


class FencedCalls(ToolParser):
    """A block is held back until it is whole, then it is a call, or text where it is none."""

    def __init__(self, turn: Turn) -> None:
        self._buffer = MarkerBuffer(turn.added_tokens)
        self._is_off = turn.tool_choice == "none"
        self._block: list[str] = []  # the open block, its first marker included
        self._num_calls = 0

    @property
    def is_in_call(self) -> bool:
        """While a block is open, what looks like a marker of reasoning is part of it."""
        return bool(self._block)

    def feed(self, text: str) -> list[Event]:
        """Gives out text as it comes, and a call when its block ends."""
        if self._is_off:
            return [Text(text)] if text else []
        self._buffer.feed(text)
        events: list[Event] = []
        while True:
            pieces, marker = self._buffer.take_until(END if self._block else START)
            if self._block:
                self._block += pieces
                events += self._close(marker) if marker is not None else []
            else:
                events += map(Text, pieces)
                self._block = [marker] if marker is not None else []
            if marker is None:
                return events

    def finish(self) -> list[Event]:
        """A block that was never closed is text."""
        rest = [*self._block, *self._buffer.finish()]
        self._block = []
        return [Text(piece) for piece in rest]

    def _close(self, end: str) -> list[Event]:
        block, self._block = self._block, []
        name, _, arguments = "".join(block[1:]).partition(" ")
        if not name.isidentifier() or not _is_object(arguments):
            return [Text(piece) for piece in [*block, end]]
        index = self._num_calls
        self._num_calls += 1
        return [ToolCallStart(index, name, new_call_id()), ToolCallArguments(index, arguments)]


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


@hookimpl
def register_tool_parsers(register: Register) -> None:
    register("fenced_calls", FencedCalls)
