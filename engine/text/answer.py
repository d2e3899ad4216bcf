"""One sequence's tokens on their way to events: detokenizer → reasoning parser → stop strings → tool parser → limits on calls.

Text of a call goes around the reasoning parser."""

import copy
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from penstock.engine.contracts.parsing import (
    Event,
    Parser,
    Phase,
    Preamble,
    Reasoning,
    ReasoningParser,
    SpecialText,
    Text,
    ToolCallArguments,
    ToolCallStart,
    ToolParser,
)
from penstock.engine.text.streaming import Detokenizer, RepetitionDetection, StopStrings


@dataclass(frozen=True, slots=True, kw_only=True)
class CallLimits:
    """An answer ends after `max_calls` calls, and after `max_alike` consecutive calls of the same name and arguments, to the letter.

    None is no bound. `opening` is the text with which a grammar opens calls: where an answer is cut before a call has its name, that text
    and all after it is the grammar's markup and no content. An answer that is held to calls alone has an empty `opening`: all of it is.
    """

    max_calls: int | None = None
    max_alike: int | None = None
    opening: str | None = None


NO_LIMITS = CallLimits()


class LimitedCalls:
    """Passes the events of one answer on until a call goes beyond the limits; from there on nothing passes, and `is_over` is set.

    A call that may yet turn out to repeat the ones before it once too often is held back until it differs from them.
    """

    def __init__(self, limits: CallLimits) -> None:
        self.is_over = False
        self._limits = limits
        self._num_calls = 0
        self._num_alike = 0  # the last whole call, and those before it that were the same
        self._previous = ("", "")  # the last whole call: its name and arguments
        self._name = ""
        self._arguments: list[str] = []
        self._held: list[Event] = []
        self._num_matched = 0  # characters of the previous arguments that the held call has repeated so far

    @property
    def is_idle(self) -> bool:
        """Whether events that belong to no call pass at once."""
        return not self._held and not self.is_over

    def feed(self, events: Iterable[Event]) -> list[Event]:
        passed: list[Event] = []
        for event in events:
            if self.is_over:
                break
            if isinstance(event, ToolCallStart):
                passed += self._start(event)
            elif isinstance(event, ToolCallArguments):
                passed += self._go_on(event)
            else:
                passed += [*self._release(), event]
        return passed

    def finish(self, unread: Sequence[Event]) -> list[Event]:
        """Generation is over, and `unread` is what parsers had held. A call that was cut while it was held passes as far as it came."""
        passed = self.feed(unread if self._limits.opening is None else _before(self._limits.opening, unread))
        return passed + self._release()

    def _release(self) -> list[Event]:
        held, self._held = self._held, []
        return held

    def _start(self, event: ToolCallStart) -> list[Event]:
        passed = self._release()
        if self._num_calls:
            call = (self._name, "".join(self._arguments))
            self._num_alike = self._num_alike + 1 if call == self._previous else 1
            self._previous = call
        if self._limits.max_calls is not None and self._num_calls >= self._limits.max_calls:
            self.is_over = True
            return passed
        self._num_calls += 1
        self._name, self._num_matched = event.name, 0
        self._arguments.clear()
        if self._limits.max_alike is None or self._num_alike < self._limits.max_alike or event.name != self._previous[0]:
            return [*passed, event]
        self._held = [event]
        return passed

    def _go_on(self, event: ToolCallArguments) -> list[Event]:
        self._arguments.append(event.fragment)
        if not self._held:
            return [event]
        self._held.append(event)
        arguments = self._previous[1]
        if not arguments.startswith(event.fragment, self._num_matched):
            return self._release()
        self._num_matched += len(event.fragment)
        if self._num_matched == len(arguments):  # a whole document, of which nothing can follow
            self.is_over = True
            self._held = []
        return []


def _before(opening: str, events: Sequence[Event]) -> list[Event]:
    """The events without the text from `opening` on."""
    room = "".join(event.text for event in events if isinstance(event, Text)).find(opening)
    if room < 0:
        return list(events)
    kept: list[Event] = []
    for event in events:
        if isinstance(event, Text):
            event = event if len(event.text) <= room else Text(event.text[:room])
            room -= len(event.text)
        kept.append(event)
    return kept


_PARTS = re.compile(r" ?\w+|\W")  # calls begin and end at no character of a word, nor at the blank before one


class ParserChain(Parser):
    """Feeds each parser the `Text` of the one before it; all other events pass by. Without parsers, everything is `Text`.

    While the last parser is inside a call, text goes around the `reasoning` parser, which otherwise is the first: what looks like one of
    its markers there belongs to the call's arguments. So does what that parser still holds when the call begins.
    """

    def __init__(self, parsers: Sequence[Parser], *, reasoning: Parser | None = None) -> None:
        self._reasoning = reasoning
        self._parsers = tuple(parsers)
        self._has_calls = reasoning is not None and bool(self._parsers) and isinstance(self._parsers[-1], ToolParser)

    @property
    def is_in_call(self) -> bool:
        """Whether what comes next belongs to a call."""
        return bool(self._parsers) and self._parsers[-1].is_in_call

    def feed(self, piece: str) -> list[Event]:
        """The events that a piece of the answer completes."""
        if self._reasoning is None:
            return self._read_content([Text(piece)] if piece else [])
        events: list[Event] = []
        for part in split_at_calls(piece) if self._has_calls else (piece,):
            if self.is_in_call:
                events += self._read_content([Text(part)])
                continue
            events += self._read_content(self._reasoning.feed(part))
            if self.is_in_call:
                events += self._read_content(self._reasoning.release())
        return events

    def finish(self) -> list[Event]:
        """Flushes in order: what one parser gives back is still read by those after it."""
        events = [] if self._reasoning is None else list(self._reasoning.finish())
        for parser in self._parsers:
            events = [*_through(parser, events), *parser.finish()]
        return events

    def _read_content(self, events: Iterable[Event]) -> list[Event]:
        for parser in self._parsers:
            events = _through(parser, events)
        return list(events)


def split_at_calls(piece: str) -> Sequence[str]:
    """The piece in parts, in none of which a call begins or ends but at its end."""
    return (piece,) if len(piece) < 2 or isinstance(piece, SpecialText) else _PARTS.findall(piece)


def _through(parser: Parser, events: Iterable[Event]) -> list[Event]:
    passed: list[Event] = []
    for event in events:
        if isinstance(event, Text):
            passed.extend(parser.feed(event.text))
        else:
            passed.append(event)
    return passed


def visible_events(events: Iterable[Event], *, skip_special_tokens: bool) -> list[Event]:
    """Without hidden special tokens where those are skipped, every text a plain `str`, and neighbours of one kind joined."""
    visible: list[Event] = []
    for event in events:
        if not isinstance(event, Text | Reasoning):
            visible.append(event)
            continue
        if not event.text or (skip_special_tokens and isinstance(event.text, SpecialText) and event.text.is_hidden):
            continue
        last = visible[-1] if visible else None
        if isinstance(last, Text | Reasoning) and type(last) is type(event):
            visible[-1] = type(event)(last.text + event.text)
        else:
            visible.append(type(event)(str(event.text)))
    return visible


class BlankText:
    """Leaves out content that is nothing but white space between reasoning, tool calls and the end of an answer that has calls.

    White space is held until what follows it is known; next to any other content it stays as it was written.
    """

    def __init__(self) -> None:
        self.has_content = False
        """Whether there has been any since the last call. Then all text passes."""
        self._held = ""
        self._has_called = False

    def feed(self, events: Iterable[Event]) -> list[Event]:
        shown: list[Event] = []
        for event in events:
            if isinstance(event, Text):
                text = self._take_held() + event.text
                self.has_content = self.has_content or bool(text.strip())
                if self.has_content:
                    shown.append(Text(text))
                else:
                    self._held = text
                continue
            if isinstance(event, ToolCallStart):
                self._take_held()
                self._has_called = True
                self.has_content = False
            shown.append(event)
        return shown

    def finish(self) -> list[Event]:
        """What was held, where there are no calls."""
        held = self._take_held()
        return [Text(held)] if held and not self._has_called else []

    def _take_held(self) -> str:
        held, self._held = self._held, ""
        return held


class _ContentRecorder(Parser):
    """Lets content pass, and keeps what came with the last token."""

    def __init__(self) -> None:
        self.text = ""

    def feed(self, text: str) -> list[Text]:
        self.text += text
        return [Text(text)]

    def finish(self) -> list[Text]:
        return []


# No text that is worth going on with: 14 of 15 answers in which SmolLM2 said this went on with it until `max_tokens`.
LOOPS = RepetitionDetection(max_pattern_size=128, min_pattern_size=16, min_count=3)


@dataclass(frozen=True, slots=True)
class PreambleParams:
    """Free text of at most `budget` tokens before a constrained answer, and the cue that the engine writes between the two.

    The cue takes the place of the token that would end the text, or that is one too many: text that repeats itself is over. It has one
    token at least. A cue that leaves no room for the answer is not begun: the answer ends with its preamble. `schema` is the JSON Schema
    that the answer is held to, if it is: from it and the free text the answer is predicted. Where the preamble `reads_calls`, a tool call
    in it is the answer. The text ends before fewer than `num_reserved` tokens are left behind the cue.
    """

    budget: int
    cue_token_ids: tuple[int, ...]
    schema: str | None = None
    reads_calls: bool = False
    num_reserved: int = 0

    def must_close(self, answer: "Answer", *, is_over: bool, room: int) -> bool:
        """Whether the cue takes the place of the token just sampled, with which the free text may be over.

        `room` is how many tokens the answer may still have, this one included.
        """
        is_last = bool(self.num_reserved and room <= len(self.cue_token_ids) + self.num_reserved)
        return answer.is_in_preamble and (is_over or is_last) and room > len(self.cue_token_ids)

    def is_spent(self, answer: "Answer", token_ids: list[int], repetition: RepetitionDetection | None) -> bool:
        """Whether the token just sampled is one too many after `token_ids`. `repetition` is the request's own."""
        if not answer.is_in_preamble or answer.phase is not Phase.PREAMBLE:
            return False
        num_free = answer.num_preamble_tokens
        return num_free >= self.budget or (repetition or LOOPS).finds(token_ids, len(token_ids) - num_free)


class Answer:
    """Turns one sequence's tokens into events, token by token.

    Stop strings apply to content, tool-call markup included, and never to reasoning. Once `stop_match` is set, only the text buffered
    before it is left: `finish` returns it, and `feed` must not be called again. A stop string that is complete before
    `min_tokens` have been fed ends nothing. Ids that end the sequence are fed only if they are to be included. Tool calls beyond the
    `call_limits` end the answer, too, and are not returned.

    After `begin_preamble` everything but reasoning is free text until `end_preamble`, in which stop strings are ignored, and calls
    too unless it `reads_calls`. After `begin_undecided` it is read only to find out whether it is a call; `begin_rest` sets what follows.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        reasoning: ReasoningParser | None,
        tool_parser: Parser | None,
        stop: Sequence[str],
        include_stop_str_in_output: bool,
        skip_special_tokens: bool,
        min_tokens: int = 0,
        call_limits: CallLimits = NO_LIMITS,
    ) -> None:
        self._detokenizer = detokenizer
        self._reasoning = reasoning
        self._stop_strings = StopStrings(stop, include_stop_str_in_output, skip_special_tokens=skip_special_tokens) if stop else None
        self._num_tokens = 0
        self._min_tokens = min_tokens
        self._skip_special_tokens = skip_special_tokens
        self._recorder = None if reasoning is None else _ContentRecorder()
        self._blank = None if tool_parser is None else BlankText()
        self._tool_parser = tool_parser
        self._calls = LimitedCalls(call_limits)
        self._chain = self._new_chain()
        self._is_plain = reasoning is None and tool_parser is None and not stop
        self.num_reasoning_tokens = 0
        """Tokens at whose start or end the model was reasoning: those of both markers count, if a marker is distinct from text."""
        self.is_in_preamble = False
        self.num_preamble_tokens = 0
        """Tokens of the free text before the answer, the cue's included."""
        self.is_undecided = False
        self.reads_calls = False
        """Whether a call is looked for in free text, which shows whether it `has_called` and, beside white space, `has_said` anything."""
        self.has_called = self.has_said = False
        self.is_settled = True
        """Whether no token of free text may yet turn out to belong to a call: parsers hold nothing."""
        self._held = ""  # free text that parsers have not let pass, and perhaps more
        self._num_held = 0  # characters that they hold
        self._opening: str | None = None

    def _new_chain(self) -> ParserChain:
        content_parsers = (self._recorder, self._stop_strings, self._tool_parser)
        return ParserChain([parser for parser in content_parsers if parser is not None], reasoning=self._reasoning)

    @property
    def phase(self) -> Phase:
        phase = Phase.CONTENT if self._reasoning is None else self._reasoning.phase
        return Phase.PREAMBLE if self._is_free and phase is not Phase.REASONING else phase

    @property
    def _is_free(self) -> bool:
        return self.is_in_preamble or self.is_undecided

    @property
    def stop_match(self) -> str | None:
        """The stop string that ended the content."""
        return None if self._stop_strings is None else self._stop_strings.match

    @property
    def has_ended(self) -> bool:
        """Whether a stop string or the limits on tool calls have ended it."""
        return self.stop_match is not None or self._calls.is_over

    @property
    def start_marker(self) -> str | None:
        """What opens reasoning, where there is any."""
        return None if self._reasoning is None else self._reasoning.start_marker

    @property
    def end_marker(self) -> str | None:
        """What ends reasoning, where there is any."""
        return None if self._reasoning is None else self._reasoning.end_marker

    @property
    def new_content(self) -> str:
        """What followed the reasoning in the token fed last, before stop strings and tool calls are looked for."""
        return "" if self._recorder is None else self._recorder.text

    def plain_text(self, token_id: int) -> Text | None:
        """What the token adds, where nothing reads the text and the token makes whole characters: then it is not to be fed."""
        return self._detokenizer.whole_text(token_id) if self._is_plain else None

    def feed(self, token_id: int) -> list[Event]:
        """What is certain now that `token_id` is known."""
        assert self.stop_match is None, "the answer ended at a stop string"
        self._num_tokens += 1
        if self._stop_strings is not None:
            self._stop_strings.is_armed = self._num_tokens >= self._min_tokens
        if self._is_free:
            return self._feed_free(token_id)
        if self._recorder is not None:
            self._recorder.text = ""
        pieces = self._detokenizer.feed(token_id)
        if self._reasoning is None:
            events = self._read(pieces)
        else:
            was_reasoning = self._reasoning.phase is Phase.REASONING
            events = self._read(pieces)
            self.num_reasoning_tokens += was_reasoning or self._reasoning.phase is Phase.REASONING
        if len(events) == 1 and self._is_shown(events[0]):
            return events
        return self._visible(self._calls.feed(events))

    def begin_preamble(self, *, reads_calls: bool = False, opening: str | None = None) -> None:
        """The tokens up to `end_preamble` are free text before the answer, but for the model's reasoning.

        A call is what the parser reads as one or, with `opening`, what this marker begins.
        """
        self.is_in_preamble = True
        self._begin_free(opening, reads_calls=reads_calls)

    def begin_undecided(self, opening: str | None = None) -> None:
        """The tokens up to `begin_rest` show whether the answer is a call, after the model's reasoning if there is any."""
        self.is_undecided = True
        self._begin_free(opening, reads_calls=True)

    def _begin_free(self, opening: str | None, *, reads_calls: bool) -> None:
        self._opening, self._held = opening, ""
        self.reads_calls = reads_calls
        self.has_called = self.has_said = False
        self.is_settled = True
        parsers = (self._recorder, self._tool_parser) if reads_calls else ()
        self._chain = ParserChain([parser for parser in parsers if parser is not None], reasoning=self._reasoning)

    def flush_free(self) -> list[Event]:
        """No more free text comes: what parsers hold of it. To be called once; `end_preamble` does otherwise."""
        events = self._visible_free([*self._read(self._detokenizer.finish()), *self._chain.finish()])
        self._chain = ParserChain([])
        return events

    def end_preamble(self, cue_token_ids: Sequence[int], token_ids: Sequence[int]) -> list[Event]:
        """The answer itself begins, without reasoning. `token_ids` are prompt and output so far, of which the cue is the end."""
        events = self.flush_free()
        self.num_preamble_tokens += len(cue_token_ids)
        tool_parser = None if self.reads_calls else self._tool_parser  # which has read what precedes
        self.begin_rest(token_ids, self._num_tokens + len(cue_token_ids), tool_parser)
        return events

    def begin_rest(self, token_ids: Sequence[int], num_tokens: int, tool_parser: Parser | None) -> None:
        """The answer itself begins, without reasoning: calls that the parser is to read, or content alone without one.

        `token_ids` are prompt and output so far, `num_tokens` how many of them are output.
        """
        self.is_in_preamble = self.is_undecided = self.reads_calls = False
        self._reasoning = self._recorder = None
        self._tool_parser = tool_parser
        if tool_parser is None:
            self._blank, self._calls = None, LimitedCalls(NO_LIMITS)
        self._num_tokens = num_tokens
        self._detokenizer = self._detokenizer.after(token_ids)
        self._chain = self._new_chain()

    def _feed_free(self, token_id: int) -> list[Event]:
        before = self.phase
        if self._recorder is not None:
            self._recorder.text = ""
        pieces = self._detokenizer.feed(token_id)
        events = self._read(pieces)
        is_reasoning = Phase.REASONING in (before, self.phase)
        if is_reasoning:
            self.num_reasoning_tokens += 1
            self._num_held = self._num_held_in_reasoning(pieces, events, is_marker=before is not self.phase)
        else:
            self.num_preamble_tokens += self.is_in_preamble
            self.has_called = self.has_called or self._finds_opening(pieces)
            self._num_held += sum(map(len, pieces)) - sum(len(event.text) for event in events if isinstance(event, Text))
        self.is_settled = not self.reads_calls or (not self._num_held and (is_reasoning or self.is_in_preamble))
        return self._visible_free(events)

    def _num_held_in_reasoning(self, pieces: Sequence[str], events: Sequence[Event], *, is_marker: bool) -> int:
        """Characters that may belong to a call, which ends the reasoning of some formats: content behind it, or a marker's beginning."""
        if is_marker:
            return 0 if any(isinstance(event, Text) for event in events) else len(self.new_content.strip())
        last = events[-1] if events else None
        is_shown = not pieces or (isinstance(last, Reasoning) and last.text.endswith(pieces[-1]))
        return 0 if is_shown else self._num_held + len("".join(pieces))

    def _finds_opening(self, pieces: Sequence[str]) -> bool:
        if self._opening is None:
            return False
        if not self._num_held:
            self._held = ""
        self._held += "".join(piece for piece in pieces if not isinstance(piece, SpecialText))
        return self._opening in pieces or (not self._detokenizer.has_added(self._opening) and self._opening in self._held)

    def _visible_free(self, events: Iterable[Event]) -> list[Event]:
        visible = visible_events(events, skip_special_tokens=self._skip_special_tokens)
        for event in visible:
            self.has_called = self.has_called or isinstance(event, ToolCallStart)
            self.has_said = self.has_said or (isinstance(event, Text) and not event.text.isspace())
        return [Preamble(event.text) if isinstance(event, Text) else event for event in visible]

    def _is_shown(self, event: Event) -> bool:
        """Whether an event alone comes out as it is, as nearly every one does, and changes nothing."""
        if not isinstance(event, Text | Reasoning) or type(event.text) is not str or not event.text or not self._calls.is_idle:
            return False
        return self._blank is None or self._blank.has_content or isinstance(event, Reasoning)

    def branch(self) -> "Answer | None":
        """An independent copy, which finds where the answer ends. It reads tool calls only where a parser separates the reasoning.

        None where a parser cannot be copied.
        """
        other = copy.copy(self)
        try:
            other._reasoning = copy.deepcopy(self._reasoning)
            other._tool_parser = None if self._reasoning is None else copy.deepcopy(self._tool_parser)
        except (TypeError, copy.Error):
            return None
        other._detokenizer = self._detokenizer.copy()
        other._stop_strings = None if self._stop_strings is None else self._stop_strings.copy()
        other._recorder = copy.copy(self._recorder)
        other._blank = None
        other._calls = LimitedCalls(NO_LIMITS)
        other._chain = other._new_chain()
        return other

    def finish(self) -> list[Event]:
        """Generation is over: what was held back."""
        held = [*self._read(self._detokenizer.finish()), *self._chain.finish()]
        if self._is_free:
            shown = self._visible_free(held)
            return shown if self.is_in_preamble else [event for event in shown if isinstance(event, Reasoning)]
        visible = self._visible(self._calls.finish(held))
        return visible if self._blank is None else [*visible, *self._blank.finish()]

    def _read(self, pieces: Iterable[str]) -> list[Event]:
        return [event for piece in pieces for event in self._chain.feed(piece)]

    def _visible(self, events: Iterable[Event]) -> list[Event]:
        visible = visible_events(events, skip_special_tokens=self._skip_special_tokens)
        return visible if self._blank is None else self._blank.feed(visible)


class ThinkingBudget:
    """At most `budget` tokens of reasoning, then the engine itself writes the end marker. None is no limit.

    A model that would end its answer while it still reasons has its reasoning closed as well: a request with a budget or a grammar wants an
    answer. So it has once: where it opens another block after that, it may end its answer there.
    A marker that no longer fits into the answer is not begun: half of one would pass for something that the model said. Where
    `num_reserved` tokens have to be left for what follows the reasoning, it is closed before they are used up.
    """

    def __init__(self, budget: int | None, end_token_ids: list[int], num_reserved: int = 0) -> None:
        self.budget = budget
        self.num_reserved = num_reserved
        self.end_token_ids = end_token_ids
        self.has_closed = False
        """Whether the end marker has been written."""

    def must_close(self, answer: Answer, *, is_stopping: bool, room: int) -> bool:
        """Whether the end marker takes the place of the token just sampled.

        `is_stopping` says that this token would end the answer, `room` how many tokens the answer may still have, this one included.
        """
        is_spent = self.budget is not None and answer.num_reasoning_tokens >= self.budget
        is_spent = is_spent or bool(self.num_reserved and room <= len(self.end_token_ids) + self.num_reserved)
        is_due = answer.phase is Phase.REASONING and (is_spent or (is_stopping and not self.has_closed))
        return is_due and room >= len(self.end_token_ids)
