"""Scores of pairs of texts, for every endpoint that gives some."""

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.api.context import PoolingContext
from penstock.api.metrics.pooling_metrics import PoolingTimer
from penstock.api.model_abilities import check_task
from penstock.api.pooling.pooling_inputs import check_inputs, check_texts, is_long, run_encoding, usage_of
from penstock.api.pooling.pooling_protocol import PoolingUsage
from penstock.api.prompts import LONG_TEXT, MAX_PROMPTS
from penstock.api.workers import MANY, run
from penstock.engine.errors import InvalidRequest
from penstock.engine.pooling.engine import EncodedText
from penstock.engine.pooling.scoring import Score, ScoreLimits, check_counts, paired, scoring_of

MAX_CHARACTERS = 2**24  # as many as a body may have: a text that is in many pairs is tokenized for each of them


@dataclass(frozen=True, slots=True)
class Side:
    """The texts on one side of the pairs, and what they are called in the body."""

    param: str
    texts: list[str]
    is_list: bool = True

    @classmethod
    def of(cls, param: str, given: str | list[str]) -> "Side":
        return cls(param, [given], is_list=False) if isinstance(given, str) else cls(param, given)

    @property
    def paths(self) -> list[str]:
        return [f"{self.param}[{position}]" if self.is_list else self.param for position in range(len(self.texts))]


def check_size(first: Side, second: Side) -> None:
    """Raises `InvalidRequest` for more than one request over HTTP may ask for."""
    if len(second.texts) > MAX_PROMPTS:
        raise InvalidRequest(f"`{second.param}` must hold at most {MAX_PROMPTS} texts, got {len(second.texts)}", second.param)
    if len(first.texts) == 1 and len(second.texts) * len(first.texts[0]) > MAX_CHARACTERS:
        raise InvalidRequest(f"the text is too long to be paired with {len(second.texts)} others", first.paths[0])


async def score_pairs(
    context: PoolingContext, timer: PoolingTimer, first: Side, second: Side, limits: ScoreLimits, priority: int | None
) -> tuple[list[Score], PoolingUsage]:
    """Scores in the order of the second side. Raises `InvalidRequest` with the path of the text that is wrong, before anything runs."""
    check_task(context, "score", "embed")
    check_counts(len(first.texts), len(second.texts), first.param, second.param)
    for side in (first, second):
        is_cut = limits.max_tokens is not None or (side is second and limits.max_second is not None)
        await check_texts(context, list(zip(side.texts, side.paths, strict=True)), is_cut=is_cut)
    scoring = scoring_of(context.engine.model.tasks)
    takes_long = is_long(first.texts + second.texts) or len(second.texts) * len(first.texts[0]) >= LONG_TEXT
    inputs = await run_encoding(context, lambda: scoring.inputs(context.engine, first.texts, second.texts, limits), is_long=takes_long)
    await check_inputs(context, inputs, input_paths(inputs, first, second))
    outputs = await timer.pool(context.engine, inputs, scoring.params, priority=priority)
    scores = await run(context, lambda: scoring.scores(outputs, len(first.texts)), is_long=len(outputs) > MANY)
    return scores, usage_of(inputs)


def input_paths(inputs: Sequence[EncodedText], first: Side, second: Side) -> list[str]:
    """Of each input the text that it is made of, and of a pair the longer one."""
    if inputs[0].tokens.token_type_ids is None:
        return first.paths + second.paths
    sides = paired(list(zip(first.texts, first.paths, strict=True)), list(zip(second.texts, second.paths, strict=True)))
    return [max(pair, key=lambda item: len(item[0]))[1] for pair in sides]
