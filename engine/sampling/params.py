"""Parameters of sampling and of beam search, validated once when they are made."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any, Literal

from penstock.engine.errors import InvalidRequest

MAX_LOGPROBS = 20
MIN_TEMPERATURE = 0.01  # below it, and above 0, float32 logits overflow; it is raised to this


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen and when a sequence ends. Names and meanings are vLLM's.

    Lists may be given, and for `stop` a single string; tuples are kept.
    Raises `InvalidRequest` with `param` set to the field's name. Token ids are checked against the vocabulary by `check_token_ids`.
    `logprobs` and `prompt_logprobs` count alternatives beside the chosen token; None returns none, 0 the chosen token's alone.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0 or -1: off
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    max_tokens: int | None = None  # None: as many as the context holds
    min_tokens: int = 0
    ignore_eos: bool = False
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: Sequence[int] = ()
    bad_words: Sequence[str] = ()
    thinking_token_budget: int | None = None
    length_stop_reason: str | None = None  # the answer's `stop_reason` where `max_tokens` ends it

    def __post_init__(self) -> None:
        for name in ("stop", "stop_token_ids", "allowed_token_ids", "bad_words"):
            given = getattr(self, name)
            object.__setattr__(self, name, (given,) if isinstance(given, str) else tuple(given or ()))

        def require(condition: bool, name: str, rule: str) -> None:
            if not condition:
                raise InvalidRequest(f"`{name}` must be {rule}, got {getattr(self, name)!r}", name)

        def finite(value: float) -> bool:
            return abs(value) <= sys.float_info.max  # math.isfinite raises for huge integers

        require(1 <= self.n <= 128, "n", "an integer from 1 to 128")
        require(finite(self.temperature) and 0 <= self.temperature <= 2, "temperature", "a number from 0 to 2")
        require(finite(self.top_p) and 0 < self.top_p <= 1, "top_p", "greater than 0 and at most 1")
        require(self.top_k >= -1, "top_k", "-1 or 0 (off), or a positive integer")
        require(finite(self.min_p) and 0 <= self.min_p <= 1, "min_p", "a number from 0 to 1")
        require(finite(self.presence_penalty) and -2 <= self.presence_penalty <= 2, "presence_penalty", "a number from -2 to 2")
        require(finite(self.frequency_penalty) and -2 <= self.frequency_penalty <= 2, "frequency_penalty", "a number from -2 to 2")
        # Logits are divided by it: much less would take them out of float32's range.
        require(finite(self.repetition_penalty) and 0.01 <= self.repetition_penalty <= 100, "repetition_penalty", "from 0.01 to 100")
        require(self.seed is None or -(2**63) <= self.seed < 2**63, "seed", "a 64-bit integer")
        require(self.max_tokens is None or self.max_tokens >= 0, "max_tokens", "a positive integer")
        require(self.min_tokens >= 0, "min_tokens", "0 or a positive integer")
        require(self.max_tokens is None or self.min_tokens <= self.max_tokens, "min_tokens", f"at most max_tokens ({self.max_tokens})")
        require(all(self.stop), "stop", "made of non-empty strings")
        require(all(self.bad_words), "bad_words", "made of non-empty strings")
        require(self.thinking_token_budget is None or self.thinking_token_budget >= 0, "thinking_token_budget", "0 or a positive integer")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            require(value is None or 0 <= value <= MAX_LOGPROBS, name, f"from 0 to {MAX_LOGPROBS}")
        require(all(finite(bias) for bias in self.logit_bias.values()), "logit_bias", "made of finite numbers")
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

    beam_width: int = 4
    max_tokens: int | None = 16
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False
    early_stopping: EarlyStopping = False
    stop: str | tuple[str, ...] | list[str] = ()
    stop_token_ids: tuple[int, ...] | list[int] = ()
    min_tokens: int = 0
    skip_special_tokens: bool = True
    n: int | None = None

    def __post_init__(self) -> None:
        def require(condition: bool, name: str, rule: str) -> None:
            if not condition:
                raise InvalidRequest(f"`{name}` must be {rule}, got {getattr(self, name)!r}", name)

        for name in ("beam_width", "max_tokens", "min_tokens", "n"):
            value = getattr(self, name)
            is_missing = value is None and name in ("max_tokens", "n")
            require(is_missing or (isinstance(value, Integral) and not isinstance(value, bool)), name, "an integer")
        for name in ("temperature", "length_penalty"):
            require(isinstance(getattr(self, name), Real), name, "a number")
        for name, kind in (("stop", str), ("stop_token_ids", Integral)):
            given = getattr(self, name)
            is_list = isinstance(given, list | tuple) and all(isinstance(item, kind) for item in given)
            require(is_list or (name == "stop" and isinstance(given, str)), name, f"a list of {'strings' if kind is str else 'token ids'}")
        require(1 <= self.beam_width <= 128, "beam_width", "an integer from 1 to 128")
        # A sum of log probabilities is divided by a length to this power, which must stay a number.
        require(abs(self.length_penalty) <= 10, "length_penalty", "a number from -10 to 10")
        require(isinstance(self.early_stopping, bool) or self.early_stopping == "never", "early_stopping", 'true, false or "never"')
        require(self.n is None or 1 <= self.n <= self.beam_width, "n", f"from 1 to beam_width ({self.beam_width})")
        require(abs(self.temperature) <= sys.float_info.max and 0 <= self.temperature <= 2, "temperature", "a number from 0 to 2")
        require(self.max_tokens is None or self.max_tokens >= 1, "max_tokens", "a positive integer")

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
