"""One tool call in JSON, streamed: an object with a name and arguments, or the arguments alone."""

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Container
from dataclasses import dataclass

from penstock.engine.text.streaming import PatternState
from penstock.plugins.json.repair import JsonRepair
from penstock.plugins.json.scanner import Chunk, JsonScanner, State

_SPACE = re.compile(r"[ \t\n\r]*")
_CONTROL = re.compile(r"[\x00-\x1f]")


class JsonArguments:
    """Streams an object, repaired where it is not JSON. Anything else is emitted when it is complete.

    A string that holds an object as JSON is emitted as that object, and `null` or an empty string as `{}`.
    """

    def __init__(self) -> None:
        self.is_complete = False
        self.is_object = False
        """More than the opening brace of an object has come."""
        self.ends: PatternState[str] | None = None
        """The markers that may end an object within a string."""
        self._object: JsonRepair | None = None
        self._scanner = JsonScanner(allows_control=True)  # of any other value
        self._held: list[str] = []
        self._fragments: list[str] = []  # not emitted yet

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
        """How many characters were read last that a marker in a string may cut off; where that made them malformed, it has."""
        return 0 if self._object is None else self._object.num_held

    @property
    def may_be_object(self) -> bool:
        """Whether the text so far may be an object or a value that stands for one."""
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
        """The arguments are complete. Without any, they are `{}`."""
        value = _meant_by("".join(self._held) or "null")
        self.is_complete = True
        self.is_object = value.startswith("{")
        self._fragments.append(value)
        self._held.clear()

    def end_at_marker(self) -> bool:
        """At the end of input: whether a marker in a string ended the object."""
        return self._object is not None and self._object.end_at_marker()

    def close(self) -> None:
        """The call ends here: an object that has begun is closed."""
        if self._object is not None and self._object.is_begun:
            self._object.close()
            self.is_complete = True

    def stop(self) -> None:
        """At the end of input: emits the text held back, unchanged."""
        if self._object is not None:
            self._object.stop()
        self._fragments += self._held
        self._held.clear()

    def take(self) -> str:
        """The new text since the last call."""
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


class StreamedCall(ABC):
    """Reads one streamed call: its name, the id that the format itself gives it, and its arguments, by `JsonArguments`.

    `is_refused` says that it may be well-formed and is none, so that nothing in it is taken for one either. `is_malformed` at the first
    character that makes no sense.
    """

    name: str | None = None
    call_id: str | None = None
    is_refused = False

    def __init__(self) -> None:
        self.is_malformed = False
        self.arguments = JsonArguments()

    @property
    @abstractmethod
    def can_start(self) -> bool:
        """Whether this is a call whose name is known, so that its arguments may be emitted."""

    @property
    @abstractmethod
    def is_named(self) -> bool:
        """Whether this is a call if the answer ends here."""

    @property
    @abstractmethod
    def is_complete(self) -> bool: ...

    @property
    @abstractmethod
    def depth(self) -> int:
        """How many brackets are open."""

    @abstractmethod
    def feed(self, text: str, position: int) -> int:
        """Reads from `position`; returns where it stopped: the end of the text, or of the call, or what is malformed."""

    def end_at_marker(self) -> bool:
        """At the end of input: whether a marker in an open string ended the call, which is malformed then."""
        self.is_malformed = self.is_malformed or self.arguments.end_at_marker()
        return self.is_malformed


@dataclass(frozen=True, slots=True)
class CallKeys:
    """The keys of the object. Without `name`, the first key is the call's name itself, and its value the arguments.

    Without a marker (`is_bare`), an object is a call only if its arguments are an object and its first key is one of a call's.
    """

    name: str | None = "name"
    arguments: tuple[str, ...] = ("arguments", "parameters")
    id: str | None = None
    is_bare: bool = False

    def may_begin(self, key: str) -> bool:
        return not self.is_bare or key in (self.name, *self.arguments, self.id, "type", "id")


USUAL_KEYS = CallKeys()


class JsonCall(StreamedCall):
    """Reads the object and emits its arguments as `JsonArguments` does, character by character.

    The keys may come in any order, and others are ignored. `is_malformed` at the first character that cannot be right: no JSON, no
    object, a name that is no string, an object that ends without one, or arguments that are no object. An object with nothing but a name
    has the arguments `{}`; one that has other members in the place of arguments is no call. With `offered`, what calls anything else is
    refused.
    """

    def __init__(self, keys: CallKeys = USUAL_KEYS, offered: Container[str] | None = None) -> None:
        super().__init__()
        self._keys = keys
        self._offered = offered
        self._scanner = JsonScanner(allows_control=True)
        self._key: list[str] = []
        self._value: list[str] = []  # of the name, or of the id
        self._reading = ""  # what the value is that is being read, where it matters
        self._num_keys = 0
        self._has_arguments = False
        self._has_others = False  # members that mean nothing in a call

    @property
    def can_start(self) -> bool:
        """The name is known and the arguments have begun; an id that comes after them is too late."""
        if self.name is None or (self._keys.is_bare and not self.arguments.is_object):
            return False
        return self.arguments.is_object or self.is_complete

    @property
    def is_named(self) -> bool:
        if self.name is None or self.is_malformed or not self.arguments.may_be_object:
            return False
        return self.can_start if self._keys.is_bare else self._has_arguments or not self._has_others

    @property
    def depth(self) -> int:
        return self._scanner.depth + (self.arguments.depth if self._is_in_arguments else 0)

    @property
    def is_complete(self) -> bool:
        return self._scanner.state is State.COMPLETE and not self.is_malformed

    def feed(self, text: str, position: int) -> int:
        while position < len(text) and not self.is_malformed and not self.is_complete:
            if self._is_in_arguments:
                position = self._read_arguments(text, position)
                continue
            depth = self._scanner.depth
            end = self._scanner.take(text, position)
            if self._scanner.state is State.MALFORMED or not self._note(text[position:end], depth):
                self.is_malformed = True
                break
            position = end
        return position

    @property
    def _is_in_arguments(self) -> bool:
        return self._reading == "arguments" and not self.arguments.is_complete

    def _read_arguments(self, text: str, position: int) -> int:
        end = self.arguments.feed(text, position)
        self.is_malformed = self.arguments.is_malformed
        if self.arguments.is_complete:
            self.is_malformed = not self.arguments.is_object
            self._scanner.pass_value()
        return end

    def _note(self, chunk: str, depth: int) -> bool:
        """Keeps what matters of a chunk that was read at `depth`; False where it makes this no call."""
        scanner = self._scanner
        deepest = max(depth, scanner.depth)
        if deepest == 0:
            return scanner.chunk is Chunk.SPACE
        if deepest > 1 or scanner.chunk is Chunk.SCALAR:
            return self._note_value(chunk)
        if scanner.chunk is Chunk.KEY:
            self._key.append(chunk)
        elif scanner.state is State.VALUE:
            return self._start_value()
        elif scanner.state is State.COMPLETE:
            return self._end()
        return True

    def _start_value(self) -> bool:
        """After a colon at depth 1. A repeated key is ignored: its first value may have been emitted already."""
        if not self._key:
            return True
        key = json.loads("".join(self._key), strict=False)
        self._key.clear()
        self._num_keys += 1
        self._reading = ""
        if self._num_keys == 1:
            self.is_refused = not self._keys.may_begin(key)
        if self._keys.name is None:
            self._reading = "arguments"
            self._has_arguments = True
            self.name = key
            return self._num_keys == 1 and is_name(key)
        if key == self._keys.name and self.name is None:
            self._reading = "name"
        elif key == self._keys.id and self.call_id is None and not self.can_start:
            self._reading = "id"
        elif key in self._keys.arguments and not self._has_arguments:
            self._reading = "arguments"
            self._has_arguments = True
        elif key not in (self._keys.name, self._keys.id, "id", "type"):
            self._has_others = True
        self._value.clear()
        return True

    def _note_value(self, chunk: str) -> bool:
        is_over = self._scanner.depth == 1 and not self._scanner.is_in_scalar
        if self._reading:
            self._value.append(chunk)
            is_string = self._value[0][0] == '"'
            if self._reading == "name":
                return is_string and (not is_over or self._end_name())
            if is_string and is_over:
                self._end_id()
        return True

    def _end_name(self) -> bool:
        self.name = json.loads("".join(self._value), strict=False)
        self.is_refused = self.is_refused or (self._offered is not None and self.name not in self._offered)
        return is_name(self.name)

    def _end_id(self) -> None:
        call_id = json.loads("".join(self._value), strict=False)
        if is_name(call_id):
            self.call_id = call_id

    def _end(self) -> bool:
        """At the object's end; False where it was no call."""
        if self._keys.is_bare:
            return self.can_start
        if self.name is None or (self._has_others and not self._has_arguments):
            return False
        if not self._has_arguments:
            self.arguments.end()
        return True


def is_name(text: str | None) -> bool:
    # Half a surrogate pair is legal in JSON and cannot be encoded.
    return text is not None and text != "" and not any("\ud800" <= char <= "\udfff" for char in text)


class NamedCall(StreamedCall):
    """Reads the arguments: an object, a string that holds one, or `null`."""

    def __init__(self, name: str, call_id: str | None = None) -> None:
        super().__init__()
        self.name = name
        self.call_id = call_id
        self._has_begun = False

    @property
    def can_start(self) -> bool:
        return self.arguments.is_object

    @property
    def is_named(self) -> bool:
        return not self.is_malformed

    @property
    def is_complete(self) -> bool:
        return self.arguments.is_complete

    @property
    def depth(self) -> int:
        return self.arguments.depth

    def feed(self, text: str, position: int) -> int:
        while not self._has_begun and position < len(text):
            if text[position] in '{"n':
                self._has_begun = True
            elif text[position] in " \t\r\n":
                position += 1
            else:
                self.is_malformed = True
                return position
        end = self.arguments.feed(text, position)
        self.is_malformed = self.arguments.is_malformed or (self.arguments.is_complete and not self.arguments.is_object)
        return end

    def end(self) -> None:
        """The format has ended the call without arguments."""
        self.arguments.end()
