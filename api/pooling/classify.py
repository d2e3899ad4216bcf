"""POST /classify: the most probable label of each input, and how probable all of them are."""

import time
import uuid
from collections.abc import Mapping

from aiohttp import web
from msgspec import Struct

from penstock.api.bodies import read_admitted_body, served_model
from penstock.api.context import POOLING
from penstock.api.errors import json_response
from penstock.api.metrics.pooling_metrics import begin_pooling_timer
from penstock.api.model_abilities import check_task
from penstock.api.pooling.pooling_inputs import read_inputs, usage_of
from penstock.api.pooling.pooling_protocol import InputFields, PoolingUsage
from penstock.api.workers import MANY, run
from penstock.engine.pooling.engine import PoolingOutput
from penstock.engine.pooling.params import PoolingParams


class ClassificationRequest(InputFields, kw_only=True, forbid_unknown_fields=True):
    """All its fields are those of every endpoint with inputs."""


class Classification(Struct):
    """`probs` are in the order of the labels' numbers. `label` is the name of the most probable one, null where the model gives none."""

    index: int
    label: str | None
    probs: list[float]
    num_classes: int


class ClassificationResponse(Struct):
    id: str
    created: int
    model: str
    data: list[Classification]
    usage: PoolingUsage
    object: str = "list"


async def classify(http: web.Request) -> web.Response:
    """A classification for each input, in their order."""
    context, timer = http.app[POOLING], begin_pooling_timer(http)
    body, headers = await read_admitted_body(http, ClassificationRequest)
    model = served_model(context, body.model)
    check_task(context, "classify")
    inputs = await read_inputs(context, body)
    outputs = await timer.pool(context.engine, inputs, PoolingParams(task="classify"), priority=body.priority)

    def write() -> web.Response:
        labels = context.engine.model.id2label
        data = [classification(index, output, labels) for index, output in enumerate(outputs)]
        answer = ClassificationResponse(f"classify-{uuid.uuid4().hex}", int(time.time()), model, data, usage_of(inputs))
        return json_response(answer, headers=headers)

    return await run(context, write, is_long=len(outputs) > MANY)


def classification(index: int, output: PoolingOutput, labels: Mapping[int, str]) -> Classification:
    probs: list[float] = output.data.tolist()
    return Classification(index, labels.get(probs.index(max(probs))), probs, len(probs))
