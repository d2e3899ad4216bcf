"""What an executor is asked to generate. Names, order and meanings are those of TensorRT-LLM's `Request`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from datetime import timedelta
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar

from penstock.engine.logits_processor import LogitsProcessor
from penstock.llm.executor_api.checks import check_flags, check_integers, check_numbers, check_type, token_ids, words, wrong
from penstock.llm.executor_api.guide import GuidedDecodingParams
from penstock.llm.executor_api.output import OutputConfig
from penstock.llm.executor_api.post_processors import BATCHED
from penstock.llm.executor_api.retention import KvCacheRetentionConfig
from penstock.llm.executor_api.sampling import SamplingConfig

if TYPE_CHECKING:
    from torch import Tensor

DEFAULT_PRIORITY = 0.5


class RequestType(Enum):
    CONTEXT_AND_GENERATION = 0
    CONTEXT_ONLY = 1
    GENERATION_ONLY = 2


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
    embedding_bias: "Tensor | None" = None
    client_id: int | str | None = None
    priority: float = DEFAULT_PRIORITY
    num_return_sequences: int | None = None
    logits_processors: str | Sequence[str | LogitsProcessorConfig] = ()
    logits_post_processor_name: str | None = None
    logits_post_processor: Callable[..., None] | LogitsProcessor | None = None
    guided_decoding_params: GuidedDecodingParams | None = None
    kv_cache_retention_config: KvCacheRetentionConfig | None = None
    allotted_time: float | timedelta | None = None
    return_all_generated_tokens: bool = False
    cache_salt: str = ""
    type: RequestType = RequestType.CONTEXT_AND_GENERATION
    position_ids: Any = None
    external_draft_tokens_config: Any = None
    prompt_tuning_config: Any = None
    multimodal_input: Any = None
    multimodal_embedding: Any = None
    mrope_config: Any = None
    lora_config: Any = None
    lookahead_config: Any = None
    eagle_config: Any = None
    encoder_input_token_ids: Any = None
    encoder_input_features: Any = None
    encoder_output_length: Any = None
    cross_attention_mask: Any = None
    skip_cross_attn_blocks: Any = None
    context_phase_params: Any = None
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
        check_integers(self, "max_tokens", "end_id", "pad_id", "num_return_sequences")
        check_numbers(self, "priority")
        check_flags(self, "streaming", "return_all_generated_tokens")
        check_type(self.sampling_config, "sampling_config", SamplingConfig, "a SamplingConfig")
        check_type(self.output_config, "output_config", OutputConfig, "an OutputConfig")
        check_type(self.client_id, "client_id", (int, str), "an integer or a string")
        check_type(self.logits_post_processor_name, "logits_post_processor_name", str, "a name")
        check_type(self.guided_decoding_params, "guided_decoding_params", GuidedDecodingParams, "those of penstock.llm.executor")
        check_type(self.kv_cache_retention_config, "kv_cache_retention_config", KvCacheRetentionConfig, "a KvCacheRetentionConfig")
        check_type(self.allotted_time, "allotted_time", (int, float, timedelta), "a number of seconds or a timedelta")
        check_type(self.cache_salt, "cache_salt", str, "a string")

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
