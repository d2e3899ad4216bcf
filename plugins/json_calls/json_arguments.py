"""The arguments of one call: a JSON value that arrives in pieces, given out as one JSON document."""

import json
import re

from penstock.plugins.automaton import MarkerAutomaton
from penstock.plugins.json_repair import JsonRepair
from penstock.plugins.json_scanner import Chunk, JsonScanner, State

_SPACE = re.compile(r"[ \t\n\r]*")
_CONTROL = re.compile(r"[\x00-\x1f]")


class JsonArguments:
    """An object is given out as it comes, mended where it is no JSON. Anything else comes out when it is complete.

    A string that holds an object as JSON is given out as that object, and `null` or an empty string as `{}`.
    """

    def __init__(self) -> None:
        self.is_complete = False
        self.is_object = False
        """More than the opening brace of an object has come."""
        self.ends: MarkerAutomaton | None = None
        """The markers that may end an object within a string."""
        self._object: JsonRepair | None = None
        self._scanner = JsonScanner(allows_control=True)  # of any other value
        self._held: list[str] = []
        self._fragments: list[str] = []  # not yet given out

    @property
    def is_malformed(self) -> bool:
        return self._scanner.state is State.MALFORMED if self._object is None else self._object.is_malformed

    @property
    def depth(self) -> int:
        """How many brackets are open."""
        return self._scanner.depth if self._object is None else self._object.depth

    @property
    def left(self) -> str:
        """What was read last, where that went wrong, and is no part of them."""
        return "" if self._object is None else self._object.left

    @property
    def num_held(self) -> int:
        """How many characters were read last that a marker in a string may cut off."""
        return 0 if self._object is None else self._object.num_held

    @property
    def may_be_object(self) -> bool:
        """Nothing has come yet that is neither an object nor stands for one."""
        if self._object is not None or self.is_complete or not self._held:
            return self.is_object or not self.is_complete
        written = "".join(self._held)
        return written[0] == "n" or (written[0] == '"' and written[1:].lstrip()[:1] in ("", "{", "\\", '"'))

    def feed(self, text: str, position: int) -> int:
        """Reads from `position`; returns where it stopped: the end of the text, or of the value, or what makes no sense."""
        if self._object is None and not self._held:
            space = _SPACE.match(text, position)
            position = position if space is None else space.end()
            if text[position : position + 1] == "{":
                self._object = JsonRepair(self.ends)
        if self._object is not None:
            end = self._object.feed(text, position)
            self.is_object = self._object.is_begun
            self.is_complete = self._object.is_complete
            return end
        return self._feed_scanner(text, position)

    def _feed_scanner(self, text: str, position: int) -> int:
        while position < len(text) and not self._scanner.is_over:
            end = self._scanner.take(text, position)
            is_space = self._scanner.chunk is Chunk.SPACE
            self._held.append(text[position:end] if is_space else _CONTROL.sub(_escaped, text[position:end]))
            position = end
        if self._scanner.state is State.COMPLETE:
            self.end()
        return position

    def end(self) -> None:
        """They are complete. Where none have come, they are `{}`."""
        value = _meant_by("".join(self._held) or "null")
        self.is_complete = True
        self.is_object = value.startswith("{")
        self._fragments.append(value)
        self._held.clear()

    def end_at_marker(self) -> bool:
        """No more comes: whether a marker in a string ended the object."""
        return self._object is not None and self._object.end_at_marker()

    def close(self) -> None:
        """The call ends here: an object that has begun is closed."""
        if self._object is not None and self._object.is_begun:
            self._object.close()
            self.is_complete = True

    def stop(self) -> None:
        """No more comes: what is held is given out as it was written."""
        if self._object is not None:
            self._object.stop()
        self._fragments += self._held
        self._held.clear()

    def take(self) -> str:
        """What has come since the last call of this."""
        fragment = "".join(self._fragments) + ("" if self._object is None else self._object.take())
        self._fragments.clear()
        return fragment


def _escaped(control: re.Match[str]) -> str:
    return json.dumps(control[0])[1:-1]


def _meant_by(value: str) -> str:
    """The object that a string, or `null`, stands for; the value itself where it stands for none."""
    content = json.loads(value) if value[0] == '"' else "" if value == "null" else value
    content = content.strip()
    if not content:
        return "{}"
    # Half a surrogate pair is legal in JSON and cannot be encoded.
    if content[0] != "{" or any("\ud800" <= char <= "\udfff" for char in content):
        return value
    reader = JsonRepair()
    end = reader.feed(content, 0)
    return reader.take() if reader.is_complete and end == len(content) else value


class ArgumentsHolder:
    """What the readers of calls have in common: the arguments are read by a `JsonArguments` of their own."""

    def __init__(self) -> None:
        self.is_malformed = False
        self._arguments = JsonArguments()

    @property
    def num_held(self) -> int:
        return self._arguments.num_held

    @property
    def left(self) -> str:
        return self._arguments.left

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
