"""The parts of an executor's request. Names and meanings are those of TensorRT-LLM's `Request` and its parts."""

import inspect
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from datetime import timedelta
from enum import Enum
from functools import cache
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Any, ClassVar, NoReturn, get_args, get_type_hints

import torch
from torch import Tensor

from penstock.engine.contracts.grammar import AdditionalProperties, GrammarSpec
from penstock.engine.contracts.logits_processor import LogitsProcessor, LogitsRow, as_processor, per_row
from penstock.engine.errors import InvalidRequest
from penstock.engine.kv_cache.blocks import DEFAULT_RETENTION, MAX_RETENTION, Retention, RetentionRule
from penstock.serving.constraints.schemas import JsonReading, check_text, in_reading
from penstock.serving.structured_outputs import Form


def check_type(value: object, name: str, kinds: type | tuple[type, ...], what: str) -> None:
    """Raises `TypeError` for a value that is neither None nor of these kinds. A bool is not a number here."""
    if value is not None and (not isinstance(value, kinds) or (isinstance(value, bool) and kinds is not bool)):
        wrong(name, what, value)


@cache
def _plain_fields(kind: type) -> dict[str, tuple[type, str]]:
    """The fields that hold a number, a flag or a string, with what such a value is called."""
    plain = {int: (Integral, "an integer"), float: (Real, "a number"), bool: (bool, "True or False"), str: (str, "a string")}
    found: dict[str, tuple[type, str]] = {}
    for name, hint in get_type_hints(kind).items():
        kinds = [each for each in (get_args(hint) if isinstance(hint, UnionType) else (hint,)) if each is not NoneType]
        if len(kinds) == 1 and kinds[0] in plain:
            found[name] = plain[kinds[0]]
    return found


def check_fields(instance: object) -> None:
    """Raises `TypeError` for a number, a flag or a string of another type than the field's."""
    holder: type = type(instance)
    for name, (kind, what) in _plain_fields(holder).items():
        check_type(getattr(instance, name), name, kind, what)


def token_ids(value: Any, name: str) -> tuple[int, ...]:
    """The ids of a sequence, a tensor or an array. Raises `TypeError` for anything else."""
    items = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(items, str | bytes) or not isinstance(items, Iterable):
        wrong(name, "token ids", value)
    ids = tuple(items)
    for item in ids:
        check_type(item, name, Integral, "made of integers")
        if item is None:
            wrong(name, "made of integers", item)
    return tuple(map(int, ids))


def words(value: Any, name: str) -> tuple[str | tuple[int, ...], ...]:
    """Words, each text or token ids. Raises `TypeError` for anything else."""
    if value is None:
        return ()
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        wrong(name, "a list of words, each token ids or text", value)
    return tuple(word if isinstance(word, str) else token_ids(word, f"{name}[{place}]") for place, word in enumerate(value))


def wrong(name: str, what: str, value: object) -> NoReturn:
    raise TypeError(f"`{name}` must be {what}, got {value!r:.100}")


@dataclass(slots=True)
class SamplingConfig:
    """None is a field that was not given.

    Tokens are drawn where one of `temperature`, `top_k`, `top_p` and `min_p` is given; otherwise, and at `temperature` 0, `top_k` 1 or
    `top_p` 0, each is the most probable one. With a `beam_width` above 1 the answers are searched for, and `num_return_sequences` of the
    beams come back, by default all; otherwise it is how many sequences are generated. `early_stopping` is 1, 0, or another number for
    "never"; it and `length_penalty` concern beams alone. `no_repeat_ngram_size` counts the output, not the prompt.

    `beam_search_diversity_rate`, `beam_width_array` and the three fields of top-p decay are not supported: a request with one of them is
    answered with an error that names it. Raises `TypeError` for values of the wrong type; attributes that are set later are checked when a
    request with them is enqueued.
    """

    beam_width: int = 1
    _: KW_ONLY
    top_k: int | None = None
    top_p: float | None = None
    top_p_min: Any = None
    top_p_reset_ids: Any = None
    top_p_decay: Any = None
    seed: int | None = None
    temperature: float | None = None
    min_tokens: int | None = None
    beam_search_diversity_rate: Any = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    length_penalty: float | None = None
    early_stopping: int | None = None
    no_repeat_ngram_size: int | None = None
    num_return_sequences: int | None = None
    min_p: float | None = None
    beam_width_array: Any = None

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        """Raises `TypeError`."""
        check_fields(self)

    @property
    def is_drawn(self) -> bool:
        """Whether chance has a say in what is generated."""
        given = (self.temperature, self.top_k, self.top_p, self.min_p)
        return any(value is not None for value in given) and self.temperature != 0 and self.top_k != 1 and self.top_p != 0


@dataclass(slots=True)
class AdditionalModelOutput:
    """A named output of the model, such as `hidden_states.last`: of the generated tokens and, with `gather_context`, of the prompt's."""

    name: str
    gather_context: bool = False


@dataclass(slots=True)
class OutputConfig:
    """`exclude_input_from_output` leaves the prompt out of `output_token_ids`, which otherwise begin with it unless the answer is streamed.

    `return_encoder_output` is answered with an error: there are no encoders. Raises `TypeError` for values of the wrong type; attributes
    that are set later are checked when a request with them is enqueued.
    """

    return_log_probs: bool = False
    return_context_logits: bool = False
    return_generation_logits: bool = False
    exclude_input_from_output: bool = False
    return_encoder_output: bool = False
    return_perf_metrics: bool = False
    additional_model_outputs: list[AdditionalModelOutput] | None = None

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        """Raises `TypeError`."""
        check_fields(self)
        for place, output in enumerate(self.additional_model_outputs or ()):
            if not isinstance(output, AdditionalModelOutput) or not isinstance(output.name, str):
                wrong(f"additional_model_outputs[{place}]", "an AdditionalModelOutput", output)

    @property
    def wanted(self) -> tuple[str, ...]:
        """The model outputs that the engine is to give, each once."""
        logits = ["logits"] if self.return_context_logits or self.return_generation_logits else []
        return tuple(dict.fromkeys([*logits, *(output.name for output in self.additional_model_outputs or ())]))

    @property
    def wants_context(self) -> bool:
        return self.return_context_logits or any(output.gather_context for output in self.additional_model_outputs or ())


@dataclass(frozen=True, slots=True)
class TokenRangeRetentionConfig:
    """Blocks that hold tokens from `token_start` up to `token_end`, not included, or the end of the prompt.

    Those of a lower `priority`, from 0 to 100, are evicted first; after `duration_ms` (milliseconds or a timedelta), if any, it is the
    default one again, 35. Raises `ValueError` and `TypeError` for what is none of this.
    """

    token_start: int
    token_end: int | None = None
    priority: int = DEFAULT_RETENTION
    duration_ms: float | timedelta | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        check_duration(self.duration_ms, "duration_ms")
        check_priority(self.priority, "priority")
        if self.token_start < 0 or (self.token_end is not None and self.token_end <= self.token_start):
            raise ValueError(f"`token_end` must come after `token_start`, got {self.token_start} and {self.token_end}")


@dataclass(frozen=True, slots=True)
class KvCacheRetentionConfig:
    """Ranges of the prompt, earlier ones before later ones, and the priority of the blocks that only hold what was generated."""

    token_range_retention_configs: list[TokenRangeRetentionConfig] = field(default_factory=list)
    decode_retention_priority: int = DEFAULT_RETENTION
    decode_duration_ms: float | timedelta | None = None

    def __post_init__(self) -> None:
        for place, token_range in enumerate(self.token_range_retention_configs):
            check_type(token_range, f"token_range_retention_configs[{place}]", TokenRangeRetentionConfig, "a TokenRangeRetentionConfig")
        check_fields(self)
        check_duration(self.decode_duration_ms, "decode_duration_ms")
        check_priority(self.decode_retention_priority, "decode_retention_priority")

    @property
    def retention(self) -> Retention:
        """The same in the engine's terms."""
        ranges = tuple(
            (given.token_start, given.token_end, RetentionRule(given.priority, _seconds(given.duration_ms)))
            for given in self.token_range_retention_configs
        )
        return Retention(ranges, RetentionRule(self.decode_retention_priority, _seconds(self.decode_duration_ms)))


@dataclass(frozen=True, slots=True, eq=False)
class LoraConfig:
    """An adapter, known as `task_id` to later requests, which need not bring its weights again.

    Row i of `weights` is for the layer of the model that row i of `config`, (module id, layer, rank), names: [rank, inputs], then
    [outputs, rank] with the scale, both flattened, then any padding.
    """

    task_id: int
    weights: Tensor | None = None
    config: Tensor | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        check_type(self.weights, "weights", Tensor, "a tensor of numbers")
        check_type(self.config, "config", Tensor, "a tensor of integers")
        if (self.weights is None) != (self.config is None):
            raise ValueError("`weights` and `config` go together")


@dataclass(frozen=True, slots=True)
class ExternalDraftTokensConfig:
    """Draft tokens of the caller's own for the beginning of the answer. A draft token is accepted where the sampled one equals it.

    So the output is the same as without, and `logits`, an `acceptance_threshold` and `fast_logits`, which would change it, are refused by
    their names.
    """

    tokens: Sequence[int]
    logits: Any = None
    acceptance_threshold: float | None = None
    fast_logits: bool | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        object.__setattr__(self, "tokens", token_ids(self.tokens, "tokens"))
        if not self.tokens:
            raise ValueError("`tokens` must hold at least one token")


def check_duration(value: float | timedelta | None, name: str) -> None:
    check_type(value, name, (int, float, timedelta), "a number of milliseconds or a timedelta")


def check_priority(value: int, name: str) -> None:
    if not 0 <= value <= MAX_RETENTION:
        raise ValueError(f"`{name}` must be from 0 to {MAX_RETENTION}, got {value}")


def _seconds(duration: float | timedelta | None) -> float | None:
    if duration is None:
        return None
    return duration.total_seconds() if isinstance(duration, timedelta) else duration / 1000


PARAM = "guided_decoding_params.guide"
ANY_JSON = json.dumps({"type": ["object", "array"]})


class GuideType(Enum):
    JSON = 0
    JSON_SCHEMA = 1
    REGEX = 2
    EBNF_GRAMMAR = 3
    STRUCTURAL_TAG = 4


FORMS = {  # as requests over HTTP have them
    GuideType.JSON_SCHEMA: "json",
    GuideType.REGEX: "regex",
    GuideType.EBNF_GRAMMAR: "ebnf",
    GuideType.STRUCTURAL_TAG: "structural_tag",
}


@dataclass(frozen=True, slots=True)
class GuidedDecodingParams:
    """JSON takes no `guide` and allows any object or array; for the others it is a schema, a regex, a grammar or a tag, as text.

    Grammars are in XGrammar's dialect: rules with `::=`, one of them `root`. Raises `TypeError` for values of the wrong type.
    """

    guide_type: GuideType
    guide: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.guide_type, GuideType):
            wrong("guide_type", "a GuideType", self.guide_type)
        check_fields(self)

    def spec(self, additional_properties: AdditionalProperties) -> GrammarSpec:
        """Raises `InvalidRequest` for a guide that is missing, superfluous or not to be read."""
        return in_reading(JsonReading(additional_properties=additional_properties), self._form().spec)

    def _form(self) -> Form:
        if self.guide_type is GuideType.JSON:
            if self.guide is not None:
                raise InvalidRequest("a guide of type JSON has no text: for a schema there is JSON_SCHEMA", PARAM)
            return Form(PARAM, "json", ANY_JSON)
        if not self.guide:
            raise InvalidRequest(f"a guide of type {self.guide_type.name} needs its text", PARAM)
        check_text(self.guide, PARAM)
        return Form(PARAM, FORMS[self.guide_type], self.guide)


BATCHED = "batched"  # the name by which a request asks for the batched callback
NUM_PARAMETERS = 5
POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
ClientId = int | str | None
RowCallback = Callable[[int, Tensor, list[list[int]], int, ClientId], None]
BatchedCallback = Callable[[list[int], list[Tensor], list[list[list[int]]], int, list[ClientId]], None]


def row_processor(given: Any, name: str) -> LogitsProcessor:
    """`callback(request_id, logits, token_ids, stream, client_id)` as a processor; a processor as it is. Raises `TypeError` for all else.

    The callback changes `logits` [1, 1, V] in place. `token_ids` hold one list, and `stream` is CUDA's, 0 on a CPU.
    """
    if not takes_five(given):
        try:
            return as_processor(given)
        except TypeError as error:
            raise TypeError(f"`{name}`: {error}; a callback takes (request_id, logits, token_ids, stream, client_id)") from None
    callback: RowCallback = given

    def process(row: LogitsRow, logits: Tensor) -> None:
        callback(int(row.request_id), logits.view(1, 1, -1), [row.token_ids], stream_of(logits), row.client_id)

    return per_row(process)


def batched_processor(callback: BatchedCallback) -> LogitsProcessor:
    """`callback(request_ids, logits, token_ids, stream, client_ids)` as a processor: lists with an entry for each row of a step, as above.

    Raises `TypeError` for anything else.
    """
    if not takes_five(callback):
        raise TypeError("`processor_batched` must take (request_ids, logits, token_ids, stream, client_ids)")
    return BatchedProcessor(callback)


class BatchedProcessor(LogitsProcessor):
    """Every beam is a row of its own."""

    def __init__(self, callback: BatchedCallback) -> None:
        self._callback = callback

    def process(self, rows: Sequence[LogitsRow], logits: Tensor) -> None:
        self._callback(
            [int(row.request_id) for row in rows],
            [logits_V.view(1, 1, -1) for logits_V in logits],
            [[row.token_ids] for row in rows],
            stream_of(logits),
            [row.client_id for row in rows],
        )


def stream_of(logits: Tensor) -> int:
    return torch.cuda.current_stream(logits.device).cuda_stream if logits.is_cuda else 0


def takes_five(callback: object) -> bool:
    """Whether it has the parameters of the original's callbacks, of which the last may have a default."""
    if not callable(callback) or isinstance(callback, type):
        return False
    try:
        parameters = inspect.signature(callback).parameters.values()
    except ValueError:  # of what is written in C
        return False
    positional = [parameter for parameter in parameters if parameter.kind in POSITIONAL]
    num_required = sum(parameter.default is inspect.Parameter.empty for parameter in positional)
    return len(positional) == NUM_PARAMETERS and num_required >= NUM_PARAMETERS - 1


@dataclass(frozen=True, slots=True)
class PromptTuningConfig:
    """Vectors for ids beyond the vocabulary: id V + i of a prompt stands for row i of `embedding_table` [rows, hidden size].

    `input_token_extra_ids` tell tables apart in a cache that knows them by ids. They change nothing here, where the vectors are the key.
    """

    embedding_table: Tensor
    input_token_extra_ids: Sequence[int] | None = None

    def __post_init__(self) -> None:
        check_type(self.embedding_table, "embedding_table", Tensor, "a tensor")


DEFAULT_PRIORITY = 0.5


class RequestType(Enum):
    CONTEXT_AND_GENERATION = 0
    CONTEXT_ONLY = 1
    GENERATION_ONLY = 2


@dataclass(frozen=True, slots=True)
class ContextPhaseParams:
    """What a request of the type `CONTEXT_ONLY` has left for one of the type `GENERATION_ONLY`, in this process or another one.

    `first_gen_tokens` are the first tokens of its sequences, in their order, and `req_id` is its id. `opaque_state` names the blocks of its
    prompt in the directory that both executors have. `draft_tokens` are refused: the executor that generates drafts for itself.
    """

    first_gen_tokens: Sequence[int]
    req_id: int
    opaque_state: bytes | None = None
    draft_tokens: Any = None

    def __post_init__(self) -> None:
        check_fields(self)
        check_type(self.opaque_state, "opaque_state", bytes, "bytes")
        object.__setattr__(self, "first_gen_tokens", token_ids(self.first_gen_tokens, "first_gen_tokens"))


@dataclass(frozen=True, slots=True)
class LogitsProcessorConfig:
    """A logits processor by the name under which it is registered, and its arguments."""

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Request:
    """Token ids, how to go on from them, and what to say of it.

    `end_id` ends an answer in place of the model's own end tokens; -1 is none at all. `stop_words` end it as well, `bad_words` do not occur
    in it: each is a list of token ids, or text, which for `stop_words` is looked for in the text and may end within a token.
    `embedding_bias` is a float tensor [V] that is added to the logits. `client_id` comes back with the responses. `priority` is from 0
    to 1; higher goes first. `logits_processors` are names, one or several, or `LogitsProcessorConfig`s; `logits_post_processor_name` is
    one more name, and `logits_post_processor` a processor itself, or a callback of five parameters, for this request alone. After
    `allotted_time`, in seconds or as a timedelta, the request ends with what there is. With `streaming`, every response has the tokens
    since the one before, or with `return_all_generated_tokens` all so far; beams are always given whole.
    `pad_id` changes nothing: no output is padded.

    Ids beyond the vocabulary stand for vectors: rows of the table in `prompt_tuning_config`, or, one after another, the rows of
    `multimodal_embedding`, a tensor [vectors, hidden size].

    A request of the type `CONTEXT_ONLY` ends after the first token of each sequence, with `context_phase_params` in its result. One of the
    type `GENERATION_ONLY`, otherwise equal, goes on from there with these `context_phase_params`.

    The other fields, from `position_ids` on, are not supported: a request with one of them is answered with an error that names it.
    Raises `TypeError` for values of the wrong type; whatever else is wrong becomes an error in the response.
    """

    BATCHED_POST_PROCESSOR_NAME: ClassVar[str] = BATCHED

    input_token_ids: Sequence[int]
    max_tokens: int
    streaming: bool = False
    sampling_config: SamplingConfig = field(default_factory=SamplingConfig)
    output_config: OutputConfig = field(default_factory=OutputConfig)
    end_id: int | None = None
    pad_id: int | None = None
    _: KW_ONLY
    bad_words: Sequence[Sequence[int] | str] | None = None
    stop_words: Sequence[Sequence[int] | str] | None = None
    embedding_bias: Tensor | None = None
    client_id: int | str | None = None
    priority: float = DEFAULT_PRIORITY
    num_return_sequences: int | None = None
    logits_processors: str | Sequence[str | LogitsProcessorConfig] = ()
    logits_post_processor_name: str | None = None
    logits_post_processor: Callable[..., None] | LogitsProcessor | None = None
    guided_decoding_params: GuidedDecodingParams | None = None
    kv_cache_retention_config: KvCacheRetentionConfig | None = None
    external_draft_tokens_config: ExternalDraftTokensConfig | None = None
    allotted_time: float | timedelta | None = None
    return_all_generated_tokens: bool = False
    cache_salt: str = ""
    prompt_tuning_config: PromptTuningConfig | None = None
    multimodal_embedding: Tensor | None = None
    type: RequestType = RequestType.CONTEXT_AND_GENERATION
    position_ids: Any = None
    multimodal_input: Any = None
    mrope_config: Any = None
    lora_config: LoraConfig | None = None
    lookahead_config: Any = None
    eagle_config: Any = None
    encoder_input_token_ids: Any = None
    encoder_input_features: Any = None
    encoder_output_length: Any = None
    cross_attention_mask: Any = None
    skip_cross_attn_blocks: Any = None
    context_phase_params: ContextPhaseParams | None = None
    language_adapter_uid: Any = None

    def __post_init__(self) -> None:
        self.input_token_ids = token_ids(self.input_token_ids, "input_token_ids")
        self.bad_words = words(self.bad_words, "bad_words")
        self.stop_words = words(self.stop_words, "stop_words")
        self.logits_processors = _choices(self.logits_processors)
        if self.max_tokens is None or self.priority is None:
            wrong("max_tokens" if self.max_tokens is None else "priority", "an integer" if self.max_tokens is None else "a number", None)
        for name, kind in (("sampling_config", SamplingConfig), ("output_config", OutputConfig)):
            if getattr(self, name) is None:
                setattr(self, name, kind())
        check_fields(self)
        check_type(self.sampling_config, "sampling_config", SamplingConfig, "a SamplingConfig")
        check_type(self.output_config, "output_config", OutputConfig, "an OutputConfig")
        check_type(self.lora_config, "lora_config", LoraConfig, "a LoraConfig")
        check_type(self.client_id, "client_id", (int, str), "an integer or a string")
        check_type(self.guided_decoding_params, "guided_decoding_params", GuidedDecodingParams, "those of penstock.llm.executor")
        check_type(self.kv_cache_retention_config, "kv_cache_retention_config", KvCacheRetentionConfig, "a KvCacheRetentionConfig")
        check_type(self.prompt_tuning_config, "prompt_tuning_config", PromptTuningConfig, "a PromptTuningConfig")
        check_type(self.multimodal_embedding, "multimodal_embedding", Tensor, "a tensor")
        check_type(self.context_phase_params, "context_phase_params", ContextPhaseParams, "a ContextPhaseParams")
        what = "an ExternalDraftTokensConfig"
        check_type(self.external_draft_tokens_config, "external_draft_tokens_config", ExternalDraftTokensConfig, what)
        check_type(self.allotted_time, "allotted_time", (int, float, timedelta), "a number of seconds or a timedelta")

    @property
    def processors(self) -> tuple[LogitsProcessorConfig, ...]:
        """All logits processors that the request names, in their order."""
        chosen = _choices(self.logits_processors)
        name = self.logits_post_processor_name
        return chosen if name is None else (*chosen, LogitsProcessorConfig(name))

    @property
    def allotted_seconds(self) -> float | None:
        return self.allotted_time.total_seconds() if isinstance(self.allotted_time, timedelta) else self.allotted_time


def _choices(given: object) -> tuple[LogitsProcessorConfig, ...]:
    """One name or several, with their arguments where they have any. Raises `TypeError` for what is no name."""
    if not isinstance(given, str | Sequence):
        wrong("logits_processors", "a name, or a list of names and LogitsProcessorConfigs", given)
    choices = [LogitsProcessorConfig(item) if isinstance(item, str) else item for item in ([given] if isinstance(given, str) else given)]
    for place, choice in enumerate(choices):
        if not isinstance(choice, LogitsProcessorConfig) or not isinstance(choice.name, str) or not isinstance(choice.arguments, Mapping):
            wrong(f"logits_processors[{place}]", "a name or a LogitsProcessorConfig", choice)
    return tuple(choices)
