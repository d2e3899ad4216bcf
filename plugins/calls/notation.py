"""Calls in Gemma's notation, `call:NAME{k:<|"|>v<|"|>,n:42}`, emitted as JSON while they arrive."""

import json
import re
from dataclasses import dataclass, field

from penstock.plugins.calls.schema_values import SCALARS, SchemaNode, TextValue, ToolSchemas, Types, quoted, to_json
from penstock.plugins.calls.stream import CallReader, Progress, Surroundings
from penstock.plugins.json.writer import JsonWriter
from penstock.plugins.markers import StepBuffer, Waiting, is_cut_marker

_QUOTE = '"'
_MAX_CLOSERS = 8
_KEY = re.compile(r"\s*[\w.\-/$]+\s*")


@dataclass(slots=True)
class _Frame:
    """An open object or array. `key` is that of the member being read."""

    closer: str
    schema: SchemaNode
    key: str | None = None
    text: list[str] = field(default_factory=list)  # of a key, or of a value without delimiters
    bare: str | None = None  # a member's value without delimiters, which goes on after its comma where no key follows
    num_blank: int = 0  # parts of the text at its beginning that are known to be white space

    @property
    def is_key_next(self) -> bool:
        return self.closer == "}" and (self.key is None or self.bare is not None)

    @property
    def has_text(self) -> bool:
        while self.num_blank < len(self.text) and not self.text[self.num_blank].strip():
            self.num_blank += 1
        return self.num_blank < len(self.text)

    def clear_text(self) -> None:
        self.text.clear()
        self.num_blank = 0

    def value_types(self) -> Types | None:
        return self.value_schema().types

    def value_schema(self) -> SchemaNode:
        return self.schema.item if self.key is None else self.schema.member(self.key)

    def may_be_key(self, text: str) -> bool:
        """Whether this is a key and not part of the value before it."""
        name = text.strip()
        is_quoted = len(name) > 1 and name.startswith(_QUOTE) and name.endswith(_QUOTE)
        return is_quoted or _KEY.fullmatch(text) is not None or name in self.schema.names


class NotationCall:
    """Takes the text between marks, and the marks: the delimiter of strings, brackets, commas and colons.

    `marks` are those that mean something at the place. Values between delimiters are strings, where the schema does not want another type;
    where it tells nothing, `types_of_strings` do. Values without are what JSON reads them as, strings in quotation marks among them, or
    else strings too: up to the comma that a key follows.
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
        self._is_in_quotes = False  # in a JSON string, whose commas and brackets are its own
        self._is_escaped = False

    @property
    def marks(self) -> tuple[str, ...]:
        if self.is_in_string:
            return (self._delimiter,)
        frame = self._frames[-1]
        return (self._delimiter, ":", ",", "}") if frame.is_key_next else (self._delimiter, "{", "[", ",", frame.closer)

    @property
    def is_in_string(self) -> bool:
        """Between delimiters."""
        return self._string is not None or self._is_in_key

    @property
    def closers(self) -> str:
        """The brackets that end the call from here, where they are few."""
        frames = self._frames if len(self._frames) <= _MAX_CLOSERS else ()
        return "".join(frame.closer for frame in reversed(frames))

    def take_arguments(self) -> str:
        """The new arguments since the last call."""
        return self._writer.take()

    def add(self, text: str) -> None:
        """Text between two marks, as it comes."""
        if self._string is not None:
            self._writer.add_json(self._string.feed(text))
        else:
            self._follow_quotes(text)
            self._frames[-1].text.append(text)

    def _follow_quotes(self, text: str) -> None:
        """A value that begins with a quotation mark is in quotes up to the next one without a backslash."""
        frame = self._frames[-1]
        if frame.is_key_next:
            return
        if not self._is_in_quotes and not frame.has_text:
            self._is_in_quotes = text.lstrip().startswith(_QUOTE)
            text = text.lstrip()[1:] if self._is_in_quotes else ""
        for char in text if self._is_in_quotes else "":
            if self._is_escaped:
                self._is_escaped = False
            elif char in ("\\", _QUOTE):
                self._is_escaped = char == "\\"
                self._is_in_quotes = self._is_escaped
                if not self._is_in_quotes:
                    return

    def mark(self, mark: str) -> None:
        """One of `marks`."""
        frame = self._frames[-1]
        if self._string is not None:
            self._end_string()
        elif self._is_in_key:
            self._is_in_key = False
        elif self._is_in_quotes:
            frame.text.append(mark)
        elif frame.is_key_next:
            self._mark_key(frame, mark)
        elif mark not in (",", frame.closer) and frame.has_text:
            frame.text.append(mark)  # in the middle of a value without delimiters
        elif mark == self._delimiter:
            self._string = TextValue(frame.value_types() or self._types_of_strings)
            self._writer.begin_value()
            frame.clear_text()
        elif mark in "{[":
            self._open(frame, mark)
        else:
            self._mark_end(frame, mark)

    def close(self) -> None:
        """The call ends here: ends what is open."""
        self._is_in_quotes = False
        if self._string is not None:
            self._end_string()
        frame = self._frames[-1]
        if frame.is_key_next:
            self._end_member(frame)
        elif frame.has_text:
            self._end_bare(frame)
        self._writer.close()

    def cut(self) -> None:
        """At the end of input: emits what has arrived and closes nothing."""
        frame = self._frames[-1]
        if self._string is not None:
            self._writer.add_json(self._string.cut())
            return
        text = "".join(frame.text) if frame.bare is None else frame.bare
        if text.strip() and (frame.bare is not None or not frame.is_key_next):
            value = TextValue(frame.value_types() or SCALARS, is_json=True)
            self._writer.begin_value()
            self._writer.add_json(value.feed(text.strip()) + value.cut())

    def _mark_key(self, frame: _Frame, mark: str) -> None:
        name = "".join(frame.text)
        if mark == ":" and frame.bare is not None and not frame.may_be_key(name):
            frame.text.append(mark)
            return
        if mark in (",", "}"):
            self._end_member(frame, may_go_on=mark == ",")
            if mark == "}":
                self._close()
            return
        self._end_value_before_key(frame)
        frame.clear_text()
        if mark == self._delimiter:
            self._is_in_key = True
        else:
            frame.key = _without_quotes(name.strip())
            self._writer.key(frame.key)

    def _mark_end(self, frame: _Frame, mark: str) -> None:
        """A comma or a bracket after a value without delimiters, or after one that has been read."""
        text = "".join(frame.text)
        if mark == "," and frame.key is not None and text.strip():
            frame.bare = text
            frame.clear_text()
            return
        self._end_bare(frame)
        if mark == frame.closer:
            self._close()

    def _end_member(self, frame: _Frame, *, may_go_on: bool = False) -> None:
        """What came where a key was expected is none: it belongs to the value before, or else has no value itself."""
        text = "".join(frame.text)
        frame.clear_text()
        if frame.bare is not None:
            frame.bare += f",{text}" if text.strip() else ""
            if not may_go_on:
                self._end_value_before_key(frame)
        elif text.strip():
            self._writer.key(_without_quotes(text.strip()))
            self._writer.scalar("null")

    def _end_value_before_key(self, frame: _Frame) -> None:
        if frame.bare is not None:
            frame.clear_text()
            frame.text.append(frame.bare)
            frame.bare = None
            self._end_bare(frame)

    def _open(self, frame: _Frame, mark: str) -> None:
        self._writer.begin(mark)
        self._frames.append(_Frame("}" if mark == "{" else "]", frame.value_schema()))
        frame.key = None
        frame.clear_text()

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
            inner = _without_quotes(text)
            json_text = text if inner == text else quoted(inner)
            self._writer.scalar(to_json(json_text, frame.value_types() or SCALARS, is_json=True))
        frame.key = None
        frame.clear_text()


def _without_quotes(text: str) -> str:
    """What a string in quotation marks says; other text as it is."""
    if len(text) < 2 or not text.startswith(_QUOTE) or not text.endswith(_QUOTE):
        return text
    try:
        value = json.loads(text, strict=False)
    except ValueError:
        return text
    return value if isinstance(value, str) and not any("\ud800" <= char <= "\udfff" for char in value) else text


_HEAD = re.compile(r"\s*(?:call)?:\s*([\w.\-/]+)\s*")  # Gemma 4 forgets the word now and then
CALL = "call:"
_MAX_HEAD = 400


class NotationReader(CallReader):
    """One call, from right after `start` to `end`. It is certain when its name and the brace after it have come.

    Another call may follow between the same pair of markers, after a comma or without one.
    """

    def __init__(
        self,
        buffer: StepBuffer,
        schemas: ToolSchemas,
        around: Surroundings,
        *,
        start: str,
        end: str,
        delimiter: str,
        types_of_strings: Types,
    ) -> None:
        super().__init__(buffer, around)
        self._schemas = schemas
        self._start = start
        self._end = end
        self._outer_ends = (end,)
        self._string_ends = (end, f"}}{end}")
        self._delimiter = delimiter
        self._types_of_strings = types_of_strings
        self._call = NotationCall(schemas.of(""), delimiter, types_of_strings)
        self._past_end: list[str] = []  # the end marker inside a string, and what follows it, while it may be the end of the call
        self._next_start: list[str] | None = None  # what follows the start marker there, up to a brace
        self._length = 0  # of the head
        self._after: list[str] = []  # white space and a comma after the call
        self._step = self._read_head

    @property
    def is_in_call(self) -> bool:
        """From the brace that opens the arguments to their end."""
        return self._step in (self._read_arguments, self._read_past_end)

    def take_arguments(self) -> str:
        return self._call.take_arguments()

    def settle(self) -> bool:
        if self._step != self._read_past_end:
            return False
        self._end_string()
        return True

    def finish(self) -> list[str]:
        rest = self._buffer.finish()
        if self._step == self._read_arguments:
            for piece in rest:
                self._call.add(piece)
            self._call.cut()
            return []
        ends = {self._read_end: (self._end, CALL), self._read_next: (CALL,)}.get(self._step)
        return [] if ends is not None and is_cut_marker(rest, *ends) else [*self._after, *rest]

    def _read_head(self) -> Progress:
        pieces, marker = self._buffer.take_until("{", self._start, self._end)
        self.head += pieces
        self._length += sum(map(len, pieces))
        if marker is None and self._length <= _MAX_HEAD:
            raise Waiting
        found = _HEAD.fullmatch("".join(self.head)) if marker == "{" and self._length <= _MAX_HEAD else None
        if found is None:
            self._buffer.put_back([] if marker is None else self._around.pieces(marker))
            return Progress.MALFORMED
        self.name = found[1]
        self.is_certain = True
        self._call = NotationCall(self._schemas.of(found[1]), self._delimiter, self._types_of_strings)
        self._step = self._read_arguments
        return Progress.READ

    def _read_arguments(self) -> Progress:
        marker = self._buffer.until(self._call.add, *self._call.marks, *self._ends)
        if self._call.is_in_string and marker.endswith(self._end):
            self._past_end = [marker]
            self._next_start = None
            self._step = self._read_past_end
            if self._around.is_token(self._end):  # elsewhere a string may hold the marker's text
                self._end_string()
        elif marker == self._end:
            return self._read_over()
        else:
            self._call.mark(marker)
        if self._call.is_complete:
            self._step = self._read_end
        return Progress.READ

    @property
    def _ends(self) -> tuple[str, ...]:
        """The end marker; in a string also with the brackets before it that end the call if the string was not closed."""
        if not self._call.is_in_string:
            return self._outer_ends
        closers = self._call.closers
        return self._string_ends if closers in ("", "}") else (*self._string_ends, f"{closers}{self._end}")

    def _read_past_end(self) -> Progress:
        """The end marker in a string belongs to it where the string is closed later; not where another call begins before that."""
        pieces, marker = self._buffer.take_until(self._delimiter, self._start, *(("{",) if self._next_start is not None else ()))
        self._past_end += pieces
        if self._next_start is not None:
            self._next_start += map(str, pieces)
        if marker is None:
            raise Waiting
        if marker == self._delimiter:
            for piece in self._past_end:
                self._call.add(piece)
            self._call.mark(marker)
            self._step = self._read_arguments
            return Progress.READ
        self._past_end.append(marker)
        if marker == self._start:
            self._next_start = []
            return Progress.READ
        head = _HEAD.fullmatch("".join(self._next_start or ()))
        self._next_start = None
        if head is not None and (not self._schemas or head[1] in self._schemas):
            self._end_string()
        return Progress.READ

    def _end_string(self) -> None:
        """The end marker ends the call within a string that was not closed; what follows it is read anew."""
        self._buffer.put_back(self._past_end[1:])
        self._step = self._read_over

    def _read_over(self) -> Progress:
        self._call.close()
        return Progress.OVER

    def _read_end(self) -> Progress:
        space, marker = self._buffer.start(self._start, self._end, CALL, ",")
        if marker == ",":
            self._after = [*space, marker]
            self._step = self._read_next
            return Progress.READ
        return Progress.OVER if marker == self._end else self._follow(space, marker)

    def _read_next(self) -> Progress:
        """After a comma between two calls."""
        space, marker = self._buffer.start(CALL)
        return self._follow([*self._after, *space], marker)

    def _follow(self, pieces: list[str], marker: str | None) -> Progress:
        """After the call, with these pieces and perhaps the beginning of another one behind them."""
        if marker is None:
            self.left = pieces
        elif marker == CALL:
            self.next_head = pieces
            self._buffer.put_back([marker])
        else:
            self._buffer.put_back([*pieces, *self._around.pieces(marker)])
        return Progress.OVER
