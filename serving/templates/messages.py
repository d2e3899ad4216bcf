"""Messages as chat templates expect them: checked, in one spelling, and with tools described for templates that do not."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.engine.contracts.grammar import GrammarKind, GrammarSpec
from penstock.engine.contracts.parsing import CallableTool, ToolFormat
from penstock.engine.contracts.structure import Either, FreeText, Literal, Marker, Repeat, Structure, TextUntil, Value
from penstock.engine.contracts.structure import Sequence as Parts
from penstock.engine.errors import InvalidRequest
from penstock.plugins.tools.json_formats import HERMES
from penstock.serving.json_limits import check_json
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
    check_arguments(messages)
    return [template_message(message, f"messages[{index}]", knows_developer) for index, message in enumerate(messages)]


def check_arguments(messages: Sequence[ChatMessage]) -> None:
    """Raises `InvalidRequest` where the arguments of tool calls, which are JSON in a string, hold more than a body may."""
    functions = [call.get("function") for message in messages for call in message.tool_calls or ()]
    texts = [function.get("arguments") for function in functions if isinstance(function, dict)]
    documents = (text.encode() for text in texts if isinstance(text, str))
    check_json(*documents, what="arguments of tool calls", param="messages")


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
