"""From a request's fields to `SamplingParams`: what the request says, else what the model's generation_config says, else the default."""

from dataclasses import dataclass
from typing import Any

from penstock.api.common_protocol import GenerationFields
from penstock.api.errors import ContextLengthExceeded
from penstock.engine.errors import InvalidRequest
from penstock.engine.sampling.params import SamplingParams

DEFAULT_LIMIT = "default_max_tokens"  # what `stop_reason` says where a default bound ended the answer
TAKEN_AS_THEY_ARE = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "min_tokens",
    "ignore_eos",
    "include_stop_str_in_output",
    "skip_special_tokens",
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
        stop=stop_strings(body.stop),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        logit_bias=body.logit_bias or {},
        allowed_token_ids=tuple(body.allowed_token_ids or ()),
        bad_words=tuple(body.bad_words or ()),
        thinking_token_budget=thinking_token_budget,
    )
    if body.allowed_token_ids == []:
        raise InvalidRequest("`allowed_token_ids` must not be empty: no token could be chosen", "allowed_token_ids")
    params.check_token_ids(vocab_size)
    return params


def stop_strings(stop: str | list[str] | None) -> tuple[str, ...]:
    """One string or several. An empty list is none; an empty string is refused further on."""
    if stop is None:
        return ()
    return (stop,) if isinstance(stop, str) else tuple(stop)


@dataclass(frozen=True, slots=True)
class TokenLimit:
    """How many tokens may be generated, and whether that is a default bound: neither the request's own nor the end of the context."""

    max_tokens: int
    is_default: bool


def token_limit(
    requested: int | None, param: str, *, prompt_param: str, default: int | None, num_prompt_tokens: int, max_model_len: int
) -> TokenLimit:
    """What was asked for; else the default, or all that the context has room for.

    Raises `ContextLengthExceeded` with the numbers where the prompt, or what was asked for, does not fit.
    """
    room = max_model_len - num_prompt_tokens
    if room < 0 or (room == 0 and requested != 0):
        raise ContextLengthExceeded(
            f"This model's maximum context length is {max_model_len} tokens. However, your prompt has {num_prompt_tokens} tokens, "
            "which leaves no room for an answer. Please shorten it.",
            prompt_param,
        )
    if requested is None:
        return TokenLimit(room, is_default=False) if default is None or default > room else TokenLimit(default, is_default=True)
    if requested > room:
        raise ContextLengthExceeded(
            f"This model's maximum context length is {max_model_len} tokens. However, you requested {requested + num_prompt_tokens} tokens "
            f"({num_prompt_tokens} in the prompt, {requested} for the answer). Please reduce `{param}` or the prompt.",
            param,
        )
    return TokenLimit(requested, is_default=False)
