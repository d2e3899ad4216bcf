"""Tools, calls and results in conversations whose chat template has no place for them: the server describes them in the prompt."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.engine.grammar import GrammarKind, GrammarSpec
from penstock.engine.structure import Either, FreeText, Literal, Marker, Repeat, Structure, TextUntil, Value
from penstock.engine.structure import Sequence as Parts
from penstock.engine.tool_format import CallableTool, ToolFormat
from penstock.plugins.tools.json_objects import HERMES
from penstock.serving.templates.messages import ToolArguments

INSTRUCTIONS = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n{tools}\n</tools>\n\n"
    "For each function call, answer in this form:\n{form}"
)
ANY_ARGUMENTS = GrammarSpec(GrammarKind.JSON_SCHEMA, '{"type": "object"}', "arguments", is_lenient=True)


@dataclass(frozen=True, slots=True)
class ToolPrompt:
    """How the server describes tools to the model, and how calls and results of earlier turns are written for it.

    `tool_format` is the tool parser's; `example` shows a call in a format that is not JSON. Where `is_default`, the model's files show no
    format that a parser reads: the server describes this one, and not the template another.
    """

    tool_format: ToolFormat | None = HERMES.tool_format
    example: str = ""
    is_default: bool = False

    @property
    def form(self) -> str:
        """How a call is written; empty where that is not known, so that the prompt cannot say it."""
        written = None if self.tool_format is None else written_call(self.tool_format, "<function-name>", "<args-json-object>")
        return written or self.example

    def replaces(self, source: str) -> bool:
        """Whether the server is to tell of tools even where the template does: it describes another format."""
        return self.is_default and self.tool_format is not None and self.tool_format.opening not in source

    def instructions(self, tools: Sequence[Mapping[str, Any]]) -> str:
        """The text that describes the tools to the model."""
        described = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
        return INSTRUCTIONS.format(tools=described, form=self.form)

    def with_calls(self, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """The conversation with calls as content."""
        return [self._with_calls(message) if "tool_calls" in message else message for message in messages]

    def _with_calls(self, message: dict[str, Any]) -> dict[str, Any]:
        calls = self._calls(message["tool_calls"] or ())
        others = {name: value for name, value in message.items() if name != "tool_calls"}
        return {**others, "content": "\n".join(text for text in (message["content"], *calls) if text)}

    def _calls(self, calls: Sequence[Any]) -> list[str]:
        functions = [call.get("function", call) for call in calls if isinstance(call, Mapping)]
        named = [function for function in functions if isinstance(function, Mapping) and isinstance(function.get("name"), str)]
        return [self._call(function["name"], function.get("arguments")) for function in named]

    def _call(self, name: str, arguments: Any) -> str:
        text = str(arguments) if isinstance(arguments, str | ToolArguments) else json.dumps(arguments or {}, ensure_ascii=False)
        written = None if self.tool_format is None else written_call(self.tool_format, name, text)
        if written is None:
            written = written_call(HERMES, name, text)
        return written or ""


def with_results(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The conversation with the results of calls as messages of the user.

    Many templates refuse two of these in a row: neighbouring results are one message, and the user's own that follows is joined to it.
    """
    written: list[dict[str, Any]] = []
    follows_result = False
    for message in messages:
        is_result = message["role"] == "tool"
        content = f"<tool_response>\n{message['content']}\n</tool_response>" if is_result else message["content"]
        if follows_result and (is_result or message["role"] == "user"):
            written[-1]["content"] += ("\n" if is_result else "\n\n") + content
        else:
            written.append({"role": "user", "content": content} if is_result else message)
        follows_result = is_result
    return written


def with_instructions(messages: Sequence[dict[str, Any]], text: str, *, has_system: bool) -> list[dict[str, Any]]:
    """The conversation with `text` in its system message; without that role, at the beginning of the first message of the user."""
    roles = [message["role"] for message in messages]
    if not has_system and "user" in roles:
        place = roles.index("user")
        return [*messages[:place], {**messages[place], "content": f"{text}\n\n{messages[place]['content']}"}, *messages[place + 1 :]]
    if has_system and roles[0] in ("system", "developer"):
        content = messages[0]["content"]
        return [{**messages[0], "content": f"{content}\n\n{text}" if content else text}, *messages[1:]]
    return [{"role": "system" if has_system else "user", "content": text}, *messages]


def written_call(tool_format: ToolFormat, name: str, arguments: str) -> str | None:
    """One call as the format writes it; None where its arguments are no JSON document."""
    parts = tool_format.calls([CallableTool(name, ANY_ARGUMENTS)], is_single=True)
    pieces = _pieces(parts, arguments)
    return None if pieces is None or pieces.count(arguments) != 1 else tool_format.opening + "".join(pieces)


def _pieces(part: Structure, arguments: str) -> list[str] | None:
    """The texts of what leaves no choice but the arguments."""
    match part:
        case Literal(text) | Marker(text):
            return [text]
        case Value(spec):
            return [arguments] if spec is ANY_ARGUMENTS else None
        case Either((only,)):
            return _pieces(only, arguments)
        case Parts(parts):
            pieces = [_pieces(one, arguments) for one in parts]
            return None if None in pieces else [text for texts in pieces for text in texts or ()]
        case Repeat(minimum=0) | FreeText():
            return []
        case Either() | Repeat() | TextUntil():
            return None
