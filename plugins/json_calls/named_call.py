"""One tool call whose name has been read before: only its arguments are JSON."""

from penstock.plugins.json_calls.json_arguments import ArgumentsHolder


class NamedCall(ArgumentsHolder):
    """Reads the arguments: an object, a string that holds one, or `null`."""

    def __init__(self, name: str, call_id: str | None = None) -> None:
        super().__init__()
        self.name: str | None = name
        self.call_id = call_id
        self.is_refused = False
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

    def end(self) -> None:
        """The format has ended the call without arguments."""
        self._arguments.end()
