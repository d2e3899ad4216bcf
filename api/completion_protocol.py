"""Requests and responses of /v1/completions."""

from msgspec import UNSET, Struct, UnsetType

from penstock.api.common_protocol import Conformance, GenerationFields, Int32, PromptLogprobs, Usage

DEFAULT_MAX_TOKENS = 16  # OpenAI's


class CompletionRequest(GenerationFields, kw_only=True, forbid_unknown_fields=True):
    """`prompt` is a string, a list of strings, token ids, or a list of lists of token ids."""

    prompt: str | list[str | int | list[int]]
    echo: bool | None = None
    logprobs: Int32 | None = None


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
