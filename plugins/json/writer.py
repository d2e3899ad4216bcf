"""Writes one JSON document piece by piece, for formats whose values are not JSON, and the arguments of calls made of parameters."""

import json
import re

from penstock.plugins.calls.schema_values import TextValue, quoted

_CLOSERS = {"{": "}", "[": "]"}
_SURROGATE = re.compile("[\ud800-\udfff]")


def escaped(text: str) -> str:
    """The inside of a JSON string. What is not ASCII stays as it is, but for halves of surrogate pairs, which have no encoding."""
    return _SURROGATE.sub(lambda half: f"\\u{ord(half[0]):04x}", json.dumps(text, ensure_ascii=False)[1:-1])


class JsonWriter:
    """What has been written so far can always be closed: a key comes out only with its value."""

    def __init__(self) -> None:
        self._out: list[str] = []
        self._closers: list[str] = []
        self._is_first = True
        self._key: str | None = None
        self._is_in_string = False

    @property
    def depth(self) -> int:
        return len(self._closers)

    def take(self) -> str:
        """The new text since the last call."""
        text = "".join(self._out)
        self._out.clear()
        return text

    def key(self, name: str) -> None:
        """Of the next value. One that never gets a value is left out."""
        self._key = name

    def begin(self, opener: str) -> None:
        """An object or an array."""
        self._before_value()
        self._out.append(opener)
        self._closers.append(_CLOSERS[opener])
        self._is_first = True

    def end(self) -> None:
        """Closes the innermost object or array."""
        self._key = None
        self._out.append(self._closers.pop())
        self._is_first = False

    def scalar(self, json_text: str) -> None:
        """A whole value."""
        self._before_value()
        self._out.append(json_text)

    def begin_value(self) -> None:
        """Of a value that `add_json` writes piece by piece."""
        self._before_value()

    def add_json(self, json_text: str) -> None:
        self._out.append(json_text)

    def begin_string(self) -> None:
        self._before_value()
        self._out.append('"')
        self._is_in_string = True

    def add(self, text: str) -> None:
        """More of a string."""
        self._out.append(escaped(text))

    def end_string(self) -> None:
        self._out.append('"')
        self._is_in_string = False

    def close(self) -> None:
        """Ends whatever is open."""
        if self._is_in_string:
            self.end_string()
        while self._closers:
            self.end()

    def _before_value(self) -> None:
        if not self._is_first:
            self._out.append(", ")
        self._is_first = False
        if self._key is not None:
            self._out.append(f'"{escaped(self._key)}": ')
            self._key = None


class ParameterCall:
    """Collects the pieces of the object. A repeated parameter is ignored: the first may have been emitted already."""

    def __init__(self) -> None:
        self._names: set[str] = set()
        self._pieces: list[str] = []
        self._name = ""
        self._is_written = False  # the name of the parameter that is open
        self.value: TextValue | None = None

    @property
    def names(self) -> frozenset[str]:
        """The parameters that have been opened."""
        return frozenset(self._names)

    def open(self, name: str, value: TextValue | None = None) -> None:
        """A parameter begins. Without a `value` that reads it, `add_json` and `drop` write it."""
        self._name = name
        self._is_written = False
        self.value = value

    def feed(self, text: str) -> None:
        """More of the open parameter's value."""
        assert self.value is not None
        self.add_json(self.value.feed(text))

    def end(self) -> None:
        """The open parameter's value is complete."""
        assert self.value is not None
        self.add_json(self.value.finish())
        self.drop()

    def drop(self) -> None:
        """The open parameter is over."""
        self._names.add(self._name)
        self.value = None

    def add(self, name: str, json_text: str) -> None:
        """A whole parameter."""
        self.open(name)
        self.add_json(json_text)
        self.drop()

    def write(self, json_text: str) -> None:
        """More of arguments that are one JSON object by themselves."""
        if json_text:
            self._pieces.append(json_text)

    def close(self) -> None:
        """The call is complete."""
        self._pieces.append("}" if self._names else "{}")

    def cut(self) -> None:
        """The call ends inside a parameter: its value so far is kept, and nothing is closed."""
        if self.value is not None:
            self.add_json(self.value.cut())

    def take(self) -> str:
        """The new text since the last call."""
        fragment = "".join(self._pieces)
        self._pieces.clear()
        return fragment

    def add_json(self, json_text: str) -> None:
        """More of the open parameter's value."""
        if not json_text or self._name in self._names:
            return
        if not self._is_written:
            self._is_written = True
            self._pieces.append(f"{', ' if self._names else '{'}{quoted(self._name)}: ")
        self._pieces.append(json_text)
