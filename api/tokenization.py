"""POST /tokenize and /detokenize, with vLLM's fields: what the model sees of a text or a conversation."""

import asyncio
from typing import Any

import msgspec
from aiohttp import web
from penstock.api.chat_protocol import ChatMessage
from penstock.api.context import CONTEXT, ServerContext
from penstock.api.decoding import decode
from penstock.api.errors import json_response
from penstock.engine.errors import InvalidRequest, NoSuchModel


class TokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Either `prompt` or `messages`. A prompt gets the tokenizer's special tokens unless told otherwise; a rendered chat brings its own."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    tools: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool = False


class TokenizeResponse(msgspec.Struct, omit_defaults=True):
    tokens: list[int]
    count: int
    max_model_len: int
    token_strs: list[str] | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    tokens: list[int]
    model: str | None = None


class DetokenizeResponse(msgspec.Struct):
    prompt: str


async def tokenize(request: web.Request) -> web.Response:
    """POST /tokenize."""
    context = request.app[CONTEXT]
    body, _ = decode(await request.read(), TokenizeRequest, allow_unknown_fields=context.options.allow_unknown_fields)
    check_model(context, body.model)
    text, add_special_tokens = await _text_of(context, body)

    def encode() -> TokenizeResponse:
        tokens = context.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        strings = [context.tokenizer.token_text(token_id) for token_id in tokens] if body.return_token_strs else None
        return TokenizeResponse(tokens, len(tokens), context.max_model_len, strings)

    return json_response(await asyncio.get_running_loop().run_in_executor(context.workers, encode))


async def detokenize(request: web.Request) -> web.Response:
    """POST /detokenize."""
    context = request.app[CONTEXT]
    body, _ = decode(await request.read(), DetokenizeRequest, allow_unknown_fields=context.options.allow_unknown_fields)
    check_model(context, body.model)
    for index, token_id in enumerate(body.tokens):
        if not 0 <= token_id < context.vocab_size:
            raise InvalidRequest(f"token id {token_id} is outside the vocabulary of {context.vocab_size} tokens", f"tokens[{index}]")

    def decode_tokens() -> DetokenizeResponse:
        return DetokenizeResponse(context.tokenizer.decode(body.tokens, skip_special_tokens=False))

    return json_response(await asyncio.get_running_loop().run_in_executor(context.workers, decode_tokens))


def check_model(context: ServerContext, name: str | None) -> None:
    """Raises `NoSuchModel`; no name at all means the model that is served."""
    if name is not None and name not in context.model_names:
        raise NoSuchModel(f"the model {name!r} is not served here; these are: {', '.join(context.model_names)}", "model")


async def _text_of(context: ServerContext, body: TokenizeRequest) -> tuple[str, bool]:
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("give either `prompt` or `messages`", "prompt")
    if body.messages is None:
        assert body.prompt is not None
        return body.prompt, body.add_special_tokens is not False
    if not body.messages:
        raise InvalidRequest("`messages` is empty", "messages")
    if body.chat_template is not None and not context.options.trust_request_chat_template:
        raise InvalidRequest("the server does not take templates from requests", "chat_template")
    if body.continue_final_message and body.add_generation_prompt:
        raise InvalidRequest("`continue_final_message` needs `add_generation_prompt` to be false", "continue_final_message")
    rendered = await context.chat_template.render(
        [msgspec.to_builtins(message) for message in body.messages],
        body.tools,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        template_kwargs=body.chat_template_kwargs,
        template=body.chat_template,
    )
    return rendered.text, body.add_special_tokens is True
