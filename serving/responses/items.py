"""The items of the Responses API: read from a request, as the messages of a conversation, and as they are stored."""

import base64
import binascii
import hashlib
import hmac
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType

from penstock.engine.errors import InvalidRequest
from penstock.engine.system.process import examined
from penstock.serving.images import content_of, image_part
from penstock.serving.requests import ChatMessage, message_of, mistaken_path

Status = Literal["in_progress", "completed", "incomplete"]


class Part(Struct):
    """One part of a message's content, of a tool's output or of reasoning."""

    type: str = "input_text"
    text: str | UnsetType = UNSET
    refusal: str | UnsetType = UNSET
    image_url: str | UnsetType | None = UNSET


class MessageItem(Struct):
    role: Literal["user", "system", "developer", "assistant"]
    content: str | list[Part]


class FunctionCallItem(Struct):
    call_id: str
    name: str
    arguments: str


class FunctionCallOutputItem(Struct):
    call_id: str
    output: str | list[Part]


class ReasoningItem(Struct):
    summary: list[Part] = []
    content: list[Part] | None = None
    encrypted_content: str | None = None


class ItemReference(Struct):
    id: str


Item = MessageItem | FunctionCallItem | FunctionCallOutputItem | ReasoningItem
KINDS: dict[str, type[Item]] = {
    "message": MessageItem,
    "function_call": FunctionCallItem,
    "function_call_output": FunctionCallOutputItem,
    "reasoning": ReasoningItem,
}
REFERENCE = "item_reference"
PREFIXES = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}
TEXT_PARTS = frozenset({"input_text", "output_text", "text", "reasoning_text", "summary_text", "refusal"})


def new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"


@dataclass(frozen=True, slots=True)
class Located:
    """An item as JSON, and its path in the request."""

    item: Mapping[str, Any]
    path: str

    @property
    def type(self) -> str:
        """A message may leave its type out, and so may a reference."""
        given = self.item.get("type")
        if given is None:
            return REFERENCE if self.item.keys() <= {"id", "type"} and self.item else "message"
        return given if isinstance(given, str) else ""


def located(given: str | list[dict[str, Any]]) -> list[Located]:
    """The items of `input`; a string is a message of the user."""
    if isinstance(given, str):
        return [Located({"type": "message", "role": "user", "content": given}, "input")]
    return [Located(item, f"input[{index}]") for index, item in enumerate(given)]


def converted(kind: type[Any], source: Located) -> Any:
    try:
        return msgspec.convert(source.item, examined(kind))
    except msgspec.ValidationError as error:
        mistake = mistaken_path(error)
        path = f"{source.path}.{mistake}" if mistake else source.path
        raise InvalidRequest(message_of(error, kind).replace("`$", f"`$.{source.path}"), path) from None


def read_item(source: Located) -> Item:
    """Raises `InvalidRequest` with the path of what is wrong. Unknown keys are tolerated: clients echo what other servers sent them."""
    kind = KINDS.get(source.type)
    if kind is None:
        known = ", ".join(f"`{name}`" for name in (*KINDS, REFERENCE))
        message = f"`{source.path}` is of type {source.type[:100]!r}, which is not supported: the items are {known}"
        raise InvalidRequest(message, f"{source.path}.type")
    item: Item = converted(kind, source)
    return item


def text_of(parts: str | list[Part], path: str, joint: str = "") -> str:
    """Raises `InvalidRequest` for a part that is not text, such as `input_image`."""
    if isinstance(parts, str):
        return parts
    return joint.join(text_of_part(part, f"{path}[{index}]") for index, part in enumerate(parts))


def text_of_part(part: Part, path: str) -> str:
    """Raises `InvalidRequest` for what is not text."""
    if part.type not in TEXT_PARTS:
        raise InvalidRequest(f"`{path}` is of type {part.type[:100]!r}: only text can be read there", path)
    name = "refusal" if part.type == "refusal" else "text"
    text = part.refusal if part.type == "refusal" else part.text
    if text is UNSET:
        raise InvalidRequest(f"`{path}.{name}` is missing", f"{path}.{name}")
    return text


def content_with_images(parts: str | list[Part], path: str) -> str | list[dict[str, Any]]:
    """The content of a chat message, of the user or of a tool. Raises `InvalidRequest` for a part that is neither text nor an image."""
    if isinstance(parts, str):
        return parts
    pieces: list[str | dict[str, Any]] = []
    for index, part in enumerate(parts):
        at = f"{path}[{index}]"
        if part.type != "input_image":
            pieces.append(text_of_part(part, at))
        elif not isinstance(part.image_url, str):
            raise InvalidRequest(f"`{at}.image_url` is missing: images are read from URLs, not from files", f"{at}.image_url")
        else:
            pieces.append(image_part(part.image_url, at))
    return content_of(pieces, "\n")


def seal(text: str, secret: str) -> str:
    """Reasoning as `encrypted_content`: authenticated, and not secret, since the client gets its text as well."""
    data = text.encode("utf-8", "surrogatepass")
    return base64.urlsafe_b64encode(_tag(data, secret) + data).decode()


def unseal(sealed: str, secret: str) -> str | None:
    """The text; None where it was not sealed with this secret."""
    try:
        data = base64.b64decode(sealed.encode("ascii"), altchars=b"-_", validate=True)
    except (ValueError, binascii.Error):
        return None
    tag, text = data[:TAG_BYTES], data[TAG_BYTES:]
    return text.decode("utf-8", "surrogatepass") if hmac.compare_digest(tag, _tag(text, secret)) else None


TAG_BYTES = hashlib.sha256().digest_size


def _tag(data: bytes, secret: str) -> bytes:
    return hmac.new(b"reasoning:" + secret.encode("utf-8", "surrogateescape"), data, hashlib.sha256).digest()


@dataclass(slots=True)
class _AssistantParts:
    texts: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)


@dataclass(slots=True)
class Conversation:
    """The messages that items make, each with the path of its first item.

    An assistant's items in a row, reasoning, text and calls, are one message: it is what one answer was, and templates write it as that.
    """

    secret: str
    messages: list[ChatMessage] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    _call_ids: set[str] = field(default_factory=set)
    _open: _AssistantParts | None = None  # those of the last message, where it is an assistant's that may go on

    def add(self, items: Iterable[Located]) -> None:
        for source in items:
            match read_item(source):
                case MessageItem("assistant", content):
                    self._assistant(source.path).texts.append(text_of(content, f"{source.path}.content"))
                case MessageItem("user", content):
                    self._append(ChatMessage(role="user", content=content_with_images(content, f"{source.path}.content")), source.path)
                case MessageItem(role, content):
                    self._append(ChatMessage(role=role, content=text_of(content, f"{source.path}.content", "\n")), source.path)
                case ReasoningItem() as item:
                    self._assistant(source.path).reasoning.append(self._reasoning(item, source.path))
                case FunctionCallItem(call_id, name, arguments):
                    self._call_ids.add(call_id)
                    call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
                    self._assistant(source.path, is_call=True).calls.append(call)
                case FunctionCallOutputItem(call_id, output):
                    if call_id not in self._call_ids:
                        raise InvalidRequest(f"no `function_call` before has the `call_id` {call_id[:100]!r}", f"{source.path}.call_id")
                    result = content_with_images(output, f"{source.path}.output")
                    self._append(ChatMessage(role="tool", tool_call_id=call_id, content=result), source.path)
        self._close()

    def instruct(self, instructions: str) -> None:
        """Puts instructions first: in one message with those that the conversation begins with, as many templates take only one."""
        is_instruction = [message.role in ("system", "developer") for message in self.messages]
        count = (*is_instruction, False).index(False)
        given = [message.content for message in self.messages[:count] if isinstance(message.content, str)]
        self.messages[:count] = [ChatMessage(role="system", content="\n\n".join([instructions, *given]))]
        self.paths[:count] = ["instructions"]

    def _append(self, message: ChatMessage, path: str) -> None:
        self._close()
        self.messages.append(message)
        self.paths.append(path)

    def _assistant(self, path: str, *, is_call: bool = False) -> _AssistantParts:
        """The message that the assistant's next item belongs to. After text without a call, text or reasoning begins another one."""
        if self._open is None or (not is_call and self._open.texts and not self._open.calls):
            self._append(ChatMessage(role="assistant"), path)
            self._open = _AssistantParts()
        return self._open

    def _close(self) -> None:
        # Joins the parts of the last message once: there may be thousands.
        if (parts := self._open) is None:
            return
        message, self._open = self.messages[-1], None
        message.content = "".join(parts.texts) if parts.texts else None
        message.reasoning_content = "".join(parts.reasoning) if parts.reasoning else None
        message.tool_calls = parts.calls or None

    def _reasoning(self, item: ReasoningItem, path: str) -> str:
        """The text where it is there, else the sealed one, else the summary."""
        if item.content:
            return text_of(item.content, f"{path}.content")
        if item.encrypted_content is None:
            return text_of(item.summary, f"{path}.summary")
        text = unseal(item.encrypted_content, self.secret)
        if text is None:
            message = f"`{path}.encrypted_content` was not made by this server for this API key, or has been changed"
            raise InvalidRequest(message, f"{path}.encrypted_content")
        return text


def is_instruction(source: Located) -> bool:
    return source.type == "message" and source.item.get("role") in ("system", "developer")


def turns_to_drop(items: Sequence[Located]) -> list[list[int]]:
    """The indexes of items that may be dropped together, those to be dropped first at the front.

    These are all turns of the user but the last, each with the answers to it, and then the steps of the last answer but its last one.
    Instructions stay, and so do a call and its result, or neither.
    """

    def is_asked(step: list[int]) -> bool:
        return any(_kind(items[index]) == "user" for index in step)

    turns: list[list[list[int]]] = []
    for step in _steps(items):
        if not turns or is_asked(step):
            turns.append([])
        turns[-1].append(step)
    if not turns:
        return []
    *earlier, last = turns
    return [[index for step in turn for index in step] for turn in earlier] + last[is_asked(last[0]) : -1]


def _kind(source: Located) -> str:
    if source.type == "message":
        return "user" if source.item.get("role") == "user" else "assistant"
    return "result" if source.type == "function_call_output" else "assistant"


def _steps(items: Sequence[Located]) -> list[list[int]]:
    """The indexes of messages of the user in a row, or of what the model said at once with the results of its calls."""
    last_result = {source.item.get("call_id"): index for index, source in enumerate(items) if source.type == "function_call_output"}
    steps: list[list[int]] = []
    before, open_until = "", -1
    for index, source in enumerate(items):
        if is_instruction(source):
            continue
        kind = _kind(source)
        if not steps or (kind != "result" and kind != before and index > open_until):
            steps.append([])
        steps[-1].append(index)
        before = kind
        if source.type == "function_call":
            open_until = max(open_until, last_result.get(source.item.get("call_id"), -1))
    return steps


def stored_item(source: Located) -> dict[str, Any]:
    """An item of `input` as `input_items` lists it: with an id, and with its content in parts."""
    item = dict(source.item)
    kind = source.type
    given = item.get("id")
    stored = {"id": given if isinstance(given, str) and given else new_id(PREFIXES[kind]), "type": kind, "status": "completed"}
    if kind == "message" and isinstance(item["content"], str):
        part = {"type": "output_text", "text": item["content"], "annotations": []} if item["role"] == "assistant" else None
        item["content"] = [part or {"type": "input_text", "text": item["content"]}]
    return stored | {name: value for name, value in item.items() if name not in ("id", "type")}
