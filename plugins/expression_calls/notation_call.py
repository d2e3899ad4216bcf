"""The arguments of one call in Gemma's notation, `{k:<|"|>v<|"|>,n:42,l:[true]}`, given out as JSON."""

from dataclasses import dataclass, field

from penstock.plugins.expression_calls.json_writer import JsonWriter
from penstock.plugins.schema_types import SchemaNode, Types
from penstock.plugins.schema_values import TextValue, to_json

SCALARS: Types = frozenset({"string", "number", "integer", "boolean", "null"})


@dataclass(slots=True)
class _Frame:
    """An open object or array. `key` is that of the member being read."""

    closer: str
    schema: SchemaNode
    key: str | None = None
    text: list[str] = field(default_factory=list)  # of a key, or of a value without delimiters

    @property
    def is_key_next(self) -> bool:
        return self.closer == "}" and self.key is None

    def value_schema(self) -> SchemaNode:
        return self.schema.item if self.key is None else self.schema.member(self.key)


class NotationCall:
    """Takes the text between marks, and the marks: the delimiter of strings, brackets, commas and colons.

    `marks` are those that mean something at the place. Values between delimiters are strings, where the schema does not want another type;
    where it tells nothing, `types_of_strings` do. Values without are what JSON reads them as, or else strings too.
    """

    def __init__(self, schema: SchemaNode, delimiter: str, types_of_strings: Types) -> None:
        self.is_complete = False
        self._delimiter = delimiter
        self._types_of_strings = types_of_strings
        self._writer = JsonWriter()
        self._writer.begin("{")
        self._frames = [_Frame("}", schema)]
        self._string: TextValue | None = None
        self._is_in_key = False

    @property
    def marks(self) -> tuple[str, ...]:
        if self._string is not None or self._is_in_key:
            return (self._delimiter,)
        frame = self._frames[-1]
        return (self._delimiter, ":", ",", "}") if frame.is_key_next else (self._delimiter, "{", "[", ",", frame.closer)

    @property
    def is_in_string(self) -> bool:
        return self._string is not None or self._is_in_key

    def take_arguments(self) -> str:
        """The arguments that have come since the last call of this."""
        return self._writer.take()

    def add(self, text: str) -> None:
        """Text between two marks, as it comes."""
        if self._string is not None:
            self._writer.add_json(self._string.feed(text))
        else:
            self._frames[-1].text.append(text)

    def mark(self, mark: str) -> None:
        """One of `marks`."""
        frame = self._frames[-1]
        if self._string is not None:
            self._end_string()
        elif self._is_in_key:
            self._is_in_key = False
        elif frame.is_key_next:
            self._mark_key(frame, mark)
        elif mark not in (",", frame.closer) and "".join(frame.text).strip():
            frame.text.append(mark)  # in the middle of a value without delimiters
        elif mark == self._delimiter:
            self._string = TextValue(frame.value_schema().types or self._types_of_strings)
            self._writer.begin_value()
            frame.text.clear()
        elif mark in "{[":
            self._open(frame, mark)
        else:
            self._end_bare(frame)
            if mark == frame.closer:
                self._close()

    def finish(self) -> None:
        """No more comes: ends what is open."""
        if self._string is not None:
            self._end_string()
        frame = self._frames[-1]
        if not frame.is_key_next and "".join(frame.text).strip():
            self._end_bare(frame)
        self._writer.close()

    def _mark_key(self, frame: _Frame, mark: str) -> None:
        name = "".join(frame.text)
        if mark == self._delimiter:
            self._is_in_key = True
            frame.text.clear()
        elif mark == ":":
            frame.key = name.strip()
            frame.text.clear()
            self._writer.key(frame.key)
        elif mark == "}":
            self._close()
        else:
            frame.text.clear()

    def _open(self, frame: _Frame, mark: str) -> None:
        self._writer.begin(mark)
        self._frames.append(_Frame("}" if mark == "{" else "]", frame.value_schema()))
        frame.key = None
        frame.text.clear()

    def _close(self) -> None:
        self._frames.pop()
        self._writer.end()
        self.is_complete = not self._frames

    def _end_string(self) -> None:
        assert self._string is not None
        self._writer.add_json(self._string.finish())
        self._string = None
        self._frames[-1].key = None

    def _end_bare(self, frame: _Frame) -> None:
        """In an array, nothing between two commas is no value; in an object it is an empty string."""
        text = "".join(frame.text).strip()
        if text or frame.key is not None:
            self._writer.scalar(to_json(text, frame.value_schema().types or SCALARS))
        frame.key = None
        frame.text.clear()
