"""Requests and responses on the wire."""

from msgspec import UNSET, Struct, UnsetType

from penstock.serving.constraints.conformance import Conformance
from penstock.serving.messages import Message, TokenCounts, ToolCall


class PromptTokensDetails(Struct):
    cached_tokens: int


class CompletionTokensDetails(Struct):
    reasoning_tokens: int


class Usage(Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


def usage_of(counts: TokenCounts) -> Usage:
    num_prompt_tokens, num_completion_tokens = counts.num_prompt_tokens, counts.num_completion_tokens
    return Usage(
        num_prompt_tokens,
        num_completion_tokens,
        num_prompt_tokens + num_completion_tokens,
        PromptTokensDetails(counts.num_cached_tokens),
        CompletionTokensDetails(counts.num_reasoning_tokens),
    )


class PromptLogprob(Struct):
    """One candidate for one position of the prompt; keyed by token id on the wire. `rank` counts from 1."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]


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


class CompletionLogprobs(Struct):
    """Parallel lists, one entry per token. `text_offset` counts characters from the start of the choice's text."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(Struct):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    structured_output: Conformance | UnsetType = UNSET


class Completion(Struct):
    """A whole completion, and also one chunk of a streamed one: OpenAI gives both the same shape."""

    id: str
    object: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    system_fingerprint: str | None = None
