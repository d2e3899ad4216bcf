"""Messages from the engine's deltas, step by step and whole, for the endpoints and the library."""

import json
from dataclasses import dataclass, field

from msgspec import Struct

from penstock.engine.contracts.parsing import Event, Reasoning, Text, ToolCallArguments, ToolCallStart
from penstock.engine.deltas import ClientFault, FinishReason, PromptInfo, SequenceDelta, TokenLogprobs
from penstock.engine.errors import EngineUnavailable, GenerationFailed, InvalidRequest


def check_delta(delta: SequenceDelta) -> None:
    """Raises where a sequence ended otherwise than by its own end or its limit: that is an error on the wire, not a finish reason."""
    if delta.finish_reason is FinishReason.ERROR:
        if isinstance(delta.error, ClientFault):
            raise InvalidRequest(str(delta.error))
        raise GenerationFailed(delta.error or "the step that this request was in failed")
    if delta.finish_reason is FinishReason.ABORT:
        raise EngineUnavailable(delta.error or "the request was aborted before it was complete")


@dataclass(slots=True)
class TokenCounts:
    """The tokens of a request over all its sequences; a prompt counts once, however many sequences (`n`) share it."""

    n: int
    prompts: dict[int, PromptInfo] = field(default_factory=dict)
    num_completion_tokens: int = 0
    _num_reasoning_tokens: dict[int, int] = field(default_factory=dict)

    def add(self, delta: SequenceDelta) -> None:
        if delta.prompt is not None:
            self.prompts.setdefault(delta.index // self.n, delta.prompt)
        self.num_completion_tokens += len(delta.token_ids)
        if delta.num_reasoning_tokens:
            self._num_reasoning_tokens[delta.index] = delta.num_reasoning_tokens

    @property
    def num_prompt_tokens(self) -> int:
        return sum(prompt.num_tokens for prompt in self.prompts.values())

    @property
    def num_cached_tokens(self) -> int:
        return sum(prompt.num_cached_tokens for prompt in self.prompts.values())

    @property
    def num_reasoning_tokens(self) -> int:
        return sum(self._num_reasoning_tokens.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningView:
    """How the client wants to see reasoning: left out, set apart, or inside the content between its markers; as it comes, or in one piece.

    `opening` is empty where the prompt already holds the start marker, so that prompt and content together read as the model wrote them.
    """

    is_included: bool = True
    is_separate: bool = True
    is_streamed: bool = True
    opening: str = ""
    closing: str = ""


@dataclass(slots=True)
class MessageStep:
    """What one step adds to one message.

    Neighbouring `events` of one kind are one event; no text is empty. The log probabilities are of the tokens that the client sees, by
    the part of the message that they belong to: those of tool calls are content. The last step has the `finish_reason`, in OpenAI's words.
    """

    events: list[Event] = field(default_factory=list)
    content_logprobs: list[TokenLogprobs] = field(default_factory=list)
    reasoning_logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def add(self, event: Event) -> None:
        """Joins it to the last event where that is of the same kind. A call's start is never joined."""
        last = self.events[-1] if self.events else None
        match last, event:
            case (_, Text("") | Reasoning("")) | (_, ToolCallArguments(_, "")):
                return
            case Text(before), Text(text):
                self.events[-1] = Text(before + text)
            case Reasoning(before), Reasoning(text):
                self.events[-1] = Reasoning(before + text)
            case ToolCallArguments(index, before), ToolCallArguments(same, fragment) if index == same:
                self.events[-1] = ToolCallArguments(index, before + fragment)
            case _:
                self.events.append(event)


class MessageReader:
    """One sequence's deltas as the steps of a message, with the reasoning as `view` says."""

    def __init__(self, view: ReasoningView | None = None) -> None:
        self._view = view or ReasoningView()
        self._held_reasoning: list[str] = []
        self._is_reasoning_inline = False
        self._num_tool_calls = 0
        self._arguments: list[str] = []  # of the last call

    def feed(self, delta: SequenceDelta) -> MessageStep:
        """Raises `GenerationFailed`, `InvalidRequest` or `EngineUnavailable` where the delta says that the sequence was cut off."""
        check_delta(delta)
        step = MessageStep()
        for token in delta.logprobs:
            self._add_logprobs(token, step)
        for event in delta.events:
            self._add(event, step)
        if delta.finish_reason is not None:
            self._release_reasoning(step)
            step.finish_reason, step.stop_reason = self._finish_reason(delta), delta.stop_reason
        return step

    def _add(self, event: Event, step: MessageStep) -> None:
        match event:
            case Reasoning(text):
                self._add_reasoning(text, step)
                return
            case Text():
                self._end_reasoning(step)
            case ToolCallStart():
                self._end_reasoning(step)
                self._num_tool_calls += 1
                self._arguments.clear()
            case ToolCallArguments(_, fragment):
                self._arguments.append(fragment)
        step.add(event)

    def _add_reasoning(self, text: str, step: MessageStep) -> None:
        view = self._view
        if not view.is_included:
            return
        if not view.is_separate:
            step.add(Text(text if self._is_reasoning_inline else view.opening + text))
            self._is_reasoning_inline = True
        elif not view.is_streamed:
            self._held_reasoning.append(text)
        else:
            step.add(Reasoning(text))

    def _end_reasoning(self, step: MessageStep) -> None:
        self._release_reasoning(step)
        if self._is_reasoning_inline:
            step.add(Text(self._view.closing))
            self._is_reasoning_inline = False

    def _release_reasoning(self, step: MessageStep) -> None:
        if self._held_reasoning:
            step.add(Reasoning("".join(self._held_reasoning)))
            self._held_reasoning.clear()

    def _add_logprobs(self, token: TokenLogprobs, step: MessageStep) -> None:
        """A token's log probabilities are shown where its text is, or are left out with it."""
        if not token.is_reasoning:
            step.content_logprobs.append(token)
        elif self._view.is_included:
            (step.reasoning_logprobs if self._view.is_separate else step.content_logprobs).append(token)

    def _finish_reason(self, delta: SequenceDelta) -> str:
        """`tool_calls` where the model has called and was not cut off in the middle of a call."""
        is_stopped = delta.finish_reason is FinishReason.STOP
        has_called = self._num_tool_calls > 0 and is_stopped and (delta.stop_reason is None or is_json(self._arguments))
        return "tool_calls" if has_called else str(delta.finish_reason)


def is_json(fragments: list[str]) -> bool:
    """Whether they are a whole document: a stop string may end an answer in the middle of a call."""
    try:
        json.loads("".join(fragments))
    except (ValueError, RecursionError):
        return False
    return True


class FunctionCall(Struct):
    """`arguments` are JSON text, as far as the model has written it."""

    name: str
    arguments: str


class ToolCall(Struct):
    """A tool call in OpenAI's shape."""

    id: str
    type: str
    function: FunctionCall


class Message:
    """One sequence's steps added up."""

    def __init__(self) -> None:
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: dict[int, tuple[ToolCallStart, list[str]]] = {}
        self.content_logprobs: list[TokenLogprobs] = []
        self.reasoning_logprobs: list[TokenLogprobs] = []
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None

    def add(self, step: MessageStep) -> None:
        for event in step.events:
            match event:
                case Text(text):
                    self._content.append(text)
                case Reasoning(text):
                    self._reasoning.append(text)
                case ToolCallStart(index):
                    self._calls[index] = (event, [])
                case ToolCallArguments(index, fragment):
                    self._calls[index][1].append(fragment)
        self.content_logprobs += step.content_logprobs
        self.reasoning_logprobs += step.reasoning_logprobs
        if step.finish_reason is not None:
            self.finish_reason, self.stop_reason = step.finish_reason, step.stop_reason

    @property
    def content(self) -> str:
        return "".join(self._content)

    @property
    def reasoning(self) -> str:
        return "".join(self._reasoning)

    @property
    def tool_calls(self) -> list[ToolCall]:
        """In the order of their indexes."""
        return [
            ToolCall(start.id, "function", FunctionCall(start.name, "".join(fragments)))
            for _, (start, fragments) in sorted(self._calls.items())
        ]
