"""What a client may ask of the sampler, checked once where it comes in."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

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
