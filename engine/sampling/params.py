"""Parameters of sampling and of beam search: each declared once, and checked when it is set."""

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from numbers import Integral, Real
from types import NoneType
from typing import Any, Literal, get_args, get_type_hints

import msgspec

from penstock.engine.errors import InvalidRequest
from penstock.engine.text.streaming import RepetitionDetection

MAX_LOGPROBS = 20
MIN_TEMPERATURE = 0.01  # below it, and above 0, float32 logits overflow; it is raised to this
_METADATA = "parameter"
_NUMBERS = {int: (Integral, "an integer"), float: (Real, "a number")}
_LISTS = {Sequence[str]: (str, "made of strings"), Sequence[int]: (Integral, "made of token ids")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """What a field means, and which of the values of its type it may have.

    `low` and `high` are bounds, of which `low` itself is left out with `is_above`. `rule` says in words what a value must be; without it,
    it is made from type and bounds. `kind` is the annotation without None, and `is_optional` says whether that was in it.
    A default may come from the model's generation_config.json, where the field is called `generation_config`. Where beam search has no
    meaning for it, any value but the default and those in `neutral` is refused.
    """

    meaning: str
    low: float | None = None
    high: float | None = None
    is_above: bool = False
    rule: str = ""
    generation_config: str = ""
    has_beam_search: bool = True
    neutral: tuple[Any, ...] = ()
    name: str = ""
    kind: Any = None
    is_optional: bool = False
    default: Any = None

    @property
    def type_rule(self) -> str:
        """What a value must be whatever its bounds."""
        if self.kind is bool:
            return "True or False"
        if self.kind == Mapping[int, float]:
            return "a dict of numbers by token id"
        if self.kind is RepetitionDetection:
            return "a RepetitionDetection, or a dict of its fields"
        return (_NUMBERS.get(self.kind) or _LISTS[self.kind])[1]

    @property
    def range_rule(self) -> str:
        if self.rule or self.low is None:
            return self.rule or self.type_rule
        end = f" to {self.high:g}" if self.high is not None else ""
        return f"{self.type_rule} from {self.low:g}{end}"

    def has_type(self, value: Any) -> bool:
        """As a caller in Python gives it. For a list None is as good as an empty one, and for one of texts a single text."""
        if self.kind is bool:
            return isinstance(value, bool)
        if self.kind in _NUMBERS:
            is_missing = value is None and self.is_optional
            return is_missing or (isinstance(value, _NUMBERS[self.kind][0]) and not isinstance(value, bool))
        if self.kind in _LISTS:
            item_kind = _LISTS[self.kind][0]
            if value is None or (item_kind is str and isinstance(value, str)):
                return True
            return isinstance(value, Sequence) and all(isinstance(item, item_kind) for item in value)
        if self.kind is RepetitionDetection:
            return isinstance(value, RepetitionDetection | Mapping | None)
        bias = value or {}
        return isinstance(bias, Mapping) and all(isinstance(key, Integral) and isinstance(bias[key], Real) for key in bias)

    def is_in_range(self, value: Any) -> bool:
        if value is None or self.kind not in _NUMBERS:
            return True
        if self.low is not None and not (value > self.low if self.is_above else value >= self.low):
            return False
        return self.high is None or value <= self.high

    def has_effect(self, value: Any) -> bool:
        """Whether it is another value than the default and those that mean as much."""
        return value not in (self.default, *self.neutral)


def parameter(default: Any, meaning: str, **declared: Any) -> Any:
    """A dataclass field that is a `Parameter`, of which `declared` are fields."""
    metadata = {_METADATA: Parameter(meaning=meaning, default=default, **declared)}
    if isinstance(default, dict):
        return dataclasses.field(default_factory=default.copy, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@cache
def parameters_of(kind: type) -> Mapping[str, Parameter]:
    """The parameters that a dataclass declares, by name and in its order."""
    types, parameters = get_type_hints(kind), {}
    for each in dataclasses.fields(kind):
        if _METADATA in each.metadata:
            kinds = [part for part in get_args(types[each.name]) if part is not NoneType]
            is_optional = NoneType in get_args(types[each.name])
            bare = kinds[0] if is_optional else types[each.name]
            parameters[each.name] = replace(each.metadata[_METADATA], name=each.name, kind=bare, is_optional=is_optional)
    return parameters


def check_types(params: object) -> None:
    """Of what a caller in Python gives. Raises `InvalidRequest` with `param` set to the field's name."""
    kind: type = type(params)
    for name, declared in parameters_of(kind).items():
        require(declared.has_type(getattr(params, name)), name, declared.type_rule, getattr(params, name))


def check_ranges(params: object) -> None:
    """Raises `InvalidRequest` with `param` set to the field's name."""
    kind: type = type(params)
    for name, declared in parameters_of(kind).items():
        require(declared.is_in_range(getattr(params, name)), name, declared.range_rule, getattr(params, name))


def require(condition: bool, name: str, rule: str, value: Any) -> None:
    """Raises `InvalidRequest` where the condition does not hold."""
    if not condition:
        raise InvalidRequest(f"`{name}` must be {rule}, got {value!r}", name)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen and when a sequence ends. Names and meanings are vLLM's.

    Lists may be given, and for `stop` a single string; tuples are kept.
    Raises `InvalidRequest` with `param` set to the field's name. Token ids are checked against the vocabulary by `check_token_ids`.
    `logprobs` and `prompt_logprobs` count alternatives beside the chosen token; None returns none, 0 the chosen token's alone.
    """

    n: int = parameter(1, "answers per prompt", low=1, high=128)
    temperature: float = parameter(
        1.0,
        f"divides the logits; 0 is greedy, and other values below {MIN_TEMPERATURE} are raised to it",
        low=0,
        high=2,
        generation_config="temperature",
    )
    top_p: float = parameter(
        1.0,
        "only the most probable tokens whose probabilities add up to this",
        low=0,
        high=1,
        is_above=True,
        rule="greater than 0 and at most 1",
        generation_config="top_p",
        has_beam_search=False,
    )
    top_k: int = parameter(
        0,
        "only this many of the most probable tokens; 1 is greedy",
        low=-1,
        rule="-1 or 0 (off), or a positive integer",
        generation_config="top_k",
        has_beam_search=False,
        neutral=(-1,),
    )
    min_p: float = parameter(
        0.0,
        "only tokens with at least this fraction of the most probable token's probability",
        low=0,
        high=1,
        generation_config="min_p",
        has_beam_search=False,
    )
    presence_penalty: float = parameter(0.0, "subtracted from the logits of tokens in the answer", low=-2, high=2)
    frequency_penalty: float = parameter(0.0, "the same, times the number of occurrences", low=-2, high=2)
    repetition_penalty: float = parameter(
        1.0,
        "divides the positive logits, and multiplies the negative ones, of tokens in the prompt or the answer",
        low=0.01,  # logits are divided by it: much less would take them out of float32's range
        high=100,
        generation_config="repetition_penalty",
    )
    seed: int | None = parameter(
        None,
        "the same request with the same seed gives the same tokens, under any load and with or without speculative decoding; on "
        "GPUs, and on CPUs [without native kernels](selftest.md#rounding), up to rounding, which differs with the number of rows in a step",
        low=-(2**63),
        high=2**63 - 1,
        rule="a 64-bit integer",
    )
    max_tokens: int | None = parameter(
        None,
        "the largest number of tokens in the answer, reasoning included",
        low=0,
        rule="a positive integer",
        generation_config="max_new_tokens",
    )
    min_tokens: int = parameter(
        0, "no stop id or stop string ends the answer before this many tokens, reasoning included", low=0, rule="0 or a positive integer"
    )
    ignore_eos: bool = parameter(False, "the model's own stop ids do not end the answer")
    stop: Sequence[str] = parameter(
        (), "a string or up to 64 of them, of 1024 characters at most; they apply to content, never to reasoning"
    )
    stop_token_ids: Sequence[int] = parameter((), "stop ids in addition to the model's own")
    include_stop_str_in_output: bool = parameter(False, "the stop string, or the token named in `stop_token_ids`, is part of the answer")
    skip_special_tokens: bool = parameter(True, "special tokens are left out of the answer's text")
    logprobs: int | None = parameter(
        None, "number of alternatives to each token of the answer, with log probabilities", low=0, high=MAX_LOGPROBS, has_beam_search=False
    )
    prompt_logprobs: int | None = parameter(
        None, "number of alternatives to each token of the prompt, with log probabilities; not with `stream`", low=0, high=MAX_LOGPROBS
    )
    logit_bias: Mapping[int, float] = parameter({}, "added to the logits of tokens; clamped to ±100")
    allowed_token_ids: Sequence[int] = parameter((), "no other token is chosen")
    bad_words: Sequence[str] = parameter(
        (), "words whose tokens the answer must not contain, with or without a blank before them; other tokens may still spell them"
    )
    thinking_token_budget: int | None = parameter(
        None, "reasoning is closed after this many tokens", low=0, rule="0 or a positive integer", has_beam_search=False
    )
    repetition_detection: RepetitionDetection | None = parameter(
        None,
        "an object: an answer ends once its last tokens are `min_count` times a pattern of `min_pattern_size` to `max_pattern_size` tokens",
        has_beam_search=False,
        neutral=(RepetitionDetection(),),
    )
    length_stop_reason: str | None = None  # the answer's `stop_reason` where `max_tokens` ends it

    def __post_init__(self) -> None:
        for name in ("stop", "stop_token_ids", "allowed_token_ids", "bad_words"):
            given = getattr(self, name)
            object.__setattr__(self, name, (given,) if isinstance(given, str) else tuple(given or ()))
        if isinstance(self.repetition_detection, Mapping):
            object.__setattr__(self, "repetition_detection", _repetition_detection(self.repetition_detection))
        if self.repetition_detection is not None:
            self.repetition_detection.check()
        check_ranges(self)
        is_short = self.max_tokens is None or self.min_tokens <= self.max_tokens
        require(is_short, "min_tokens", f"at most max_tokens ({self.max_tokens})", self.min_tokens)
        for name in ("stop", "bad_words"):
            require(all(getattr(self, name)), name, "made of non-empty strings", getattr(self, name))
        is_finite = all(abs(bias) <= sys.float_info.max for bias in self.logit_bias.values())  # math.isfinite raises for huge integers
        require(is_finite, "logit_bias", "made of finite numbers", self.logit_bias)
        if 0 < self.temperature < MIN_TEMPERATURE:
            object.__setattr__(self, "temperature", MIN_TEMPERATURE)

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0 or self.top_k == 1

    def check_token_ids(self, vocab_size: int) -> None:
        """Raises `InvalidRequest` where a token id in one of the fields is not in the vocabulary."""
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            token_ids = getattr(self, name)
            for token_id in (min(token_ids), max(token_ids)) if token_ids else ():
                if not 0 <= token_id < vocab_size:
                    raise InvalidRequest(f"`{name}` holds token id {token_id}, outside the vocabulary of {vocab_size} tokens", name)


def _repetition_detection(given: Mapping[str, Any]) -> RepetitionDetection:
    try:
        return msgspec.convert(given, RepetitionDetection)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"`repetition_detection`: {error}", "repetition_detection") from None


# By generation_config's names. `do_sample` is left out, as in vLLM: a client that wants greedy says temperature 0.
SAMPLING_DEFAULTS = {each.generation_config: name for name, each in parameters_of(SamplingParams).items() if each.generation_config}


def check_sampling_defaults(given: Mapping[str, Any]) -> None:
    """Of values by generation_config's names, where None is no value. Raises `ValueError`, of which `InvalidRequest` is one."""
    if unknown := given.keys() - SAMPLING_DEFAULTS.keys():
        raise ValueError(f"{', '.join(sorted(unknown))}: the names are {', '.join(SAMPLING_DEFAULTS)}")
    values = {name: value for name, value in given.items() if value is not None}
    for name, value in values.items():
        declared = parameters_of(SamplingParams)[SAMPLING_DEFAULTS[name]]
        require(declared.has_type(value), name, declared.type_rule, value)
    SamplingParams(**{SAMPLING_DEFAULTS[name]: value for name, value in values.items()})


EarlyStopping = bool | Literal["never"]


@dataclass(frozen=True, slots=True)
class BeamSearchParams:
    """How many beams are kept, how their answers are scored, and when they end. Names are vLLM's, meanings those of `transformers`.

    An answer's score is the sum of its tokens' log probabilities divided by its number of tokens to the power of `length_penalty`.
    `early_stopping`: True ends the search with the first `beam_width` answers; False once the best beam would not be among these if it
    ended where it is; "never" once it could not be however it went on. `temperature` divides the logits; 0 leaves them as they are.
    `n` of the answers are returned, best first; None is all `beam_width`.

    In a `Request`, the engine reads width, penalty and `early_stopping` from here and all else from its `SamplingParams`, which
    `sampling_params` makes. Raises `InvalidRequest` with `param` set to the field's name.
    """

    beam_width: int = parameter(4, "partial answers that are kept", low=1, high=128)
    max_tokens: int | None = parameter(16, "tokens of an answer", low=1, rule="a positive integer")
    ignore_eos: bool = False
    temperature: float = parameter(0.0, "divides the logits; 0 leaves them as they are", low=0, high=2)
    length_penalty: float = parameter(
        1.0,
        "the power of the length that a score is divided by",
        low=-10,  # a sum of log probabilities is divided by a length to this power, which must stay a number
        high=10,
    )
    include_stop_str_in_output: bool = False
    early_stopping: EarlyStopping = False
    stop: str | tuple[str, ...] | list[str] = ()
    stop_token_ids: tuple[int, ...] | list[int] = ()
    min_tokens: int = parameter(0, "before these, nothing ends an answer", low=0, rule="0 or a positive integer")
    skip_special_tokens: bool = True
    n: int | None = parameter(None, "answers that are returned", low=1)

    def __post_init__(self) -> None:
        check_types(self)
        for name, kind in (("stop", str), ("stop_token_ids", Integral)):
            given = getattr(self, name)
            is_list = isinstance(given, list | tuple) and all(isinstance(item, kind) for item in given)
            what = "strings" if kind is str else "token ids"
            require(is_list or (name == "stop" and isinstance(given, str)), name, f"a list of {what}", given)
        check_ranges(self)
        is_known = isinstance(self.early_stopping, bool) or self.early_stopping == "never"
        require(is_known, "early_stopping", 'true, false or "never"', self.early_stopping)
        require(self.n is None or self.n <= self.beam_width, "n", f"from 1 to beam_width ({self.beam_width})", self.n)

    def sampling_params(self, **rules: Any) -> SamplingParams:
        """What goes beside it in a `Request`. `rules` are further fields, such as `repetition_penalty` or `bad_words`."""
        return SamplingParams(
            n=self.n or self.beam_width,
            temperature=self.temperature,
            max_tokens=self.max_tokens,
            min_tokens=self.min_tokens,
            ignore_eos=self.ignore_eos,
            stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop),
            stop_token_ids=tuple(self.stop_token_ids),
            include_stop_str_in_output=self.include_stop_str_in_output,
            skip_special_tokens=self.skip_special_tokens,
            **rules,
        )
