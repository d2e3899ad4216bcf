"""The stream of tool calls, the contract of the readers of calls, and `CallFormat`, the base of declared formats."""

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
from penstock.engine.text.streaming import PatternState
from penstock.plugins.markers import StepBuffer, Waiting, compile_markers, join_pieces, split_symbols, text_into


def new_call_id() -> str:
    """A new id in OpenAI's form: `call_` and 24 hexadecimal digits."""
    return f"call_{secrets.token_hex(12)}"


def new_short_call_id() -> str:
    """A new id in the form that Mistral's templates require: nine letters and digits."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


_OPENERS = "([{"
_CLOSERS = ")]}"


class MalformedCall:
    """Passes text up to the bracket that closes a call of which `depth` are open, or to one of `ends`. Brackets in strings do not count."""

    def __init__(self, buffer: StepBuffer, depth: int, ends: Sequence[str], quotes: str) -> None:
        self._buffer = buffer
        self._depth = depth
        self._ends = ends
        self._quotes = quotes
        self._quote = ""

    @property
    def is_over(self) -> bool:
        return self._depth <= 0

    def read(self, events: list[Event]) -> str | None:
        """Reads on to the next mark, which is returned where it is one of `ends`, and text otherwise."""
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
        return None


class Progress(Enum):
    """The result of reading on."""

    READ = auto()  # there may be more
    OVER = auto()  # the call has ended
    MALFORMED = auto()  # this is no call: only before it is certain


class CallReader(ABC):
    """Reads one call from a buffer that others have read the beginning of.

    `name` is None until it has been read, and `call_id` where the format has none. Until the call `is_certain`, `head` are the pieces that
    have been read, which are text if it is none after all. A call that was not closed ends where it goes wrong: `left` is what was read
    then and is text, `end_marker` the marker of what is outside that was met instead. `next_head` are the pieces before another call that
    follows without a marker.
    """

    name: str | None = None
    call_id: str | None = None
    is_certain = False
    end_marker: str | None = None
    next_head: list[str] | None = None

    def __init__(self, buffer: StepBuffer, around: "Surroundings") -> None:
        self.head: list[str] = []
        self.left: list[str] = []
        self._buffer = buffer
        self._around = around
        self._step: Callable[[], Progress]

    @property
    def is_in_call(self) -> bool:
        """Whether the next text belongs to the call's arguments."""
        return self.name is not None

    @property
    def is_refused(self) -> bool:
        """Whether this is no call already, although there is more of it to read: `head` is text."""
        return False

    @property
    def is_whole(self) -> bool:
        """Whether the call has ended as it should."""
        return True

    @property
    def depth(self) -> int:
        """How many of its brackets were open where it went wrong."""
        return 0

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


@dataclass(frozen=True)
class Surroundings:
    """The markers around calls, which a call's reader meets if the call was not closed."""

    markers: tuple[str, ...]
    added_tokens: frozenset[str]

    def __deepcopy__(self, memo: object) -> Self:
        return self  # they never change

    @cached_property
    def tokens(self) -> tuple[str, ...]:
        """Those that no plain text can be."""
        return tuple(filter(self.is_token, self.markers))

    @cached_property
    def ends_in_strings(self) -> PatternState[str]:
        """Those that end a call in plain text even within a string, where that has no right end: no fence, bracket or brace does."""
        distinct = (marker for marker in self.markers if len(marker) > 3 and not any(char in marker for char in "`{\n"))
        return compile_markers(tuple(marker for marker in distinct if marker not in self.tokens), self.added_tokens)

    def is_token(self, marker: str) -> bool:
        return any(token in marker for token in self.added_tokens if token)

    def pieces(self, marker: str) -> list[str]:
        """The original pieces of a marker that turned out to be none."""
        return [marker] if isinstance(marker, SpecialText) else join_pieces(split_symbols(marker, self.added_tokens))


class CallStream(ToolParser):
    """A tool parser: text, and calls in it, as a state machine whose states (`_step`) read from the buffer as far as they can.

    What is no call is `Text`, unchanged; what may become one is held back until that is certain. White space between calls is part of the
    format. A call that goes wrong after it has started is closed there, and the rest is `Text`; so is everything with
    `tool_choice: none`. Each call is read by a `CallReader`; `markers` are those around calls. A subclass has the states in which its
    calls may begin, and those after a call.
    """

    def __init__(
        self, turn: Turn, markers: tuple[str, ...], tool_format: ToolFormat | None, new_id: Callable[[], str] = new_call_id
    ) -> None:
        self.tool_format = tool_format
        self._is_off = turn.tool_choice == "none"
        self._buffer = StepBuffer(turn.added_tokens)
        self._around = Surroundings(markers, turn.added_tokens)
        self._new_id = new_id
        self._num_calls = 0
        self._ids: set[str] = set()
        self._held: list[str] = []  # text if no call follows: markers, separators
        self._reader: CallReader | None = None
        self._is_started = False  # the call that is being read has been emitted
        self._malformed: MalformedCall | None = None  # is passed over
        self._step: Callable[[list[Event]], None] = self._read_text

    @property
    def is_in_call(self) -> bool:
        """Whether the next text belongs to a call's arguments, or to what turned out to be none."""
        return self._malformed is not None if self._reader is None else self._reader.is_in_call

    def feed(self, text: str) -> list[Event]:
        if self._is_off:
            return [Text(text)] if text else []
        self._buffer.feed(text)
        return self._read_on()

    def finish(self) -> list[Event]:
        """An open call with a name stays a call as far as it was written; any other text held back is text."""
        events: list[Event] = []
        while self._reader is not None and self._reader.settle():
            events += self._read_on()
        reader = self._reader
        rest = self._buffer.finish() if reader is None else reader.finish()
        if reader is not None and not self._give_out(reader, events):
            self._held += reader.head
        if not self._is_cut_end(self._held, rest):
            self._say([*self._held, *rest], events)
        self._held = []
        return events

    def _read_on(self) -> list[Event]:
        events: list[Event] = []
        try:
            while True:
                self._step(events)
        except Waiting:
            if self._reader is not None:
                self._give_out(self._reader, events)
            return events

    @abstractmethod
    def _read_text(self, events: list[Event]) -> None:
        """Outside of calls, up to where one may begin."""

    def _begin(self, reader: CallReader, held: list[str]) -> None:
        """A call may begin here, after the pieces held."""
        self._held = held
        self._reader = reader
        self._is_started = False
        self._step = self._read_call

    def _read_call(self, events: list[Event]) -> None:
        reader = self._reader
        assert reader is not None
        progress = reader.read()
        if not self._is_started and (progress is Progress.MALFORMED or (reader.name is not None and not self._may_call(reader.name))):
            self._reader = None
            self._held += reader.head
            self._give_back(events)
            self._leave_call(reader, events, is_call=False)
        elif progress is Progress.OVER:
            self._give_out(reader, events)
            self._reader = None
            self._say(reader.left, events)
            self._leave_call(reader, events, is_call=True)

    @abstractmethod
    def _leave_call(self, reader: CallReader, events: list[Event], *, is_call: bool) -> None:
        """Enters the state after a call, or after what turned out to be none and is text."""

    def _pass_over(self, depth: int, ends: Sequence[str], quotes: str, then: Callable[[str | None, list[Event]], None]) -> None:
        """What is left of a call that was none, or went wrong, is text up to the bracket that closes it, or to one of `ends`.

        `then` gets that marker, or None after the bracket, and enters the next state.
        """
        self._malformed = MalformedCall(self._buffer, depth, ends, quotes)
        self._leave_malformed = then
        self._step = self._read_malformed

    def _read_malformed(self, events: list[Event]) -> None:
        malformed = self._malformed
        assert malformed is not None
        marker = None if malformed.is_over else malformed.read(events)
        if marker is not None or malformed.is_over:
            self._malformed = None
            self._leave_malformed(marker, events)

    def _may_call(self, name: str) -> bool:
        """Whether a call of this name is one."""
        return True

    def _give_out(self, reader: CallReader, events: list[Event]) -> bool:
        """Emits what is certain of the call; False where it is not yet one."""
        if not self._is_started:
            if reader.is_refused:
                self._held += reader.head
                reader.head.clear()
                self._give_back(events)
            if not reader.is_certain or reader.name is None or not self._may_call(reader.name):
                return False
            self._start(reader.name, reader.call_id, events)
        arguments = reader.take_arguments()
        if arguments:
            events.append(ToolCallArguments(self._num_calls - 1, arguments))
        return True

    def _start(self, name: str, call_id: str | None, events: list[Event]) -> None:
        if not call_id or call_id in self._ids:  # results are told apart by it
            call_id = self._new_id()
        self._ids.add(call_id)
        self._is_started = True
        self._held = []
        events.append(ToolCallStart(self._num_calls, name, call_id))
        self._num_calls += 1

    def _give_back(self, events: list[Event]) -> None:
        """The text held back is no call."""
        held, self._held = self._held, []
        self._say(held, events)

    def _reject(self, events: list[Event]) -> None:
        """The text held back is no call, and other text follows."""
        self._give_back(events)
        self._step = self._read_text

    def _say(self, pieces: Sequence[str], events: list[Event]) -> None:
        events += map(Text, join_pieces([piece for piece in pieces if piece]))

    @abstractmethod
    def _is_cut_end(self, held: list[str], rest: list[str]) -> bool:
        """Whether an answer that ends in this text was cut within what ends calls, or is followed by nothing else."""


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
        # At most one call is open, so arguments belong to the call that has begun last; consecutive ones are joined.
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
