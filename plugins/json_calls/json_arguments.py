"""The arguments of one call: a JSON value that arrives in chunks, given out as one JSON document."""

import json

from penstock.plugins.json_scanner import JsonScanner, State


class JsonArguments:
    """What was written is given out as it is, at once, but for two things that models write where they mean an object.

    A string that holds an object as JSON is given out as that object, and `null` or an empty string as `{}`: both when they are complete.
    """

    def __init__(self) -> None:
        self.is_object = False
        """More than the opening brace of an object has come."""
        self._fragments: list[str] = []  # not yet given out
        self._held: list[str] = []  # of a value that may stand for another one
        self._first = ""

    def add(self, chunk: str) -> None:
        """Adds a chunk of the value as a `JsonScanner` passes it. The first one is where the value begins."""
        if not self._first:
            self._first = chunk[0]
        elif self._first == "{" and not chunk.isspace():
            self.is_object = True
        (self._held if self._first in '"n' else self._fragments).append(chunk)

    def end(self) -> None:
        """The value is complete. Where none has come, it is `{}`."""
        if not self._first or self._held:
            value = _meant_by("".join(self._held) or "null")
            self.is_object = value.startswith("{")
            self._held.clear()
            self._fragments.append(value)

    def release(self) -> None:
        """No more of the value comes: what is held is given out as it was written."""
        self._fragments += self._held
        self._held.clear()

    def take(self) -> str:
        """What has come since the last call of this."""
        fragment = "".join(self._fragments)
        self._fragments.clear()
        return fragment


def _meant_by(value: str) -> str:
    """The object that a string, or `null`, stands for; the value itself where it stands for none."""
    content = "" if value == "null" else json.loads(value).strip()
    if not content:
        return "{}"
    return content if content[0] == "{" and _is_document(content) else value


def _is_document(text: str) -> bool:
    scanner = JsonScanner()
    position = 0
    while position < len(text) and not scanner.is_over:
        position = scanner.take(text, position)
    # Half a surrogate pair is legal in JSON and cannot be encoded.
    return scanner.state is State.COMPLETE and position == len(text) and not any("\ud800" <= char <= "\udfff" for char in text)
