"""What the model sees of a text or a conversation, with vLLM's fields."""

from typing import Any

import msgspec

from penstock.engine.errors import InvalidRequest
from penstock.serving.context import ModelContext, prompt_queue, queue_for
from penstock.serving.endpoints.bodies import served_model
from penstock.serving.prompts import (
    check_template_fields,
    check_tokenizable,
    encode_prompt,
    render_conversation,
    template_kwargs,
)
from penstock.serving.requests import ChatMessage, Messages
from penstock.serving.templates.rendering import RenderedPrompt

MAX_IDS = 2**16  # where the context holds more, twice the context


class TokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Either `prompt` or `messages`. Special tokens are added to a prompt by default; a rendered chat brings its own."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    tools: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool = False


class TokenizeResponse(msgspec.Struct):
    """`token_strs` are the tokens' texts, if they were asked for."""

    tokens: list[int]
    count: int
    max_model_len: int
    token_strs: list[str] | msgspec.UnsetType = msgspec.UNSET


class DetokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    tokens: list[int]
    model: str | None = None


class DetokenizeResponse(msgspec.Struct):
    prompt: str


def tokenized(context: ModelContext, body: TokenizeRequest) -> TokenizeResponse:
    if body.messages is None:
        check_tokenizable(context, body.prompt or "", "prompt")
        tokens = context.tokenizer.encode(body.prompt or "", add_special_tokens=body.add_special_tokens is not False)
    else:
        prompt = _rendered(context, body, body.messages)
        check_tokenizable(context, prompt.text, "messages")
        tokens = encode_prompt(context, prompt, add_special_tokens=body.add_special_tokens is True)
    strings = [context.tokenizer.token_text(token_id) for token_id in tokens] if body.return_token_strs else msgspec.UNSET
    return TokenizeResponse(tokens, len(tokens), context.max_model_len, strings)


def _rendered(context: ModelContext, body: TokenizeRequest, messages: list[ChatMessage]) -> RenderedPrompt:
    """The prompt that /v1/chat/completions would make of the same fields."""
    check_template_fields(context, body)
    kwargs = template_kwargs(body.chat_template_kwargs, None, context.options.default_chat_template_kwargs)
    return render_conversation(context, body, messages, body.tools or [], kwargs)


async def answer_tokens(context: ModelContext, body: TokenizeRequest, size: int) -> bytes:
    """A `TokenizeResponse`, encoded. Raises `InvalidRequest`."""
    served_model(context, body.model)
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("give either `prompt` or `messages`", "prompt")
    queue = prompt_queue(size, is_conversation=body.messages is not None, template=body.chat_template)
    return await context.workers.run(queue, lambda: msgspec.json.encode(tokenized(context, body)))


async def answer_text(context: ModelContext, body: DetokenizeRequest, size: int) -> bytes:
    """A `DetokenizeResponse`, encoded. Raises `InvalidRequest`."""
    served_model(context, body.model)
    limit = max(MAX_IDS, 2 * context.max_model_len)
    if len(body.tokens) > limit:
        raise InvalidRequest(f"at most {limit} tokens are turned into text at once, got {len(body.tokens)}", "tokens")

    def write() -> bytes:
        for index, token_id in enumerate(body.tokens):
            if not 0 <= token_id < context.vocab_size:
                raise InvalidRequest(f"token id {token_id} is outside the vocabulary of {context.vocab_size} tokens", f"tokens[{index}]")
        return msgspec.json.encode(DetokenizeResponse(context.tokenizer.decode(body.tokens, skip_special_tokens=False)))

    return await context.workers.run(queue_for(size), write)
