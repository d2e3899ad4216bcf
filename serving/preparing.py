"""From a caller's request to the engine's: one path for every endpoint and for the library.

Everything up to the compiling of a constraint is plain code, which runs in a worker where the request is long.
"""

import asyncio
import functools
import itertools
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from penstock.engine.adapters.registry import Adapter
from penstock.engine.contracts.grammar import GrammarSpec
from penstock.engine.contracts.logits_processor import ChosenProcessor, chosen_processors
from penstock.engine.contracts.parsing import Phase, ReasoningParser, ToolFormat, Turn
from penstock.engine.deltas import FinishReason, SequenceDelta
from penstock.engine.errors import InvalidRequest
from penstock.engine.multimodal.inputs import ProcessedPrompt
from penstock.engine.request import AnswerFactory, Request
from penstock.engine.sampling.params import MAX_LOGPROBS, SamplingParams
from penstock.engine.speculation.proposers import Prediction
from penstock.engine.text.answer import PreambleParams
from penstock.engine.text.tokenizer import CHARS_PER_TOKEN
from penstock.serving.context import ServerContext, queue_for
from penstock.serving.images import ImageSource
from penstock.serving.messages import ReasoningView
from penstock.serving.prompts import (
    check_prompt_ids,
    check_template_fields,
    check_text_length,
    check_tokenizable,
    completion_prompts,
    encode_prompt,
    encode_prompts,
    image_token_for,
    path_of,
    prompt_ids,
    read_images,
    render_conversation,
    template_kwargs,
    with_images,
)
from penstock.serving.requests import (
    DEFAULT_MAX_TOKENS,
    ChatCompletionRequest,
    CompletionRequest,
    GenerationFields,
    LogitsProcessorChoice,
    TokenLimit,
    beam_search,
    sampling_params,
    searched_defaults,
    token_limit,
)
from penstock.serving.structured_outputs import (
    DIRECT,
    AnswerMode,
    Constraint,
    answer_mode,
    chat_constraint,
    chosen_backend,
    compiled,
    ends_within,
    measures_pressure,
    plan_constraint,
    possible_choices,
    require_constraint,
    samples_exactly,
)
from penstock.serving.tools import ToolUse, deciding_opening, tool_use

if TYPE_CHECKING:
    from penstock.engine.sampling.rows import TokenRules

MAX_SEQUENCES = 4096  # over all prompts of a completion
MAX_PROMPT_LOGPROBS = 2**20  # likewise: an answer of 75 MB
LONG_TRANSCRIPT = 2**13  # tokens, which take a millisecond to keep
MAX_LOGPROBS_HELD = 2**22  # of generated tokens, in an answer that is sent as a whole


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One prompt of a completion. `text` is what `echo` gives back."""

    token_ids: list[int]
    text: str


@dataclass(slots=True, kw_only=True)
class PreparedChat:
    """A conversation that the engine can answer. `view` is how its reasoning is shown, `tools` what may be called.

    `text` is the prompt's, without images in it.
    """

    request: Request
    text: str | None
    tools: ToolUse
    view: ReasoningView
    constraint: Constraint


@dataclass(slots=True, kw_only=True)
class PreparedCompletion:
    """One engine request for each prompt."""

    prompts: list[Prompt]
    requests: list[Request]
    constraint: Constraint
    shows_preamble: bool = False


@dataclass(frozen=True, slots=True)
class ParserFacts:
    """What the parsers of an answer say before it begins, asked once for each request.

    `reasoning` and `tool_format` are None without such a parser, and where calls cannot be promised.
    """

    reasoning: ReasoningParser | None
    tool_format: ToolFormat | None

    @classmethod
    def of(cls, context: ServerContext, turn: Turn) -> "ParserFacts":
        reasoning = None if context.reasoning_parser is None else context.reasoning_parser(turn)
        tool_parser = None if context.tool_parser is None or not turn.tools else context.tool_parser(turn)
        return cls(reasoning, None if tool_parser is None else tool_parser.tool_format)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    """What a caller of the library, or another endpoint, decides otherwise than a client of chat completions.

    With `params` the body says nothing of sampling, and `path` names the conversation in errors. Where a server without a tool parser is
    not `strict_tools`, the prompt describes the tools, and the model's calls stay text. Where `clamps_max_tokens`, an answer that asks for
    more tokens than the context has room for may have as many as that; one that does not ask gets `max_tokens` at most. What is prepared
    several times shares the images that are `fetched`. The answer ends at `deadline`, in `time.monotonic()`. `key_name` is that of the API
    key, and `http_id` that of the HTTP request, both for operators.
    """

    client: str | None = None
    params: SamplingParams | None = None
    path: str = "messages"
    strict_tools: bool = True
    clamps_max_tokens: bool = False
    adapter: Adapter | None = None
    fetched: dict[str, bytes] | None = None
    max_tokens: int | None = None
    deadline: float | None = None
    key_name: str | None = None
    http_id: str | None = None


HTTP = ChatOptions()


async def prepare_chat(context: ServerContext, body: ChatCompletionRequest, size: int, options: ChatOptions = HTTP) -> PreparedChat:
    """The engine's request for a conversation of `size` characters. Raises `InvalidRequest` for all that is wrong with it."""
    prepared = await planned_chat(context, body, size, options)
    constraint = prepared.constraint
    prepared.request.grammar = await compiled(context, constraint, options.client)
    prepared.request.call_grammar = await compiled(context, Constraint(constraint.calls, constraint.backend), options.client)
    return prepared


async def planned_chat(context: ServerContext, body: ChatCompletionRequest, size: int, options: ChatOptions) -> PreparedChat:
    """As `prepare_chat`, with the constraint read but not compiled."""
    images, queue = await read_images(context, body, size, options.fetched)
    return await context.workers.run(queue, lambda: plan_chat(context, body, options, images))


async def count_prompt_tokens(context: ServerContext, body: ChatCompletionRequest, size: int) -> int:
    """How many tokens the prompt of a conversation of `size` characters has, be it longer than the context."""
    images, queue = await read_images(context, body, size)

    def count() -> int:
        tools = tool_use(body, has_parser=context.tool_parser is not None)
        kwargs = template_kwargs(body.chat_template_kwargs, body.reasoning_effort, context.options.default_chat_template_kwargs)
        prompt = render_conversation(context, body, body.messages, tools.shown, kwargs, image_token_for(context, images))
        check_tokenizable(context, prompt.text, "messages")
        return len(with_images(context, encode_prompt(context, prompt, add_special_tokens=False), images).token_ids)

    return await context.workers.run(queue, count)


def plan_chat(
    context: ServerContext, body: ChatCompletionRequest, options: ChatOptions = HTTP, images: Sequence[ImageSource] = ()
) -> PreparedChat:
    """All of `prepare_chat` but the compiling."""
    check_chat(context, body)
    tools = tool_use(body, has_parser=context.tool_parser is not None or not options.strict_tools)
    if tools.is_forced and context.tool_parser is None:
        raise InvalidRequest("a forced `tool_choice` needs a tool parser: give `tool_parser` to the engine", "tool_choice")
    if tools.shown and samples_exactly(body):
        raise InvalidRequest('`tools` cannot be combined with `structured_outputs.sampling` "exact"', "tools")
    salt = cache_salt(context, body, options.client)
    turn, text, prompt = render(context, body, tools, salt, images)
    reasoning = context.reasoning_parser
    mode = answer_mode(body, None if reasoning is None else functools.partial(reasoning, turn))
    turn = replace(turn, prompt_tail=turn.prompt_tail + mode.opening)
    facts = ParserFacts.of(context, turn)
    prompt = with_opening(context, prompt, mode)
    params = chat_params(context, body, facts, len(prompt.token_ids), options, mode)
    processors = logits_processors(context, body.logits_processors)
    spec, calls = chat_constraint(context, body, tools, facts.tool_format)
    spec = possible_choices(spec, params.bad_words, functools.partial(context.tokenizer.encode, add_special_tokens=False))
    require_constraint(body, spec)
    opening = None if spec is None or facts.tool_format is None else facts.tool_format.opening
    make_answer = AnswerFactory(
        context.tokenizer,
        prompt.token_ids,
        params,
        reasoning=reasoning,
        tools=context.tool_parser if turn.tools else None,
        turn=replace(turn, is_constrained=spec is not None),
        call_limits=tools.limits(context.options.max_tool_calls, opening),
    )
    request = make_request(
        body,
        prompt,
        make_answer,
        request_id=f"chatcmpl-{uuid.uuid4().hex}",
        rules=context.token_rules(params),
        processors=processors,
        salt=salt,
        preamble=preamble_of(context, mode, spec, params, len(prompt.token_ids), may_call=calls is not None),
        adapter=options.adapter,
    )
    request.prediction = prediction_of(context, None if body.prediction is None else body.prediction.text)
    request.call_opening = None if spec is None or calls is None else deciding_opening(tools, spec, facts.tool_format)
    request.deadline, request.client_id, request.http_id = options.deadline, options.key_name, options.http_id
    constraint = Constraint(spec, chosen_backend(body, context.plugins.grammar_backends), calls)
    view = replace(reasoning_view(body, facts, turn), shows_preamble=mode.shows_preamble)
    is_text = not images and mode is DIRECT  # else the prompt has more than the template writes in a later turn
    return PreparedChat(request=request, text=text if is_text else None, tools=tools, view=view, constraint=constraint)


async def prepare_completion(
    context: ServerContext,
    body: CompletionRequest,
    size: int,
    request_id: str,
    client: str | None = None,
    adapter: Adapter | None = None,
) -> PreparedCompletion:
    """One engine request for each prompt. `client` is the one that its work is counted for. Raises `InvalidRequest`."""
    prepared = await context.workers.run(queue_for(size), lambda: plan_completion(context, body, request_id, client, adapter))
    grammar = await compiled(context, prepared.constraint, client)
    for request in prepared.requests:
        request.grammar = grammar
    return prepared


def plan_completion(
    context: ServerContext, body: CompletionRequest, request_id: str, client: str | None = None, adapter: Adapter | None = None
) -> PreparedCompletion:
    """All of `prepare_completion` but the compiling."""
    check_streaming(body)
    if body.max_tokens is not None and body.max_tokens < (0 if body.echo else 1):
        raise InvalidRequest(f"`max_tokens` must be at least 1 (0 only with `echo`), got {body.max_tokens}", "max_tokens")
    beam_search(body)  # raises before any prompt is encoded
    mode, constraint = answer_mode(body), plan_constraint(context, body, body.bad_words or ())
    sources, embeds = completion_prompts(context, body)
    encoded = encode_prompts(context, sources, add_special_tokens=body.add_special_tokens is not False)
    processed = [with_opening(context, ProcessedPrompt(*each), mode) for each in zip(encoded, embeds, strict=True)]
    encoded = [prompt.token_ids for prompt in processed]
    params = completion_params(context, body, encoded)
    rules = context.token_rules(params[0])  # all differ in `max_tokens` alone
    processors = logits_processors(context, body.logits_processors)
    salt = cache_salt(context, body, client)
    requests = [
        make_request(
            body,
            prompt,
            AnswerFactory(context.tokenizer, [] if prompt.embeds else prompt.token_ids, prompt_params),
            request_id=request_id if len(sources) == 1 else f"{request_id}-{position}",
            rules=rules,
            processors=processors,
            salt=salt,
            preamble=preamble_of(context, mode, constraint.spec, prompt_params, len(prompt.token_ids)),
            adapter=adapter,
        )
        for position, (prompt, prompt_params) in enumerate(zip(processed, params, strict=True))
    ]
    prompts = readable_prompts(context, body, sources, encoded)
    return PreparedCompletion(prompts=prompts, requests=requests, constraint=constraint, shows_preamble=mode.shows_preamble)


def make_request(
    body: GenerationFields,
    prompt: ProcessedPrompt,
    make_answer: AnswerFactory,
    *,
    request_id: str,
    rules: "TokenRules | None",
    processors: list[ChosenProcessor],
    salt: str,
    preamble: PreambleParams | None,
    adapter: Adapter | None,
) -> Request:
    """What the requests of chats and of completions have in common."""
    return Request(
        request_id=request_id,
        prompt_token_ids=prompt.token_ids,
        params=make_answer.params,
        rules=rules,
        make_answer=make_answer,
        logits_processors=processors,
        priority=body.priority or 0,
        cache_salt=salt,
        beam=beam_search(body),
        exact=samples_exactly(body),
        preamble=preamble,
        measures_pressure=measures_pressure(body),
        ends_within=ends_within(body),
        embeds=prompt.embeds,
        adapter=adapter,
    )


def check_chat(context: ServerContext, body: ChatCompletionRequest) -> None:
    """Raises `InvalidRequest` for fields that contradict each other or that the operator has not allowed."""
    check_streaming(body)
    beam_search(body)
    check_template_fields(context, body)
    if body.top_logprobs is not None and body.top_logprobs > 0 and not body.logprobs:
        raise InvalidRequest("when using `top_logprobs`, `logprobs` must be set to true.", "top_logprobs")
    if body.max_tokens is not None and body.max_completion_tokens is not None:
        raise InvalidRequest("set `max_completion_tokens` or its older name `max_tokens`, not both", "max_tokens")


def check_streaming(body: GenerationFields) -> None:
    """Raises `InvalidRequest` for options that only make sense with the other value of `stream`."""
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("Stream options can only be defined when `stream=True`.", "stream_options")
    if body.prompt_logprobs is not None and body.stream:
        raise InvalidRequest("`prompt_logprobs` are not available when `stream=True`.", "prompt_logprobs")


def render(
    context: ServerContext, body: ChatCompletionRequest, tools: ToolUse, salt: str, images: Sequence[ImageSource] = ()
) -> tuple[Turn, str, ProcessedPrompt]:
    """Where the answer starts, and the prompt as text and as the engine takes it."""
    kwargs = template_kwargs(body.chat_template_kwargs, body.reasoning_effort, context.options.default_chat_template_kwargs)
    prompt = render_conversation(context, body, body.messages, tools.shown, kwargs, image_token_for(context, images))
    check_text_length(context, prompt.text, "messages")
    prompt_token_ids = prompt_ids(context, body, prompt, salt)
    check_prompt_ids(prompt_token_ids, context.vocab_size, "messages")
    turn = Turn(
        prompt_tail=prompt.tail,
        added_tokens=context.tokenizer.added_texts,
        tools=tools.shown,
        tool_choice=tools.choice,
        chat_template_kwargs=kwargs,
        response_template=context.tokenizer.response_template,
        continued=prompt.continued,
    )
    return turn, prompt.text, with_images(context, prompt_token_ids, images, salt)


def generate_chat(context: ServerContext, prepared: PreparedChat) -> AsyncGenerator[SequenceDelta, None]:
    """The answers to a conversation. What is said is known in its next turn."""
    deltas = context.engine.generate(prepared.request)
    if prepared.text is None or prepared.request.beam is not None:
        return deltas
    return _transcribed(context, prepared.request, prepared.text, deltas)


async def _transcribed(
    context: ServerContext, request: Request, prompt: str, deltas: AsyncGenerator[SequenceDelta, None]
) -> AsyncGenerator[SequenceDelta, None]:
    """The same deltas. The answers are kept once all have ended, before the client hears of that."""
    said: list[list[int]] = [[] for _ in range(request.params.n)]
    is_whole = [False] * request.params.n
    async with aclosing(deltas):
        async for delta in deltas:
            said[delta.index] += delta.token_ids
            is_whole[delta.index] = delta.finish_reason not in (None, FinishReason.ERROR, FinishReason.ABORT)
            yield delta

    def keep() -> None:
        for token_ids in itertools.compress(said, is_whole):
            context.transcripts.add(prompt, request.cache_salt, request.prompt_token_ids, token_ids)

    size = len(request.prompt_token_ids) + sum(map(len, said))
    if size > LONG_TRANSCRIPT:
        await asyncio.to_thread(keep)
    else:
        keep()


def prediction_of(context: ServerContext, text: str | None) -> Prediction | None:
    """The predicted answer in tokens, as far as the context has room for them."""
    if text is None:
        return None
    beginning = text[: CHARS_PER_TOKEN * context.max_model_len]
    token_ids = context.tokenizer.encode(beginning, add_special_tokens=False)[: context.max_model_len]
    return Prediction(token_ids) if token_ids else None


def chat_params(
    context: ServerContext,
    body: ChatCompletionRequest,
    facts: ParserFacts,
    num_prompt_tokens: int,
    options: ChatOptions,
    mode: AnswerMode = DIRECT,
) -> SamplingParams:
    """The caller's own parameters, or the body's."""
    budget = functools.partial(thinking_budget, context, body, facts.reasoning, own=mode.channel_budget)
    if options.params is not None:
        room = limit_of(context, options.params, num_prompt_tokens, options.path)
        return replace(options.params, thinking_token_budget=budget(room))
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
        default=min(filter(None, (context.default_sampling.get("max_tokens"), options.max_tokens)), default=None),
        num_prompt_tokens=num_prompt_tokens,
        max_model_len=context.max_model_len,
        is_clamped=options.clamps_max_tokens,
    )
    return sampling_params(
        body,
        limit=limit,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        prompt_logprobs=body.prompt_logprobs,
        thinking_token_budget=budget(limit.max_tokens),
        defaults=searched_defaults(body, context.default_sampling),
        vocab_size=context.vocab_size,
    )


def limit_of(context: ServerContext, params: SamplingParams, num_prompt_tokens: int, path: str) -> int:
    """How many tokens the answer may have: what was asked for, as far as the context has room. Raises `InvalidRequest`."""
    params.check_token_ids(context.vocab_size)
    return token_limit(
        None,
        "max_tokens",
        prompt_param=path,
        default=params.max_tokens,
        num_prompt_tokens=num_prompt_tokens,
        max_model_len=context.max_model_len,
    ).max_tokens


def thinking_budget(
    context: ServerContext, body: ChatCompletionRequest, parser: ReasoningParser | None, max_tokens: int, *, own: int | None = None
) -> int | None:
    """The request's own budget as it is (-1: none), or that of its mode; else the server's, but content gets as many tokens at least.

    What the end marker takes is set aside first: even a short answer is to show some content.
    """
    if parser is None or body.thinking_token_budget == -1:
        return None
    if body.thinking_token_budget is None and own is not None:
        return own
    if body.thinking_token_budget is not None or context.default_thinking_budget is None or body.use_beam_search:
        return body.thinking_token_budget
    marker = context.tokenizer.encode(parser.end_marker, add_special_tokens=False)
    return min(context.default_thinking_budget, max(max_tokens - len(marker), 0) // 2)


def reasoning_view(body: ChatCompletionRequest, facts: ParserFacts, turn: Turn) -> ReasoningView:
    opening = closing = ""
    parser = facts.reasoning
    if parser is not None and body.separate_reasoning is False:
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


def with_opening(context: ServerContext, prompt: ProcessedPrompt, mode: AnswerMode) -> ProcessedPrompt:
    """The prompt with what the mode ends it with."""
    if not mode.opening:
        return prompt
    return replace(prompt, token_ids=prompt.token_ids + context.tokenizer.encode(mode.opening, add_special_tokens=False))


def preamble_of(
    context: ServerContext,
    mode: AnswerMode,
    spec: GrammarSpec | None,
    params: SamplingParams,
    num_prompt_tokens: int,
    *,
    may_call: bool = False,
) -> PreambleParams | None:
    """The free text before an answer under the constraint, where the mode has any."""
    if spec is None:
        return None
    room = context.max_model_len - num_prompt_tokens
    max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
    return mode.preamble(context.tokenizer, spec, max_tokens, may_call=may_call)


def completion_params(context: ServerContext, body: CompletionRequest, encoded: Sequence[list[int]]) -> list[SamplingParams]:
    """Each prompt's: the same object for all that may grow by as many tokens."""
    by_limit: dict[TokenLimit, SamplingParams] = {}
    params: list[SamplingParams] = []
    prompt_logprobs = body.prompt_logprobs
    if body.echo and body.logprobs is not None:  # an echoed prompt shows those of its tokens as well
        prompt_logprobs = max(body.logprobs, prompt_logprobs or 0)
    for position, token_ids in enumerate(encoded):
        path = path_of("prompt" if body.prompt_embeds is None else "prompt_embeds", position, len(encoded))
        limit = token_limit(
            body.max_tokens,
            "max_tokens",
            prompt_param=path,
            default=DEFAULT_MAX_TOKENS,
            num_prompt_tokens=len(token_ids),
            max_model_len=context.max_model_len,
        )
        check_prompt_ids(token_ids, context.vocab_size, path)
        if limit not in by_limit:
            by_limit[limit] = sampling_params(
                body,
                limit=limit,
                logprobs=body.logprobs,
                prompt_logprobs=prompt_logprobs,
                defaults=searched_defaults(body, context.default_sampling),
                vocab_size=context.vocab_size,
            )
        params.append(by_limit[limit])
    if params[0].n * len(params) > MAX_SEQUENCES:
        raise InvalidRequest(f"prompts times `n` must be at most {MAX_SEQUENCES}, got {params[0].n * len(params)}", "n")
    check_prompt_logprobs(body, params[0], sum(map(len, encoded)))
    return params


def check_prompt_logprobs(body: CompletionRequest, params: SamplingParams, num_prompt_tokens: int) -> None:
    """Raises `InvalidRequest` for more log probabilities of prompts than an answer may have: each choice has those of its prompt."""
    if params.prompt_logprobs is None:
        return
    number = num_prompt_tokens * params.n * (1 + params.prompt_logprobs)
    if number > MAX_PROMPT_LOGPROBS:
        message = f"an answer may hold at most {MAX_PROMPT_LOGPROBS} log probabilities of prompts, got {number}: send fewer prompts at once"
        raise InvalidRequest(message, "logprobs" if body.prompt_logprobs is None else "prompt_logprobs")


def check_logprobs(body: GenerationFields, requests: Sequence[Request]) -> None:
    """Raises `InvalidRequest` for more log probabilities than a whole answer may hold. A stream sends each at once, and holds none."""
    wanted = [request.params for request in requests if request.params.logprobs is not None and not body.stream]
    number = sum(params.n * (params.max_tokens or 0) * (1 + (params.logprobs or 0)) for params in wanted)
    if number > MAX_LOGPROBS_HELD:
        message = f"an answer that is not streamed may hold at most {MAX_LOGPROBS_HELD} log probabilities, got a request for {number}: "
        raise InvalidRequest(f"{message}give a smaller `max_tokens`, or stream", "max_tokens")


def readable_prompts(
    context: ServerContext, body: CompletionRequest, sources: Sequence[str | list[int]], encoded: Sequence[list[int]]
) -> list[Prompt]:
    """The prompts with the text that `echo` gives back: the client's own, or the text of its token ids."""
    skip_special_tokens = body.skip_special_tokens is not False

    def text_of(source: str | list[int]) -> str:
        if not body.echo:
            return ""
        return source if isinstance(source, str) else context.tokenizer.decode(source, skip_special_tokens=skip_special_tokens)

    return [Prompt(token_ids=token_ids, text=text_of(source)) for source, token_ids in zip(sources, encoded, strict=True)]


def cache_salt(context: ServerContext, body: GenerationFields, client: str | None) -> str:
    """Keeps cached prefixes within one API key where the server has several: a hit would tell one client what another has asked."""
    salt, options = body.cache_salt or "", context.options
    is_isolated = options.isolate_keys or (options.has_several_keys and not options.share_prefix_cache)
    return f"{client} {salt}" if is_isolated and client is not None else salt


def logits_processors(context: ServerContext, choices: list[LogitsProcessorChoice] | None) -> list[ChosenProcessor]:
    """What the engine calls once per sequence. Raises `InvalidRequest` for a name or arguments that are refused."""
    chosen = [(choice.name, choice.arguments) for choice in choices or ()]
    return chosen_processors(context.plugins.logits_processors, chosen) if chosen else []
