"""One tool call whose name has been read before: only its arguments are JSON."""

from penstock.plugins.json_calls.json_arguments import JsonArguments
from penstock.plugins.json_scanner import Chunk, JsonScanner, State


class NamedCall:
    """Reads the arguments: an object, or a string that holds one."""

    def __init__(self, name: str, call_id: str | None = None) -> None:
        self.name: str | None = name
        self.call_id = call_id
        self.is_malformed = False
        self.is_refused = False
        self._scanner = JsonScanner()
        self._arguments = JsonArguments()
        self._has_begun = False

    @property
    def can_start(self) -> bool:
        return self._has_begun

    @property
    def is_complete(self) -> bool:
        return self._scanner.state is State.COMPLETE

    def feed(self, text: str, position: int) -> int:
        """Reads from `position`; returns where it stopped: the end of the text, or of the arguments, or what is malformed."""
        while position < len(text) and not self.is_malformed and not self.is_complete:
            end = self._scanner.take(text, position)
            self._has_begun = self._has_begun or text[position] in '{"'
            if self._scanner.state is State.MALFORMED or not (self._has_begun or self._scanner.chunk is Chunk.SPACE):
                self.is_malformed = True
                break
            if self._has_begun:
                self._arguments.add(text[position:end])
            if self.is_complete:
                self._arguments.end()
            position = end
        return position

    def take_arguments(self) -> str:
        """The arguments that have come since the last call of this."""
        return self._arguments.take()

    def stop(self) -> None:
        self._arguments.release()

    def end(self) -> None:
        """The format has ended the call without arguments."""
        self._has_begun = True
        self._arguments.end()
