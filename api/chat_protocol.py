"""Requests and responses of /v1/chat/completions."""

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from penstock.api.answers.messages import Message, ToolCall
from penstock.api.common_protocol import Conformance, GenerationFields, Int32, Int64, PromptLogprobs, Usage

Role = Literal["system", "developer", "user", "assistant", "tool"]
ReasoningField = Literal["reasoning_content", "reasoning", "both"]  # DeepSeek's name, vLLM's newer one, or the two
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class ChatMessage(Struct, kw_only=True):
    """One message of the conversation. Unknown keys are tolerated: clients echo whatever other servers sent them."""

    role: Role
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    reasoning_content: Any = None
    reasoning: Any = None


Messages = Annotated[list[ChatMessage], Meta(max_length=2**14)]  # each takes some microseconds to render, and some tokens


class ChatCompletionRequest(GenerationFields, kw_only=True, forbid_unknown_fields=True):
    """OpenAI's fields, with vLLM's and SGLang's for reasoning and templates; docs/requests.md says what each means."""

    messages: Messages
    max_completion_tokens: Int64 | None = None
    logprobs: bool | None = None
    top_logprobs: Int32 | None = None

    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None

    reasoning_effort: ReasoningEffort | None = None
    thinking_token_budget: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None  # -1: none, whatever the server's default
    include_reasoning: bool | None = None
    separate_reasoning: bool | None = None
    stream_reasoning: bool | None = None

    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class TopLogprob(Struct):
    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(Struct):
    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct):
    """`content` are the tokens of content and calls; those of the reasoning are apart, where any are shown."""

    content: list[TokenLogprob]
    reasoning_content: list[TokenLogprob] | UnsetType = UNSET


class FunctionDelta(Struct):
    arguments: str
    name: str | UnsetType = UNSET


class ToolCallDelta(Struct):
    """The first one of a call has its id, type and name; the following ones only more of the arguments."""

    index: int
    function: FunctionDelta
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET


class ChatDelta(Struct):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType | None = UNSET
    reasoning: str | UnsetType | None = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChunkChoice(Struct):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | UnsetType = UNSET
    structured_output: Conformance | UnsetType = UNSET


class ChatCompletionChunk(Struct):
    id: str
    object: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    system_fingerprint: str | None = None


class AssistantMessage(Struct, kw_only=True):
    role: str = "assistant"
    content: str | None
    reasoning_content: str | UnsetType | None = UNSET
    reasoning: str | UnsetType | None = UNSET
    refusal: None = None
    tool_calls: list[ToolCall] | UnsetType = UNSET

    @classmethod
    def of(cls, message: Message, *, has_reasoning_parser: bool, is_call_forced: bool = False) -> "AssistantMessage":
        """`reasoning_content` is there, if only as null, wherever the server tells reasoning apart. A forced call leaves no content."""
        reasoning, calls = message.reasoning or None, message.tool_calls
        return cls(
            content=message.content or (None if reasoning or calls or is_call_forced else ""),
            reasoning_content=reasoning if has_reasoning_parser else UNSET,
            tool_calls=calls or UNSET,
        )


class ChatChoice(Struct):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: str
    stop_reason: int | str | None
    structured_output: Conformance | UnsetType = UNSET


class ChatCompletion(Struct):
    id: str
    object: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    system_fingerprint: str | None = None
