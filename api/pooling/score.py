"""POST /v1/score."""

import time
import uuid

from aiohttp import web

from penstock.api.bodies import read_admitted_body, served_model
from penstock.api.context import POOLING
from penstock.api.errors import json_response
from penstock.api.metrics.pooling_metrics import begin_pooling_timer
from penstock.api.pooling.pooling_inputs import token_limit
from penstock.api.pooling.score_protocol import ScoreEntry, ScoreRequest, ScoreResponse
from penstock.api.pooling.scores import Side, check_size, score_pairs
from penstock.engine.errors import InvalidRequest
from penstock.engine.pooling.scoring import ScoreLimits

NAMES = (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2"))


async def create_scores(http: web.Request) -> web.Response:
    """A score for each pair: one text against one or many, or as many against as many."""
    context, timer = http.app[POOLING], begin_pooling_timer(http)
    body, headers = await read_admitted_body(http, ScoreRequest)
    model = served_model(context, body.model)
    first, second = sides(body)
    check_size(first, second)
    limits = ScoreLimits(token_limit(context, body.truncate_prompt_tokens))
    scores, usage = await score_pairs(context, timer, first, second, limits, body.priority)
    data = [ScoreEntry(index, score.value) for index, score in enumerate(scores)]
    return json_response(ScoreResponse(f"score-{uuid.uuid4().hex}", int(time.time()), model, data, usage), headers=headers)


def sides(body: ScoreRequest) -> tuple[Side, Side]:
    """Raises `InvalidRequest` unless one pair of names is there, and no other name."""
    given = {name: texts for names in NAMES for name in names if (texts := getattr(body, name)) is not None}
    for one, two in NAMES:
        if set(given) == {one, two}:
            return Side.of(one, given[one]), Side.of(two, given[two])
    missing = next((name for names in NAMES for name in names if set(names) & set(given) and name not in given), "text_1")
    raise InvalidRequest("give `text_1` and `text_2`, or `queries` and `documents`, and no other texts", missing)
