"""Reasoning formats as declarations: what a family of models writes around its reasoning, and the state machine that reads it.

Parsers around it change what is content: tags taken out of it, reasoning moved to it, the prompt's marker put in front of it.
"""

import enum
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields

from penstock.engine.contracts.parsing import Event, Format, FormatInfo, Phase, Reasoning, ReasoningParser, SpecialText, Text, Turn
from penstock.plugins.calls.schema_values import ToolSchemas
from penstock.plugins.markers import EdgeSpace, StepBuffer, marker_suffix, text_into

ALL = sys.maxsize  # line breaks next to a marker


class Thinking(enum.Enum):
    """How an answer begins if the prompt has neither opened nor closed the reasoning."""

    ALWAYS = "always"  # with reasoning
    ON = "on"  # with reasoning if its first text is a start marker; with content where a switch is false
    OFF = "off"  # with content; as ON where a switch is true


@dataclass(frozen=True, slots=True, kw_only=True)
class ThinkFormat(Format):
    """How a family of models marks its reasoning. Registered in place of a factory, it makes the parsers and describes itself.

    `start` and `end` are the markers that the engine itself writes, `other_starts` and `other_ends` further spellings. `text_markers` are a
    start and an end that count only if `start` is not an added token, the start only at the beginning of an answer. `effort_markers` are
    values of `reasoning_effort`, each with a start and an end, for formats with several pairs; the pair named by prompt or request is
    first. `label` is a first line of a block that is part of its marker. With `has_suffix`, checkpoints add a suffix to the markers' names.

    `thinking` is how an answer begins that the prompt has not begun. `switches` are arguments of the chat template, and `off_efforts`
    values of `reasoning_effort` that count as a false switch. The prompt up to the last of `boundaries` belongs to other turns.

    `implicit_ends` end the reasoning and stay in the content, where the tool parser reads them. `inner_call` is the start and the end of a
    call after which the reasoning continues. Another block begins at a start marker that is an added token, or that immediately follows the
    block before it; with `has_blocks_anywhere`, at any start marker, and end markers that end nothing are removed. Otherwise
    `drops_repeated_end` removes one of these, and `drops_leading_end` one at the beginning of the answer.

    `newlines_after_start`, `newlines_before_end` and `newlines_after_end` are the numbers of line breaks that belong to the marker. With
    `trims_space`, all white space at both ends of the reasoning does, and white space before wrapped content. `content_starts` and
    `wrappers` enclose content and are removed; a content start in the prompt has closed the reasoning. `{tool}` in a wrapper is the
    name of any tool that the request offers. `content_tags` are removed if they enclose the whole content. With
    `nonempty_content`, reasoning without content after it is content with `enable_thinking: false` or `force_nonempty_content: true`.

    `models`, `aliases`, `signs`, `counter_signs` and `prompt_tail` are as in `FormatInfo`. So are `markers` and `example`, which are
    derived from the rest by default; `note` is added to the description of the format's quirks.
    """

    models: str
    start: str = "<think>"
    end: str = "</think>"
    other_starts: tuple[str, ...] = ()
    other_ends: tuple[str, ...] = ()
    text_markers: tuple[str, str] | None = None
    effort_markers: tuple[tuple[str, tuple[str, str]], ...] = ()
    label: str = ""
    has_suffix: bool = False
    thinking: Thinking = Thinking.ON
    switches: tuple[str, ...] = ()
    off_efforts: tuple[str, ...] = ()
    boundaries: tuple[str, ...] = ()
    implicit_ends: tuple[str, ...] = ()
    inner_call: tuple[str, str] | None = None
    has_blocks_anywhere: bool = False
    drops_repeated_end: bool = False
    drops_leading_end: bool = False
    newlines_after_start: int = 0
    newlines_before_end: int = 0
    newlines_after_end: int = 0
    trims_space: bool = False
    content_starts: tuple[str, ...] = ()
    wrappers: tuple[str, ...] = ()
    content_tags: tuple[str, str] | None = None
    nonempty_content: bool = False
    aliases: tuple[str, ...] = ()
    signs: tuple[str, ...] = ()
    counter_signs: tuple[str, ...] = ()
    prompt_tail: str = ""
    markers: tuple[str, ...] = ()
    example: str = ""
    note: str = ""

    def __post_init__(self) -> None:
        for field in fields(self):
            given = getattr(self, field.name)
            if isinstance(field.default, tuple) and not isinstance(given, tuple):
                raise TypeError(f"`{field.name}` is a tuple, such as `({given!r},)`")
        if not self.start or not self.end:
            raise ValueError("`start` and `end` must not be empty")

    @property
    def info(self) -> FormatInfo:
        return FormatInfo(
            models=self.models,
            markers=self.markers or tuple(_plain_markers(self)),
            quirks=" ".join([*_quirks(self), *([self.note] if self.note else [])]),
            aliases=self.aliases,
            signs=self.signs,
            counter_signs=self.counter_signs,
            prompt_tail=self.prompt_tail,
            example=self.example or _example(self),
        )

    def __call__(self, turn: Turn) -> ReasoningParser:
        parser: ReasoningParser = ThinkParser(self, turn)
        if self.content_tags is not None:
            parser = ContentTags(parser, *self.content_tags, turn.added_tokens)
        arguments = turn.chat_template_kwargs
        wants_content = arguments.get("enable_thinking") is False or arguments.get("force_nonempty_content") is True
        if self.nonempty_content and wants_content and parser.phase is not Phase.CONTENT:
            parser = NonemptyContent(parser)
        return parser

    def phase(self, turn: Turn) -> Phase:
        """Where an answer begins: decided by the prompt, else by the request, else by the family."""
        pairs = [*self.pairs(turn), *([self.text_markers] if self.text_markers else [])]
        starts = [start for start, _ in pairs] + list(self.other_starts)
        ends = [end for _, end in pairs] + [*self.other_ends, *self.content_starts]
        phase = turn.phase(starts, ends, self.boundaries)
        if phase is not Phase.UNDECIDED:
            return phase
        if self.thinking is Thinking.ALWAYS:
            return Phase.REASONING
        given = [turn.chat_template_kwargs.get(name) for name in self.switches]
        if self.thinking is Thinking.OFF:
            return Phase.UNDECIDED if any(given) else Phase.CONTENT
        is_off = any(value is False for value in given) or turn.chat_template_kwargs.get("reasoning_effort") in self.off_efforts
        return Phase.CONTENT if is_off else Phase.UNDECIDED

    def pairs(self, turn: Turn) -> list[tuple[str, str]]:
        """The pairs of markers that may occur anywhere in this answer; the engine writes the first."""
        if self.effort_markers:
            effort = turn.chat_template_kwargs.get("reasoning_effort")
            used = [pair for name, pair in self.effort_markers if name == effort or any(marker in turn.prompt_tail for marker in pair)]
            return [*used, *(pair for _, pair in self.effort_markers if pair not in used)]
        if not self.has_suffix:
            return [(self.start, self.end)]
        suffix = marker_suffix(turn)
        return [(f"{self.start.removesuffix('>')}{suffix}>", f"{self.end.removesuffix('>')}{suffix}>")]


class State(enum.Enum):
    """What a parser reads; `NEXT` says what may come after it."""

    START = enum.auto()  # the beginning of the answer, white space so far
    LABEL = enum.auto()  # what follows a start marker, where the format labels its blocks
    REASONING = enum.auto()
    INNER_CALL = enum.auto()  # a call in the middle of the reasoning
    AFTER_BLOCK = enum.auto()  # white space after a block, which another one may follow at once
    CONTENT = enum.auto()


NEXT = {
    State.START: {State.LABEL, State.REASONING, State.AFTER_BLOCK, State.CONTENT},
    State.LABEL: {State.REASONING, State.AFTER_BLOCK, State.CONTENT},
    State.REASONING: {State.INNER_CALL, State.AFTER_BLOCK, State.CONTENT},
    State.INNER_CALL: {State.REASONING},
    State.AFTER_BLOCK: {State.LABEL, State.REASONING, State.CONTENT},
    State.CONTENT: {State.LABEL, State.REASONING},
}


class ThinkParser(ReasoningParser):
    """Reads one answer in a `ThinkFormat`.

    Content that a grammar holds stays as it is: no block begins in it, and no end marker is taken out.
    """

    def __init__(self, think: ThinkFormat, turn: Turn) -> None:
        pairs = think.pairs(turn)
        self.start_marker, self.end_marker = pairs[0]
        self._format = think
        self._phase = think.phase(turn)
        self._state = State.START if self._phase is not Phase.CONTENT or think.drops_leading_end else State.CONTENT
        self._step = STEPS[self._state]
        self._starts = (*(start for start, _ in pairs), *think.other_starts)
        self._first_starts = self._starts
        ends = [*(end for _, end in pairs), *think.other_ends]
        if think.text_markers is not None and think.start not in turn.added_tokens:
            self._first_starts += think.text_markers[:1]
            ends += think.text_markers[1:]
        self._ends = tuple("\n" * count + end for end in ends for count in range(think.newlines_before_end + 1))
        self._labels = (f"{think.label}\n", *(think.label + end for end in ends)) if think.label else ()
        self._inner_call = None if turn.is_constrained else think.inner_call
        self._reasoning_markers = (*self._ends, *think.implicit_ends, *(think.inner_call or ())[:1])
        self._wrappers = tuple(_wrappers(think, turn))
        self._may_reopen = not turn.is_constrained and (think.has_blocks_anywhere or self._phase is not Phase.CONTENT)
        openers = [start for start in self._starts if think.has_blocks_anywhere or start in turn.added_tokens]
        self._openers = tuple(openers if self._may_reopen else ())
        self._num_stray_ends = 0 if turn.is_constrained else ALL if think.has_blocks_anywhere else int(think.drops_repeated_end)
        self._content_markers = self._watched_in_content()
        self._num_quoted_starts = 0  # in the content, whose end markers have not come yet
        self._num_newlines = 0  # that would still belong to the last marker
        self._space = EdgeSpace() if think.trims_space else None
        self._buffer = StepBuffer(turn.added_tokens)

    @property
    def phase(self) -> Phase:
        return self._phase

    def feed(self, text: str) -> list[Event]:
        self._buffer.feed(text)
        return self._buffer.run(lambda events: self._step(self, events))

    def finish(self) -> list[Event]:
        """Emits the text held back: a marker that was never completed is part of its reasoning or content."""
        events: list[Event] = []
        self._give_out(self._buffer.finish(), events)
        if self._space is not None:
            events += self._events(self._space.finish())
        return events

    def release(self) -> list[Event]:
        return self.finish()

    def _enter(self, state: State, num_newlines: int = 0) -> None:
        assert state in NEXT[self._state], (self._state, state)
        self._state = state
        self._step = STEPS[state]
        self._phase = Phase.REASONING if state in (State.LABEL, State.REASONING) else Phase.CONTENT
        self._num_newlines = num_newlines

    def _open(self, space: Sequence[str], events: list[Event]) -> None:
        """Enters a block after its start marker, which `space` preceded."""
        self._enter(State.LABEL if self._labels else State.REASONING, self._num_newlines)
        self._give_out(list(space), events)
        self._num_newlines = self._format.newlines_after_start

    def _end_block(self, events: list[Event], *, is_marked: bool) -> None:
        self._end_stretch(events)
        if is_marked:
            is_followed = self._may_reopen and not self._format.has_blocks_anywhere
            self._enter(State.AFTER_BLOCK if is_followed else State.CONTENT, self._format.newlines_after_end)
        else:
            self._enter(State.CONTENT)

    def _read_start(self, events: list[Event]) -> None:
        # A start marker is removed even if the prompt has opened the block: a model may repeat it.
        starts = () if self._phase is Phase.CONTENT else self._first_starts
        space, marker = self._buffer.start(*starts, *(self._ends if self._format.drops_leading_end else ()))
        if marker is not None and marker in starts:
            self._open(space, events)
        elif marker is not None:
            self._give_out(space, events)
            self._end_block(events, is_marked=True)
        else:
            self._enter(State.REASONING if self._phase is Phase.REASONING else State.CONTENT)
            self._give_out(space, events)

    def _read_label(self, events: list[Event]) -> None:
        space, label = self._buffer.start(*self._labels)
        self._give_out(space, events)
        if label is None or label.endswith("\n"):
            self._enter(State.REASONING)
        else:
            self._end_block(events, is_marked=True)

    def _read_reasoning(self, events: list[Event]) -> None:
        marker = self._buffer.until(lambda piece: self._give_out([piece], events), *self._reasoning_markers)
        if marker in self._ends:
            self._end_block(events, is_marked=True)
            return
        if self._inner_call is not None and marker == self._inner_call[0]:
            self._end_stretch(events)
            self._enter(State.INNER_CALL)
        else:
            self._end_block(events, is_marked=False)
        events += map(Text, self._buffer.marker_pieces)

    def _read_inner_call(self, events: list[Event]) -> None:
        assert self._inner_call is not None
        self._buffer.until(text_into(events), self._inner_call[1])
        events += map(Text, self._buffer.marker_pieces)
        self._enter(State.REASONING)

    def _read_after_block(self, events: list[Event]) -> None:
        # White space between two blocks belongs to the reasoning.
        space, marker = self._buffer.start(*self._starts)
        if marker is not None:
            self._open(space, events)
        else:
            self._enter(State.CONTENT, self._num_newlines)
            self._give_out(space, events)

    def _read_content(self, events: list[Event]) -> None:
        marker = self._buffer.until(lambda piece: self._give_out([piece], events), *self._content_markers)
        if marker in self._openers:
            self._end_stretch(events)
            self._open((), events)
        elif marker in self._starts:
            self._num_quoted_starts += 1
            self._give_out(self._buffer.marker_pieces, events)
        elif marker in self._ends and self._num_quoted_starts:
            self._num_quoted_starts -= 1
            self._give_out(self._buffer.marker_pieces, events)
        else:
            self._end_stretch(events)
            if marker in self._ends:
                self._num_stray_ends -= 1
                self._content_markers = self._watched_in_content()
            elif marker not in self._wrappers:
                events += map(Text, self._buffer.marker_pieces)

    def _watched_in_content(self) -> tuple[str, ...]:
        block_markers = (*self._starts, *self._ends) if self._num_stray_ends else self._openers
        edges = self._format.implicit_ends if self._format.trims_space else ()  # white space between a block and a call is dropped
        return (*block_markers, *self._wrappers, *edges)

    def _give_out(self, pieces: list[str], events: list[Event]) -> None:
        if self._num_newlines:
            pieces = [piece for piece in map(self._without_newlines, pieces) if piece]
        if self._space is not None and self._state is not State.INNER_CALL:
            pieces = self._space.take(pieces, drops_leading=self._phase is Phase.REASONING)
        events += self._events(pieces)

    def _end_stretch(self, events: list[Event]) -> None:
        """A marker ends what is being emitted: the white space before it belongs to the marker or to the text."""
        if self._space is not None:
            events += self._events(self._space.end(drops_trailing=self._phase is Phase.REASONING))

    def _events(self, pieces: list[str]) -> list[Event]:
        kind = Reasoning if self._phase is Phase.REASONING else Text
        return [kind(piece) for piece in pieces]

    def _without_newlines(self, piece: str) -> str:
        """The piece without the line breaks that still belong to the marker before it."""
        rest = piece if isinstance(piece, SpecialText) else piece[_num_leading_newlines(piece, self._num_newlines) :]
        self._num_newlines = 0 if rest else self._num_newlines - len(piece)
        return rest


STEPS = {
    State.START: ThinkParser._read_start,
    State.LABEL: ThinkParser._read_label,
    State.REASONING: ThinkParser._read_reasoning,
    State.INNER_CALL: ThinkParser._read_inner_call,
    State.AFTER_BLOCK: ThinkParser._read_after_block,
    State.CONTENT: ThinkParser._read_content,
}


def _num_leading_newlines(text: str, most: int) -> int:
    return next((position for position, character in enumerate(text[:most]) if character != "\n"), min(most, len(text)))


def _wrappers(think: ThinkFormat, turn: Turn) -> Iterator[str]:
    tools = ToolSchemas(turn.tools).names if any("{tool}" in wrapper for wrapper in think.wrappers) else ()
    for wrapper in (*think.content_starts, *think.wrappers):
        if "{tool}" in wrapper:
            yield from (wrapper.replace("{tool}", name) for name in tools)
        else:
            yield wrapper


def _plain_markers(think: ThinkFormat) -> Iterator[str]:
    """All markers but those that are made of others."""
    start = think.start + (f"{think.label}\n" if think.label else "")
    pairs = [(start, think.end), (*think.other_starts, *think.other_ends), think.text_markers, *(pair for _, pair in think.effort_markers)]
    groups = [*pairs, think.content_tags, think.content_starts, think.wrappers]
    markers = dict.fromkeys(marker for group in groups for marker in group or ())
    for marker in markers:
        if "{tool}" not in marker and not any(other in marker for other in markers if other != marker):
            yield marker


def _example(think: ThinkFormat) -> str:
    """An answer to a prompt that ends as these models' prompts do."""
    is_open = think.phase(Turn(prompt_tail=think.prompt_tail)) is Phase.REASONING
    opening = "" if is_open else think.start + (f"{think.label}\n" if think.label else "")
    before, after = think.content_tags or ("", "")
    return f"{opening}Capitals.{think.end}{before}Oslo.{after}"


def _quirks(think: ThinkFormat) -> Iterator[str]:
    """What a reader of docs/parsers.md should know of a format, in sentences."""
    switches = _either(think.switches)
    if think.thinking is Thinking.ALWAYS:
        yield f"Always reasons: without `{think.end}`, everything is reasoning."
    elif think.thinking is Thinking.OFF:
        yield f"Off unless {switches} is true."
    elif switches:
        yield f"On unless {switches} is false{''.join(f' or `reasoning_effort` is `{effort}`' for effort in think.off_efforts)}."
    if think.effort_markers:
        yield f"`reasoning_effort` {_either([effort for effort, _ in think.effort_markers])} chooses the markers."
    if think.has_suffix:
        yield f"Checkpoints may add a suffix to their markers, `{think.start.removesuffix('>')}:x>`."
    if think.text_markers:
        yield f"`{think.text_markers[0]}` counts only at the start, and only if the vocabulary has no `{think.start}`."
    if think.label:
        yield f"The first line of a block, `{think.label}`, is part of its marker."
    if think.implicit_ends:
        yield f"{_either(think.implicit_ends)} ends the reasoning."
    if think.inner_call:
        yield f"A call within the reasoning, `{think.inner_call[0]}` … `{think.inner_call[1]}`, is content; then the reasoning continues."
    if think.has_blocks_anywhere:
        yield "A block may begin anywhere in the content, and an end marker that ends nothing is removed."
    if think.content_starts or think.wrappers:
        yield "Markers around the content are removed."
    if think.content_tags:
        yield f"`{think.content_tags[0]}` around the content is removed."
    if think.drops_leading_end:
        yield f"A leading `{think.end}` is removed."
    if think.drops_repeated_end:
        yield f"A second `{think.end}` is removed."
    yield from _newline_quirks(think)
    if think.trims_space:
        yield "White space at both ends of the reasoning is removed."
    if think.nonempty_content:
        yield (
            "With `enable_thinking: false` or `force_nonempty_content`, reasoning that no content follows is content; it is known only at "
            "the end, so the reasoning does not stream."
        )


def _newline_quirks(think: ThinkFormat) -> Iterator[str]:
    places = [
        (think.newlines_after_start, f"after `{think.start}`"),
        (think.newlines_before_end, f"before `{think.end}`"),
        (think.newlines_after_end, f"after `{think.end}`"),
    ]
    dropped = [f"{'all' if count == ALL else count} {place}" for count, place in places if count]
    if dropped:
        yield f"Removed line breaks: {', '.join(dropped)}."


def _either(words: Sequence[str]) -> str:
    quoted = [f"`{word}`" for word in words]
    return " or ".join(filter(None, [", ".join(quoted[:-1]), *quoted[-1:]]))


class ContentTags(ReasoningParser):
    """Takes tags such as `<answer>` … `</answer>` out of the content that another reasoning parser gives.

    The opening tag counts only where the content begins, with the white space before it, and the closing tag only after it. A line break
    on the inner side of each belongs to it, and one after the closing tag. Content without the opening tag stays as it is.
    """

    def __init__(self, parser: ReasoningParser, opening: str, closing: str, added_tokens: frozenset[str] = frozenset()) -> None:
        self.start_marker = parser.start_marker
        self.end_marker = parser.end_marker
        self._parser = parser
        self._opening = opening
        self._closings = (f"\n{closing}", closing)
        self._buffer = StepBuffer(added_tokens)
        self._step = self._read_start
        self._may_drop_newline = False

    @property
    def phase(self) -> Phase:
        return self._parser.phase

    def feed(self, text: str) -> list[Event]:
        return self._through(self._parser.feed(text))

    def finish(self) -> list[Event]:
        events = self._through(self._parser.finish())
        return [*events, *self._texts(self._buffer.finish())]

    def release(self) -> list[Event]:
        events = self._through(self._parser.release())
        return [*events, *self._texts(self._buffer.finish())]

    def _through(self, inner: Iterable[Event]) -> list[Event]:
        events: list[Event] = []
        for event in inner:
            if not isinstance(event, Text):
                events += self._texts(self._buffer.finish())
                events.append(event)
                continue
            self._buffer.feed(event.text)
            events += self._buffer.run(lambda events: self._step(events))
        return events

    def _read_start(self, events: list[Event]) -> None:
        space, marker = self._buffer.start(self._opening)
        if marker is None:
            events += self._texts(space)
            self._step = self._read_rest
        else:
            self._may_drop_newline = True
            self._step = self._read_inside

    def _read_inside(self, events: list[Event]) -> None:
        self._buffer.until(lambda piece: events.extend(self._texts([piece])), *self._closings)
        self._may_drop_newline = True
        self._step = self._read_rest

    def _read_rest(self, events: list[Event]) -> None:
        self._buffer.until(lambda piece: events.extend(self._texts([piece])))

    def _texts(self, pieces: list[str]) -> list[Event]:
        if pieces and self._may_drop_newline:
            self._may_drop_newline = False
            if pieces[0].startswith("\n"):
                pieces = [pieces[0][1:], *pieces[1:]]
        return [Text(piece) for piece in pieces if piece]


class NonemptyContent(ReasoningParser):
    """Moves the reasoning that another parser gives to the content, where that has nothing but white space.

    Which of the two it was is known at the first content or at the end: until then it is held back.
    """

    def __init__(self, parser: ReasoningParser) -> None:
        self.start_marker = parser.start_marker
        self.end_marker = parser.end_marker
        self._parser = parser
        self._held: list[Event] = []
        self._is_decided = False

    @property
    def phase(self) -> Phase:
        return self._parser.phase

    def feed(self, text: str) -> list[Event]:
        return self._through(self._parser.feed(text))

    def finish(self) -> list[Event]:
        events = self._through(self._parser.finish())
        events += [Text(event.text) if isinstance(event, Reasoning) else event for event in self._held]
        self._held = []
        return events

    def release(self) -> list[Event]:
        return self._through(self._parser.release())

    def _through(self, events: Iterable[Event]) -> list[Event]:
        if self._is_decided:
            return list(events)
        for event in events:
            self._held.append(event)
            self._is_decided = self._is_decided or not (isinstance(event, Reasoning) or (isinstance(event, Text) and event.text.isspace()))
        if not self._is_decided:
            return []
        released, self._held = self._held, []
        return released


class AppendThink(ReasoningParser):
    """Emits `<think>` and then the whole answer, markers included. Nothing is reasoning, so constraints hold from the first token."""

    start_marker = "<think>"
    end_marker = "</think>"
    phase = Phase.CONTENT

    def __init__(self, turn: Turn) -> None:
        self._prefix = "" if turn.phase("<think>", "</think>") is Phase.CONTENT else self.start_marker

    def feed(self, text: str) -> list[Event]:
        if not text:
            return []
        if text in (self.start_marker, self.end_marker):
            text = str(text)  # a marker that is a special token is to be seen here
        prefix, self._prefix = self._prefix, ""
        return [Text(prefix), Text(text)] if prefix else [Text(text)]

    def finish(self) -> list[Event]:
        """Emits the marker even if nothing followed it."""
        prefix, self._prefix = self._prefix, ""
        return [Text(prefix)] if prefix else []
