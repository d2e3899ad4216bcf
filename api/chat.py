"""POST /v1/chat/completions."""

import time
from collections.abc import Mapping, Sequence

from aiohttp import web
from msgspec import UNSET, UnsetType

from penstock.api.answering import answer
from penstock.api.bodies import client_of, read_admitted_body, served_model
from penstock.api.context import CONTEXT, begin_timer
from penstock.api.protocol import (
    AssistantMessage,
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatDelta,
    ChatLogprobs,
    FunctionDelta,
    PromptLogprobs,
    TokenWriter,
    ToolCallDelta,
    Usage,
    usage_of,
)
from penstock.engine.contracts.parsing import Event, Reasoning, Text, ToolCallArguments, ToolCallStart
from penstock.engine.deltas import SequenceDelta, TokenLogprobs
from penstock.engine.sequence import Request
from penstock.serving.constraints.conformance import Conformance, warning_header
from penstock.serving.context import ServerContext
from penstock.serving.messages import Message, MessageReader, MessageStep, ReasoningView, TokenCounts
from penstock.serving.preparing import ChatOptions, answer_check, prepare_chat
from penstock.serving.requests import ChatCompletionRequest, ReasoningField, StreamOptions, searched


def name_reasoning(answer: ChatDelta | AssistantMessage, field: ReasoningField) -> None:
    """Puts the reasoning where clients look for it: null, not absent, if the answer has none."""
    text = answer.reasoning_content or None
    if field != "reasoning_content":
        answer.reasoning = text
    answer.reasoning_content = UNSET if field == "reasoning" else text


def chat_delta(event: Event) -> ChatDelta:
    """One event on the wire. Each delta holds one kind of thing: clients look at one field and skip the others."""
    match event:
        case Text(text):
            return ChatDelta(content=str(text))
        case Reasoning(text):
            return ChatDelta(reasoning_content=str(text))
        case ToolCallStart(index, name, call_id):
            return ChatDelta(tool_calls=[ToolCallDelta(index, FunctionDelta("", name), call_id, "function")])
        case ToolCallArguments(index, fragment):
            return ChatDelta(tool_calls=[ToolCallDelta(index, FunctionDelta(str(fragment)))])


class LogprobsWriter:
    """Log probabilities in chat's form: `num_top` alternatives for each token, or none at all where it is None."""

    def __init__(self, tokens: TokenWriter, num_top: int | None) -> None:
        self._tokens = tokens
        self._num_top = num_top

    def write(self, content: Sequence[TokenLogprobs], reasoning: Sequence[TokenLogprobs]) -> ChatLogprobs | None:
        if self._num_top is None or not (content or reasoning):
            return None
        num_top = self._num_top
        written = [self._tokens.chat(token, num_top) for token in reasoning]
        return ChatLogprobs([self._tokens.chat(token, num_top) for token in content], written or UNSET)


class ChoiceWriter:
    """The steps of one message as the choices of chunks.

    `found` is what checking complete choices has found, by their index: it is in there before a choice's last step comes.
    """

    def __init__(self, index: int, logprobs: LogprobsWriter, found: Mapping[int, Conformance] | None = None) -> None:
        self._index = index
        self._logprobs = logprobs
        self._found = {} if found is None else found
        self._content: list[TokenLogprobs] = []  # of tokens whose text has not been sent
        self._reasoning: list[TokenLogprobs] = []

    def opening(self) -> ChatChunkChoice:
        return ChatChunkChoice(self._index, ChatDelta(role="assistant", content=""))

    def write(self, step: MessageStep) -> list[ChatChunkChoice]:
        self._content += step.content_logprobs
        self._reasoning += step.reasoning_logprobs
        choices = [ChatChunkChoice(self._index, chat_delta(event), self._take_logprobs()) for event in step.events]
        if step.finish_reason is not None:
            stop = UNSET if step.stop_reason is None else step.stop_reason
            found = self._found.get(self._index, UNSET)
            choices.append(ChatChunkChoice(self._index, ChatDelta(), self._take_logprobs(), step.finish_reason, stop, found))
        return choices

    def whole(self, message: Message, *, has_reasoning_parser: bool, is_call_forced: bool) -> ChatChoice:
        """The choice of a body."""
        return ChatChoice(
            self._index,
            AssistantMessage.of(message, has_reasoning_parser=has_reasoning_parser, is_call_forced=is_call_forced),
            self._logprobs.write(message.content_logprobs, message.reasoning_logprobs),
            message.finish_reason or "",
            message.stop_reason,
            self._found.get(self._index, UNSET),
        )

    def _take_logprobs(self) -> ChatLogprobs | None:
        content, reasoning = self._content, self._reasoning
        self._content, self._reasoning = [], []
        return self._logprobs.write(content, reasoning)


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
        self._reasoning_field, self._fingerprint = context.options.reasoning_field, context.system_fingerprint
        self._without_role = set(range(request.params.n)) if self._has_reasoning_parser else set[int]()
        self._options = body.stream_options or StreamOptions()
        logprobs = LogprobsWriter(self._tokens, request.params.logprobs)
        self._readers = [MessageReader(view) for _ in range(request.params.n)]
        self._choices = [ChoiceWriter(index, logprobs, found) for index in range(request.params.n)]
        self._messages = [Message() for _ in range(request.params.n)]
        self._counts = TokenCounts(request.params.n)

    @property
    def is_long(self) -> bool:
        return self._num_prompt_top is not None

    def opening(self) -> list[ChatCompletionChunk]:
        """A chunk of the role for each choice; where the answer may begin with reasoning, its first delta has the role instead.

        Clients print a heading at the first `content`, be it empty, and take what is not reasoning for content.
        """
        return [] if self._has_reasoning_parser else [self._chunk([choice.opening()]) for choice in self._choices]

    def chunks(self, delta: SequenceDelta) -> list[ChatCompletionChunk]:
        self._counts.add(delta)
        choices = self._choices[delta.index].write(self._readers[delta.index].feed(delta))
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
        return [self._chunk([], usage_of(self._counts))]

    def add(self, delta: SequenceDelta) -> None:
        self._counts.add(delta)
        self._messages[delta.index].add(self._readers[delta.index].feed(delta))

    def body(self) -> ChatCompletion:
        choices = [
            choice.whole(message, has_reasoning_parser=self._has_reasoning_parser, is_call_forced=self._is_call_forced)
            for choice, message in zip(self._choices, self._messages, strict=True)
            if message.finish_reason is not None  # beam search may find fewer than were asked for
        ]
        if self._has_reasoning_parser:
            for choice in choices:
                name_reasoning(choice.message, self._reasoning_field)
        return ChatCompletion(
            self._id,
            "chat.completion",
            self._created,
            self._model,
            choices,
            usage_of(self._counts),
            self._prompt_logprobs(),
            self._fingerprint,
        )

    def _chunk(self, choices: list[ChatChunkChoice], usage: Usage | UnsetType | None = UNSET) -> ChatCompletionChunk:
        """OpenAI sends `usage: null` on every chunk but the last where usage was asked for."""
        if usage is UNSET and self._options.include_usage:
            usage = usage_of(self._counts) if self._options.continuous_usage_stats else None
        return ChatCompletionChunk(self._id, "chat.completion.chunk", self._created, self._model, choices, usage, self._fingerprint)

    def _prompt_logprobs(self) -> PromptLogprobs | UnsetType:
        prompt = self._counts.prompts.get(0)
        if self._num_prompt_top is None or prompt is None or prompt.logprobs is None:
            return UNSET
        return self._tokens.prompt(prompt.logprobs, self._num_prompt_top)


async def create_chat_completion(http: web.Request) -> web.StreamResponse:
    """Answers a conversation: one body, or a stream of the deltas that it is the fold of."""
    context, timer = http.app[CONTEXT], begin_timer(http)
    body, size, headers = await read_admitted_body(http, ChatCompletionRequest)
    model = served_model(context, body.model)
    prepared = await prepare_chat(context, body, size, ChatOptions(client=client_of(http)))
    request = prepared.request
    check = await answer_check(context, body, size, request.grammar, prepared.tools)
    fold = ChatFold(context, body, request, prepared.view, model, check.found, is_call_forced=prepared.tools.is_forced)
    deltas = check.watch(timer.watch(searched(body, context.engine.generate(request))))
    headers |= warning_header(request.grammar)
    return await answer(http, deltas, fold, stream=bool(body.stream), headers=headers, interval=body.stream_interval)
