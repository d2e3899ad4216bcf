"""From a body's conversation to the prompt's text and token ids, with the special tokens in messages read or kept as text."""

import json
from dataclasses import replace
from functools import lru_cache
from typing import Any

import jinja2
from jinja2 import nodes
from msgspec import structs

from penstock.engine.content_tokenizer import ContentTokenizer
from penstock.engine.errors import InvalidRequest
from penstock.serving.context import SharedContext
from penstock.serving.requests import ChatMessage
from penstock.serving.templates.chat_template import RenderedPrompt, TemplateFields, render_conversation
from penstock.serving.templates.environment import TemplateEnvironment

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
