"""Messages: checked, and as chat templates expect them, whatever spelling the client used."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.engine.errors import InvalidRequest
from penstock.serving.requests import ChatMessage

Message = Mapping[str, Any]


class ToolArguments(dict[str, Any]):
    """A call's arguments for templates of both kinds: those that take a mapping, and those that take its JSON text."""

    def __init__(self, text: str, values: Mapping[str, Any]) -> None:
        super().__init__(values)
        self._text = text

    def __str__(self) -> str:
        return self._text

    def __add__(self, other: str) -> str:
        return self._text + other

    def __radd__(self, other: str) -> str:
        return other + self._text


def prepare_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    return [prepare_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def prepare_message(message: Message, path: str = "messages") -> dict[str, Any]:
    """A message as templates expect it, whatever spelling the client used. `path` is its JSON path.

    `content` is a string, '' where it is absent; reasoning is there under both its names; a tool call's arguments are a mapping.
    """
    prepared = {name: value for name, value in message.items() if value is not None}
    prepared["content"] = _content_text(message.get("content"), f"{path}.content")
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    if reasoning is not None:
        prepared["reasoning_content"] = prepared["reasoning"] = reasoning
    if isinstance(message.get("tool_calls"), list):
        prepared["tool_calls"] = [_prepare_tool_call(call) for call in message["tool_calls"]]
    return prepared


def _content_text(content: Any, path: str) -> str:
    """Parts are joined by line ends, as vLLM does for templates that take strings."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    texts: list[str] = []
    for index, part in enumerate(content):
        if isinstance(part, Mapping):
            text, kind = part.get("text", part.get("refusal")), part.get("type")
        else:
            text, kind = part, type(part).__name__
        if not isinstance(text, str):
            raise InvalidRequest(f"content parts of type {kind!r} cannot be read by this model", f"{path}[{index}]")
        texts.append(text)
    return "\n".join(texts)


def _prepare_tool_call(call: Any) -> Any:
    if not isinstance(call, Mapping) or not isinstance(call.get("function"), Mapping):
        return call
    function = dict(call["function"])
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            values = json.loads(arguments or "{}")
        except ValueError:
            values = None  # a truncated call of an earlier answer stays text
        if isinstance(values, dict):
            function["arguments"] = ToolArguments(arguments or "{}", values)
    return {**call, "function": function}


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
