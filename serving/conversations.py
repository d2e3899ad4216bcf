"""Prompts: from a conversation or texts to token ids, with the special tokens in messages parsed or kept as text."""

import json
from dataclasses import replace
from functools import lru_cache
from typing import Any

import jinja2
from jinja2 import nodes
from msgspec import structs

from penstock.engine.errors import ContextLengthExceeded, InvalidRequest
from penstock.engine.text.tokenizer import ContentTokenizer
from penstock.serving.context import SharedContext
from penstock.serving.requests import ChatMessage
from penstock.serving.templates.chat_template import RenderedPrompt, TemplateFields, render_conversation
from penstock.serving.templates.environment import TemplateEnvironment
from penstock.serving.templates.messages import check_arguments

LOOKING = frozenset(
    {"count", "endswith", "find", "index", "partition", "removeprefix", "removesuffix", "replace", "rfind", "rindex", "rpartition"}
    | {"rsplit", "split", "startswith"}
)


def render_prompt(
    context: SharedContext, body: TemplateFields, messages: list[ChatMessage], tools: list[dict[str, Any]], kwargs: dict[str, Any]
) -> RenderedPrompt:
    """As `render_conversation`; where content is text, what it holds of special tokens is marked in the prompt's `text`."""
    tokenizer = context.content_tokenizer
    if tokenizer is None:
        return render_conversation(context, body, messages, tools, kwargs)
    source = body.chat_template or context.chat_template.source_for(tools) or ""
    prompt = render_conversation(context, body, *_marked(tokenizer, source, messages, tools, kwargs))
    return replace(prompt, tail=tokenizer.unmark(prompt.tail), continued=tokenizer.unmark(prompt.continued))


def encode_prompt(context: SharedContext, prompt: RenderedPrompt, *, add_special_tokens: bool) -> list[int]:
    """The token ids of what `render_prompt` gave."""
    tokenizer = context.content_tokenizer or context.tokenizer
    return tokenizer.encode(prompt.text, add_special_tokens=add_special_tokens)


@lru_cache(maxsize=16)
def looked_for(source: str) -> str:
    """All that a chat template looks for in texts, such as the end of the reasoning in earlier answers."""
    try:
        tree = TemplateEnvironment().parse(source)
    except jinja2.TemplateError:  # rendering it raises the error for the client
        return ""
    found: list[nodes.Node] = []
    for compare in tree.find_all(nodes.Compare):
        found += [compare.expr, *(operand.expr for operand in compare.ops)]
    for call in tree.find_all(nodes.Call):
        if isinstance(call.node, nodes.Getattr) and call.node.attr in LOOKING:
            found += call.args
    return "\n".join(node.value for node in found if isinstance(node, nodes.Const) and isinstance(node.value, str))


def _marked(
    tokenizer: ContentTokenizer, source: str, messages: list[ChatMessage], tools: list[dict[str, Any]], kwargs: dict[str, Any]
) -> tuple[list[ChatMessage], list[dict[str, Any]], dict[str, Any]]:
    check_arguments(messages)
    marked = []
    for index, message in enumerate(messages):
        # The template finds by them what is reasoning in an answer; in other messages they mean nothing.
        kept = tokenizer.markers_in(looked_for(source)) if message.role == "assistant" else frozenset[str]()
        try:
            marked.append(_marked_message(tokenizer, message, kept))
        except InvalidRequest as error:
            raise InvalidRequest(error.message, f"messages[{index}]") from None
    return marked, tokenizer.mark(tools), tokenizer.mark(kwargs)


def _marked_message(tokenizer: ContentTokenizer, message: ChatMessage, kept: frozenset[str]) -> ChatMessage:
    others = {name: tokenizer.mark(getattr(message, name)) for name in ("name", "tool_call_id", "reasoning_content", "reasoning")}
    calls = message.tool_calls and [tokenizer.mark(_plain_call(call)) for call in message.tool_calls]
    return structs.replace(message, content=tokenizer.mark(message.content, kept), tool_calls=calls, **others)


def _plain_call(call: dict[str, Any]) -> dict[str, Any]:
    """The call with arguments in which nothing is escaped that need not be: a template may be given them decoded."""
    function = call.get("function")
    arguments = function.get("arguments") if isinstance(function, dict) else None
    if not isinstance(function, dict) or not isinstance(arguments, str) or "\\" not in arguments:
        return call
    try:
        arguments = json.dumps(json.loads(arguments), ensure_ascii=False)
    except (ValueError, RecursionError):  # stays text
        return call
    return {**call, "function": {**function, "arguments": arguments}}


MAX_PROMPTS = 2048  # OpenAI's, of embeddings


def split_prompts(given: str | list[str | int | list[int]], param: str) -> list[str | list[int]]:
    """The prompts of all four forms that OpenAI has: a string, strings, token ids, lists of these.

    Raises `InvalidRequest` for none, for too many, and for a list of both ids and prompts.
    """
    if isinstance(given, str):
        return [given]
    ids = [item for item in given if isinstance(item, int)]
    if ids and len(ids) == len(given):
        return [ids]
    if ids:
        position = next(position for position, item in enumerate(given) if isinstance(item, int) != isinstance(given[0], int))
        raise InvalidRequest(f"`{param}` must hold either token ids or prompts, not both", f"{param}[{position}]")
    if not 1 <= len(given) <= MAX_PROMPTS:
        raise InvalidRequest(f"`{param}` must hold from 1 to {MAX_PROMPTS} prompts, got {len(given)}", param)
    return [item for item in given if not isinstance(item, int)]


def path_of(param: str, position: int, count: int) -> str:
    return param if count == 1 else f"{param}[{position}]"


def check_text_length(context: SharedContext, text: str, param: str) -> None:
    """Raises `ContextLengthExceeded` for a text that cannot fit the context, without tokenizing all of it."""
    limit = context.max_model_len
    beginning = context.tokenizer.beginning(text, limit)
    if len(beginning) < len(text):
        raise ContextLengthExceeded(
            f"This model's maximum context length is {limit} tokens. However, the first {len(beginning)} of your prompt's "
            f"{len(text)} characters are more than that. Please shorten it.",
            param,
        )


def check_prompt_ids(token_ids: list[int], vocab_size: int, param: str) -> None:
    """Raises `InvalidRequest` for a prompt without tokens, and for an id that is not in the vocabulary."""
    if not token_ids:
        raise InvalidRequest("the prompt holds no tokens", param)
    for bad in (min(token_ids), max(token_ids)):
        if not 0 <= bad < vocab_size:
            raise InvalidRequest(f"token id {bad} is outside the vocabulary of {vocab_size} tokens", param)
