"""POST /v1/chat/completions."""

import uuid
from dataclasses import replace

from aiohttp import web

from penstock.api.answers.answering import answer
from penstock.api.answers.chat_fold import ChatFold
from penstock.api.answers.folds import ReasoningView
from penstock.api.beams import beam_search, searched, searched_defaults
from penstock.api.bodies import read_admitted_body, served_model
from penstock.api.chat_protocol import ChatCompletionRequest
from penstock.api.constraints.answer_check import AnswerCheck, warning_header
from penstock.api.constraints.constraint_size import is_large
from penstock.api.constraints.constraints import grammar_spec_in, open_schema
from penstock.api.constraints.json_reading import JsonReading, in_reading, json_reading
from penstock.api.constraints.tool_grammar import answer_grammar, callable_tool
from penstock.api.context import CONTEXT, ServerContext
from penstock.api.messages import template_kwargs
from penstock.api.metrics.metrics import begin_timer
from penstock.api.preparing import (
    added_token_texts,
    answer_reader,
    cache_salt,
    check_streaming,
    client_of,
    compiled_grammar,
    logits_processors,
)
from penstock.api.prompts import check_prompt_ids, check_text_length, encode_text
from penstock.api.sampling import sampling_params, token_limit
from penstock.api.templates.rendering import check_template_fields, render_conversation
from penstock.api.tools import ToolUse, tool_use
from penstock.api.workers import run
from penstock.engine.errors import InvalidRequest
from penstock.engine.grammar import CompiledGrammar, GrammarSpec
from penstock.engine.parsing import Phase
from penstock.engine.request import Request
from penstock.engine.sampling.sampling_params import MAX_LOGPROBS, SamplingParams
from penstock.engine.tool_format import ToolFormat
from penstock.engine.turn import Turn


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
