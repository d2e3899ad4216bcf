"""Streams of tool calls: their base classes, the contract of call readers, and `CallFormat`, the base of declared formats."""

import re
import secrets
import string
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import cached_property
from typing import Self

from penstock.engine.contracts.parsing import (
    CallableTool,
    Event,
    Format,
    FormatInfo,
    Parser,
    SpecialText,
    Text,
    ToolCallArguments,
    ToolCallStart,
    ToolFormat,
    ToolParser,
    Turn,
)
from penstock.engine.contracts.structure import Structure
from penstock.engine.text.answer import split_at_calls
from penstock.plugins.calls.schema_values import ToolSchemas, has_strict_tool
from penstock.plugins.markers import StepBuffer, Waiting, is_cut_marker, join_pieces, split_symbols, text_into


def new_call_id() -> str:
    """A new id in OpenAI's form: `call_` and 24 hexadecimal digits."""
    return f"call_{secrets.token_hex(12)}"


def new_short_call_id() -> str:
    """A new id in the form that Mistral's templates require: nine letters and digits."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


_OPENERS = "([{"
_CLOSERS = ")]}"


class MalformedCall:
    """Passes text up to the bracket that closes the call, of which `depth` are open. Brackets in strings do not count."""

    def __init__(self, buffer: StepBuffer, depth: int, ends: Sequence[str], *, quotes: str = "\"'") -> None:
        self.is_over = depth <= 0
        self._buffer = buffer
        self._depth = depth
        self._ends = ends
        self._quotes = quotes
        self._quote = ""

    def read(self, events: list[Event]) -> str:
        """Reads on to the next mark, which is text unless it is one of `ends`."""
        marks = (self._quote, f"\\{self._quote}") if self._quote else (*_OPENERS, *_CLOSERS, *self._quotes)
        marker = self._buffer.until(text_into(events), *marks, *self._ends)
        if marker in self._ends:
            return marker
        events.append(Text(marker))
        if self._quote or marker in self._quotes:
            if len(marker) == 1:
                self._quote = "" if self._quote else marker
        else:
            self._depth += 1 if marker in _OPENERS else -1
            self.is_over = self._depth <= 0
        return marker


class Progress(Enum):
    """The result of reading on."""

    READ = auto()  # there may be more
    OVER = auto()  # the call is complete
    MALFORMED = auto()  # this is no call: only before it has a name


class CallReader(ABC):
    """Reads one call from a buffer that others have read the beginning of.

    `name` is None until it has been read. Until the call `is_certain`, `head` are the pieces that have been read, which are text if it is
    none after all. A call that was not closed ends where it goes wrong: `left` is what was read then and is text, `end_marker` the marker
    of what is outside that was met instead. `next_head` are the pieces before another call that follows without a marker.
    """

    name: str | None = None
    is_certain = False
    end_marker: str | None = None
    next_head: list[str] | None = None

    def __init__(self, buffer: StepBuffer, schemas: ToolSchemas, around: "Surroundings") -> None:
        self.head: list[str] = []
        self.left: list[str] = []
        self._buffer = buffer
        self._schemas = schemas
        self._around = around
        self._step: Callable[[], Progress]

    @property
    def is_in_call(self) -> bool:
        """Whether the next text belongs to the call's arguments."""
        return self.name is not None

    def read(self) -> Progress:
        """Takes one step. Raises `Waiting` where more text has to come first."""
        return self._step()

    def settle(self) -> bool:
        """Generation is over: decides what only more text would have decided. True where that leaves something to read."""
        return False

    @abstractmethod
    def finish(self) -> list[str]:
        """Generation is over inside the call: gives back what has been read after `head` and is no part of a call."""

    @abstractmethod
    def take_arguments(self) -> str:
        """The new arguments since the last call."""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """The markers that enclose calls, which a call's reader meets if the call was not closed."""

    markers: tuple[str, ...]
    added_tokens: frozenset[str]

    @property
    def tokens(self) -> tuple[str, ...]:
        """Those that no plain text can be."""
        return tuple(marker for marker in self.markers if self.is_token(marker))

    def is_token(self, marker: str) -> bool:
        return any(token in marker for token in self.added_tokens if token)

    def pieces(self, marker: str) -> list[str]:
        """The original pieces of a marker that turned out to be none."""
        return [marker] if isinstance(marker, SpecialText) else join_pieces(split_symbols(marker, self.added_tokens))


_TAIL = 64
_INDENT = " \t"


@dataclass(frozen=True, slots=True, kw_only=True)
class Envelope:
    """`call` opens a call; `section` and `section_end`, if given, enclose all of them.

    `skipped` markers may occur between calls and mean nothing. Where `may_lack_section`, a call of an offered tool may begin a line
    without one. Where `is_offered_only`, what calls a tool that the request does not offer is text.
    """

    call: str
    section: str = ""
    section_end: str = ""
    skipped: tuple[str, ...] = ()
    may_lack_section: bool = False
    is_offered_only: bool = False

    @property
    def enclosing(self) -> tuple[str, ...]:
        """The markers around calls."""
        return tuple(marker for marker in (self.section, self.section_end, self.call) if marker)


NewReader = Callable[[StepBuffer, ToolSchemas, Surroundings], CallReader]


class CallStream(ToolParser):
    """A tool parser: text, and calls in it, as a state machine whose states (`_step`) read from the buffer as far as they can.

    What is no call is `Text`, unchanged; what may become one is held back until that is certain. White space between calls is part of the
    format. With `tool_choice: none`, everything is text.
    """

    def __init__(self, turn: Turn, tool_format: ToolFormat | None, new_id: Callable[[], str] = new_call_id) -> None:
        self.tool_format = tool_format
        self._is_off = turn.tool_choice == "none"
        self._added_tokens = turn.added_tokens
        self._buffer = StepBuffer(turn.added_tokens)
        self._new_id = new_id
        self._num_calls = 0
        self._held: list[str] = []  # text if no call follows: markers, separators, and the call itself until it is certain
        self._step: Callable[[list[Event]], None]

    @property
    @abstractmethod
    def is_in_call(self) -> bool:
        """Whether the next text belongs to a call's arguments."""

    @abstractmethod
    def finish(self) -> list[Event]:
        """An open call with a name stays a call as far as it was written; any other text held back is text."""

    def feed(self, text: str) -> list[Event]:
        if self._is_off:
            return [Text(text)] if text else []
        self._buffer.feed(text)
        return self._read_on()

    def _read_on(self) -> list[Event]:
        return self._buffer.run(lambda events: self._step(events))

    def start_call(self, events: list[Event], name: str, call_id: str | None = None) -> None:
        events.append(ToolCallStart(self._num_calls, name, call_id or self._new_id()))
        self._num_calls += 1
        self._held = []

    def give_arguments(self, events: list[Event], fragment: str) -> None:
        """More arguments of the call that was started last."""
        if fragment:
            events.append(ToolCallArguments(self._num_calls - 1, fragment))

    def _give_back(self, events: list[Event]) -> None:
        """The text held back is no call."""
        events += map(Text, join_pieces(self._held))
        self._held = []

    def _as_written(self, marker: str) -> list[str]:
        """The original pieces of a marker, which may hold added tokens."""
        return [marker] if isinstance(marker, SpecialText) else join_pieces(split_symbols(marker, self._added_tokens))


class SectionStream(CallStream):
    """Calls that begin with a marker of their own, alone or in sections; `new_reader` makes the reader of one call."""

    def __init__(self, turn: Turn, envelope: Envelope, new_reader: NewReader, tool_format: ToolFormat | None) -> None:
        super().__init__(turn, tool_format)
        self._new_reader = new_reader
        self._envelope = envelope
        self._schemas = ToolSchemas(turn.tools)
        self._around = Surroundings(envelope.enclosing, turn.added_tokens)
        # Strict calls are held to their tool from the section's marker on, so that a call without one would evade that.
        self._may_lack_section = envelope.may_lack_section and not has_strict_tool(turn.tools)
        self._step = self._read_text
        self._reader: CallReader | None = None
        self._is_started = False  # the call that is being read has been emitted
        self._is_bare = False  # the call that is being read has no section
        self._is_in_section = False
        self._tail = ""  # the end of the text so far, where there are sections

    @property
    def is_in_call(self) -> bool:
        return self._reader is not None and self._reader.is_in_call

    def finish(self) -> list[Event]:
        events: list[Event] = []
        while self._reader is not None and self._reader.settle():
            events += self._read_on()
        if self._reader is not None:
            reader = self._reader
            rest = reader.finish()
            if self._start(reader, events):
                self.give_arguments(events, reader.take_arguments())
            else:
                rest = [*self._held, *reader.head, *rest]
        else:
            rest = [*self._held, *self._buffer.finish()]
            if self._step == self._read_after and is_cut_marker(rest, *self._ends):
                rest = []
        self._say(rest, events)
        return events

    def _read_text(self, events: list[Event]) -> None:
        envelope = self._envelope
        markers: tuple[str, ...] = envelope.enclosing if self._is_in_section else (envelope.section or envelope.call,)
        if self._may_lack_section and envelope.call not in markers:
            markers = (*markers, envelope.call)
        marker = self._buffer.until(lambda piece: self._say([piece], events), *markers)
        if marker == envelope.call and envelope.section and not self._is_in_section and not self._may_begin_here:
            self._say(self._around.pieces(marker), events)
        else:
            self._follow(marker, [])

    def _follow(self, marker: str, space: list[str]) -> None:
        """Handles a marker of the envelope that is allowed here."""
        envelope = self._envelope
        pieces = [*space, *self._around.pieces(marker)]
        if marker == envelope.call:
            self._open(pieces)
        elif marker == envelope.section:
            self._held = pieces
            self._step = self._read_section
        elif marker == envelope.section_end:
            self._is_in_section = False
            if self._step != self._read_text:  # white space after other text is text
                self._step = self._read_after

    @property
    def _may_begin_here(self) -> bool:
        """At the beginning of a line, and not after a quotation of what sections begin with."""
        before = self._tail.rstrip(_INDENT)
        return (not before or before.endswith("\n")) and not before.rstrip().endswith(self._envelope.section)

    def _read_section(self, events: list[Event]) -> None:
        space, marker = self._buffer.start(self._envelope.call)
        self._held += space
        if marker is not None:
            self._open([*self._held, *self._around.pieces(marker)])
        else:
            self._reject([], events)

    def _open(self, block: list[str]) -> None:
        self._is_bare = bool(self._envelope.section) and not self._is_in_section and self._step != self._read_section
        self._held = block
        self._is_started = False
        self._reader = self._new_reader(self._buffer, self._schemas, self._around)
        self._step = self._read_call

    def _read_call(self, events: list[Event]) -> None:
        reader = self._reader
        assert reader is not None
        try:
            progress = reader.read()
        except Waiting:
            self._give_out(reader, events)
            raise
        if not self._is_started and (progress is Progress.MALFORMED or (reader.name is not None and not self._may_call(reader.name))):
            self._reject(reader.head, events)
            return
        self._give_out(reader, events)
        if progress is Progress.OVER:
            self._reader = None
            self._step = self._read_text if reader.left else self._read_after
            self._say(reader.left, events)
            if reader.next_head is not None:
                self._open(reader.next_head)
            elif reader.end_marker is not None:
                self._follow(reader.end_marker, [])

    def _give_out(self, reader: CallReader, events: list[Event]) -> None:
        if self._start(reader, events):
            self.give_arguments(events, reader.take_arguments())

    def _may_call(self, name: str) -> bool:
        is_offered_only = self._is_bare or self._envelope.is_offered_only
        return not is_offered_only or not self._schemas or name in self._schemas

    def _start(self, reader: CallReader, events: list[Event]) -> bool:
        """Begins the call, unless it has begun; False where it is not certain."""
        if self._is_started or not reader.is_certain or reader.name is None or not self._may_call(reader.name):
            return self._is_started
        self._is_started = True
        self._is_in_section = not self._is_bare and bool(self._envelope.section)
        self.start_call(events, reader.name)
        return True

    def _reject(self, pieces: list[str], events: list[Event]) -> None:
        """It was no call: the text held back and these pieces are text."""
        self._reader = None
        held, self._held = self._held, []
        self._say([*held, *pieces], events)
        self._step = self._read_text

    def _read_after(self, events: list[Event]) -> None:
        envelope = self._envelope
        markers = (
            *self._ends,
            envelope.section,
            envelope.call if self._is_in_section or not envelope.section or self._may_lack_section else "",
        )
        space, marker = self._buffer.start(*(marker for marker in markers if marker))
        if marker is None:
            self._say(space, events)
            self._step = self._read_text
        elif marker not in envelope.skipped:
            self._is_bare = False
            self._follow(marker, space)

    @property
    def _ends(self) -> tuple[str, ...]:
        """What may follow a call and is none."""
        envelope = self._envelope
        ends = (envelope.section_end, *envelope.skipped) if self._is_in_section or self._is_bare else ()
        return tuple(marker for marker in ends if marker)

    def _say(self, pieces: Iterable[str], events: list[Event]) -> None:
        for piece in join_pieces([piece for piece in pieces if piece]):
            if self._envelope.section:
                self._tail = (self._tail + piece[-_TAIL:])[-_TAIL:]
            events.append(Text(piece))


class ParsersInTurn(ToolParser):
    """A tool parser made of two, whose calls are numbered as one row. A call that the first finds ends whatever the second was reading.

    While the second is inside a call, text goes around the first, and so does what that one still holds when the call begins.
    """

    def __init__(self, first: Parser, new_second: Callable[[], Parser], tool_format: ToolFormat | None = None) -> None:
        self.tool_format = tool_format
        self._first = first
        self._new_second = new_second
        self._second = new_second()
        self._num_calls = 0

    @property
    def is_in_call(self) -> bool:
        """Whether either is inside a call."""
        return self._first.is_in_call or self._second.is_in_call

    def feed(self, text: str) -> list[Event]:
        events: list[Event] = []
        for part in split_at_calls(text):
            if self._second.is_in_call:
                events += self._through([Text(part)])
                continue
            events += self._through(self._first.feed(part))
            if self._second.is_in_call:
                events += self._through(self._first.release())
        return self._numbered(events)

    def finish(self) -> list[Event]:
        return self._numbered([*self._through(self._first.finish()), *self._second.finish()])

    def _through(self, events: Iterable[Event]) -> list[Event]:
        passed: list[Event] = []
        for event in events:
            if isinstance(event, Text):
                passed += self._second.feed(event.text)
                continue
            if isinstance(event, ToolCallStart):
                passed += self._second.finish()
                self._second = self._new_second()
            passed.append(event)
        return passed

    def _numbered(self, events: Iterable[Event]) -> list[Event]:
        """No two calls are ever open, so arguments are those of the call that has begun last; those that follow each other become one."""
        numbered: list[Event] = []
        for event in events:
            if isinstance(event, ToolCallStart):
                event = ToolCallStart(self._num_calls, event.name, event.id)
                self._num_calls += 1
            elif isinstance(event, ToolCallArguments):
                last = numbered.pop() if numbered and isinstance(numbered[-1], ToolCallArguments) else None
                fragment = last.fragment if isinstance(last, ToolCallArguments) else ""
                event = ToolCallArguments(self._num_calls - 1, fragment + event.fragment)
            numbered.append(event)
        return numbered


SLOT = re.compile(r"\{(\w+)\}")
_TAG = re.compile(r"<[^<>\s]+>")


@dataclass(frozen=True, kw_only=True)
class CallFormat(Format):
    """One wire format of tool calls, declared once: parser, grammar, markers, example and the row in docs/parsers.md follow from it.

    It is registered as the factory of its parsers: `register(row.name, row)`. The fields here are those of `FormatInfo`;
    `markers` and `example` follow from the templates of a subclass where they are not given.
    """

    name: str = ""
    models: str = ""
    quirks: str = ""
    aliases: tuple[str, ...] = ()
    signs: tuple[str, ...] = ()
    other_signs: tuple[tuple[str, ...], ...] = ()
    counter_signs: tuple[str, ...] = ()
    prompt_tail: str = ""
    markers: tuple[str, ...] = ()
    example: str = ""

    def __deepcopy__(self, memo: object) -> Self:
        return self  # it never changes

    @property
    def info(self) -> FormatInfo:
        """What `register` takes with the parser."""
        return FormatInfo(
            models=self.models,
            markers=self.all_markers,
            quirks=self.quirks,
            aliases=self.aliases,
            signs=self.signs,
            other_signs=self.other_signs,
            counter_signs=self.counter_signs,
            prompt_tail=self.prompt_tail,
            example=self.example or self.written_example(),
        )

    @cached_property
    def all_markers(self) -> tuple[str, ...]:
        """Those that are given, or else those of the templates."""
        return self.markers or self.written_markers()

    @property
    def tool_format(self) -> ToolFormat | None:
        """How calls are written; None for a format that no grammar can be held to."""
        return self

    @property
    @abstractmethod
    def opening(self) -> str:
        """The text or marker with which the first call begins, and at which a grammar takes over."""

    @abstractmethod
    def calls(self, tools: Sequence[CallableTool], *, is_single: bool) -> Structure:
        """What follows `opening`. There is at least one tool. Raises `UnsupportedGrammar` for arguments that cannot be written so."""

    @abstractmethod
    def __call__(self, turn: Turn) -> ToolParser:
        """The parser of one answer."""

    @abstractmethod
    def written_markers(self) -> tuple[str, ...]:
        """The markers in the templates, in their order."""

    @abstractmethod
    def written_example(self) -> str:
        """A call of `weather` with the city Oslo."""


def tags_of(template: str) -> tuple[str, ...]:
    """The markers in a template that are spelled as tags, each once."""
    return tuple(dict.fromkeys(_TAG.findall(template)))
