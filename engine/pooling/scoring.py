"""How alike two texts are: by one vector for each, or by a cross-encoder that reads both at once."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch

from penstock.engine.errors import InvalidRequest
from penstock.engine.pooling.engine import EncodedText, PoolingEngine, PoolingOutput
from penstock.engine.pooling.params import PoolingParams, PoolingTask

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ScoreLimits:
    """`max_tokens` cuts what is scored, a text or a pair, and `max_second` the second text, to so many tokens. None: nothing is cut."""

    max_tokens: int | None = None
    max_second: int | None = None


@dataclass(frozen=True, slots=True)
class Score:
    """Of one pair. `prompt_token_ids` are those of both texts, as the model read them."""

    value: float
    prompt_token_ids: list[int]


class Scoring(Protocol):
    """From texts to what the model computes, and from that to scores. The first texts are one or as many as the second."""

    @property
    def params(self) -> PoolingParams: ...

    def inputs(self, engine: PoolingEngine, first: Sequence[str], second: Sequence[str], limits: ScoreLimits) -> list[EncodedText]:
        """Raises `InvalidRequest` for a lone surrogate, and for limits that leave nothing."""
        ...

    def scores(self, outputs: Sequence[PoolingOutput], num_first: int) -> list[Score]:
        """Of the outputs for `inputs`, in the order of the second texts."""
        ...


class CrossScoring:
    """One input for each pair."""

    params = PoolingParams(task="score")

    def inputs(self, engine: PoolingEngine, first: Sequence[str], second: Sequence[str], limits: ScoreLimits) -> list[EncodedText]:
        return [
            engine.encode(one, two, max_tokens=limits.max_tokens, max_pair_tokens=limits.max_second) for one, two in paired(first, second)
        ]

    def scores(self, outputs: Sequence[PoolingOutput], num_first: int) -> list[Score]:
        return [Score(float(output.data[0]), output.prompt_token_ids) for output in outputs]


class CosineScoring:
    """One input for each text, those of the first before those of the second: one that is in many pairs is computed once."""

    params = PoolingParams(task="embed", normalize=True)

    def inputs(self, engine: PoolingEngine, first: Sequence[str], second: Sequence[str], limits: ScoreLimits) -> list[EncodedText]:
        bounds = [bound for bound in (limits.max_tokens, limits.max_second) if bound is not None]
        one = [engine.encode(text, max_tokens=limits.max_tokens) for text in first]
        return one + [engine.encode(text, max_tokens=min(bounds, default=None)) for text in second]

    def scores(self, outputs: Sequence[PoolingOutput], num_first: int) -> list[Score]:
        one, two = outputs[:num_first], outputs[num_first:]
        cosines = (torch.stack([output.data for output in one]) * torch.stack([output.data for output in two])).sum(dim=-1)
        token_ids = (first.prompt_token_ids + second.prompt_token_ids for first, second in paired(one, two))
        return [Score(value, ids) for value, ids in zip(cosines.tolist(), token_ids, strict=True)]


def scoring_of(tasks: Collection[PoolingTask]) -> Scoring:
    """How a model that has these tasks scores; it has `score` or `embed`."""
    return CrossScoring() if "score" in tasks else CosineScoring()


def check_counts(num_first: int, num_second: int, first_param: str, second_param: str) -> None:
    """Raises `InvalidRequest` unless it is one text against one or many, or as many against as many."""
    for count, param in ((num_first, first_param), (num_second, second_param)):
        if not count:
            raise InvalidRequest(f"`{param}` holds no texts", param)
    if num_first not in (1, num_second):
        raise InvalidRequest(
            f"`{first_param}` must hold one text or as many as `{second_param}`, which has {num_second}; it has {num_first}", first_param
        )


def paired(first: Sequence[T], second: Sequence[T]) -> list[tuple[T, T]]:
    """Each of the second with its own of the first, or with the only one."""
    return list(zip(first if len(first) > 1 else [first[0]] * len(second), second, strict=True))
