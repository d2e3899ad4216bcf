"""One chat request's deltas as its chunks, and as the body that the same chunks add up to."""

import time
from collections.abc import Mapping

from msgspec import UNSET, UnsetType

from penstock.api.answers.folds import ChoiceFold, MessageFold, ReasoningView, UsageFold
from penstock.api.answers.logprobs import TokenWriter
from penstock.api.chat_protocol import (
    AssistantMessage,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatCompletionRequest,
    ChatDelta,
    ReasoningField,
)
from penstock.api.common_protocol import Conformance, PromptLogprobs, StreamOptions, Usage
from penstock.api.context import ServerContext
from penstock.engine.deltas import SequenceDelta
from penstock.engine.request import Request


def name_reasoning(answer: ChatDelta | AssistantMessage, field: ReasoningField) -> None:
    """Puts the reasoning where clients look for it: null, not absent, where there is none."""
    text = answer.reasoning_content or None
    if field != "reasoning_content":
        answer.reasoning = text
    answer.reasoning_content = UNSET if field == "reasoning" else text


class ChatFold:
    """One request's deltas as chunks, and as the body that the same chunks add up to."""

    def __init__(
        self,
        context: ServerContext,
        body: ChatCompletionRequest,
        request: Request,
        view: ReasoningView,
        model: str,
        found: Mapping[int, Conformance],
        *,
        is_call_forced: bool = False,
    ) -> None:
        self._id, self._created, self._model = request.request_id, int(time.time()), model
        self._tokens = TokenWriter(context.tokenizer, as_token_ids=bool(body.return_tokens_as_token_ids))
        self._num_prompt_top = body.prompt_logprobs
        self._is_call_forced = is_call_forced
        self._has_reasoning_parser = context.reasoning_parser is not None
        self._reasoning_field, self._fingerprint = context.options.reasoning_field, context.options.system_fingerprint
        self._without_role = set(range(request.params.n)) if self._has_reasoning_parser else set[int]()
        self._options = body.stream_options or StreamOptions()
        num_top = request.params.logprobs
        write = (lambda token: self._tokens.chat(token, num_top)) if num_top is not None else None
        self._choices = [ChoiceFold(index, view, write, found) for index in range(request.params.n)]
        self._messages = [MessageFold(index) for index in range(request.params.n)]
        self._usage = UsageFold(request.params.n)

    @property
    def is_long(self) -> bool:
        return self._num_prompt_top is not None

    def opening(self) -> list[ChatCompletionChunk]:
        """A chunk of the role for each choice; where the answer may begin with reasoning, its first delta has the role instead.

        Clients print a heading at the first `content`, be it empty, and take what is not reasoning for content.
        """
        return [] if self._has_reasoning_parser else [self._chunk([choice.opening()]) for choice in self._choices]

    def chunks(self, delta: SequenceDelta) -> list[ChatCompletionChunk]:
        self._usage.feed(delta)
        choices = self._choices[delta.index].feed(delta)
        if self._has_reasoning_parser:
            self._show_reasoning(choices)
        return [self._chunk([choice]) for choice in choices]

    def _show_reasoning(self, choices: list[ChatChunkChoice]) -> None:
        for choice in choices:
            if choice.index in self._without_role:
                self._without_role.remove(choice.index)
                choice.delta.role = "assistant"
            if choice.finish_reason is not None:
                choice.delta.content = ""  # clients read `content` of each delta without reasoning, as DeepSeek's API lets them
            name_reasoning(choice.delta, self._reasoning_field)

    def closing(self) -> list[ChatCompletionChunk]:
        if not self._options.include_usage:
            return []
        return [self._chunk([], self._usage.usage())]

    def add(self, delta: SequenceDelta) -> None:
        self._usage.feed(delta)
        self._messages[delta.index].feed(self._choices[delta.index].feed(delta))

    def body(self) -> ChatCompletion:
        shape = {"has_reasoning_parser": self._has_reasoning_parser, "is_call_forced": self._is_call_forced}
        choices = [message.choice(**shape) for message in self._messages if message.is_finished]
        if self._has_reasoning_parser:
            for choice in choices:
                name_reasoning(choice.message, self._reasoning_field)
        return ChatCompletion(
            self._id,
            "chat.completion",
            self._created,
            self._model,
            choices,
            self._usage.usage(),
            self._prompt_logprobs(),
            self._fingerprint,
        )

    def _chunk(self, choices: list[ChatChunkChoice], usage: Usage | UnsetType | None = UNSET) -> ChatCompletionChunk:
        """OpenAI sends `usage: null` on every chunk but the last where usage was asked for."""
        if usage is UNSET and self._options.include_usage:
            usage = self._usage.usage() if self._options.continuous_usage_stats else None
        return ChatCompletionChunk(self._id, "chat.completion.chunk", self._created, self._model, choices, usage, self._fingerprint)

    def _prompt_logprobs(self) -> PromptLogprobs | UnsetType:
        prompt = self._usage.prompts.get(0)
        if self._num_prompt_top is None or prompt is None or prompt.logprobs is None:
            return UNSET
        return self._tokens.prompt(prompt.logprobs, self._num_prompt_top)
