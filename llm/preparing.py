"""From what a caller of the library gives to requests of the engine, through the same checks as over HTTP."""

import asyncio
import uuid
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import msgspec

from penstock.api.answers.messages import ReasoningView
from penstock.api.chat import check, conversation_request, reasoning_view, render, thinking_budget
from penstock.api.chat_protocol import ChatCompletionRequest, ChatMessage
from penstock.api.constraints.constraint_size import is_large
from penstock.api.constraints.constraints import grammar_spec
from penstock.api.context import ServerContext
from penstock.api.decoding import mistaken_path
from penstock.api.preparing import answer_reader, compiled_grammar, logits_processors
from penstock.api.prompts import check_prompt_ids, check_text_length, encode_text
from penstock.api.sampling import token_limit
from penstock.api.tools import tool_use
from penstock.api.workers import run
from penstock.engine.errors import InvalidRequest
from penstock.engine.request import Request
from penstock.llm.prompts import PromptSource
from penstock.llm.sampling_params import SamplingParams

T = TypeVar("T")
Message = Mapping[str, Any]
PLAIN = ReasoningView()


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request that the engine can take, and what of it is to be given back. `path` is where in the call it came from."""

    request: Request
    params: SamplingParams
    path: str
    prompt: str | None = None
    view: ReasoningView = PLAIN


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    """How conversations are rendered, and which tools there are."""

    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False

    def __post_init__(self) -> None:
        self._require("chat_template", str | None, "Jinja's source")
        self._require("chat_template_kwargs", dict | None, "a dict")
        self._require("tools", list | None, "a list of tools, each a dict")
        self._require("tool_choice", str | dict | None, "a string or a dict")
        self._require("add_generation_prompt", bool, "True or False")
        self._require("continue_final_message", bool, "True or False")

    def _require(self, name: str, kind: Any, what: str) -> None:
        value = getattr(self, name)
        if not isinstance(value, kind):
            raise InvalidRequest(f"`{name}` must be {what}, got {value!r:.100}", name)


async def token_ids_of(context: ServerContext, source: PromptSource) -> list[int]:
    """Raises `InvalidRequest` for a prompt without tokens, for ids that there are not, and for one that the context cannot hold."""
    token_ids = source.token_ids
    if token_ids is None:
        text = source.text or ""
        await check_text_length(context, text, source.path)
        token_ids = await encode_text(context, text, add_special_tokens=True)
    check_prompt_ids(token_ids, context.vocab_size, source.path)
    return token_ids


async def prepare_prompt(
    context: ServerContext, source: PromptSource, params: SamplingParams, *, request_id: str | None = None, priority: int = 0
) -> Prepared:
    """A text to be continued. No parser reads what the model says. Raises `InvalidRequest`."""
    token_ids = await token_ids_of(context, source)
    check_params(context, params, len(token_ids), source.path)
    body = params.constraint_fields()
    spec = await run(context, lambda: grammar_spec(body, context.options.additional_properties), is_long=is_large(body))
    request = Request(
        request_id=request_id or f"gen-{uuid.uuid4().hex}",
        prompt_token_ids=token_ids,
        params=params,
        make_answer=answer_reader(context.tokenizer, token_ids, params),
        grammar=await compiled_grammar(context, body, spec),
        logits_processors=logits_processors(context, params.processor_choices()),
        priority=priority,
        cache_salt=source.cache_salt,
        outputs=tuple(params.additional_outputs),
        with_context_outputs=params.additional_context_outputs,
    )
    return Prepared(request, params, source.path, source.text)


async def prepare_chat(
    context: ServerContext,
    messages: Sequence[Message],
    params: SamplingParams,
    options: ChatOptions,
    path: str,
    *,
    request_id: str | None = None,
    priority: int = 0,
) -> Prepared:
    """A conversation to be answered, through the code of /v1/chat/completions. Raises `InvalidRequest`."""
    body = chat_body(messages, params, options)
    check(context, body)
    # Without a parser, tools are only told to the model, and its calls stay text.
    tools = tool_use(body, has_parser=True)
    if tools.is_forced and context.tool_parser is None:
        raise InvalidRequest("a forced `tool_choice` needs a tool parser: give `tool_parser` to the engine", "tool_choice")
    turn, token_ids = await render(context, body, tools)
    max_tokens = check_params(context, params, len(token_ids), path)
    params = replace(params, thinking_token_budget=thinking_budget(context, body, max_tokens))
    request = await conversation_request(context, body, tools, turn, token_ids, params)
    request.request_id, request.priority = request_id or request.request_id, priority
    request.outputs, request.with_context_outputs = tuple(params.additional_outputs), params.additional_context_outputs
    text = context.tokenizer.decode(token_ids, skip_special_tokens=False)
    return Prepared(request, params, path, text, reasoning_view(context, body, turn))


def chat_body(messages: Sequence[Message], params: SamplingParams, options: ChatOptions) -> ChatCompletionRequest:
    """What a client would have sent, as far as the conversation goes: how to sample stays with `params`."""
    try:
        read = msgspec.convert(list(messages), list[ChatMessage])
    except msgspec.ValidationError as error:
        message = str(error).replace("`$", "`messages")
        raise InvalidRequest(message, f"messages{mistaken_path(error) or ''}") from None
    return ChatCompletionRequest(
        messages=read,
        chat_template=options.chat_template,
        chat_template_kwargs=options.chat_template_kwargs,
        tools=options.tools or None,
        tool_choice=options.tool_choice,
        add_generation_prompt=options.add_generation_prompt,
        continue_final_message=options.continue_final_message,
        thinking_token_budget=params.thinking_token_budget,
        structured_outputs=params.constraint_fields().structured_outputs,
        logits_processors=params.processor_choices(),
    )


def check_params(context: ServerContext, params: SamplingParams, num_prompt_tokens: int, path: str) -> int:
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


async def prepare_each(requests: Iterable[tuple[str, Awaitable[Prepared]]]) -> list[Prepared]:
    """All of a call's requests, by where in the call they come from. Raises `InvalidRequest`, naming which of several is at fault."""
    batch = []
    for path, preparing in requests:
        try:
            batch.append(await preparing)
        except InvalidRequest as error:
            raise located(error, path) from None
        await asyncio.sleep(0)  # a batch of thousands must not hold up the answers to others
    return batch


def one_for_each(given: Any, kind: type[T], name: str, count: int, what: str) -> Sequence[T]:
    """`given` for all of `count`, or one of them for each: `what` they are is said where there are not as many. Raises `InvalidRequest`."""
    if isinstance(given, kind):
        return [given] * count
    if not isinstance(given, Sequence):
        raise InvalidRequest(f"`{name}` must be {kind.__name__}, or a list of them, got {type(given).__name__}", name)
    for index, own in enumerate(given):
        if not isinstance(own, kind):
            raise InvalidRequest(f"`{name}[{index}]` must be {kind.__name__}, got {type(own).__name__}", f"{name}[{index}]")
    if len(given) != count:
        raise InvalidRequest(f"there are {count} {what} and {len(given)} {name}: give one, or one for each", name)
    return given


def refuse_adapter(lora_request: object) -> None:
    """Raises `InvalidRequest` for anything but None."""
    if lora_request is not None:
        raise InvalidRequest("`lora_request`: adapters are not supported", "lora_request")


def located(error: InvalidRequest, path: str) -> InvalidRequest:
    """The same mistake, naming which of several prompts or conversations it is of."""
    if "[" not in path or error.message.startswith(path):
        return error
    inner = error.param if error.param and not error.param.startswith(path) else None
    return type(error)(f"{path}: {error.message}", f"{path}.{inner}" if inner else path)
