"""A request of the Responses API, and the chat request that asks the same of the model."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from msgspec import Meta, Raw, Struct, field, structs

from penstock.engine.errors import InvalidRequest
from penstock.serving.requests import (
    ChatCompletionRequest,
    ConversationFields,
    FieldsWithoutEffect,
    Int64,
    JsonSchemaFormat,
    ReasoningEffort,
    ResponseFormat,
    Summary,
)
from penstock.serving.responses.items import Conversation, Located


class TextFormat(Struct, forbid_unknown_fields=True):
    """The schema is here itself, where chat completions have it in `json_schema`."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    description: str | None = None
    schema: Any = None
    strict: bool | None = None


class TextOptions(Struct, forbid_unknown_fields=True):
    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None  # without effect: models of OpenAI's were trained on it


class ReasoningOptions(Struct, forbid_unknown_fields=True):
    """`generate_summary` is the older name of `summary`. Of `context` and `mode` there is only what happens anyway."""

    effort: ReasoningEffort | None = None
    summary: Summary | Literal["none"] | None = None
    generate_summary: Summary | None = None
    context: Literal["auto", "all_turns"] | None = None
    mode: Literal["standard"] | None = None

    @property
    def is_summarized(self) -> bool:
        return self.summary in ("auto", "concise", "detailed") or self.generate_summary is not None


MetadataKey = Annotated[str, Meta(max_length=64)]
MetadataValue = Annotated[str, Meta(max_length=512)]
Metadata = Annotated[dict[MetadataKey, MetadataValue], Meta(max_length=16)]
Label = Annotated[str, Meta(max_length=512)]

Include = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    # Of tools that are not run, and of images: there is nothing to include.
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "web_search_call.action.sources",
    "web_search_call.results",
]


LOGPROBS: Include = "message.output_text.logprobs"
ENCRYPTED: Include = "reasoning.encrypted_content"


class ResponsesRequest(ConversationFields, kw_only=True, forbid_unknown_fields=True):
    """OpenAI's fields, with those of chat completions that other servers added; docs/responses.md says what each means."""

    input: str | Annotated[list[dict[str, Any]], Meta(max_length=2**14)] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    background: bool | None = None
    include: list[Include] | None = None
    max_output_tokens: Int64 | None = None
    reasoning: ReasoningOptions | None = None
    text: TextOptions | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    truncation: Literal["auto", "disabled"] | None = None

    # Chat completions accept these without effect, and do not decode them. Here the response has them.
    metadata: Metadata | None = None  # type: ignore[assignment]
    prompt_cache_key: Label | None = None  # type: ignore[assignment]
    safety_identifier: Label | None = None  # type: ignore[assignment]
    service_tier: Literal["auto", "default", "flex", "priority", "scale"] | None = None  # type: ignore[assignment]
    store: bool | None = None  # type: ignore[assignment]

    client_metadata: Raw = field(default_factory=Raw)  # Codex's; without effect
    context_management: Any = None
    conversation: Any = None
    prompt: Any = None

    def __post_init__(self) -> None:
        for name in NOT_DECODED:
            setattr(self, name, Raw())  # what is raw keeps the whole body in memory

    def includes(self, what: Include) -> bool:
        return what in (self.include or ())

    @property
    def is_stored(self) -> bool:
        return self.store is not False

    @property
    def is_summarized(self) -> bool:
        return self.reasoning is not None and self.reasoning.is_summarized

    @property
    def shows_logprobs(self) -> bool:
        return self.includes(LOGPROBS) or bool(self.top_logprobs)


NOT_DECODED = tuple(name for name, kind in ResponsesRequest.__annotations__.items() if kind is Raw) + tuple(
    name for name in FieldsWithoutEffect.__struct_fields__ if name not in ResponsesRequest.__annotations__
)

# What this endpoint does not do, and the values that ask for nothing.
NOT_SUPPORTED: dict[str, tuple[str, tuple[Any, ...]]] = {
    "best_of": ("there is one answer to each request", (None, 1)),
    "context_management": ("conversations are not compacted", (None, [])),
    "conversation": ("conversations are not stored; use `previous_response_id`", (None,)),
    "kv_transfer_params": ("prompts are handed over by /v1/chat/completions and /v1/completions", (None,)),
    "max_tokens": ("use `max_output_tokens`", (None,)),
    "n": ("there is one answer to each request", (None, 1)),
    "prompt": ("prompts are not kept here: send `instructions` and `input`", (None,)),
    "prompt_logprobs": ("log probabilities of the prompt are given by /v1/chat/completions and /v1/completions", (None,)),
    "response_format": ("use `text.format`", (None,)),
    "use_beam_search": ("beam search is for /v1/chat/completions and /v1/completions", (None, False)),
}


def check_request(body: ResponsesRequest) -> None:
    """Raises `InvalidRequest` for what contradicts itself and for what this endpoint does not do."""
    for name, (reason, neutral) in NOT_SUPPORTED.items():
        if getattr(body, name) not in neutral:
            raise InvalidRequest(f"`{name}` is not supported here: {reason}", name)
    if body.input is None and body.previous_response_id is None:
        raise InvalidRequest("Object missing required field `input`", "input")
    if body.background and not body.is_stored:
        raise InvalidRequest("`background` takes `store`: its answer is fetched later", "background")
    if body.stream_options is not None and body.stream_options.continuous_usage_stats:
        raise InvalidRequest("the usage comes with the last event only", "stream_options.continuous_usage_stats")


@dataclass(frozen=True, slots=True)
class Tools:
    """The functions of `tools` as chat completions have them. `places` are their indexes in `tools`, `skipped` the types of the others."""

    functions: list[dict[str, Any]]
    places: list[int]
    skipped: list[str]

    @classmethod
    def of(cls, given: Sequence[dict[str, Any]]) -> "Tools":
        """Tools that a model server does not run, such as web search, are skipped. Raises `InvalidRequest` for one without a type."""
        functions: list[dict[str, Any]] = []
        places: list[int] = []
        skipped: list[str] = []
        for index, tool in enumerate(given):
            kind = tool.get("type")
            if not isinstance(kind, str):
                raise InvalidRequest(f"`tools[{index}].type` must be a string", f"tools[{index}].type")
            if kind == "function":
                functions.append({"type": kind, "function": {name: value for name, value in tool.items() if name != "type"}})
                places.append(index)
            else:
                skipped.append(kind)
        return cls(functions, places, skipped)

    def choice(self, given: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
        """`tool_choice` as chat completions have it."""
        if not self.functions and given == "auto":
            return None
        if not isinstance(given, dict):
            return given
        kind = given.get("type")
        if kind == "function":
            return {"type": kind, "function": {"name": given.get("name")}}
        if kind != "allowed_tools":
            message = f"`tool_choice` must name a function: tools of type {str(kind)[:100]!r} are not run here"
            raise InvalidRequest(message, "tool_choice.type")
        allowed = given.get("tools")
        if not isinstance(allowed, list) or not all(isinstance(tool, dict) for tool in allowed):
            raise InvalidRequest("`tool_choice.tools` must be a list of objects", "tool_choice.tools")
        named = [tool for tool in allowed if tool.get("type") == "function"]
        return {
            "type": kind,
            "allowed_tools": {
                "mode": given.get("mode"),
                "tools": [{"type": "function", "function": {"name": tool.get("name")}} for tool in named],
            },
        }


@dataclass(frozen=True, slots=True)
class Asked:
    """A request in terms of chat completions. `paths` are the items' of its messages, `tools` those that it was given."""

    chat: ChatCompletionRequest
    paths: list[str]
    tools: Tools

    def renamed(self, error: InvalidRequest) -> InvalidRequest:
        """A refusal of the chat request, with the names that the fields have here."""
        if error.param is None:
            return error
        message = QUOTED.sub(lambda found: found[1] + self._path(found[2]), error.message)
        return type(error)(message, self._path(error.param))

    def _path(self, param: str) -> str:
        found = re.match(r"(messages|tools)\[(\d{1,5})\](\.function)?", param)
        if found and found[1] == "messages" and int(found[2]) < len(self.paths):
            return self.paths[int(found[2])]
        if found and found[1] == "tools" and int(found[2]) < len(self.tools.places):
            return f"tools[{self.tools.places[int(found[2])]}]{param[found.end() :]}"
        for old, new in NAMES.items():
            if re.match(rf"{old}(?=$|[.\[])", param):
                return new + param[len(old.replace("\\", "")) :]
        return param


QUOTED = re.compile(r"(`(?:\$\.)?)([a-z_][\w.\[\]]*)")  # a field's name or path in a message

# By their names in chat completions, the longer before those they begin with.
NAMES = {
    r"response_format\.json_schema": "text.format",
    "response_format": "text.format",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "messages": "input",
    "reasoning_effort": "reasoning.effort",
    r"tool_choice\.allowed_tools": "tool_choice",
}


def ask(body: ResponsesRequest, items: Sequence[Located], secret: str) -> Asked:
    """Raises `InvalidRequest`. `items` are those of the conversation so far and of the request; `secret` has sealed its reasoning."""
    if body.structured_outputs is not None and body.structured_outputs.include_preamble:
        path = "structured_outputs.include_preamble"
        raise InvalidRequest(f"`{path}` is for chat completions and completions: no item of a response holds a preamble", path)
    tools = Tools.of(body.tools or [])
    choice = tools.choice(body.tool_choice)
    conversation = Conversation(secret)
    conversation.add(items)
    if body.instructions:
        conversation.instruct(body.instructions)
    if not conversation.messages:
        conversation.add([Located({"role": "user", "content": ""}, "input")])
    chat = ChatCompletionRequest(
        **{name: getattr(body, name) for name in ConversationFields.__struct_fields__ if name not in FieldsWithoutEffect.__struct_fields__},
        messages=conversation.messages,
        max_completion_tokens=body.max_output_tokens,
        logprobs=True if body.shows_logprobs else None,
        tools=tools.functions or None,
        tool_choice=choice,
        reasoning_effort=None if body.reasoning is None else body.reasoning.effort,
    )
    chat.response_format = response_format(body)
    return Asked(chat, conversation.paths, tools)


def response_format(body: ResponsesRequest) -> ResponseFormat | None:
    given = None if body.text is None else body.text.format
    if given is None or given.type == "text":
        return None
    if given.type == "json_object":
        return ResponseFormat("json_object")
    if given.schema is None:
        raise InvalidRequest("`text.format` of type `json_schema` takes a `schema`", "text.format.schema")
    schema = {name: value for name, value in structs.asdict(given).items() if name != "type"}
    return ResponseFormat("json_schema", JsonSchemaFormat(**schema))
