"""Requests as HTTP bodies and the library give them: conversations, constraints and sampling fields, and bounds on their JSON."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

import msgspec
import numpy as np
from msgspec import Meta, Raw, Struct, field, inspect

from penstock.engine.contracts.grammar import AdditionalProperties, GrammarKind
from penstock.engine.errors import ContextLengthExceeded, InvalidRequest
from penstock.engine.sampling.params import BeamSearchParams, SamplingParams, parameters_of
from penstock.engine.system.process import examined
from penstock.engine.text.streaming import RepetitionDetection

T = TypeVar("T")

PATH = re.compile(r" - at (?:`key` in )?`\$\.?([^`]*)`$")

PATH_STEP = re.compile(r"\w+")  # a field, or an index

FIELD = re.compile(r"Object (?:missing required|contains unknown) field `([^`]+)`")
# Of a JSON document, counted before it is decoded:
SMALL = 2**16  # bytes: holds too few items to matter
MAX_ITEMS = 2_000_000  # members and elements: token ids, most of them; 25 ns each
MAX_KEYS = 100_000  # 400 ns each
MAX_STRINGS = 500_000  # 60 ns each
MAX_BRACKETS = 100_000  # each an object for the garbage collector to walk through
_QUOTE, _BACKSLASH = b'"\\'
_PIECE = 2**20  # bytes looked at together: what is made of them stays in the processor's cache


def mistaken_path(error: msgspec.ValidationError) -> str | None:
    """Where in the value the mistake is: None where it is the value itself."""
    found = PATH.search(str(error))
    path = found[1] if found else None
    field = FIELD.match(str(error))
    if field:
        path = f"{path}.{field[1]}" if path else field[1]
    return path


def message_of(error: msgspec.ValidationError, kind: Any) -> str:
    """What msgspec expected of a value of this type, what it got and where, with the values of an enum, which msgspec leaves out."""
    message, path = str(error), mistaken_path(error)
    if not message.startswith("Invalid enum value") or path is None:
        return message
    mistake, separator, place = message.rpartition(" - at ")
    values = [f"`{value}`" for value in _values_at(inspect.type_info(kind), PATH_STEP.findall(path))]
    return f"{mistake}: expected one of {', '.join(values)}{separator}{place}" if values else message


def _values_at(info: inspect.Type, steps: Sequence[str]) -> Iterator[str]:
    """The texts that a type allows at a path."""
    if isinstance(info, inspect.UnionType):
        for member in info.types:
            yield from _values_at(member, steps)
    elif isinstance(info, inspect.LiteralType) and not steps:
        yield from map(str, info.values)
    elif isinstance(info, inspect.ListType) and steps:
        yield from _values_at(info.item_type, steps[1:])
    elif isinstance(info, inspect.StructType) and steps:
        for known in info.fields:
            if known.encode_name == steps[0]:
                yield from _values_at(known.type, steps[1:])


def convert_at(value: Any, kind: type[T], path: str) -> T:
    """The part of a body at `path`, of a type that other parts have decided. Raises `InvalidRequest` with the mistake's path."""
    try:
        return msgspec.convert(value, examined(kind))
    except msgspec.ValidationError as error:
        mistake = mistaken_path(error)
        message = message_of(error, kind).replace("`$", f"`$.{path}")
        raise InvalidRequest(message, path if mistake is None else f"{path}.{mistake}".replace(".[", "[")) from None


ReasoningField = Literal["reasoning_content", "reasoning", "both"]  # DeepSeek's name, vLLM's newer one, or the two


Int32 = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]

MAX_TIMEOUT = 86_400  # seconds

Int64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]

# Every sequence looks for these in all it says: far more than anyone needs, and little enough to prepare at once.
StopString = Annotated[str, Meta(max_length=1024)]

BadWord = Annotated[str, Meta(max_length=256)]
CacheSalt = Annotated[str, Meta(min_length=1, max_length=1024)]

# OpenAI stops at 4; evaluation harnesses written for vLLM send more.
StopList = Annotated[list[StopString], Meta(max_length=64)]

NOTHING = Raw()


class FieldsWithoutEffect(Struct, kw_only=True):
    """Fields of OpenAI's and vLLM's references that clients send and that mean nothing here: accepted, and without effect.

    They steer OpenAI's storage, billing, caching and abuse tracking, features of single models of theirs, or vLLM's routing. They are not
    decoded: millions of values would hold the interpreter's lock.
    """

    metadata: Raw = field(default_factory=Raw)
    moderation: Raw = field(default_factory=Raw)
    prompt_cache_key: Raw = field(default_factory=Raw)
    prompt_cache_options: Raw = field(default_factory=Raw)
    prompt_cache_retention: Raw = field(default_factory=Raw)
    safety_identifier: Raw = field(default_factory=Raw)
    service_tier: Raw = field(default_factory=Raw)
    session_id: Raw = field(default_factory=Raw)
    store: Raw = field(default_factory=Raw)
    user: Raw = field(default_factory=Raw)
    verbosity: Raw = field(default_factory=Raw)

    def __post_init__(self) -> None:
        for name in FieldsWithoutEffect.__struct_fields__:
            setattr(self, name, NOTHING)  # what is raw keeps the whole body in memory


class RequestFields(FieldsWithoutEffect, kw_only=True):
    """What a request says of itself. `request_id` and `timeout` are other places for the headers `x-request-id` and `x-request-timeout`."""

    model: str | None = None
    request_id: Annotated[str, Meta(pattern=r"^[!-~]{1,128}$")] | None = None
    priority: Int32 | None = None
    timeout: Annotated[float, Meta(gt=0, le=MAX_TIMEOUT)] | None = None


class StreamOptions(Struct, forbid_unknown_fields=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None  # without effect: padding against traffic analysis, only useful behind OpenAI's own edge


class GrammarDefinition(Struct, forbid_unknown_fields=True):
    """A grammar whose dialect is stated. `ebnf` is another name of `gbnf`."""

    definition: str
    syntax: Literal["lark", "gbnf", "ebnf"]

    @property
    def kind(self) -> GrammarKind:
        return GrammarKind.LARK if self.syntax == "lark" else GrammarKind.GBNF


Mode = Literal["direct", "think", "draft"]
PreambleText = Annotated[str, Meta(max_length=4096)]


class StructuredOutputs(Struct, forbid_unknown_fields=True):
    """vLLM's spelling of a constraint: one of the first six; the others say how.

    Those from `mode` on also apply to a constraint that another field gives.
    """

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
    sampling: Literal["masked", "exact"] | None = None

    mode: Mode | None = None
    preamble_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    include_preamble: bool | None = None
    opening: PreambleText | None = None
    cue: Annotated[PreambleText, Meta(min_length=1)] | None = None
    pressure: bool | None = None
    within_max_tokens: bool | None = None


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


class ConstraintFields(RequestFields, kw_only=True):
    """The form that an answer must have, in every spelling; at most one constraint is given."""

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


class KVTransferParams(Struct, forbid_unknown_fields=True):
    """vLLM's: the prompt is computed for another server, or by another one, whose answer has had the `state`. The rest has to be null."""

    do_remote_decode: bool | None = None
    do_remote_prefill: bool | None = None
    state: Annotated[str, Meta(max_length=1024)] | None = None
    remote_engine_id: None = None
    remote_block_ids: None = None
    remote_host: None = None
    remote_port: None = None


class GenerationFields(ConstraintFields, kw_only=True):
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
    repetition_detection: RepetitionDetection | None = None
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
    cache_salt: CacheSalt | None = None
    kv_transfer_params: KVTransferParams | None = None


Role = Literal["system", "developer", "user", "assistant", "tool"]

Summary = Literal["auto", "concise", "detailed"]
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class TextPart(Struct, forbid_unknown_fields=True):
    text: str
    type: Literal["text"]


class ChatReasoning(Struct, forbid_unknown_fields=True):
    """How much to reason, in the form of the Responses API and of routers: other spellings of chat's own fields."""

    effort: ReasoningEffort | None = None
    enabled: bool | None = None
    exclude: bool | None = None
    max_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    summary: Summary | None = None  # the reasoning itself is shown


class PredictedContent(Struct, forbid_unknown_fields=True):
    """What most of the answer is expected to be."""

    type: Literal["content"]
    content: str | list[TextPart]

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


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


class ConversationFields(GenerationFields, kw_only=True):
    """What every endpoint that answers conversations takes alike."""

    top_logprobs: Int32 | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    thinking_token_budget: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None  # -1: none, whatever the server's default
    include_reasoning: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class ChatCompletionRequest(ConversationFields, kw_only=True, forbid_unknown_fields=True):
    """OpenAI's fields, with vLLM's and SGLang's for reasoning and templates; docs/requests.md says what each means."""

    messages: Messages
    max_completion_tokens: Int64 | None = None
    prediction: PredictedContent | None = None
    logprobs: bool | None = None

    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None

    reasoning: ChatReasoning | None = None
    reasoning_effort: ReasoningEffort | None = None
    separate_reasoning: bool | None = None
    stream_reasoning: bool | None = None

    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    def __post_init__(self) -> None:
        """What `reasoning` says counts where the field that it stands for is not given."""
        super().__post_init__()
        if (reasoning := self.reasoning) is None:
            return
        if self.reasoning_effort is None:
            self.reasoning_effort = "none" if reasoning.enabled is False else reasoning.effort
        if self.thinking_token_budget is None:
            self.thinking_token_budget = reasoning.max_tokens
        if self.include_reasoning is None and reasoning.exclude is not None:
            self.include_reasoning = not reasoning.exclude


DEFAULT_MAX_TOKENS = 16  # OpenAI's, of completions


class CompletionRequest(GenerationFields, kw_only=True, forbid_unknown_fields=True):
    """`prompt` is a string, a list of strings, token ids, or a list of lists of token ids; `prompt_embeds` are tensors in base64."""

    prompt: str | list[str | int | list[int]] | None = None
    prompt_embeds: str | list[str] | None = None
    echo: bool | None = None
    logprobs: Int32 | None = None


DEFAULT_LIMIT = "default_max_tokens"  # what `stop_reason` says where a default bound ended the answer
# The endpoints spell them differently.
_GIVEN_APART = frozenset({"max_tokens", "logprobs", "prompt_logprobs"})
TAKEN_AS_THEY_ARE = tuple(
    name for name in parameters_of(SamplingParams) if name in GenerationFields.__struct_fields__ and name not in _GIVEN_APART
)


def sampling_params(
    body: GenerationFields,
    *,
    limit: "TokenLimit",
    logprobs: int | None,
    prompt_logprobs: int | None,
    thinking_token_budget: int | None = None,
    defaults: dict[str, Any],
    vocab_size: int,
) -> SamplingParams:
    """Raises `InvalidRequest` naming the field that is out of range.

    `limit`, `logprobs` and `prompt_logprobs` are given apart because the endpoints spell them differently.
    """
    chosen = {name: value for name in TAKEN_AS_THEY_ARE if (value := getattr(body, name)) is not None}
    params = SamplingParams(
        **{name: value for name, value in defaults.items() if name in TAKEN_AS_THEY_ARE and value is not None} | chosen,
        max_tokens=limit.max_tokens,
        length_stop_reason=DEFAULT_LIMIT if limit.is_default else None,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        thinking_token_budget=thinking_token_budget,
    )
    if body.allowed_token_ids == []:
        raise InvalidRequest("`allowed_token_ids` must not be empty: no token could be chosen", "allowed_token_ids")
    params.check_token_ids(vocab_size)
    return params


@dataclass(frozen=True, slots=True)
class TokenLimit:
    """How many tokens may be generated, and whether that is a default bound: neither the request's own nor the end of the context."""

    max_tokens: int
    is_default: bool


def token_limit(
    requested: int | None,
    param: str,
    *,
    prompt_param: str,
    default: int | None,
    num_prompt_tokens: int,
    max_model_len: int,
    is_clamped: bool = False,
) -> TokenLimit:
    """What was asked for, where `is_clamped` as far as the context has room; else the default, or all that the context has room for.

    Raises `ContextLengthExceeded` with the numbers where the prompt, or what was asked for, does not fit.
    """
    room = max_model_len - num_prompt_tokens
    if room < 0 or (room == 0 and requested != 0):
        raise ContextLengthExceeded(
            f"This model's maximum context length is {max_model_len} tokens. However, your prompt has {num_prompt_tokens} tokens, "
            "which leaves no room for an answer. Please shorten it.",
            prompt_param,
            num_prompt_tokens=num_prompt_tokens,
            max_prompt_tokens=max_model_len - 1,
        )
    if requested is None:
        return TokenLimit(room, is_default=False) if default is None or default > room else TokenLimit(default, is_default=True)
    if requested > room and not is_clamped:
        raise ContextLengthExceeded(
            f"This model's maximum context length is {max_model_len} tokens. However, you requested {requested + num_prompt_tokens} tokens "
            f"({num_prompt_tokens} in the prompt, {requested} for the answer). Please reduce `{param}` or the prompt.",
            param,
        )
    return TokenLimit(min(requested, room), is_default=False)


# What each has to be where there is no beam search.
_NEUTRAL: dict[str, tuple[Any, ...]] = {"best_of": (None, 1), "early_stopping": (None, False), "length_penalty": (None, 0, 1)}


def beam_search(body: GenerationFields) -> BeamSearchParams | None:
    """How to search, or None where nothing is to be searched for. Raises `InvalidRequest` for what contradicts that.

    The answers returned are `n`, the beams `best_of`, which is as many where it is not given.
    """
    if not body.use_beam_search:
        for name, neutral in _NEUTRAL.items():
            if getattr(body, name) not in neutral:
                raise InvalidRequest(f"`{name}` is for beam search: `use_beam_search` must be true", name)
        return None
    if body.stream:
        raise InvalidRequest("beam search gives its answers when it is over, and cannot be streamed", "stream")
    num_answers = 1 if body.n is None else body.n
    width = num_answers if body.best_of is None else body.best_of
    if num_answers > width:
        raise InvalidRequest(f"`best_of` must be at least `n`, {num_answers}, got {width}", "best_of")
    try:
        return BeamSearchParams(
            width,
            n=num_answers,
            length_penalty=1.0 if body.length_penalty is None else body.length_penalty,
            early_stopping=False if body.early_stopping is None else body.early_stopping,
        )
    except InvalidRequest as error:
        raise beam_refusal(error, body) from None


def searched_defaults(body: GenerationFields, defaults: dict[str, Any]) -> dict[str, Any]:
    """The defaults of the fields that a request leaves out. What is recommended for drawing tokens means nothing to a search."""
    if not body.use_beam_search:
        return defaults
    return {"repetition_penalty": defaults.get("repetition_penalty"), "temperature": 0.0}


def beam_refusal(error: InvalidRequest, body: GenerationFields) -> InvalidRequest:
    """The engine's refusal, with the name that the beam width has in the body."""
    if error.param != "beam_width":
        return error
    name = "n" if body.best_of is None else "best_of"
    return InvalidRequest(error.message.replace("`beam_width`", f"`{name}`"), name)


def check_json(*documents: bytes | bytearray, what: str = "a body", param: str | None = None) -> None:
    """Raises `InvalidRequest` for JSON with more keys, strings, items or brackets, all documents together, than any request needs.

    Counts outside strings only, so that a long text may hold any characters. Invalid JSON may be counted wrongly, and is refused later.
    """
    if sum(map(len, documents)) < SMALL:
        return
    counts = dict.fromkeys(b",:[{", 0)
    num_strings = sum(_count(document, counts) for document in documents)
    brackets = counts[ord("[")] + counts[ord("{")]
    for number, limit, counted in (
        (brackets, MAX_BRACKETS, "opening brackets and braces"),
        (counts[ord(":")], MAX_KEYS, "keys"),
        (num_strings, MAX_STRINGS, "strings"),
        (counts[ord(",")] + brackets, MAX_ITEMS, "items"),
    ):
        if number > limit:
            raise InvalidRequest(f"more than {limit} {counted} in {what} are refused", param)


def _count(document: bytes | bytearray, counts: dict[int, int]) -> int:
    """How many strings there are. Adds how often each of the characters in `counts` occurs outside of them."""
    num_quotes = 0
    for piece in _pieces(document.replace(b"\\\\", b"__")):
        characters = np.frombuffer(piece, dtype=np.uint8)
        is_quote = characters == _QUOTE
        is_quote[1:] &= characters[:-1] != _BACKSLASH
        is_outside = (np.cumsum(is_quote, dtype=np.int32) + num_quotes) % 2 == 0
        num_quotes += int(is_quote.sum())
        for character in counts:
            counts[character] += int(np.count_nonzero((characters == character) & is_outside))
    return num_quotes // 2


def _pieces(document: bytes | bytearray) -> list[bytes | bytearray]:
    """Cut where no piece begins with a quote that a backslash at the end of the one before it escapes."""
    pieces: list[bytes | bytearray] = []
    start = 0
    while start < len(document):
        end = start + _PIECE
        while document[end - 1 : end] == b"\\":
            end += 1
        pieces.append(document[start:end])
        start = end
    return pieces
