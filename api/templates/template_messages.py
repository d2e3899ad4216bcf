"""Messages as chat templates expect them, whatever spelling the client used."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.engine.errors import InvalidRequest

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
