"""Requests as HTTP bodies and the library give them: conversations, constraints and sampling fields."""

import re
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Raw, Struct

from penstock.engine.grammar import AdditionalProperties

PATH = re.compile(r" - at (?:`key` in )?`\$\.?([^`]*)`$")

FIELD = re.compile(r"Object (?:missing required|contains unknown) field `([^`]+)`")


def mistaken_path(error: msgspec.ValidationError) -> str | None:
    """Where in the value the mistake is: None where it is the value itself."""
    found = PATH.search(str(error))
    path = found[1] if found else None
    field = FIELD.match(str(error))
    if field:
        path = f"{path}.{field[1]}" if path else field[1]
    return path


ReasoningField = Literal["reasoning_content", "reasoning", "both"]  # DeepSeek's name, vLLM's newer one, or the two


Int32 = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]

Int64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]

# Every sequence looks for these in all it says: far more than anyone needs, and little enough to prepare at once.
StopString = Annotated[str, Meta(max_length=1024)]

BadWord = Annotated[str, Meta(max_length=256)]

# OpenAI stops at 4; evaluation harnesses written for vLLM send more.
StopList = Annotated[list[StopString], Meta(max_length=64)]

NOTHING = Raw()


class FieldsWithoutEffect(Struct, kw_only=True):
    """Fields of OpenAI's and vLLM's references that clients send and that mean nothing here: accepted, and without effect.

    They steer OpenAI's storage, billing, caching and abuse tracking, features of single models of theirs, or vLLM's routing. They are not
    decoded: millions of values would hold the interpreter's lock.
    """

    metadata: Raw = NOTHING
    moderation: Raw = NOTHING
    prompt_cache_key: Raw = NOTHING
    prompt_cache_options: Raw = NOTHING
    prompt_cache_retention: Raw = NOTHING
    safety_identifier: Raw = NOTHING
    service_tier: Raw = NOTHING
    session_id: Raw = NOTHING
    store: Raw = NOTHING
    user: Raw = NOTHING
    verbosity: Raw = NOTHING

    def __post_init__(self) -> None:
        for name in FieldsWithoutEffect.__struct_fields__:
            setattr(self, name, NOTHING)  # what is raw keeps the whole body in memory


class RequestFields(FieldsWithoutEffect, kw_only=True):
    """What a request says of itself. `request_id` is another place for the header `x-request-id`."""

    model: str | None = None
    request_id: Annotated[str, Meta(pattern=r"^[!-~]{1,128}$")] | None = None
    priority: Int32 | None = None


class StreamOptions(Struct, forbid_unknown_fields=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None  # without effect: padding against traffic analysis, only useful behind OpenAI's own edge


class GrammarDefinition(Struct, forbid_unknown_fields=True):
    """A grammar whose dialect is stated. `ebnf` is another name of `gbnf`."""

    definition: str
    syntax: Literal["lark", "gbnf", "ebnf"]


class StructuredOutputs(Struct, forbid_unknown_fields=True):
    """vLLM's spelling of a constraint: one of the first six; the others say how."""

    json: Any = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | GrammarDefinition | None = None
    json_object: bool | None = None
    structural_tag: str | dict[str, Any] | None = None

    additional_properties: AdditionalProperties | None = None
    backend: str | None = None
    whitespace_pattern: str | None = None
    disable_any_whitespace: bool | None = None
    disable_fallback: bool | None = None
    disable_additional_properties: bool | None = None


class JsonSchemaFormat(Struct, forbid_unknown_fields=True):
    name: str | None = None
    description: str | None = None
    schema: Any = None
    strict: bool | None = None


class ResponseFormat(Struct, forbid_unknown_fields=True):
    """Which of the other fields may be there, `type` says."""

    type: str
    json_schema: JsonSchemaFormat | None = None
    schema: Any = None
    grammar: str | GrammarDefinition | None = None
    format: dict[str, Any] | None = None
    structures: list[dict[str, Any]] | None = None
    triggers: list[str] | None = None


class LogitsProcessorChoice(Struct, forbid_unknown_fields=True):
    """A processor that a plug-in has registered: only its name and arguments come over the wire, never code."""

    name: str
    arguments: dict[str, Any] = {}


class GenerationFields(RequestFields, kw_only=True):
    """How to sample and constrain: the same fields on every endpoint that generates. None, and null, mean the default."""

    stream: bool | None = None
    stream_interval: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    stream_options: StreamOptions | None = None

    n: Int32 | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int32 | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: Int64 | None = None
    max_tokens: Int64 | None = None
    min_tokens: Int64 | None = None
    ignore_eos: bool | None = None
    stop: StopString | StopList | None = None
    stop_token_ids: Annotated[list[Int32], Meta(max_length=1024)] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    prompt_logprobs: Int32 | None = None
    return_tokens_as_token_ids: bool | None = None
    logit_bias: dict[Int32, float] | None = None
    allowed_token_ids: Annotated[list[Int32], Meta(max_length=2**18)] | None = None  # as many as the largest vocabularies have
    bad_words: Annotated[list[BadWord], Meta(max_length=1024)] | None = None
    logits_processors: Annotated[list[LogitsProcessorChoice], Meta(max_length=16)] | None = None
    use_beam_search: bool | None = None
    best_of: Int32 | None = None
    length_penalty: float | None = None
    early_stopping: bool | Literal["never"] | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=1024)] | None = None

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Any = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | GrammarDefinition | None = None
    guided_additional_properties: AdditionalProperties | None = None
    guided_whitespace_pattern: str | None = None
    guided_decoding_backend: str | None = None
    json_schema: Any = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | dict[str, Any] | None = None


Role = Literal["system", "developer", "user", "assistant", "tool"]

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


DEFAULT_MAX_TOKENS = 16  # OpenAI's, of completions


class CompletionRequest(GenerationFields, kw_only=True, forbid_unknown_fields=True):
    """`prompt` is a string, a list of strings, token ids, or a list of lists of token ids."""

    prompt: str | list[str | int | list[int]]
    echo: bool | None = None
    logprobs: Int32 | None = None
