"""Calls whose arguments are elements, nested like objects and arrays, with a mark before each tag."""

import json
import re
from collections.abc import Mapping
from collections.abc import Sequence as Tools
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from penstock.engine.contracts.parsing import CallableTool, SpecialText, Turn
from penstock.engine.contracts.structure import Either, Marker, Repeat, Sequence, Structure
from penstock.engine.errors import UnsupportedGrammar
from penstock.plugins.calls.markup_format import ParameterSchema, check_keywords, members, value_structure
from penstock.plugins.calls.markup_reader import read_attribute_tag
from penstock.plugins.calls.schema_values import SchemaNode, TextValue, ToolSchemas, followed, quoted
from penstock.plugins.calls.section_stream import Envelope, SectionStream
from penstock.plugins.calls.stream import CallFormat, CallReader, Progress, Surroundings
from penstock.plugins.grammars.json_schema.values import ANNOTATIONS
from penstock.plugins.json.writer import ParameterCall
from penstock.plugins.markers import StepBuffer

ITEM = "item"

_CONTAINERS = frozenset({"object", "array"})


class Element:
    """The elements inside an array are called `item`; in an object, a repeated name makes an array of its values.

    Text is coerced by the schema; text next to elements is ignored.
    """

    def __init__(self, name: str, node: SchemaNode) -> None:
        self.name = name
        self._node = node
        self._types = node.types
        self._text = TextValue(self._types)
        self._json: list[str] = []
        self._raw: list[str] = []
        self._children: dict[str, list[str]] = {}

    @property
    def is_text(self) -> bool:
        """By its schema nothing else may be inside."""
        return self._types is not None and not self._types & _CONTAINERS

    @property
    def names(self) -> frozenset[str]:
        """Of the elements that its schema describes."""
        return self._node.names

    @property
    def is_in_json_string(self) -> bool:
        return self._text.is_in_json_string

    def feed(self, text: str) -> None:
        self._json.append(self._text.feed(text))
        if not self.is_text:
            self._raw.append(text)

    def take(self) -> str:
        """What is certain of text."""
        written = "".join(self._json) if self.is_text else ""
        if written:
            self._json.clear()
        return written

    def child(self, name: str) -> "Element":
        is_item = name == ITEM and self._types is not None and "array" in self._types
        return Element(name, self._node.item if is_item else self._node.member(name))

    def may_hold(self, name: str) -> bool:
        """As far as its schema tells."""
        if self._types == frozenset({"array"}):
            return name == ITEM
        return not self.names or name in self.names

    def add(self, name: str, json_text: str) -> None:
        """A child that is complete."""
        self._children.setdefault(name, []).append(json_text)

    def finish(self) -> str:
        """The rest of the value's JSON."""
        types = self._types or frozenset()
        if not self._children:
            if types and types <= _CONTAINERS and not "".join(self._raw).strip():
                return "[]" if "array" in types else "{}"
            return "".join([*self._json, self._text.finish()])
        items = self._children.get(ITEM, [])
        if len(self._children) == 1 and items and ("array" in types or "object" not in types):
            return f"[{', '.join(items)}]"
        members = (f"{quoted(name)}: {_one_or_all(values)}" for name, values in self._children.items())
        return "{" + ", ".join(members) + "}"

    def cut(self, name: str = "", json_text: str = "") -> str:
        """The rest as far as it was written, with what there is of the child that is open."""
        if not self._children and not name:
            return "".join([*self._json, self._text.cut()])
        types = self._types or frozenset()
        names = self._children.keys() | {name} - {""}
        if names == {ITEM} and ("array" in types or "object" not in types):
            return f"[{', '.join([*self._children.get(ITEM, []), *([json_text] if name else [])])}"
        members = [f"{quoted(key)}: {_one_or_all(values)}" for key, values in self._children.items() if key != name]
        if name:
            values = self._children.get(name, [])
            members.append(f"{quoted(name)}: {'[' if values else ''}{', '.join([*values, json_text])}")
        return "{" + ", ".join(members)


def _one_or_all(values: list[str]) -> str:
    return values[0] if len(values) == 1 else f"[{', '.join(values)}]"


_BEFORE_TAG = re.compile(r"\s*<?")
_IN_TAG = re.compile(r"[^<>\n]*")


class ElementReader(CallReader):
    """One call, from right after `<invoke name=`, to its `</invoke>` or to the end of the section, the tag `section`.

    `mark` precedes each tag. A text argument is streamed character by character, a nested one is emitted at its end. An element that was
    not closed ends with the one around it, or where an argument of the tool begins that it cannot hold. Tags that fit nowhere are text in
    a value that is text, and ignored elsewhere. Anything else between arguments ends the call.
    """

    def __init__(self, buffer: StepBuffer, mark: str, section: str, schemas: ToolSchemas, around: Surroundings) -> None:
        super().__init__(buffer, around)
        self._schemas = schemas
        self._mark = mark
        self._section = section
        self._root = Element("", SchemaNode(None, None))
        self._call = ParameterCall()
        self._open: list[Element] = []  # the argument, and what is open inside it
        self._tag: list[str] = []  # the tag that is being read
        self._is_tag_begun = True  # which is true of the call's own
        self._step = self._read_call_tag

    def take_arguments(self) -> str:
        return self._call.take()

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
            self._call.add_json(json_text)
        elif self._step == self._read_content:
            self._call.close()
        return []

    def _read_call_tag(self) -> Progress:
        is_closed = self._take_tag()
        self.head += self._tag
        tag = read_attribute_tag("".join(self._tag)[:-1]) if is_closed else None
        if tag is None:
            return Progress.MALFORMED
        self.name = tag.name
        self.is_certain = True
        self._root = Element("", self._schemas.of(tag.name))
        self._step = self._read_content
        return Progress.READ

    def _read_content(self) -> Progress:
        """What is in an element, or between arguments, up to the next mark."""
        if not self._open:
            return self._read_between()
        marker = self._buffer.until(self._feed, self._mark)
        if self._open[-1].is_in_json_string and not self._around.is_token(marker):
            self._feed(marker)
            return Progress.READ
        return self._expect_tag()

    def _read_between(self) -> Progress:
        space, marker = self._buffer.start(self._mark)
        if marker is not None:
            return self._expect_tag()
        self.left = space
        self._call.close()
        return Progress.OVER

    def _expect_tag(self) -> Progress:
        self._tag = []
        self._is_tag_begun = False
        self._step = self._read_tag
        return Progress.READ

    def _read_tag(self) -> Progress:
        is_closed = self._take_tag()
        self._step = self._read_content
        tag = "".join(self._tag).strip()[1:-1].strip() if is_closed else ""
        if tag.startswith("/"):
            return self._follow_end(tag[1:].strip())
        return self._follow_start(tag) if tag else self._no_tag()

    def _follow_start(self, name: str) -> Progress:
        if self._open and not self._open[-1].may_hold(name) and name in self._root.names and name not in self._call.names:
            self._close_all()
        if not self._open:
            self._call.open(name)
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
        self._call.close()
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
            self._call.add_json(self._open[0].take())

    def _close_all(self) -> None:
        while self._open:
            self._close()

    def _close(self) -> None:
        element = self._open.pop()
        if self._open:
            self._open[-1].add(element.name, element.finish())
        else:
            self._call.add_json(element.finish())
            self._call.drop()

    def _take_tag(self) -> bool:
        """Takes a tag with its brackets; False where something comes that cannot belong to one, which is left."""
        while True:
            piece, start = self._buffer.next_piece(), self._buffer.offset
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


_NAME = re.compile(r"[^\s<>/\"'][^<>\n\"']*(?<!\s)")
_OBJECT = frozenset({"type", "properties", "required", "additionalProperties"}) | ANNOTATIONS
_ARRAY = frozenset({"type", "items", "minItems", "maxItems"}) | ANNOTATIONS
_MAX_DEPTH = 6


@dataclass(frozen=True, kw_only=True)
class ElementFormat(CallFormat):
    """`mark` precedes each tag. All calls are in an element `section`, each in an element `invoke`.

    In a grammar, values nested other than by plain properties and items are JSON, which the parser reads as well.
    Required properties are all written, in the schema's order; others may be left out.
    """

    mark: str
    section: str

    def __call__(self, turn: Turn) -> SectionStream:
        mark, section = self.mark, self.section
        envelope = Envelope(section=f"{mark}<{section}>", section_end=f"{mark}</{section}>", call=f"{mark}<invoke name=")
        return SectionStream(turn, envelope, self._new_reader, self.tool_format)

    def _new_reader(self, buffer: StepBuffer, schemas: ToolSchemas, around: Surroundings) -> ElementReader:
        return ElementReader(buffer, self.mark, self.section, schemas, around)

    def written_markers(self) -> tuple[str, ...]:
        return (self.mark, f"<{self.section}>", "<invoke name=", "</invoke>", f"</{self.section}>")

    def written_example(self) -> str:
        mark, section = self.mark, self.section
        call = f'{mark}<invoke name="weather">{mark}<city>Oslo{mark}</city>{mark}</invoke>'
        return f"{mark}<{section}>\n{call}\n{mark}</{section}>"

    @property
    def opening(self) -> str:
        return f"{self.mark}<{self.section}>"

    def calls(self, tools: Tools[CallableTool], *, is_single: bool) -> Structure:
        call = Sequence((Marker(f'\n{self.mark}<invoke name="'), Either(tuple(map(self._call, tools)))))
        more = () if is_single else (Repeat(call),)
        return Sequence((call, *more, Marker(f"\n{self.mark}</{self.section}>")))

    def _call(self, tool: CallableTool) -> Structure:
        _check_name(tool.name, tool.arguments.param)
        root = json.loads(tool.arguments.text)
        path = tool.arguments.param
        check_keywords(root if isinstance(root, Mapping) else {}, tool.arguments)
        arguments = ParameterSchema("", root, root, replace(tool.arguments, param=path))
        return Sequence((Marker(f'{tool.name}">'), *self._members(arguments, path, 0), Marker(f"{self.mark}</invoke>")))

    def _members(self, parent: ParameterSchema, path: str, depth: int) -> list[Structure]:
        schema = parent.schema if isinstance(parent.schema, Mapping) else {}

        def element(name: str, described: Any) -> Structure:
            _check_name(name, f"{path}.properties.{name}")
            return self._element(name, ParameterSchema(name, described, parent.root, replace(parent.spec, param=path)), depth)

        return members(schema, path, element)

    def _element(self, name: str, value: ParameterSchema, depth: int) -> Structure:
        """A tag, what is in it, and the tag that ends it."""
        schema: Any = followed(value.schema, value.root)
        start, end = Marker(f"{self.mark}<{name}>"), Marker(f"{self.mark}</{name}>")
        if depth < _MAX_DEPTH and isinstance(schema, Mapping) and _nests(schema, "object", _OBJECT) and schema.get("properties"):
            return Sequence((start, *self._members(replace(value, schema=schema), value.path, depth + 1), end))
        if (
            depth < _MAX_DEPTH
            and isinstance(schema, Mapping)
            and _nests(schema, "array", _ARRAY)
            and isinstance(schema.get("items"), Mapping)
        ):
            item = self._element(ITEM, replace(value, name=f"{value.name}.items", schema=schema["items"]), depth + 1)
            return Sequence((start, Repeat(item, schema.get("minItems", 0), schema.get("maxItems")), end))
        return Sequence((start, value_structure(value, partial(TextValue, value.types), end=self.mark), Marker(f"</{name}>")))


def _nests(schema: Mapping[str, Any], kind: str, keywords: frozenset[str]) -> bool:
    return schema.get("type") == kind and all(keyword in keywords or keyword.startswith("x-") for keyword in schema)


def _check_name(name: str, path: str) -> None:
    if not _NAME.fullmatch(name) or name.split()[0] in ("invoke", "tool_call"):
        raise UnsupportedGrammar(f"the name {json.dumps(name)} cannot be written in this model's tool calls", path)
