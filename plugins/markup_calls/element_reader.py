"""Reads one call whose arguments are elements, each tag behind a mark of its own: how MiniMax-M3 writes them."""

import re
from collections.abc import Callable

from penstock.engine.events import SpecialText
from penstock.plugins.markers import MarkerBuffer
from penstock.plugins.markup_calls.call_reader import Progress, Surroundings
from penstock.plugins.markup_calls.element_value import Element
from penstock.plugins.markup_calls.parameter_markup import read_attribute_tag
from penstock.plugins.schema_types import SchemaNode, ToolSchemas
from penstock.plugins.schema_values import quoted

_BEFORE_TAG = re.compile(r"\s*<?")
_IN_TAG = re.compile(r"[^<>\n]*")


class ElementReader:
    """One call, from right after `<invoke name=`, to its `</invoke>` or to the end of the section, the tag `section`.

    `mark` stands before each tag. An argument that is text comes out character by character, a nested one at its end. An element that was
    not closed ends with the one around it, or where an argument of the tool begins that it cannot hold. Tags that fit nowhere are text in
    a value that is text, and passed over elsewhere. Anything else between arguments ends the call.
    """

    def __init__(self, buffer: MarkerBuffer, mark: str, section: str, schemas: ToolSchemas, around: Surroundings) -> None:
        self.name: str | None = None
        self.is_certain = False
        self.head: list[str] = []
        self.left: list[str] = []
        self.end_marker: str | None = None
        self._buffer = buffer
        self._mark = mark
        self._section = section
        self._schemas = schemas
        self._around = around
        self._root = Element("", SchemaNode(None, None))
        self._names: set[str] = set()
        self._open: list[Element] = []  # the argument, and what is open inside it
        self._pieces: list[str] = []
        self._is_written = False  # the name of the argument that is open
        self._tag: list[str] = []  # what has come of a tag
        self._is_tag_begun = True  # which is true of the call's own
        self._step: Callable[[], Progress] = self._read_call_tag

    def read(self) -> Progress:
        return self._step()

    def settle(self) -> bool:
        return False

    def take_arguments(self) -> str:
        fragment = "".join(self._pieces)
        self._pieces.clear()
        return fragment

    def finish(self) -> list[str]:
        rest = self._buffer.finish()
        if self.name is None:
            return [*self._tag, *rest]
        if self._open:
            for piece in rest if self._step == self._read_content else ():
                self._open[-1].feed(piece)
            *around, last = self._open
            name, json_text = last.name, last.cut()
            for element in reversed(around):
                name, json_text = element.name, element.cut(name, json_text)
            self._write(json_text)
        elif self._step == self._read_content:
            self._end()
        return []

    def _read_call_tag(self) -> Progress:
        is_closed = self._take_tag()
        if is_closed is None:
            return Progress.WAITING
        self.head += self._tag
        tag = read_attribute_tag("".join(self._tag)[:-1]) if is_closed else None
        if tag is None:
            return Progress.MALFORMED
        self.name = tag.name
        self.is_certain = True
        self._root = Element("", self._schemas.of(tag.name).node)
        self._step = self._read_content
        return Progress.READ

    def _read_content(self) -> Progress:
        """What is in an element, or between arguments, up to the next mark."""
        if not self._open:
            return self._read_between()
        pieces, marker = self._buffer.take_until(self._mark)
        for piece in pieces:
            self._feed(piece)
        if marker is None:
            return Progress.WAITING
        if self._open[-1].is_in_json_string and not self._around.is_token(marker):
            self._feed(marker)
            return Progress.READ
        return self._expect_tag()

    def _read_between(self) -> Progress:
        start = self._buffer.take_start(self._mark)
        if start is None:
            return Progress.WAITING
        space, marker = start
        if marker is not None:
            return self._expect_tag()
        self.left = space
        self._end()
        return Progress.OVER

    def _expect_tag(self) -> Progress:
        self._tag = []
        self._is_tag_begun = False
        self._step = self._read_tag
        return Progress.READ

    def _read_tag(self) -> Progress:
        is_closed = self._take_tag()
        if is_closed is None:
            return Progress.WAITING
        self._step = self._read_content
        tag = "".join(self._tag).strip()[1:-1].strip() if is_closed else ""
        if tag.startswith("/"):
            return self._follow_end(tag[1:].strip())
        return self._follow_start(tag) if tag else self._no_tag()

    def _follow_start(self, name: str) -> Progress:
        if self._open and not self._open[-1].may_hold(name) and name in self._root.names and name not in self._names:
            self._close_all()
        if not self._open:
            self._is_written = False
            self._open.append(self._root.child(name))
        elif self._open[-1].is_text:
            return self._no_tag()
        else:
            self._open.append(self._open[-1].child(name))
        return Progress.READ

    def _follow_end(self, name: str) -> Progress:
        if any(element.name == name for element in self._open):
            while self._open[-1].name != name:
                self._close()
            self._close()
            return Progress.READ
        if name not in ("invoke", self._section):
            return self._no_tag()
        self._close_all()
        self._end()
        if name == self._section:
            self.end_marker = f"{self._mark}</{name}>"
        return Progress.OVER

    def _no_tag(self) -> Progress:
        for piece in [self._mark, *self._tag] if self._open else ():
            self._feed(piece)
        return Progress.READ

    def _feed(self, piece: str) -> None:
        self._open[-1].feed(piece)
        if len(self._open) == 1:
            self._write(self._open[0].take())

    def _close_all(self) -> None:
        while self._open:
            self._close()

    def _close(self) -> None:
        element = self._open.pop()
        if self._open:
            self._open[-1].add(element.name, element.finish())
            return
        self._write(element.finish(), element.name)
        self._names.add(element.name)

    def _write(self, json_text: str, name: str | None = None) -> None:
        """More of the argument that is open, or of `name`. One that comes again is passed over."""
        name = self._open[0].name if name is None else name
        if not json_text or name in self._names:
            return
        if not self._is_written:
            self._is_written = True
            self._pieces.append(f"{', ' if self._names else '{'}{quoted(name)}: ")
        self._pieces.append(json_text)

    def _end(self) -> None:
        self._pieces.append("}" if self._names else "{}")

    def _take_tag(self) -> bool | None:
        """Takes a tag with its brackets; False where something comes that cannot belong to one, which is left; None where it goes on."""
        while (piece := self._buffer.peek()) is not None:
            start = self._buffer.offset
            is_begun = self._is_tag_begun
            if isinstance(piece, SpecialText):
                is_whole = not is_begun and piece.startswith("<") and piece.endswith(">")
                if is_whole:
                    self._tag.append(piece)
                    self._buffer.skip(len(piece))
                return is_whole
            found = (_IN_TAG if is_begun else _BEFORE_TAG).match(piece, start)
            end = start if found is None else found.end()
            is_closed = is_begun and end < len(piece) and piece[end] == ">"
            end += is_closed
            if end > start:
                self._tag.append(piece[start:end])
                self._buffer.skip(end - start)
            self._is_tag_begun = is_begun or piece[start:end].endswith("<")
            if is_closed or (end < len(piece) and (is_begun or not self._is_tag_begun)):
                return is_closed
        return None
