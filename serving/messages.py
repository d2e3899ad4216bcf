"""What the engine brings, step by step, as wire deltas; and whole answers as folds of those same deltas."""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from msgspec import UNSET, UnsetType

from penstock.api.protocol import (
    AssistantMessage,
    ChatChoice,
    ChatChunkChoice,
    ChatDelta,
    ChatLogprobs,
    CompletionTokensDetails,
    FunctionCall,
    FunctionDelta,
    PromptTokensDetails,
    TokenLogprob,
    ToolCall,
    ToolCallDelta,
    Usage,
)
from penstock.engine.deltas import ClientFault, FinishReason, PromptInfo, SequenceDelta, TokenLogprobs
from penstock.engine.errors import EngineUnavailable, GenerationFailed, InvalidRequest
from penstock.engine.events import Event, Reasoning, Text, ToolCallArguments, ToolCallStart
from penstock.serving.constraints.conformance import Conformance


def check_delta(delta: SequenceDelta) -> None:
    """Raises where a sequence ended otherwise than by its own end or its limit: that is an error on the wire, not a finish reason."""
    if delta.finish_reason is FinishReason.ERROR:
        if isinstance(delta.error, ClientFault):
            raise InvalidRequest(str(delta.error))
        raise GenerationFailed(delta.error or "the step that this request was in failed")
    if delta.finish_reason is FinishReason.ABORT:
        raise EngineUnavailable(delta.error or "the request was aborted before it was complete")


@dataclass(slots=True)
class UsageFold:
    """Counts tokens over all sequences; a prompt counts once, however many sequences (`n`) share it."""

    n: int
    prompts: dict[int, PromptInfo] = field(default_factory=dict)
    num_completion_tokens: int = 0
    num_reasoning_tokens: dict[int, int] = field(default_factory=dict)

    def feed(self, delta: SequenceDelta) -> None:
        if delta.prompt is not None:
            self.prompts.setdefault(delta.index // self.n, delta.prompt)
        self.num_completion_tokens += len(delta.token_ids)
        if delta.num_reasoning_tokens:
            self.num_reasoning_tokens[delta.index] = delta.num_reasoning_tokens

    def usage(self) -> Usage:
        num_prompt_tokens = sum(prompt.num_tokens for prompt in self.prompts.values())
        return Usage(
            num_prompt_tokens,
            self.num_completion_tokens,
            num_prompt_tokens + self.num_completion_tokens,
            PromptTokensDetails(sum(prompt.num_cached_tokens for prompt in self.prompts.values())),
            CompletionTokensDetails(sum(self.num_reasoning_tokens.values())),
        )


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


class ChoiceFold:
    """One sequence's steps as wire deltas. Each delta holds one kind of thing: clients look at one field and skip the others.

    `found` is what checking complete choices has found, by their index: it is in there before a choice's last step comes.
    """

    def __init__(
        self,
        index: int,
        view: ReasoningView,
        write_logprobs: Callable[[TokenLogprobs], TokenLogprob] | None = None,
        found: Mapping[int, Conformance] | None = None,
    ) -> None:
        self._index = index
        self._view = view
        self._write_logprobs = write_logprobs
        self._found = {} if found is None else found
        self._pending_logprobs = LogprobsFold()
        self._held_reasoning: list[str] = []
        self._is_reasoning_inline = False
        self._num_tool_calls = 0
        self._arguments: list[str] = []  # of the last call

    def opening(self) -> ChatChunkChoice:
        return ChatChunkChoice(self._index, ChatDelta(role="assistant", content=""))

    def feed(self, delta: SequenceDelta) -> list[ChatChunkChoice]:
        """Raises `GenerationFailed` or `EngineUnavailable` where the delta says that the sequence was cut off."""
        check_delta(delta)
        if self._write_logprobs is not None:
            for token in delta.logprobs:
                self._add_logprobs(token, self._write_logprobs(token))
        deltas: list[ChatDelta] = []
        for event in delta.events:
            self._take(event, deltas)
        if delta.finish_reason is not None:
            self._release_reasoning(deltas)
        choices = [ChatChunkChoice(self._index, chat_delta, self._take_logprobs()) for chat_delta in deltas]
        if delta.finish_reason is not None:
            choices.append(self._last_choice(delta.finish_reason, delta.stop_reason))
        return choices

    def _take(self, event: Event, deltas: list[ChatDelta]) -> None:
        match event:
            case Text(text):
                self._end_reasoning(deltas)
                add_content(deltas, text)
            case Reasoning(text):
                self._take_reasoning(text, deltas)
            case ToolCallStart(index, name, call_id):
                self._end_reasoning(deltas)
                self._num_tool_calls += 1
                self._arguments.clear()
                call = ToolCallDelta(index, FunctionDelta("", name), call_id, "function")
                deltas.append(ChatDelta(tool_calls=[call]))
            case ToolCallArguments(index, fragment):
                if fragment:
                    self._arguments.append(fragment)
                    add_arguments(deltas, index, fragment)

    def _take_reasoning(self, text: str, deltas: list[ChatDelta]) -> None:
        view = self._view
        if not view.is_included:
            return
        if not view.is_separate:
            add_content(deltas, text if self._is_reasoning_inline else view.opening + text)
            self._is_reasoning_inline = True
        elif not view.is_streamed:
            self._held_reasoning.append(text)
        else:
            add_reasoning(deltas, text)

    def _end_reasoning(self, deltas: list[ChatDelta]) -> None:
        self._release_reasoning(deltas)
        if self._is_reasoning_inline:
            add_content(deltas, self._view.closing)
            self._is_reasoning_inline = False

    def _release_reasoning(self, deltas: list[ChatDelta]) -> None:
        if self._held_reasoning:
            add_reasoning(deltas, "".join(self._held_reasoning))
            self._held_reasoning.clear()

    def _add_logprobs(self, token: TokenLogprobs, written: TokenLogprob) -> None:
        """A token's log probabilities are shown where its text is, or are left out with it."""
        if not token.is_reasoning:
            self._pending_logprobs.content.append(written)
        elif self._view.is_included:
            part = self._pending_logprobs.reasoning if self._view.is_separate else self._pending_logprobs.content
            part.append(written)

    def _take_logprobs(self) -> ChatLogprobs | None:
        pending, self._pending_logprobs = self._pending_logprobs, LogprobsFold()
        return pending.whole()

    def _last_choice(self, reason: FinishReason, stop_reason: int | str | None) -> ChatChunkChoice:
        has_called = self._num_tool_calls > 0 and reason is FinishReason.STOP and (stop_reason is None or is_json(self._arguments))
        finish_reason = "tool_calls" if has_called else str(reason)
        stop = UNSET if stop_reason is None else stop_reason
        found = self._found.get(self._index, UNSET)
        return ChatChunkChoice(self._index, ChatDelta(), self._take_logprobs(), finish_reason, stop, found)


def is_json(fragments: list[str]) -> bool:
    """Whether they are a whole document: what the client has stopped may be the middle of a call."""
    try:
        json.loads("".join(fragments))
    except (ValueError, RecursionError):
        return False
    return True


def add_content(deltas: list[ChatDelta], text: str) -> None:
    if deltas and isinstance(deltas[-1].content, str):
        deltas[-1].content += text
    elif text:
        deltas.append(ChatDelta(content=str(text)))


def add_reasoning(deltas: list[ChatDelta], text: str) -> None:
    if deltas and isinstance(deltas[-1].reasoning_content, str):
        deltas[-1].reasoning_content += text
    elif text:
        deltas.append(ChatDelta(reasoning_content=str(text)))


def add_arguments(deltas: list[ChatDelta], index: int, fragment: str) -> None:
    """Fragments of one step become one delta, but never join a call's first delta, whose arguments are empty by convention."""
    last = deltas[-1].tool_calls if deltas else UNSET
    if isinstance(last, list) and last[0].index == index and last[0].id is UNSET:
        last[0].function.arguments += fragment
    else:
        deltas.append(ChatDelta(tool_calls=[ToolCallDelta(index, FunctionDelta(str(fragment)))]))


@dataclass(slots=True)
class LogprobsFold:
    """Log probabilities by the part of the answer that their tokens are of."""

    content: list[TokenLogprob] = field(default_factory=list)
    reasoning: list[TokenLogprob] = field(default_factory=list)

    def feed(self, logprobs: ChatLogprobs) -> None:
        self.content += logprobs.content
        self.reasoning += logprobs.reasoning_content or ()

    def whole(self) -> ChatLogprobs | None:
        return ChatLogprobs(self.content, self.reasoning or UNSET) if self.content or self.reasoning else None


class MessageFold:
    """A whole chat choice from the deltas that streaming would have sent."""

    def __init__(self, index: int) -> None:
        self._index = index
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: dict[int, tuple[str, str, list[str]]] = {}
        self._logprobs = LogprobsFold()
        self._finish_reason = ""
        self._stop_reason: int | str | None = None
        self._structured_output: Conformance | UnsetType = UNSET

    def feed(self, choices: Iterable[ChatChunkChoice]) -> None:
        for choice in choices:
            delta = choice.delta
            if isinstance(delta.content, str):
                self._content.append(delta.content)
            if isinstance(delta.reasoning_content, str):
                self._reasoning.append(delta.reasoning_content)
            for call in delta.tool_calls or ():
                if isinstance(call.function.name, str) and isinstance(call.id, str):
                    self._calls[call.index] = (call.id, call.function.name, [])
                self._calls[call.index][2].append(call.function.arguments)
            if choice.logprobs is not None:
                self._logprobs.feed(choice.logprobs)
            if choice.finish_reason is not None:
                self._finish_reason = choice.finish_reason
                self._stop_reason = None if choice.stop_reason is UNSET else choice.stop_reason
                self._structured_output = choice.structured_output

    @property
    def is_finished(self) -> bool:
        """False for an answer that beam search did not find."""
        return bool(self._finish_reason)

    def choice(self, *, has_reasoning_parser: bool, is_call_forced: bool = False) -> ChatChoice:
        """`reasoning_content` is there, if only as null, wherever the server tells reasoning apart. A forced call leaves no content."""
        content = "".join(self._content)
        reasoning = "".join(self._reasoning) or None
        calls = [
            ToolCall(call_id, "function", FunctionCall(name, "".join(fragments)))
            for _, (call_id, name, fragments) in sorted(self._calls.items())
        ]
        message = AssistantMessage(
            content=content or (None if reasoning or calls or is_call_forced else ""),
            reasoning_content=reasoning if has_reasoning_parser else UNSET,
            tool_calls=calls or UNSET,
        )
        return ChatChoice(self._index, message, self._logprobs.whole(), self._finish_reason, self._stop_reason, self._structured_output)
