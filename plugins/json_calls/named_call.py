"""One tool call whose name has been read before: only its arguments are JSON."""

from penstock.plugins.automaton import MarkerAutomaton
from penstock.plugins.json_calls.json_arguments import JsonArguments


class NamedCall:
    """Reads the arguments: an object, a string that holds one, or `null`."""

    def __init__(self, name: str, call_id: str | None = None) -> None:
        self.name: str | None = name
        self.call_id = call_id
        self.is_malformed = False
        self.is_refused = False
        self._arguments = JsonArguments()
        self._has_begun = False

    @property
    def can_start(self) -> bool:
        return self._arguments.is_object

    @property
    def is_named(self) -> bool:
        return not self.is_malformed

    @property
    def is_complete(self) -> bool:
        return self._arguments.is_complete

    @property
    def depth(self) -> int:
        return self._arguments.depth

    @property
    def num_held(self) -> int:
        return self._arguments.num_held

    @property
    def left(self) -> str:
        return self._arguments.left

    def feed(self, text: str, position: int) -> int:
        """Reads from `position`; returns where it stopped: the end of the text, or of the arguments, or what is malformed."""
        while not self._has_begun and position < len(text):
            if text[position] in '{"n':
                self._has_begun = True
            elif text[position] in " \t\r\n":
                position += 1
            else:
                self.is_malformed = True
                return position
        end = self._arguments.feed(text, position)
        self.is_malformed = self._arguments.is_malformed or (self._arguments.is_complete and not self._arguments.is_object)
        return end

    def take_arguments(self) -> str:
        """The arguments that have come since the last call of this."""
        return self._arguments.take()

    def watch(self, ends: MarkerAutomaton) -> None:
        self._arguments.ends = ends

    def end_at_marker(self) -> bool:
        self.is_malformed = self.is_malformed or self._arguments.end_at_marker()
        return self.is_malformed

    def close(self) -> None:
        self._arguments.close()

    def stop(self) -> None:
        self._arguments.stop()

    def end(self) -> None:
        """The format has ended the call without arguments."""
        self._arguments.end()
