"""Checks the conversation and hands it to the chat template as plain data."""

from collections.abc import Mapping
from typing import Any

from penstock.api.chat_protocol import ChatMessage
from penstock.engine.errors import InvalidRequest

TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
RESERVED_KWARGS = frozenset(
    {"chat_template", "messages", "tools", "documents", "tokenize", "add_generation_prompt", "continue_final_message", "self"}
)


def template_messages(messages: list[ChatMessage], *, knows_developer: bool) -> list[dict[str, Any]]:
    """Messages with the fields that templates know and that are set.

    `developer` is OpenAI's newer word for `system`; a template that does not know it is given the older one.
    Raises `InvalidRequest` for an empty conversation and for content that is not text, with its path.
    """
    if not messages:
        raise InvalidRequest("`messages` must hold at least one message", "messages")
    return [template_message(message, f"messages[{index}]", knows_developer) for index, message in enumerate(messages)]


def template_message(message: ChatMessage, path: str, knows_developer: bool) -> dict[str, Any]:
    if isinstance(message.content, list):
        for index, part in enumerate(message.content):
            check_part(part, f"{path}.content[{index}]")
    role = "system" if message.role == "developer" and not knows_developer else message.role
    written: dict[str, Any] = {"role": role, "content": message.content}
    for name in ("name", "tool_calls", "tool_call_id"):
        value = getattr(message, name)
        if value:
            written[name] = value
    reasoning = message.reasoning_content or message.reasoning
    if isinstance(reasoning, str):
        written["reasoning_content"] = reasoning
    return written


def check_part(part: dict[str, Any], path: str) -> None:
    kind = part.get("type")
    if not isinstance(kind, str) or kind not in TEXT_PARTS:
        raise InvalidRequest(f"`{path}` is of type {str(kind)[:100]!r}: this model reads only text", path)
    if not isinstance(part.get(TEXT_PARTS[kind]), str):
        raise InvalidRequest(f"`{path}.{TEXT_PARTS[kind]}` must be a string", f"{path}.{TEXT_PARTS[kind]}")


def template_kwargs(given: dict[str, Any] | None, reasoning_effort: str | None, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """What templates read beside the conversation. An effort of `none` is also said in the two words that templates without efforts know.

    `defaults` are the server's, and give way to what the request says. Raises `InvalidRequest` for a name that is the request's own: a
    template, above all, must not come in through here.
    """
    kwargs = dict(given or {})
    for name in kwargs:
        if name in RESERVED_KWARGS:
            reserved = ", ".join(sorted(RESERVED_KWARGS))
            raise InvalidRequest(f"`{name}` is not an argument for the template, nor are: {reserved}", f"chat_template_kwargs.{name}")
    if reasoning_effort is not None:
        kwargs.setdefault("reasoning_effort", reasoning_effort)
        if reasoning_effort == "none":
            kwargs.setdefault("enable_thinking", False)
            kwargs.setdefault("thinking", False)
    return {**defaults, **kwargs}
