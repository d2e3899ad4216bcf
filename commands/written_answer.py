"""A text that a model has written, read as the server reads it while it is generated."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

from penstock.api.answers.folds import ChoiceFold, MessageFold, ReasoningView
from penstock.api.chat_protocol import AssistantMessage
from penstock.engine.events import SpecialText
from penstock.engine.hooks import ReasoningParserFactory, ToolParserFactory
from penstock.engine.outputs import FinishReason, SequenceDelta
from penstock.engine.text.blank_text import BlankText
from penstock.engine.text.parser_chain import ParserChain
from penstock.engine.text.visible_events import visible_events
from penstock.engine.turn import Turn
from penstock.plugins.markers import join_pieces, split_symbols


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenAnswer:
    """`special_tokens` are those that are special tokens in the text; `chunk_sizes`, in characters, begin again when they are used up.

    Of special tokens that no parser has consumed, `shown_tokens` are content and others are left out.
    """

    text: str
    prompt_tail: str = ""
    tools: Sequence[Mapping[str, Any]] = ()
    response_template: Mapping[str, Any] | None = None
    special_tokens: frozenset[str] = frozenset()
    shown_tokens: frozenset[str] = frozenset()
    chunk_sizes: Sequence[int] = ()

    @property
    def turn(self) -> Turn:
        return Turn(
            prompt_tail=self.prompt_tail,
            added_tokens=self.special_tokens,
            tools=self.tools,
            tool_choice="auto",
            response_template=self.response_template,
        )

    def pieces(self) -> Iterator[str]:
        """The text as parsers get it: each special token by itself, and the rest in chunks."""
        sizes = cycle(self.chunk_sizes or (max(len(self.text), 1),))
        for piece in join_pieces(split_symbols(self.text, self.special_tokens)):
            if isinstance(piece, SpecialText):
                yield SpecialText(piece, is_hidden=piece not in self.shown_tokens)
                continue
            start = 0
            while start < len(piece):
                end = start + next(sizes)
                yield piece[start:end]
                start = end

    def message(self, reasoning_parser: ReasoningParserFactory | None, tool_parser: ToolParserFactory | None) -> AssistantMessage:
        """What a whole answer would hold: the same fold over the same chain of parsers."""
        tools = [] if tool_parser is None else [tool_parser(self.turn)]
        chain = ParserChain(tools, reasoning=None if reasoning_parser is None else reasoning_parser(self.turn))
        blank, choice, message = BlankText(), ChoiceFold(0, ReasoningView()), MessageFold(0)
        for piece in self.pieces():
            events = blank.feed(visible_events(chain.feed(piece), skip_special_tokens=True))
            message.feed(choice.feed(SequenceDelta(0, events=events)))
        events = [*blank.feed(visible_events(chain.finish(), skip_special_tokens=True)), *blank.finish()]
        message.feed(choice.feed(SequenceDelta(0, events=events, finish_reason=FinishReason.STOP)))
        return message.choice(has_reasoning_parser=reasoning_parser is not None).message
