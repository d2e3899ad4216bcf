"""Beam search as clients ask for it, in vLLM's words, and what it finds as they are to see it."""

import math
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from penstock.api.common_protocol import GenerationFields
from penstock.engine.deltas import SequenceDelta
from penstock.engine.errors import InvalidRequest
from penstock.engine.sampling.params import BeamSearchParams

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
