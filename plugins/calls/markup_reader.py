"""Reads one call made of named parameters, as its `ParameterMarkup` says."""

import json
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto

from penstock.engine.contracts.parsing import SpecialText
from penstock.plugins.calls.schema_values import ANY_TYPE, STRING, TextValue, ToolSchemas, Types
from penstock.plugins.calls.section_stream import Envelope
from penstock.plugins.calls.stream import CallReader, Progress, Surroundings
from penstock.plugins.json.repair import JsonRepair
from penstock.plugins.json.writer import ParameterCall
from penstock.plugins.markers import StepBuffer, is_cut_marker


@dataclass(frozen=True, slots=True)
class Tag:
    """What an opening tag says. `is_string` is the format's own word on the parameter's type, where it has one."""

    name: str
    is_string: bool | None = None


class Heads(Enum):
    """Where names are written."""

    TAGS = auto()  # in the opening tags
    LINES = auto()  # after the call's marker, up to the next one or the end of the line; a parameter's in a pair of markers


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterMarkup(Envelope):
    """`call` opens a call and `call_end` closes it; in between each parameter has a name and, before `value_end`, a value.

    With `Heads.TAGS`, `call` and `parameter` are the beginnings of tags, the rest of which, up to `tag_end`, `read_tag` reads, and `lead`
    is the text between the call's marker and such a tag, whatever precedes it. With `Heads.LINES`, `name_ends` follow the call's
    name, where there are any, and `name_end` and `value` separate a parameter's name from its value; before `value`, a type may be written
    between `type_start` and `type_end`.

    `implied_ends` end a value that was not closed; those that are added tokens do so in all formats. A value may also be enclosed in
    `literal` and `literal_end`, which nothing else ends.
    """

    call_end: str
    parameter: str
    value_end: str
    read_tag: Callable[[str], Tag | None]
    heads: Heads = Heads.TAGS
    tag_end: str = ">"
    lead: str = ""
    name_ends: tuple[str, ...] = ()
    name_end: str = ""
    type_start: str = ""
    type_end: str = ""
    value: str = ""
    implied_ends: tuple[str, ...] = ()
    literal: str = ""
    literal_end: str = ""
    trims_newline: bool = False
    reads_untyped_json: bool = False
    wrappers: tuple[str, ...] = ()

    @property
    def markers(self) -> tuple[str, ...]:
        """All of them, the outermost first."""
        tags = (self.section, *self.skipped, self.call, self.lead, *self.name_ends, self.parameter, self.name_end)
        types = (self.type_start, self.type_end)
        ends = (self.literal_end, self.value_end, self.call_end, self.section_end)
        return tuple(marker for marker in (*tags, *types, self.value, self.literal, *ends) if marker)

    def can_write(self, name: str) -> bool:
        """Whether a tool or a parameter of this name is read back as such."""
        if any(mark in name for mark in "<>\n\"'") or name != name.strip():
            return False
        return bool(name)

    def new_value(self, types: Types | None, tag: Tag) -> TextValue:
        """What reads a value of a parameter that has these types by its schema."""
        is_json = tag.is_string is False
        if tag.is_string and (types is None or "string" in types):
            types = STRING
        elif types is None and (is_json or self.reads_untyped_json):
            types, is_json = ANY_TYPE, True
        return TextValue(types, is_json=is_json, trims_newline=self.trims_newline)


_ATTRIBUTE = re.compile(r"""\s*(?:"([^"]*)"|'([^']*)'|([^\s"'>]+))(.*)""", re.DOTALL)
_IS_STRING = re.compile(r"""\bstring\s*=\s*["']?(true|false)\b""", re.IGNORECASE)


def read_bare_tag(text: str) -> Tag | None:
    """`NAME`, what is left of `<function=NAME>`; in quotes also where a model adds them."""
    name = text.strip().strip("\"'")
    return Tag(name) if name else None


def read_attribute_tag(text: str) -> Tag | None:
    """`"NAME"`, what is left of `<invoke name="NAME">`, with a `string="true"` after it in some formats."""
    found = _ATTRIBUTE.fullmatch(text)
    name = "" if found is None else (found[1] or found[2] or found[3] or "").strip()
    if found is None or not name:
        return None
    is_string = _IS_STRING.search(found[4])
    return Tag(name, None if is_string is None else is_string[1].lower() == "true")


_TAG_TEXT = re.compile(r"[^<>\n]*")
_LINE_TEXT = re.compile(r"[^<\n]*")
_NO_NAME = re.compile(r"[\s{}\[\]\"'<>]")


class ParameterReader(CallReader):
    """One call, from right after `markup.call`.

    A name that holds white space or brackets is one only where the request offers such a tool. The call is certain with its first
    parameter, with its end or, if one JSON object takes the place of the parameters, with that. Anything but white space between
    parameters ends the call, as the end of the answer does: it is complete there, and stays open where it stops inside a parameter.

    What closes the call or its section, as plain text inside a value, is part of the value where the value's own end follows. Where the
    beginning of another call, its name included, or the end of the answer does, the value was not closed: it ends there, and what follows
    is read anew. A value that quotes whole calls does not end with them.
    """

    def __init__(
        self, buffer: StepBuffer, markup: ParameterMarkup, schemas: ToolSchemas, around: Surroundings, *, has_lead: bool = True
    ) -> None:
        super().__init__(buffer, around)
        self._schemas = schemas
        self._markup = markup
        self._schema = schemas.of("")
        self._ends = (*around.tokens, *filter(around.is_token, (markup.parameter, markup.call_end)))  # of any value
        self._starts = tuple(marker for marker in (markup.section, markup.call) if marker)
        self._value_ends: tuple[str, ...] = ()
        self._unclosed_ends: tuple[str, ...] = ()  # of a value that may not have been closed
        self._value_marks: tuple[str, ...] = ()
        self._num_quoted = Counter[str]()  # what has been opened in the value, by what closes it
        self._past_end: list[str] = []  # one of those ends, and what follows it, while it may be part of the value
        self._next_start = markup.lead or markup.call
        self._next_call: ParameterReader | None = None  # after such an end
        self._between = (markup.parameter, markup.call_end, *around.markers)
        self._call = ParameterCall()
        self._body = JsonRepair()
        self._is_wrapper = False
        self._has_name = False  # what is held of the call's line is more than white space
        self._held: list[str] = []  # of a tag or a name that is not complete
        self._tag = Tag("")  # of the parameter whose value comes next
        self._type: list[str] = []
        self._step = self._read_lead if markup.lead and has_lead else self._first_step

    @property
    def _first_step(self) -> Callable[[], Progress]:
        return self._read_call_tag if self._markup.heads is Heads.TAGS else self._read_line

    def take_arguments(self) -> str:
        return self._call.take()

    def finish(self) -> list[str]:
        rest = self._buffer.finish()
        is_cut_between = self._step == self._read_between and is_cut_marker(rest, *self._between)
        self.is_certain = self.is_certain or is_cut_between or self._step == self._read_body
        if not self.is_certain:
            return [*self._held, *rest]
        if self._step in (self._read_value, self._read_literal):
            for piece in rest:
                self._call.feed(piece)
            self._call.cut()
        elif self._step in (self._read_between, self._read_literal_end):
            self._call.close()
        elif self._step == self._read_body:
            self._body.stop()
            self._call.write(self._body.take())
        return []

    # The call's name

    def _read_lead(self) -> Progress:
        """What comes before the tag, such as the kind of tool and its name, which the tag repeats."""
        marker = self._buffer.until(self.head.append, self._markup.lead, *self._around.tokens)
        self.head += self._around.pieces(marker)
        self._step = self._first_step
        return Progress.READ if marker == self._markup.lead else Progress.MALFORMED

    def _read_call_tag(self) -> Progress:
        tag = self._take_tag()
        self.head += self._held
        self._held = []
        self._step = self._read_between
        return Progress.READ if tag is not None and self._start(tag.name) else Progress.MALFORMED

    def _read_line(self) -> Progress:
        """A name that ends with the line, or with whatever cannot be part of it; line breaks before it are passed over."""
        while True:
            piece, start = self._buffer.next_piece(), self._buffer.offset
            found = None if isinstance(piece, SpecialText) else _LINE_TEXT.match(piece, start)
            end = start if found is None else found.end()
            self._has_name = self._has_name or not (end == start or piece[start:end].isspace())
            is_break = found is not None and piece[end : end + 1] == "\n"
            end += is_break and not self._has_name
            if end == start:
                break
            self._held.append(piece[start:end])
            self._buffer.skip(end - start)
        self._step = self._read_after_line
        return Progress.READ

    def _read_after_line(self) -> Progress:
        markup = self._markup
        space, marker = self._buffer.start(*(markup.name_ends or (markup.parameter, markup.call_end)))
        name = "".join(self._held).strip()
        self.head += [*self._held, *space, *([] if marker is None else self._around.pieces(marker))]
        self._held = []
        self._step = self._read_between
        if marker is None or not self._start(name):
            return Progress.MALFORMED
        return self._follow(marker)

    def _start(self, name: str) -> bool:
        if not name or (name not in self._schemas and _NO_NAME.search(name)):
            return False
        self.name = name
        self._schema = self._schemas.of(name)
        return True

    # Its parameters

    def _read_between(self) -> Progress:
        space, marker = self._buffer.start(*self._between)
        if marker is not None:
            return self._follow(marker)
        return self._open_body(space) if self._is_body_next else self._stop(space)

    @property
    def _is_body_next(self) -> bool:
        """The arguments as one JSON object, in the place of parameters."""
        piece = self._buffer.peek()
        return not self.is_certain and piece is not None and not isinstance(piece, SpecialText) and piece[self._buffer.offset] == "{"

    def _open_body(self, space: list[str]) -> Progress:
        self.head += space
        self._step = self._read_body
        return Progress.READ

    def _read_body(self) -> Progress:
        piece = self._buffer.next_piece()
        start = self._buffer.offset
        is_end = isinstance(piece, SpecialText) and piece in self._ends
        end = start if is_end else self._body.feed(piece, start)
        if not self.is_certain and end > start:
            self.head.append(piece if isinstance(piece, SpecialText) else piece[start:end])
        self._buffer.skip(end - start)
        is_malformed = is_end or self._body.is_malformed
        if is_malformed and not self._body.is_begun:
            return Progress.MALFORMED
        if is_malformed:
            self._body.close()
        if self._body.is_begun:
            self.is_certain = True
            self._call.write(self._body.take())
        if self._body.is_complete:
            self._step = self._read_body_end
        return Progress.READ

    def _read_body_end(self) -> Progress:
        space, marker = self._buffer.start(self._markup.call_end, *self._around.markers)
        if marker is None:
            self.left = [self._body.left, *space]
        elif marker != self._markup.call_end:
            self.end_marker = marker
        return Progress.OVER

    def _stop(self, left: list[str]) -> Progress:
        """What follows the last parameter is text, of which `left` has been read."""
        if not self.is_certain:
            self.head += left
            return Progress.MALFORMED
        self.left = left
        self._call.close()
        return Progress.OVER

    def _follow(self, marker: str) -> Progress:
        markup = self._markup
        self._step = self._read_between
        if marker == markup.parameter:
            self.is_certain = True
            self._step = self._read_parameter_tag if markup.heads is Heads.TAGS else self._read_parameter_name
            return Progress.READ
        if marker in markup.name_ends:
            return Progress.READ
        self.is_certain = True
        if marker != markup.call_end:
            self.end_marker = marker
        self._call.close()
        return Progress.OVER

    def _read_parameter_tag(self) -> Progress:
        tag = self._take_tag()
        return self._no_parameter() if tag is None else self._open(tag)

    def _read_parameter_name(self) -> Progress:
        """Between its markers; a model may forget the second."""
        ends = (self._markup.call_end, *self._around.markers)
        marker = self._buffer.until(self._held.append, self._markup.name_end, self._markup.value, *ends)
        name = "".join(self._held).strip()
        if marker == self._markup.name_end:
            self._held += self._around.pieces(marker)
            self._tag = Tag(name)
            self._step = self._read_value_marker
            return Progress.READ
        if marker == self._markup.value and name:
            return self._open(Tag(name))
        if marker in ends:
            return self._follow(marker)
        self._held += self._around.pieces(marker)
        return self._no_parameter()

    def _read_value_marker(self) -> Progress:
        types = (self._markup.type_start,) if self._markup.type_start else ()
        space, marker = self._buffer.start(self._markup.value, *self._between, *types)
        if marker in self._between:  # the parameter has no value
            self._held = []
            return self._follow(marker)
        if marker == self._markup.value and self._tag.name:
            return self._open(self._tag)
        self._held += [*space, *([] if marker is None else self._around.pieces(marker))]
        if marker is None or marker not in types:
            return self._no_parameter()
        self._type = []
        self._step = self._read_type
        return Progress.READ

    def _read_type(self) -> Progress:
        """What the format itself says of the value that follows."""
        marker = self._buffer.until(self._type.append, self._markup.type_end, self._markup.call_end, *self._around.tokens)
        self._held += self._type
        self._held += self._around.pieces(marker)
        if marker != self._markup.type_end:
            return self._no_parameter()
        self._tag = Tag(self._tag.name, "".join(self._type).strip() == "string")
        self._step = self._read_value_marker
        return Progress.READ

    def _no_parameter(self) -> Progress:
        """What began like a parameter is text."""
        return self._stop([*self._around.pieces(self._markup.parameter), *self._held])

    def _open(self, tag: Tag) -> Progress:
        self._held = []
        names = self._schema.names
        self._is_wrapper = tag.name in self._markup.wrappers and bool(names) and tag.name not in names
        types = frozenset({"object"}) if self._is_wrapper else self._schema.member(tag.name).types
        self._call.open(tag.name, self._markup.new_value(types, tag))
        self._step = self._read_literal if self._markup.literal else self._read_value
        self._end_value_with(self._markup.value_end, *self._markup.implied_ends)
        return Progress.READ

    def _end_value_with(self, *ends: str) -> None:
        """A line break before what ends a value that was not closed belongs to the markup."""
        markup = self._markup
        self._value_ends = (*ends, *self._ends)
        outer = (markup.value_end, markup.call_end, markup.section_end)
        self._unclosed_ends = tuple(marker for marker in outer if marker and marker not in self._value_ends)
        lines = (f"\n{marker}" for marker in (*markup.implied_ends, *self._unclosed_ends, *self._ends))
        self._value_marks = tuple(dict.fromkeys((*self._value_ends, *self._unclosed_ends, *lines, *self._starts)))
        self._num_quoted.clear()

    def _read_literal(self) -> Progress:
        """Whether the value has markers of its own."""
        space, marker = self._buffer.start(self._markup.literal)
        if marker is not None:
            self._end_value_with(self._markup.literal_end)
        for piece in space if marker is None else ():
            self._call.feed(piece)
        self._step = self._read_value
        return Progress.READ

    def _read_literal_end(self) -> Progress:
        space, marker = self._buffer.start(self._markup.value_end)
        self._step = self._read_between
        return self._stop(space) if marker is None else Progress.READ

    def _read_value(self) -> Progress:
        marker = self._buffer.until(self._call.feed, *self._value_marks)
        assert self._call.value is not None
        end = marker.removeprefix("\n")
        is_quoted = self._call.value.is_in_json_string and not self._around.is_token(marker)
        if is_quoted or self._is_quoted_call(end):
            self._call.feed(marker)
        elif end in self._unclosed_ends:
            self._past_end = [marker]
            self._step = self._read_past_end
        else:
            return self._follow_value(end)
        return Progress.READ

    def _is_quoted_call(self, marker: str) -> bool:
        """Whether the marker opens a call or a section inside the value, or closes one that was opened there."""
        if marker in self._value_ends:
            return False
        if marker in self._starts:
            self._num_quoted[self._markup.call_end if marker == self._markup.call else self._markup.section_end] += 1
            return True
        self._num_quoted[marker] -= 1
        return self._num_quoted[marker] >= 0

    def _read_past_end(self) -> Progress:
        marker = self._buffer.until(self._past_end.append, *self._value_ends, self._next_start)
        if marker == self._next_start:
            self._past_end += self._around.pieces(marker)
            self._next_call = ParameterReader(self._buffer, self._markup, self._schemas, self._around, has_lead=False)
            self._step = self._read_next_call
            return Progress.READ
        self._buffer.put_back(self._around.pieces(marker))
        for piece in self._past_end:
            self._call.feed(piece)
        self._past_end = []
        self._num_quoted.clear()
        self._step = self._read_value
        return Progress.READ

    def _read_next_call(self) -> Progress:
        """Whether another call begins after one that was perhaps not closed."""
        call = self._next_call
        assert call is not None
        progress = call.read()
        if call.name is not None and (not self._schemas or call.name in self._schemas):
            return self._end_unclosed_value()
        if call.name is not None or progress is Progress.MALFORMED:
            self._next_call = None
            self._buffer.put_back(call.head)
            self._step = self._read_past_end
            return Progress.READ
        return progress

    def _end_unclosed_value(self) -> Progress:
        marker, *rest = self._past_end
        if self._next_call is not None:
            rest += [*self._next_call.head, *self._next_call._held]
            self._next_call = None
        self._past_end = []
        self._buffer.put_back(rest)
        return self._follow_value(marker.removeprefix("\n"))

    def settle(self) -> bool:
        if not self._past_end:
            return False
        self._step = self._end_unclosed_value
        return True

    def _follow_value(self, marker: str) -> Progress:
        self._end_value()
        is_literal = marker == self._markup.literal_end
        self._step = self._read_literal_end if is_literal else self._read_between
        return Progress.READ if is_literal or marker == self._markup.value_end else self._follow(marker)

    def _end_value(self) -> None:
        """All arguments in one parameter that the tool does not have, `arguments` or `input`, are the arguments."""
        value = self._call.value
        members = _members(value.raw) if self._is_wrapper and value is not None else None
        if members is None or not members.keys() <= self._schema.names:
            self._call.end()
            return
        for name, json_text in members.items():
            self._call.add(name, json_text)

    def _take_tag(self) -> Tag | None:
        """Holds what is left of a tag, its end included; None where something comes that cannot belong to it."""
        end = self._markup.tag_end
        is_closed = self._take_tag_in_brackets() if end == ">" else self._take_tag_until(end)
        return self._markup.read_tag("".join(self._held)[: -len(end)]) if is_closed else None

    def _take_tag_in_brackets(self) -> bool:
        while True:
            piece, start = self._buffer.next_piece(), self._buffer.offset
            found = None if isinstance(piece, SpecialText) else _TAG_TEXT.match(piece, start)
            if found is None:
                return False
            end = found.end()
            is_closed = end < len(piece) and piece[end] == ">"
            end += is_closed
            if end > start:
                self._held.append(piece[start:end])
                self._buffer.skip(end - start)
            if is_closed or end < len(piece):
                return is_closed

    def _take_tag_until(self, end: str) -> bool:
        marker = self._buffer.until(self._held.append, end, *self._around.tokens)
        self._held += self._around.pieces(marker)
        return marker == end


def _members(text: str) -> dict[str, str] | None:
    try:
        value = json.loads(text)
        if not isinstance(value, dict):
            return None
        return {name: json.dumps(member, ensure_ascii=False, allow_nan=False) for name, member in value.items()}
    except (ValueError, RecursionError):
        return None
