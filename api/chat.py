"""POST /v1/chat/completions."""

import time
import uuid
from collections.abc import Mapping
from dataclasses import replace

from aiohttp import web
from msgspec import UNSET, UnsetType

from penstock.api.answering import answer
from penstock.api.bodies import client_of, read_admitted_body, served_model
from penstock.api.context import CONTEXT
from penstock.api.logprobs import TokenWriter
from penstock.api.metrics import begin_timer
from penstock.api.protocol import AssistantMessage, ChatChunkChoice, ChatCompletion, ChatCompletionChunk, ChatDelta, PromptLogprobs, Usage
from penstock.engine.deltas import SequenceDelta
from penstock.engine.errors import InvalidRequest
from penstock.engine.grammar import CompiledGrammar, GrammarSpec
from penstock.engine.parsing import Phase
from penstock.engine.request import Request
from penstock.engine.sampling.params import MAX_LOGPROBS, SamplingParams
from penstock.engine.tool_format import ToolFormat
from penstock.engine.turn import Turn
from penstock.serving.constraints.answer_check import AnswerCheck, warning_header
from penstock.serving.constraints.conformance import Conformance
from penstock.serving.constraints.sources import JsonReading, in_reading, is_large, json_reading
from penstock.serving.constraints.specs import grammar_spec_in, open_schema
from penstock.serving.context import ServerContext
from penstock.serving.messages import ChoiceFold, MessageFold, ReasoningView, UsageFold
from penstock.serving.preparing import added_token_texts, answer_reader, cache_salt, check_streaming, compiled_grammar, logits_processors
from penstock.serving.prompts import check_prompt_ids, check_text_length, encode_text
from penstock.serving.requests import ChatCompletionRequest, ReasoningField, StreamOptions
from penstock.serving.sampling import beam_search, sampling_params, searched, searched_defaults, token_limit
from penstock.serving.templates.chat_template import check_template_fields, render_conversation
from penstock.serving.templates.messages import template_kwargs
from penstock.serving.tools import ToolUse, answer_grammar, callable_tool, tool_use
from penstock.serving.workers import run


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


async def create_chat_completion(http: web.Request) -> web.StreamResponse:
    """Answers a conversation: one body, or a stream of the deltas that it is the fold of."""
    context, timer = http.app[CONTEXT], begin_timer(http)
    body, headers = await read_admitted_body(http, ChatCompletionRequest)
    model = served_model(context, body.model)
    request, view, tools = await prepare(context, body, client_of(http))
    check = await answer_check(context, body, tools, request.grammar)
    fold = ChatFold(context, body, request, view, model, check.found, is_call_forced=tools.is_forced)
    deltas = check.watch(timer.watch(searched(body, context.engine.generate(request))))
    headers |= warning_header(request.grammar)
    return await answer(http, deltas, fold, stream=bool(body.stream), headers=headers, interval=body.stream_interval)


async def prepare(context: ServerContext, body: ChatCompletionRequest, client: str | None = None) -> tuple[Request, ReasoningView, ToolUse]:
    """The engine's request, how its reasoning is to be shown, and what is asked of tools. `client` is whom its work is held to.

    Raises `InvalidRequest` for all that is wrong with the body.
    """
    check(context, body)
    tools = tool_use(body, has_parser=context.tool_parser is not None)
    turn, prompt_token_ids = await render(context, body, tools)
    params = chat_sampling_params(context, body, len(prompt_token_ids))
    request = await conversation_request(context, body, tools, turn, prompt_token_ids, params, client)
    return request, reasoning_view(context, body, turn), tools


async def conversation_request(
    context: ServerContext,
    body: ChatCompletionRequest,
    tools: ToolUse,
    turn: Turn,
    prompt_token_ids: list[int],
    params: SamplingParams,
    client: str | None = None,
) -> Request:
    """The engine's request for a conversation that has been rendered. Raises `InvalidRequest`."""
    processors = logits_processors(context, body.logits_processors)
    tool_format = call_format(context, tools, turn)
    spec = await constraint(context, body, tools, tool_format)
    turn = replace(turn, is_constrained=spec is not None)
    return Request(
        request_id=f"chatcmpl-{uuid.uuid4().hex}",
        prompt_token_ids=prompt_token_ids,
        params=params,
        make_answer=answer_reader(
            context.tokenizer,
            prompt_token_ids,
            params,
            reasoning=context.reasoning_parser,
            tools=context.tool_parser if turn.tools else None,
            turn=turn,
            call_limits=tools.limits(context.options.max_tool_calls, None if spec is None or tool_format is None else tool_format.opening),
        ),
        grammar=await compiled_grammar(context, body, spec, client),
        logits_processors=processors,
        priority=body.priority or 0,
        cache_salt=cache_salt(context, body, client),
        beam=beam_search(body),
    )


def check(context: ServerContext, body: ChatCompletionRequest) -> None:
    """Raises `InvalidRequest` for fields that contradict each other or that the operator has not allowed."""
    check_streaming(body)
    beam_search(body)
    check_template_fields(context, body)
    if body.top_logprobs is not None and body.top_logprobs > 0 and not body.logprobs:
        raise InvalidRequest("when using `top_logprobs`, `logprobs` must be set to true.", "top_logprobs")
    if body.max_tokens is not None and body.max_completion_tokens is not None:
        raise InvalidRequest("set `max_completion_tokens` or its older name `max_tokens`, not both", "max_tokens")


async def render(context: ServerContext, body: ChatCompletionRequest, tools: ToolUse) -> tuple[Turn, list[int]]:
    """Where the answer starts, and the prompt's token ids."""
    kwargs = template_kwargs(body.chat_template_kwargs, body.reasoning_effort, context.options.chat_template_kwargs)
    prompt = await render_conversation(context, body, body.messages, tools.shown, kwargs)
    await check_text_length(context, prompt.text, "messages")
    # The template writes the special tokens itself.
    prompt_token_ids = await encode_text(context, prompt.text, add_special_tokens=bool(body.add_special_tokens))
    check_prompt_ids(prompt_token_ids, context.vocab_size, "messages")
    turn = Turn(
        prompt_tail=prompt.tail,
        added_tokens=added_token_texts(context.tokenizer),
        tools=tools.shown,
        tool_choice=tools.choice,
        chat_template_kwargs=kwargs,
        response_template=context.tokenizer.response_template,
        continued=prompt.continued,
    )
    return turn, prompt_token_ids


def call_format(context: ServerContext, tools: ToolUse, turn: Turn) -> ToolFormat | None:
    """How calls are written, where there may be any and the tool parser says so."""
    if not tools.shown or context.tool_parser is None:
        return None
    return context.tool_parser(turn).tool_format


async def constraint(
    context: ServerContext, body: ChatCompletionRequest, tools: ToolUse, tool_format: ToolFormat | None
) -> GrammarSpec | None:
    """What the answer is held to, tool calls included. Long schemas are written out in a worker."""
    chosen = json_reading(body, context.options.additional_properties)
    if not tools.shown or context.tool_parser is None:
        return await run(context, lambda: in_reading(chosen, lambda reading: grammar_spec_in(reading, body)), is_long=is_large(body))
    parser_name = context.plugins.tool_parsers.active

    def spec(reading: JsonReading) -> GrammarSpec | None:
        return answer_grammar(tools, grammar_spec_in(reading, body), tool_format, parser_name, reading)

    return await run(context, lambda: in_reading(chosen, spec), is_long=True)


async def answer_check(context: ServerContext, body: ChatCompletionRequest, tools: ToolUse, grammar: CompiledGrammar | None) -> AnswerCheck:
    """Where the grammar is lenient: checks the content against its schema, and calls against those of their tools."""
    if grammar is None or not grammar.warnings:
        return AnswerCheck(context.conformance)

    def schemas() -> tuple[str | None, dict[str, str]]:
        arguments = {tool.name: callable_tool(tool).arguments.text for tool in tools.callable if not tool.is_strict}
        return open_schema(body, grammar), arguments

    return AnswerCheck(context.conformance, *await run(context, schemas, is_long=True))


def chat_sampling_params(context: ServerContext, body: ChatCompletionRequest, num_prompt_tokens: int) -> SamplingParams:
    name, requested = "max_tokens", body.max_tokens
    if body.max_completion_tokens is not None:
        name, requested = "max_completion_tokens", body.max_completion_tokens
    if requested is not None and requested < 1:
        raise InvalidRequest(f"`{name}` must be at least 1, got {requested}", name)
    if body.top_logprobs is not None and not 0 <= body.top_logprobs <= MAX_LOGPROBS:
        raise InvalidRequest(f"`top_logprobs` must be from 0 to {MAX_LOGPROBS}, got {body.top_logprobs}", "top_logprobs")
    limit = token_limit(
        requested,
        name,
        prompt_param="messages",
        default=context.default_sampling.get("max_tokens"),
        num_prompt_tokens=num_prompt_tokens,
        max_model_len=context.max_model_len,
    )
    return sampling_params(
        body,
        limit=limit,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        prompt_logprobs=body.prompt_logprobs,
        thinking_token_budget=thinking_budget(context, body, limit.max_tokens),
        defaults=searched_defaults(body, context.default_sampling),
        vocab_size=context.vocab_size,
    )


def thinking_budget(context: ServerContext, body: ChatCompletionRequest, max_tokens: int) -> int | None:
    """The request's own budget as it is (-1: none); else the server's, but content gets as many tokens at least.

    What the end marker takes is set aside first: even a short answer is to show some content.
    """
    if context.reasoning_parser is None or body.thinking_token_budget == -1:
        return None
    if body.thinking_token_budget is not None or context.default_thinking_budget is None or body.use_beam_search:
        return body.thinking_token_budget
    parser = context.reasoning_parser(Turn(response_template=context.tokenizer.response_template))
    marker = context.tokenizer.encode(parser.end_marker, add_special_tokens=False)
    return min(context.default_thinking_budget, max(max_tokens - len(marker), 0) // 2)


def reasoning_view(context: ServerContext, body: ChatCompletionRequest, turn: Turn) -> ReasoningView:
    opening = closing = ""
    if context.reasoning_parser is not None and body.separate_reasoning is False:
        parser = context.reasoning_parser(turn)
        is_opened = parser.phase is Phase.CONTENT or turn.phase(parser.start_marker, parser.end_marker) is Phase.REASONING
        opening = "" if is_opened else parser.start_marker
        closing = parser.end_marker
    return ReasoningView(
        is_included=body.include_reasoning is not False,
        is_separate=body.separate_reasoning is not False,
        is_streamed=body.stream_reasoning is not False,
        opening=opening,
        closing=closing,
    )
