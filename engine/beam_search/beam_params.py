"""What a client may ask of beam search, checked once where it comes in."""

import sys
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Literal

from penstock.engine.errors import InvalidRequest
from penstock.engine.sampling.params import SamplingParams

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
