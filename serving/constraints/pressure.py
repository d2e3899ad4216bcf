"""Constraint pressure: how improbable the model found what its masks left, in all and by the field that was being written."""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass

from msgspec import UNSET, Struct, UnsetType

from penstock.engine.contracts.parsing import Event, Text, ToolCallArguments, ToolCallStart
from penstock.engine.deltas import SequenceDelta
from penstock.plugins.json.scanner import Chunk, JsonScanner, State

NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)  # a member that JSONPath (RFC 9535) writes behind a dot


class FieldPressure(Struct):
    """`path` is JSONPath."""

    path: str
    nats: float


class Pressure(Struct, omit_defaults=True):
    """Of one answer: the sum over its tokens of -log(the probability that the mask left), and the field with the largest part of it."""

    nats: float
    worst: FieldPressure | UnsetType


@dataclass(slots=True)
class _Container:
    """An open object or array. `place` is the member or index that is being written, None before a key is complete.

    `nats` are those of the key so far: only its last character tells which field they belong to.
    """

    path: str
    place: str | int | None
    nats: float = 0.0


class PathReader:
    """Reads a JSON document as it is written, and adds the pressure of each of its tokens to the field that the token begins in.

    A key belongs to the field that it names; commas and brackets belong to the object or array around them. Of text that is not JSON,
    everything belongs to `root`.
    """

    def __init__(self, root: str, fields: dict[str, float]) -> None:
        self._root = root
        self._fields = fields
        self._scanner = JsonScanner()
        self._open: list[_Container] = []
        self._key: list[str] = []

    def add(self, nats: float) -> None:
        """The pressure of the next token."""
        state, innermost = self._scanner.state, self._open[-1] if self._open else None
        if self._scanner.is_over or innermost is None:
            self._add(self._root, nats)
        elif innermost.place is None and state is not State.AFTER_VALUE:
            innermost.nats += nats
        else:
            self._add(innermost.path if state is State.AFTER_VALUE else self._path(innermost), nats)

    def read(self, text: str) -> None:
        position = 0
        while position < len(text):
            end = self._scanner.take(text, position)
            if self._scanner.state is State.MALFORMED:
                self.finish()
                return
            if end == position:
                if self._scanner.is_over:
                    return
                continue  # a number has ended
            self._pass(text[position:end])
            position = end

    def finish(self) -> None:
        """What belongs to a key that is not complete, belongs to its object."""
        for container in self._open:
            self._add(container.path, container.nats)
        self._open.clear()

    def _pass(self, piece: str) -> None:
        chunk = self._scanner.chunk
        if chunk is Chunk.KEY:
            self._key.append(piece)
            if self._scanner.state is State.COLON:
                container = self._open[-1]
                container.place = json.loads("".join(self._key))
                self._key.clear()
                self._add(self._path(container), container.nats)
                container.nats = 0.0
        elif chunk is Chunk.MARK:
            self._mark(piece)

    def _mark(self, mark: str) -> None:
        innermost = self._open[-1] if self._open else None
        if mark in "{[":
            path = self._root if innermost is None else self._path(innermost)
            self._open.append(_Container(path, None if mark == "{" else 0))
        elif mark in "}]":
            closed = self._open.pop()
            self._add(closed.path, closed.nats)
        elif mark == "," and innermost is not None:
            innermost.place = innermost.place + 1 if isinstance(innermost.place, int) else None

    def _path(self, container: _Container) -> str:
        match container.place:
            case int(index):
                return f"{container.path}[{index}]"
            case str(name) if NAME.fullmatch(name):
                return f"{container.path}.{name}"
            case str(name):
                return f"{container.path}['{_quoted(name)}']"
        return container.path

    def _add(self, path: str, nats: float) -> None:
        if nats:
            self._fields[path] = self._fields.get(path, 0.0) + nats


def _quoted(name: str) -> str:
    """As JSONPath writes it between single quotes. Half of a surrogate pair, which JSON may spell and UTF-8 may not, stays an escape."""
    escaped = json.dumps(name, ensure_ascii=False)[1:-1].replace('\\"', '"').replace("'", "\\'")
    return escaped.encode(errors="backslashreplace").decode()


class PressureReader:
    """The pressure of one sequence, delta by delta. Of a tool call, what comes before its arguments belongs to the whole answer, `$`."""

    def __init__(self) -> None:
        self._nats = 0.0
        self._fields: dict[str, float] = {}
        self._readers: list[PathReader] = []
        self._content = self._reader("$")
        self._current = self._content

    def feed(self, delta: SequenceDelta) -> None:
        events = iter(delta.events)
        num_read = 0
        for place, nats in delta.pressures:
            while num_read < place:
                self._read(next(events))
                num_read += 1
            self._nats += nats
            self._current.add(nats)
        self._read_all(events)

    def result(self) -> Pressure:
        """All that has been read is the answer."""
        for reader in self._readers:
            reader.finish()
        worst = max(self._fields.items(), key=lambda item: item[1], default=None)
        return Pressure(self._nats, UNSET if worst is None else FieldPressure(*worst))

    def _reader(self, root: str) -> PathReader:
        self._readers.append(PathReader(root, self._fields))
        return self._readers[-1]

    def _read_all(self, events: Iterable[Event]) -> None:
        for event in events:
            self._read(event)

    def _read(self, event: Event) -> None:
        match event:
            case Text(text):
                self._current = self._content
                self._content.read(text)
            case ToolCallStart(index):
                self._current = self._reader(f"$.tool_calls[{index}].function.arguments")
            case ToolCallArguments(_, fragment):
                self._current.read(fragment)
