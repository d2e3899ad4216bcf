"""From a request's fields to `SamplingParams` and `BeamSearchParams`: its own, else the model's generation_config, else defaults."""

import math
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from penstock.engine.deltas import SequenceDelta
from penstock.engine.errors import ContextLengthExceeded, InvalidRequest
from penstock.engine.sampling.params import BeamSearchParams, SamplingParams, parameters_of
from penstock.serving.requests import GenerationFields

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
        raise _renamed(error, body) from None


def searched_defaults(body: GenerationFields, defaults: dict[str, Any]) -> dict[str, Any]:
    """The defaults of the fields that a request leaves out. What is recommended for drawing tokens means nothing to a search."""
    if not body.use_beam_search:
        return defaults
    return {"repetition_penalty": defaults.get("repetition_penalty"), "temperature": 0.0}


def searched(body: GenerationFields, deltas: AsyncGenerator[SequenceDelta, None]) -> AsyncGenerator[SequenceDelta, None]:
    """The deltas of one prompt, without the answers that a search did not find."""
    return _searched(body, deltas) if body.use_beam_search else deltas


async def _searched(body: GenerationFields, deltas: AsyncGenerator[SequenceDelta, None]) -> AsyncGenerator[SequenceDelta, None]:
    try:
        async with aclosing(deltas):
            async for delta in deltas:
                if delta.beam_score != -math.inf:
                    yield delta
    except InvalidRequest as error:
        raise _renamed(error, body) from None


def _renamed(error: InvalidRequest, body: GenerationFields) -> InvalidRequest:
    """The engine's refusal, with the name that the beam width has in the body."""
    if error.param != "beam_width":
        return error
    name = "n" if body.best_of is None else "best_of"
    return InvalidRequest(error.message.replace("`beam_width`", f"`{name}`"), name)
