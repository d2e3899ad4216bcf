"""Requests of the Messages API as the chat requests that they ask for: blocks become messages, tools and thinking their chat fields."""

import base64
import hashlib
import hmac
import json
import re
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeVar

from msgspec import Meta, Struct

from penstock.engine.errors import InvalidRequest
from penstock.engine.kv_cache.blocks import Retention, RetentionRule
from penstock.serving.images import content_of, image_part
from penstock.serving.requests import (
    CacheSalt,
    ChatCompletionRequest,
    ChatMessage,
    Int32,
    JsonSchemaFormat,
    ReasoningEffort,
    RequestFields,
    ResponseFormat,
    StopList,
    convert_at,
)

T = TypeVar("T")

MAX_MESSAGES = 2**14
BILLING_HEADER = "x-anthropic-billing-header:"
RETENTION_SECONDS = {"5m": 300.0, "1h": 3600.0}
RETENTION_PRIORITY = 60  # above the default: evicted after all that no client has marked
TOOL_ID = "toolu_"
ENCODED_TOOL_ID = "toolu_-"
PROVIDER_TOOL = re.compile(r"\w+_20\d{6}|mcp_toolset")  # their types end in a date
PLAIN_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]*")


class CacheControl(Struct):
    type: Literal["ephemeral"] = "ephemeral"
    ttl: Literal["5m", "1h"] | None = None


class TextBlock(Struct):
    text: str


class ThinkingBlock(Struct):
    thinking: str
    signature: str = ""


class ToolUseBlock(Struct):
    id: str
    name: str
    input: dict[str, Any]


class ToolResultBlock(Struct):
    tool_use_id: str
    content: str | list[dict[str, Any]] | None = None
    is_error: bool | None = None


class SearchResultBlock(Struct):
    title: str
    source: str
    content: list[TextBlock]


class DocumentSource(Struct):
    type: str
    data: str = ""
    content: str | list[dict[str, Any]] = ""


class DocumentBlock(Struct):
    source: DocumentSource
    title: str | None = None
    context: str | None = None


class ImageBlockSource(Struct):
    type: Literal["base64", "url"]
    url: str = ""
    media_type: str = ""
    data: str = ""


class ImageBlock(Struct):
    source: ImageBlockSource

    @property
    def url(self) -> str:
        return self.source.url if self.source.type == "url" else f"data:{self.source.media_type};base64,{self.source.data}"


class InputMessage(Struct):
    """`ctx` and `msg` are Claude Code's; they are read as `user`."""

    role: Literal["user", "assistant", "system", "ctx", "msg"]
    content: str | list[dict[str, Any]]


class ThinkingConfig(Struct):
    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(Struct):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(Struct):
    effort: ReasoningEffort | None = None
    format: OutputFormat | None = None


class ToolChoice(Struct):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class CustomTool(Struct):
    name: str
    input_schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None


class PromptFields(RequestFields, kw_only=True):
    """What makes the prompt. `output_format` is the older place of `output_config.format`."""

    messages: Annotated[list[InputMessage], Meta(max_length=MAX_MESSAGES)]
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: ToolChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    cache_control: CacheControl | None = None


class CountTokensRequest(PromptFields, kw_only=True, forbid_unknown_fields=True):
    """The body of /v1/messages/count_tokens."""


class MessagesRequest(PromptFields, kw_only=True, forbid_unknown_fields=True):
    """The body of /v1/messages; docs/messages.md says what each field does."""

    max_tokens: Annotated[int, Meta(ge=1, le=2**63 - 1)]
    stream: bool | None = None
    stop_sequences: StopList | None = None
    temperature: float | None = None
    top_k: Int32 | None = None
    top_p: float | None = None
    cache_salt: CacheSalt | None = None


# Blocks of conversations with tools that a provider runs. Others may have run them: the conversation goes on without.
SKIPPED_BLOCKS = frozenset(
    {
        "bash_code_execution_tool_result",
        "code_execution_tool_result",
        "container_upload",
        "mcp_tool_result",
        "mcp_tool_use",
        "server_tool_use",
        "text_editor_code_execution_tool_result",
        "tool_reference",
        "tool_search_tool_result",
        "web_fetch_tool_result",
        "web_search_tool_result",
    }
)


class ThinkingSigner:
    """Signs the thinking of answers, and finds what was changed in it. Its key is its own: the signatures of others prove nothing here."""

    def __init__(self) -> None:
        self._key = secrets.token_bytes(32)
        self._prefix = f"penstock-{secrets.token_hex(4)}-"

    def sign(self, thinking: str) -> str:
        digest = hmac.digest(self._key, thinking.encode("utf-8", "surrogatepass"), hashlib.sha256)
        return self._prefix + base64.urlsafe_b64encode(digest).decode().rstrip("=")

    def is_forged(self, thinking: str, signature: str) -> bool:
        """Whether it is one of ours, and not that of this thinking."""
        if not signature.startswith(self._prefix):
            return False
        return not hmac.compare_digest(signature.encode("utf-8", "surrogatepass"), self.sign(thinking).encode())


def tool_use_id(call_id: str) -> str:
    """A call's id as the Messages API writes it, from which `call_id_of` makes it again: some templates insist on their model's own."""
    if PLAIN_ID.fullmatch(call_id):
        return TOOL_ID + call_id
    return ENCODED_TOOL_ID + base64.urlsafe_b64encode(call_id.encode("utf-8", "surrogatepass")).decode().rstrip("=")


def call_id_of(written: str) -> str:
    """Of another server's id, what it is without the prefix."""
    encoded = written.removeprefix(ENCODED_TOOL_ID)
    if encoded != written:
        try:
            decoded = base64.urlsafe_b64decode(encoded + "=" * (-len(encoded) % 4)).decode("utf-8", "surrogatepass")
        except ValueError:
            return written
        return decoded if tool_use_id(decoded) == written else written
    return written.removeprefix(TOOL_ID)


@dataclass(slots=True)
class Conversion:
    """A chat request, and what it cannot say. `skipped` are the paths and types of what was left out, `ttl` the longest `cache_control`."""

    body: ChatCompletionRequest
    skipped: list[str]
    ttl: str | None

    @property
    def retention(self) -> Retention | None:
        """Keeps the whole prompt, and the answer, which is part of the next one."""
        if self.ttl is None:
            return None
        rule = RetentionRule(RETENTION_PRIORITY, RETENTION_SECONDS[self.ttl])
        return Retention(((0, None, rule),), rule)


def chat_request(body: PromptFields, signer: ThinkingSigner, *, takes_late_system: bool) -> Conversion:
    """Raises `InvalidRequest` with the path of what cannot be read. `takes_late_system`: as `ChatTemplate.takes_late_system`."""
    reader = ConversationReader(signer, takes_late_system=takes_late_system)
    reader.note_cache_control(body.cache_control)
    if body.system is not None:
        reader.read_system(body.system)
    for index, message in enumerate(body.messages):
        reader.read(message, f"messages[{index}]")
    tools = read_tools(body.tools or [], reader)
    schema = (body.output_config and body.output_config.format) or body.output_format
    chat = ChatCompletionRequest(
        model=body.model,
        messages=reader.finish(),
        priority=body.priority,
        tools=tools or None,
        response_format=None if schema is None else _response_format(schema),
        continue_final_message=_is_prefilled(body.messages) or None,
    )
    set_tool_choice(chat, body.tool_choice)
    set_thinking(chat, body)
    if isinstance(body, MessagesRequest):
        set_sampling(chat, body)
    return Conversion(chat, reader.skipped, reader.ttl)


def _response_format(output: OutputFormat) -> ResponseFormat:
    return ResponseFormat("json_schema", JsonSchemaFormat(name="output", schema=output.schema, strict=True))


def _is_prefilled(messages: Sequence[InputMessage]) -> bool:
    """Whether the answer continues the last message. Raises `InvalidRequest` where that ends with what cannot be continued."""
    if not messages or messages[-1].role != "assistant":
        return False
    content = messages[-1].content
    if isinstance(content, list) and any(block.get("type") == "tool_use" for block in content):
        path = f"messages[{len(messages) - 1}]"
        raise InvalidRequest(f"`{path}` is the last message and calls a tool: it can be followed by its `tool_result` only", path)
    return True


def set_tool_choice(chat: ChatCompletionRequest, choice: ToolChoice | None) -> None:
    if choice is None:
        return
    if choice.type == "tool" and choice.name is None:
        raise InvalidRequest("a `tool_choice` of type `tool` must have a `name`", "tool_choice.name")
    if choice.type == "tool":
        chat.tool_choice = {"type": "function", "function": {"name": choice.name}}
    elif chat.tools is not None or choice.type == "any":
        chat.tool_choice = "required" if choice.type == "any" else choice.type
    if choice.disable_parallel_tool_use and chat.tools is not None:
        chat.parallel_tool_calls = False


def set_thinking(chat: ChatCompletionRequest, body: PromptFields) -> None:
    """By the fields that chat has for it; what the model does by default is left to it where the request says nothing."""
    thinking, config = body.thinking, body.output_config
    chat.reasoning_effort = None if config is None else config.effort
    if thinking is None:
        return
    if thinking.type == "disabled":
        chat.reasoning_effort = "none"
        return
    chat.chat_template_kwargs = {"enable_thinking": True, "thinking": True}
    if thinking.type == "adaptive":
        return
    if thinking.budget_tokens is None:
        raise InvalidRequest("`thinking` of type `enabled` must have `budget_tokens`", "thinking.budget_tokens")
    if isinstance(body, MessagesRequest) and thinking.budget_tokens >= body.max_tokens:
        raise InvalidRequest("`max_tokens` must be greater than `thinking.budget_tokens`", "max_tokens")
    chat.thinking_token_budget = thinking.budget_tokens


def set_sampling(chat: ChatCompletionRequest, body: MessagesRequest) -> None:
    chat.max_tokens, chat.stream, chat.stop = body.max_tokens, body.stream, body.stop_sequences or None
    chat.temperature, chat.top_k, chat.top_p = body.temperature, body.top_k, body.top_p
    chat.cache_salt = body.cache_salt


def read_tools(tools: Sequence[dict[str, Any]], reader: "ConversationReader") -> list[dict[str, Any]]:
    """The client's own tools as functions, in their order. Those with a type of the provider's are skipped: nothing here runs them."""
    functions = []
    for index, definition in enumerate(tools):
        path = f"tools[{index}]"
        reader.note_cache_control(definition.get("cache_control"), path)
        kind = definition.get("type")
        if isinstance(kind, str) and PROVIDER_TOOL.fullmatch(kind):
            reader.skip(path, kind)
            continue
        if kind not in (None, "custom"):
            raise InvalidRequest(f"`{path}.type` must be `custom`, got {str(kind)[:100]!r}", f"{path}.type")
        tool = convert_at(definition, CustomTool, path)
        function = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema, "strict": tool.strict}
        given = {name: value for name, value in function.items() if value is not None}
        functions.append({"type": "function", "function": given})
    return functions


TEXT = frozenset({"text"})
RESULT_KINDS = TEXT | {"document", "image", "search_result"}
KINDS = {
    "assistant": TEXT | {"thinking", "redacted_thinking", "tool_use"},
    "system": TEXT,
    "user": RESULT_KINDS | {"tool_result"},
}


@dataclass(slots=True)
class Turn:
    """What the blocks of one message say, images among the texts. Results of tools are messages of their own."""

    texts: list[str | dict[str, Any]] = field(default_factory=list)
    thinking: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    results: list[ChatMessage] = field(default_factory=list)


def texts_of(turn: Turn) -> list[str]:
    return [text for text in turn.texts if isinstance(text, str)]


class ConversationReader:
    """Reads a conversation in blocks, and writes it in chat messages.

    Neighbouring messages of one role are one, as they are for Anthropic: many templates refuse two of the user in a row.
    """

    def __init__(self, signer: ThinkingSigner, *, takes_late_system: bool) -> None:
        self.skipped: list[str] = []
        self.ttl: str | None = None
        self._messages: list[ChatMessage] = []
        self._turn_so_far = Turn()  # of the last message, unless it is a tool's: joined once, since there may be thousands of parts
        self._signer = signer
        self._takes_late_system = takes_late_system
        self._readers: dict[str, Callable[[dict[str, Any], str, Turn], None]] = {
            "text": self._read_text,
            "document": self._read_document,
            "search_result": self._read_search_result,
            "image": self._read_image,
            "thinking": self._read_thinking,
            "redacted_thinking": self._pass,
            "tool_use": self._read_tool_use,
            "tool_result": self._read_tool_result,
        }

    def read_system(self, system: str | list[dict[str, Any]]) -> None:
        """The system prompt without the first block that changes at every turn, which would cost the whole prefix."""
        if isinstance(system, list) and system and str(system[0].get("text", "")).startswith(BILLING_HEADER):
            system = system[1:]
        text = self._text(system, "system", TEXT)
        if text:
            self._add("system", text)

    def read(self, message: InputMessage, path: str) -> None:
        role = "user" if message.role in ("ctx", "msg") else message.role
        turn = self._turn(message.content, f"{path}.content", KINDS[role])
        if role == "assistant":
            self._add_assistant(turn)
        elif role == "system":
            self._add_system("\n".join(texts_of(turn)))
        else:
            if turn.results:
                self._end_message()
                self._messages += turn.results
            if turn.texts or not turn.results:
                self._add("user", *turn.texts)

    def note_cache_control(self, value: CacheControl | dict[str, Any] | None, path: str = "") -> None:
        if value is None:
            return
        control = value if isinstance(value, CacheControl) else convert_at(value, CacheControl, f"{path}.cache_control")
        self.ttl = max(self.ttl or "5m", control.ttl or "5m", key=RETENTION_SECONDS.__getitem__)

    def skip(self, path: str, kind: object) -> None:
        self.skipped.append(f"{path}: {kind}")

    def finish(self) -> list[ChatMessage]:
        """The messages of all that was read."""
        self._end_message()
        return self._messages

    def _begin(self, role: Literal["system", "user", "assistant"]) -> None:
        """A message of this role, unless the last one is."""
        if not self._messages or self._messages[-1].role != role:
            self._end_message()
            self._messages.append(ChatMessage(role=role))

    def _end_message(self) -> None:
        turn, self._turn_so_far = self._turn_so_far, Turn()
        if not self._messages or (last := self._messages[-1]).role == "tool":
            return
        last.content = content_of(turn.texts, "" if last.role == "assistant" else "\n")
        last.reasoning_content = "".join(turn.thinking) or None
        last.tool_calls = turn.calls or None

    def _add(self, role: Literal["system", "user"], *texts: str | dict[str, Any]) -> None:
        self._begin(role)
        if self._turn_so_far.texts == [""]:
            self._turn_so_far.texts.clear()
        self._turn_so_far.texts += texts

    def _add_system(self, text: str) -> None:
        """In its place where the template takes it there, or else in a turn of the user, marked."""
        if self._takes_late_system or all(message.role == "system" for message in self._messages):
            self._add("system", text)
        else:
            self._add("user", f"<system>\n{text}\n</system>")

    def _add_assistant(self, turn: Turn) -> None:
        self._begin("assistant")
        self._turn_so_far.texts += turn.texts
        self._turn_so_far.thinking += turn.thinking
        self._turn_so_far.calls += turn.calls

    def _turn(self, content: str | list[dict[str, Any]], path: str, kinds: frozenset[str]) -> Turn:
        """Raises `InvalidRequest` for a block that is none of these `kinds`, nor one that is skipped."""
        if isinstance(content, str):
            return Turn([content])
        turn = Turn()
        for index, block in enumerate(content):
            place, kind = f"{path}[{index}]", block.get("type")
            self.note_cache_control(block.get("cache_control"), place)
            if not isinstance(kind, str) or kind not in kinds | SKIPPED_BLOCKS:
                raise InvalidRequest(f"`{place}` is of type {str(kind)[:100]!r}: {', '.join(sorted(kinds))} can be read there", place)
            if kind in SKIPPED_BLOCKS:
                self.skip(place, kind)
            else:
                self._readers[kind](block, place, turn)
        return turn

    def _text(self, content: str | list[dict[str, Any]], path: str, kinds: frozenset[str]) -> str:
        return "\n".join(texts_of(self._turn(content, path, kinds)))

    def _read_text(self, block: dict[str, Any], path: str, turn: Turn) -> None:
        turn.texts.append(convert_at(block, TextBlock, path).text)

    def _read_image(self, block: dict[str, Any], path: str, turn: Turn) -> None:
        turn.texts.append(image_part(convert_at(block, ImageBlock, path).url, path))

    def _read_document(self, block: dict[str, Any], path: str, turn: Turn) -> None:
        document = convert_at(block, DocumentBlock, path)
        source = document.source
        if source.type == "text":
            text = source.data
        elif source.type == "content":
            text = self._text(source.content, f"{path}.source.content", TEXT)
        else:
            raise InvalidRequest(f"`{path}.source` is of type {source.type[:100]!r}: only text can be read", f"{path}.source")
        turn.texts.append("\n".join(part for part in (document.title, document.context, text) if part))

    def _read_search_result(self, block: dict[str, Any], path: str, turn: Turn) -> None:
        result = convert_at(block, SearchResultBlock, path)
        turn.texts.append("\n".join((result.title, result.source, *(part.text for part in result.content))))

    def _read_thinking(self, block: dict[str, Any], path: str, turn: Turn) -> None:
        thought = convert_at(block, ThinkingBlock, path)
        if self._signer.is_forged(thought.thinking, thought.signature):
            raise InvalidRequest(f"`{path}.signature` is not that of this `thinking`: send both as they came", f"{path}.signature")
        turn.thinking.append(thought.thinking)

    def _pass(self, block: dict[str, Any], path: str, turn: Turn) -> None:
        """Redacted thinking is of another provider, and cannot be read."""

    def _read_tool_use(self, block: dict[str, Any], path: str, turn: Turn) -> None:
        call = convert_at(block, ToolUseBlock, path)
        function = {"name": call.name, "arguments": json.dumps(call.input, ensure_ascii=False)}
        turn.calls.append({"id": call_id_of(call.id), "type": "function", "function": function})

    def _read_tool_result(self, block: dict[str, Any], path: str, turn: Turn) -> None:
        result = convert_at(block, ToolResultBlock, path)
        pieces = self._turn(result.content or "", f"{path}.content", RESULT_KINDS).texts
        if result.is_error:
            pieces = [f"Error: {pieces[0]}", *pieces[1:]] if pieces and isinstance(pieces[0], str) else ["Error: ", *pieces]
        message = ChatMessage(role="tool", tool_call_id=call_id_of(result.tool_use_id), content=content_of(pieces, "\n"))
        turn.results.append(message)
