"""One sequence's tokens on their way to events: detokenizer → reasoning parser → stop strings → tool parser → limits on calls.

Text of a call goes around the reasoning parser.
"""

import copy
from collections.abc import Iterable, Sequence

from penstock.engine.events import Event, Text
from penstock.engine.parsing import Parser, Phase, ReasoningParser
from penstock.engine.text.answer import BlankText, ParserChain, visible_events
from penstock.engine.text.call_limits import NO_LIMITS, CallLimits, LimitedCalls
from penstock.engine.text.detokenizer import Detokenizer
from penstock.engine.text.stops import StopStrings


class _Tap(Parser):
    """Lets content pass, and keeps what came with the last token."""

    def __init__(self) -> None:
        self.text = ""

    def feed(self, text: str) -> list[Text]:
        self.text += text
        return [Text(text)]

    def finish(self) -> list[Text]:
        return []


class Answer:
    """What one sequence says, token by token.

    Stop strings apply to content, tool-call markup included, and never to reasoning. Once `stop_match` is set nothing more comes out but
    what was held back before it: `finish` gives that, and `feed` must not be called again. A stop string that is complete before
    `min_tokens` have been fed ends nothing. Ids that end the sequence are fed only where they are to be seen. Tool calls beyond the
    `call_limits` end the answer, too, and do not come out.
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
        self._tap = None if reasoning is None else _Tap()
        self._blank = None if tool_parser is None else BlankText()
        self._tool_parser = tool_parser
        self._calls = LimitedCalls(call_limits)
        self._chain = self._new_chain()
        self.num_reasoning_tokens = 0
        """Tokens at whose start or end the model was reasoning: those of both markers count, as far as a marker is told from text."""

    def _new_chain(self) -> ParserChain:
        content_parsers = (self._tap, self._stop_strings, self._tool_parser)
        return ParserChain([parser for parser in content_parsers if parser is not None], reasoning=self._reasoning)

    @property
    def phase(self) -> Phase:
        return Phase.CONTENT if self._reasoning is None else self._reasoning.phase

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
        return "" if self._tap is None else self._tap.text

    def feed(self, token_id: int) -> list[Event]:
        """What is certain now that `token_id` is known."""
        assert self.stop_match is None, "the answer ended at a stop string"
        self._num_tokens += 1
        if self._stop_strings is not None:
            self._stop_strings.is_armed = self._num_tokens >= self._min_tokens
        if self._tap is not None:
            self._tap.text = ""
        before = self.phase
        events = self._read(self._detokenizer.feed(token_id))
        if Phase.REASONING in (before, self.phase):
            self.num_reasoning_tokens += 1
        return self._visible(self._calls.feed(events))

    def branch(self) -> "Answer | None":
        """One that goes on by itself and says where it ends. It reads tool calls only where reasoning is told from them.

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
        other._tap = copy.copy(self._tap)
        other._blank = None
        other._calls = LimitedCalls(NO_LIMITS)
        other._chain = other._new_chain()
        return other

    def finish(self) -> list[Event]:
        """Generation is over: what was held back."""
        held = [*self._read(self._detokenizer.finish()), *self._chain.finish()]
        visible = self._visible(self._calls.finish(held))
        return visible if self._blank is None else [*visible, *self._blank.finish()]

    def _read(self, pieces: Iterable[str]) -> list[Event]:
        return [event for piece in pieces for event in self._chain.feed(piece)]

    def _visible(self, events: Iterable[Event]) -> list[Event]:
        visible = visible_events(events, skip_special_tokens=self._skip_special_tokens)
        return visible if self._blank is None else self._blank.feed(visible)
